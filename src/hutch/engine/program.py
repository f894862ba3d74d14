"""One program in a live sandbox: a command with its own streams, or with a terminal of its own."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import struct
import termios
import time

from ..errors import HutchError, SpecError
from ..isolation import jail
from ..model import Limits, Outcome, Result, Value
from . import verdict
from .agent import Child, refused
from .pipes import Capture, Pipes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .live import LiveSandbox
    from .pipes import Listener

_WRITE_BYTES = 65536
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_PATIENCE_SECONDS = 5.0
"""What a program has to be gone once it was killed. One that is not takes the sandbox along."""
_TERMINAL_BYTES = 256 * 1024
"""More than a terminal holds."""


class Command(Value):
    """What to execute, and how."""

    argv: tuple[str, ...]
    limits: Limits
    variables: tuple[tuple[str, str], ...] = ()
    """Beside those of the sandbox."""
    cwd: str = jail.WORKSPACE
    timeout_seconds: float | None = None
    stdin: bytes | None = b""
    """None: it is written piece by piece, until `close_stdin`."""
    terminal: tuple[int, int] | None = None
    """Rows and columns, for a program that wants a terminal; its output is then one stream."""


class Program:
    """A command that was started."""

    def __init__(self, sandbox: LiveSandbox, command: Command, listener: Listener | None) -> None:
        self._sandbox = sandbox
        self._command = command
        self._loop = asyncio.get_running_loop()
        self._capture = Capture(command.limits, listener, lambda: self._stop(Outcome.OUTPUT))
        self._outcome: Outcome | None = None
        self._pipes: Pipes | None = None
        self._child: Child | None = None
        self._input = -1
        """Where our side of its standard input is."""
        self._feeding: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._writable: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._forget: Callable[[], object] = lambda: None
        self._ended: asyncio.Future[tuple[int | None, str | None]] = self._loop.create_future()
        self._hits: dict[str, int] = {}
        self._started = time.monotonic()
        self._stopping: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, sandbox: LiveSandbox, command: Command, listener: Listener | None = None) -> Program:
        """Start a command.

        A program that is not there is not an error of ours: `wait` tells what a shell would.

        Raises:
            SpecError: the command cannot be one.
            StartError, HostError: the sandbox did not start.
            GoneError: it is over.
        """
        if not command.argv or not all(map(_is_word, (*command.argv, command.cwd))):
            raise SpecError(
                "a command is a list of words without NUL bytes, the program first",
                code="spec.command",
                hint='for example ["ls", "-la"]',
            )
        self = cls(sandbox, command, listener)
        self._hits = sandbox.hits
        sandbox.watch()
        if command.timeout_seconds is not None:
            self._timer = self._loop.call_later(command.timeout_seconds + _PATIENCE_SECONDS, self._give_up)
        try:
            await self._spawn()
        except OSError as error:
            self._explain(error)
            return self
        except BaseException as error:
            if isinstance(error, HutchError) and self._outcome is not None:
                self._end(None, None)  # its time was over before it began
                return self
            self._release()
            raise
        self._forget = sandbox.on_end(lambda: self._end(None, None))
        if self._timer is not None:
            self._timer.cancel()
            assert command.timeout_seconds is not None
            self._timer = self._loop.call_later(command.timeout_seconds, self._stop, Outcome.TIMEOUT)
        return self

    async def _spawn(self) -> None:
        command = self._command
        variables = {**dict(self._sandbox.plan.variables), **dict(command.variables)}
        where = os.path.join(jail.WORKSPACE, command.cwd)
        if command.terminal is not None:
            self._child = await self._sandbox.agent.spawn(
                command.argv, variables=variables, cwd=where, terminal=command.terminal
            )
            self._input = self._child.terminal
            os.set_blocking(self._input, False)
            self._loop.add_reader(self._input, self._read_terminal)
        else:
            try:
                self._pipes = Pipes()
                if command.stdin == b"":
                    theirs = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                else:
                    theirs, self._input = os.pipe2(os.O_CLOEXEC)
            except OSError as error:
                raise refused(error) from error
            self._pipes.begin(self._capture)
            try:
                if self._input >= 0:
                    os.set_blocking(self._input, False)
                self._child = await self._sandbox.agent.spawn(
                    command.argv, variables=variables, cwd=where, fds=(theirs, *self._pipes.theirs)
                )
            finally:
                os.close(theirs)
                self._pipes.hand_over()
        self._child.exited.add_done_callback(self._exited)
        if command.stdin:
            self._feeding = self._loop.create_task(self._feed(command.stdin))

    def _explain(self, error: OSError) -> None:
        program = self._command.argv[0]
        number = error.errno or 0
        if number == errno.EAGAIN:
            text, code = "no more processes can be started in this sandbox", _NOT_EXECUTABLE
        else:
            text, code = os.strerror(number), _NOT_FOUND if number == errno.ENOENT else _NOT_EXECUTABLE
        if number in (errno.ENOENT, errno.ENOTDIR) and self._command.cwd not in (jail.WORKSPACE, "."):
            text += f" (it was to start in {self._command.cwd})"
        self._capture.feed(1, f"hutch: {program}: {text}\n".encode())
        self._end(code, None)

    # ---- while it runs ----

    def on_end(self, callback: Callable[[], None]) -> None:
        """Have something called when it ended and its output was read."""
        self._ended.add_done_callback(lambda _: callback())

    @property
    def pid(self) -> int:
        """As it is called inside; 0 if it never started."""
        return self._child.pid if self._child is not None else 0

    async def write_stdin(self, data: bytes) -> None:
        """Write to its standard input. What nobody reads any more is dropped."""
        async with self._writing:
            await self._feed(data, close=False)

    async def close_stdin(self) -> None:
        """Tell it that there is no more input: end of file, or Ctrl-D on a terminal."""
        if self._command.terminal is not None:
            await self.write_stdin(b"\x04")
        else:
            async with self._writing:
                self._close_input()

    async def signal(self, number: int) -> bool:
        """Send a signal to it and its group. False if it is gone."""
        if self._child is None or self._ended.done():
            return False
        try:
            return await self._sandbox.agent.signal(self._child, number, "group")
        except (HutchError, OSError):
            return False

    def resize(self, rows: int, columns: int) -> None:
        """Tell it the size of its terminal."""
        if self._command.terminal is not None and self._input >= 0:
            fcntl.ioctl(self._input, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def wait(self) -> Result:
        """Wait for its end. Cancelled, it ends the program.

        Raises:
            GoneError, ProtocolError: the sandbox was ended, not by the program.
        """
        try:
            exit_code, signal_name = await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self._stop(Outcome.KILLED)
            raise
        if exit_code is None and signal_name is None:
            self._outcome = self._outcome or self._sandbox.verdict()
        return self._sandbox.result(
            self._capture,
            exit_code=exit_code,
            signal_name=signal_name,
            outcome=self._outcome,
            hits_before=self._hits,
            started=self._started,
        )

    # ---- inside ----

    async def _feed(self, data: bytes, *, close: bool = True) -> None:
        rest = memoryview(data)
        try:
            while rest and self._input >= 0:
                try:
                    rest = rest[os.write(self._input, rest[:_WRITE_BYTES]) :]
                except BlockingIOError:
                    await self._wait_for_room()
        except OSError:
            pass  # it does not read any more
        if close and self._command.terminal is None:
            self._close_input()

    async def _wait_for_room(self) -> None:
        self._writable = self._loop.create_future()
        self._loop.add_writer(self._input, self._go_on)
        try:
            await self._writable
        finally:
            if self._input >= 0:
                self._loop.remove_writer(self._input)

    def _go_on(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def _close_input(self) -> None:
        if self._input >= 0:
            self._loop.remove_reader(self._input)
            self._loop.remove_writer(self._input)
            os.close(self._input)
            self._input = -1
            self._go_on()

    def _read_terminal(self) -> int:
        try:
            chunk = os.read(self._input, _WRITE_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # the last program on the terminal is gone
            chunk = b""
        if not chunk:
            self._loop.remove_reader(self._input)
            return 0
        self._capture.feed(0, chunk)
        return len(chunk)

    def _stop(self, outcome: Outcome) -> None:
        if self._ended.done() or self._outcome is not None:
            return
        self._outcome = outcome
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_PATIENCE_SECONDS, self._give_up)
        if self._child is not None:
            task = self._loop.create_task(self._kill(self._child))
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    def _give_up(self) -> None:
        """It neither begins nor ends: the sandbox must go."""
        self._outcome = self._outcome or Outcome.TIMEOUT
        self._sandbox.kill(Outcome.KILLED)

    async def _kill(self, child: Child) -> None:
        try:
            await self._sandbox.agent.signal(child, signal.SIGKILL, "session")
        except (HutchError, OSError):
            return  # it is over anyway, or will be with the sandbox

    def _exited(self, exited: asyncio.Future[int]) -> None:
        if not exited.cancelled():
            self._end(*verdict.read_status(exited.result()))

    def _end(self, exit_code: int | None, signal_name: str | None) -> None:
        if self._ended.done():
            return
        if self._pipes is not None:
            self._pipes.end()
        elif self._input >= 0:
            left = _TERMINAL_BYTES  # somebody in the background may go on writing for ever
            while left > 0 and (read := self._read_terminal()):
                left -= read
        self._ended.set_result((exit_code, signal_name))
        self._release()

    def _release(self) -> None:
        self._forget()
        if self._timer is not None:
            self._timer.cancel()
        if self._feeding is not None:
            self._feeding.cancel()
        self._close_input()
        if self._pipes is not None:
            # Its children may live on; they are not to be stopped by a pipe that nobody reads.
            self._pipes.discard(self._sandbox.on_end)
        self._sandbox.unwatch()


def _is_word(word: object) -> bool:
    """Whether a program can be given it."""
    try:
        return isinstance(word, str) and b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False

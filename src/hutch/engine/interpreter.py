"""One interpreter that stays alive in a sandbox, and the runs that it is given, one after the other.

The driver inside (guest/) is the user's own process. All that is believed of it is one line for each run, "done TOKEN
CODE", where the token is new each time; anything else ends the sandbox with a `ProtocolError`. That a process died is
heard from the agent, not from the process.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import time

from ..errors import HostError, HutchError, ProtocolError, StartError
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

_GRACE_SECONDS = 1.0
"""What an interpreter has, once interrupted, to come back with its state."""
_PATIENCE_SECONDS = 5.0
"""What it has to be gone once it was killed. If it is not, the sandbox has to go."""
_ATTEMPTS = 3
_INTERRUPTED = 130
_LINE_BYTES = 128
_GUEST = os.path.dirname(jail.DRIVERS["python"][1])
_ARGUMENTS = {
    # Imported, not executed: only so its compiled form is used.
    "python": ("-S", "-c", f"import sys; sys.path.insert(0, {_GUEST!r}); import python; python.main()"),
    "bash": ("--norc", "--noprofile", jail.DRIVERS["bash"][1]),
    "node": ("--no-force-async-hooks-checks", jail.DRIVERS["node"][1], "session"),
}


class Run(Value):
    """One request to an interpreter."""

    code: str
    limits: Limits
    stdin: bytes = b""
    timeout_seconds: float | None = None
    once: bool = False
    """As a script: nothing comes after it, and it ends when the process would."""
    echo: bool = False
    """Show the value of the last expression."""


class Interpreter:
    """An interpreter of one sandbox. Runs wait for each other in the order in which they came."""

    def __init__(self, sandbox: LiveSandbox, name: str) -> None:
        """Make it ready to be started.

        Raises:
            HostError: the environment has no such interpreter.
        """
        programs = dict(sandbox.plan.interpreters)
        if name not in programs:
            raise HostError(
                f"environment {sandbox.plan.environment} has no {name}",
                code="host.interpreter",
                details=f"it has {', '.join(programs)}",
                hint=f"use an environment that has {name}, or install it",
            )
        self.name = name
        self._program = programs[name]
        self._sandbox = sandbox
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._process: _Process | None = None
        self._was_lost = False
        """A process with state of earlier runs is gone, and no run was told so yet."""

    def start(self) -> asyncio.Future[None]:
        """Start the process, unless it is there. Done when that takes runs; nobody has to wait for it.

        Raises:
            HostError: this machine refused what it takes on our side.
        """
        if self._process is None:
            try:
                self._process = _Process(self._sandbox, self.name, self._program, self._lose)
            except OSError as error:
                raise refused(error) from error
        return self._process.ready

    def _lose(self, process: _Process) -> None:
        if self._process is process:
            self._process = None
            self._was_lost = process.runs > 0

    async def run(self, run: Run, listener: Listener | None = None) -> Result:
        """Run code, after what came before it.

        Raises:
            StartError, HostError: the sandbox or the interpreter did not start. With code start.full, because what
                runs in the sandbox leaves no room for one more.
            ProtocolError: the process sent what it must not; the sandbox was killed.
            GoneError: the sandbox was closed meanwhile. With code sandbox.gone, before this run began.
        """
        async with self._turn:
            if self._process is not None:
                await self._process.recover()
            for _ in range(_ATTEMPTS):
                self._sandbox.require_alive()
                self.start()
                process = self._process
                assert process is not None
                lost, self._was_lost = self._was_lost, False
                self._sandbox.watch()
                try:
                    result = await process.run(run, listener)
                    return result.replace(state_lost=lost or (not run.once and process.is_gone))
                except _Unheard:
                    self._was_lost = lost or process.runs > 1
                finally:
                    self._sandbox.unwatch()
            raise _no_room(self.name, "it was killed each time before it could take the run")

    async def interrupt(self) -> bool:
        """End what runs now, as Ctrl-C would. False if nothing does."""
        process = self._process
        return process is not None and await process.interrupt()


class _Unheard(Exception):
    """The process was gone before it read what it was to run."""


class _Process:
    """One life of an interpreter."""

    def __init__(self, sandbox: LiveSandbox, name: str, program: str, on_end: Callable[[_Process], None]) -> None:
        self._name = name
        self._sandbox = sandbox
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self.runs = 0
        self.is_gone = False
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._ending: asyncio.Future[tuple[int | None, str | None]] | None = None
        """Of the run that is active: how it ended."""
        self._waiter: asyncio.Future[None] | None = None
        """Whoever waits for that, and may give up without ending it."""
        self._timer: asyncio.TimerHandle | None = None
        self._token = b""
        self._outcome: Outcome | None = None
        self._is_patient = True
        """Whether a run that takes too long is worth an attempt to save the state."""
        self._is_killed = False
        self._is_interrupted = False
        self._signalling: set[asyncio.Task[bool]] = set()
        self._giving_up: asyncio.TimerHandle | None = None
        self._recovery: asyncio.Task[None] | None = None
        """Of a run that nobody waits for any more: until it is over, there is no other."""
        self._lie: ProtocolError | None = None
        self._is_unheard = False
        self._received = b""
        self._child: Child | None = None
        self._pipes = Pipes()
        opened: list[int] = []
        try:
            opened.append(null := os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            opened.append(code := os.memfd_create("code", os.MFD_CLOEXEC))
            opened.append(stdin := os.memfd_create("stdin", os.MFD_CLOEXEC))
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            self._pipes.close()
            for fd in opened:
                os.close(fd)
            raise
        self._code, self._stdin = code, stdin
        os.set_blocking(self._control.fileno(), False)
        self._loop.add_reader(self._control.fileno(), self._read)
        argv = [program, *_ARGUMENTS[name], jail.RUNS]
        fds = (null, *self._pipes.theirs, theirs.fileno(), self._code, self._stdin)
        self._task = self._loop.create_task(self._live(argv, fds))
        # The request is sent when the task first runs; its copies of the descriptors are then in the socket.
        self._handed_over = (null, theirs)
        self._forget = sandbox.on_end(lambda: self.end(None))

    async def _live(self, argv: list[str], fds: tuple[int, ...]) -> None:
        """Start it, and hear of its end."""
        spawning = self._sandbox.agent.spawn(
            argv, variables=dict(self._sandbox.plan.variables), cwd=jail.WORKSPACE, fds=fds
        )
        try:
            self._child = await spawning
        except OSError as error:
            self._sandbox.fail(_explain(argv, error))
            return
        except HutchError:
            return  # the sandbox is over, and has said so to everybody
        finally:
            self._hand_over()
        try:
            self.end(await self._child.exited)
        except asyncio.CancelledError:
            if self._sandbox.is_alive:
                raise

    def _hand_over(self) -> None:
        null, theirs = self._handed_over
        if theirs.fileno() >= 0:
            theirs.close()
            os.close(null)
            self._pipes.hand_over()

    # ---- one run ----

    async def run(self, run: Run, listener: Listener | None) -> Result:
        started = time.monotonic()
        hits = self._sandbox.hits
        self.runs += 1
        self._outcome = None
        self._is_interrupted = False
        self._is_patient = not run.once
        capture = Capture(run.limits, listener, lambda: self._overdo(Outcome.OUTPUT))
        self._pipes.begin(capture)
        ending = self._ending = self._loop.create_future()
        self._token = os.urandom(16).hex().encode()
        self._waiter = self._loop.create_future()
        try:
            self._send(run)
            if run.timeout_seconds is not None:
                self._timer = self._loop.call_later(run.timeout_seconds, self._overdo, Outcome.TIMEOUT)
            await self._waiter
            exit_code, signal_name = ending.result()
            await self._settle(exit_code)
        except asyncio.CancelledError:
            capture.mute()
            if not run.once and self._sandbox.is_alive:
                self._recovery = self._loop.create_task(self._end_run(ending))
                await self.recover()
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._recovery is None:
                self._conclude()
        if self._lie is not None:
            raise self._lie  # whatever it said of this run, it said too much
        if self._is_unheard and self._outcome is None and self._sandbox.is_alive and not self.ready.cancelled():
            raise _Unheard
        if self.is_gone and exit_code is None and signal_name is None:
            self._outcome = self._outcome or self._sandbox.verdict()
        result = self._sandbox.result(
            capture,
            exit_code=exit_code,
            signal_name=signal_name,
            outcome=self._outcome,
            hits_before=hits,
            started=started,
        )
        if self.ready.cancelled() and result.outcome in (Outcome.OK, Outcome.FAILED):
            raise StartError(
                f"{self._name} did not start in the sandbox: {result.explain()}",
                code="start.interpreter",
                details=result.stderr[-2000:],
                hint=f"check that {self._name} works on the host: hutch run -e shell '{self._name} --version'",
            )
        return result

    def _conclude(self) -> None:
        self._ending = None
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._pipes.end()

    async def _settle(self, exit_code: int | None) -> None:
        """No signal that was meant for this run may meet the next one."""
        if self._signalling:
            await asyncio.wait(self._signalling)
        if self._is_killed and self._child is not None and not self._child.exited.done():
            await asyncio.wait([self._child.exited], timeout=_PATIENCE_SECONDS)
        if self._is_interrupted and exit_code != _INTERRUPTED and not self.is_gone:
            # It may have ended by itself, with the interrupt still before it: that shall meet a run that does nothing.
            self._pipes.end()
            self._ending = self._loop.create_future()
            self._token = os.urandom(16).hex().encode()
            self._send(Run(code="", limits=Limits()))
            await asyncio.wait([self._ending], timeout=_GRACE_SECONDS)
            if not self._ending.done():
                self._kill()
                await asyncio.wait([self._ending])
            self._pipes.drop()

    async def recover(self) -> None:
        """Wait until a run that nobody waits for any more is over."""
        if self._recovery is not None:
            await asyncio.shield(self._recovery)
            self._recovery = None

    async def _end_run(self, ending: asyncio.Future[tuple[int | None, str | None]]) -> None:
        if not ending.done():
            self._post_signal(signal.SIGINT, "group")
            await asyncio.wait([ending], timeout=_GRACE_SECONDS)
        if not ending.done():
            self._kill()
            await asyncio.wait([ending])
        await self._settle(ending.result()[0])
        self._conclude()

    def _send(self, run: Run) -> None:
        code = run.code.encode("utf-8", "surrogateescape")
        for fd, data in ((self._code, code), (self._stdin, run.stdin)):
            os.ftruncate(fd, len(data))
            written = 0
            while written < len(data):
                written += os.pwrite(fd, data[written:] if written else data, written)
        flags = ",".join(name for name, on in (("once", run.once), ("echo", run.echo)) if on) or "-"
        patience = int((run.timeout_seconds or 0) * 1000)
        header = f"run {self._token.decode()} {self.runs} {len(code)} {len(run.stdin)} {patience} {flags}\n"
        try:
            self._control.send(header.encode())
        except OSError:
            # Its end is on the way; or it closed what it listens to, and would never answer.
            self._is_unheard = True
            self._kill()

    def _overdo(self, outcome: Outcome) -> None:
        """A limit is reached. Who only took too long may come back; who floods us may not."""
        if self._ending is None or self._ending.done() or self._outcome is not None:
            return
        self._outcome = outcome
        if outcome is Outcome.TIMEOUT and self._is_patient:
            self._post_signal(signal.SIGINT, "group")
            self._timer = self._loop.call_later(_GRACE_SECONDS, self._kill)
        else:
            self._kill()

    def _kill(self) -> None:
        if self._ending is None or self._is_killed:
            return
        if self._child is None:
            self._sandbox.kill(Outcome.KILLED)  # it does not even start
            return
        self._is_killed = True
        self._post_signal(signal.SIGKILL, "session")
        self._giving_up = self._loop.call_later(_PATIENCE_SECONDS, self._sandbox.kill, Outcome.KILLED)

    def _post_signal(self, number: int, scope: str) -> None:
        self._is_interrupted = self._is_interrupted or number == signal.SIGINT
        task = self._loop.create_task(self._signal(number, scope))
        self._signalling.add(task)
        task.add_done_callback(self._signalling.discard)

    async def _signal(self, number: int, scope: str) -> bool:
        try:
            return self._child is not None and await self._sandbox.agent.signal(self._child, number, scope)
        except (HutchError, OSError):
            return False  # it is over anyway

    async def interrupt(self) -> bool:
        if self._ending is None:
            return False
        self._is_interrupted = True
        return await self._signal(signal.SIGINT, "group")

    # ---- what it says ----

    def _read(self) -> None:
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError as error:
            data = b""
            # What the kernel says when the other end is closed and something lies there unread.
            self._is_unheard = self._is_unheard or isinstance(error, ConnectionResetError)
        if not data:
            self._loop.remove_reader(self._control.fileno())
            return
        lines = (self._received + data).split(b"\n")
        self._received = lines.pop()
        if len(self._received) > _LINE_BYTES or not all(self._hear(line) for line in lines):
            said = (lines[0] if lines else self._received)[:_LINE_BYTES]
            self._lie = ProtocolError(
                "an interpreter sent what it was not asked for; the sandbox was killed",
                code="protocol.interpreter",
                details=repr(said),
                hint="code in this sandbox wrote to a descriptor that is not its own; use a fresh one",
            )
            self._sandbox.fail(self._lie)

    def _tell(self, ending: asyncio.Future[tuple[int | None, str | None]], how: tuple[int | None, str | None]) -> None:
        ending.set_result(how)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _hear(self, line: bytes) -> bool:
        if line == b"ready":
            if self.ready.done():
                return False
            self.ready.set_result(None)
            return True
        words = line.split(b" ")
        if len(words) != 3 or words[0] != b"done" or words[1] != self._token or self._ending is None:
            return False
        if not words[2].isdigit() or len(words[2]) > 3 or int(words[2]) > 255 or self._ending.done():
            return False
        self._token = b""
        self._tell(self._ending, (int(words[2]), None))
        return True

    def end(self, status: int | None) -> None:
        """The process is gone: with a wait status, or with the whole sandbox."""
        if self.is_gone:
            return
        if status is not None:
            self._read()  # a last word counts
        if self.is_gone:
            return  # it was one too many
        self.is_gone = True
        if self._ending is not None and not self._ending.done():
            self._tell(self._ending, (None, None) if status is None else verdict.read_status(status))
            self._pipes.end()
        self._forget()
        if not self.ready.done():
            self.ready.cancel()
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        os.close(self._code)
        os.close(self._stdin)
        self._hand_over()
        if status is None:
            self._task.cancel()
            self._pipes.close()
        else:
            # Its children may live on; they are not to be stopped by a pipe that nobody reads.
            self._pipes.discard(self._sandbox.on_end)
        self._on_end(self)


def _no_room(program: str, why: str) -> StartError:
    return StartError(
        f"what runs in the sandbox leaves no room for {program} ({why})",
        code="start.full",
        hint="raise pids or memory_mb, or end what runs there: box.kill",
    )


def _explain(argv: list[str], error: OSError) -> HutchError:
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ELIBBAD):
        return _no_room(argv[0], os.strerror(error.errno or 0))
    return HostError(
        f"{argv[0]} could not be executed in the sandbox ({error.strerror})",
        code="host.program",
        details=" ".join(argv),
        hint=f"check that {argv[0]} runs on the host, and that all its libraries lie in /usr",
    )

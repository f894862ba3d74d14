"""The Python API for programs with an event loop. `blocking.py` is the same for those without."""

from __future__ import annotations

import asyncio
import codecs
import os
import weakref

from .config import data_directory
from .engine import state
from .engine.box import Box
from .engine.engine import Engine
from .engine.files import Entry, Files, Transfer
from .engine.interpreter import Run
from .engine.planning import STDIN_BYTES, check_code
from .engine.pool import DEFAULT_SIZE
from .engine.program import Command, Program
from .engine.session import Session, Sessions
from .engine.store import Store
from .errors import GoneError, SpecError
from .model import Limits, Result, Value
from .spec import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
    from types import EllipsisType, TracebackType
    from typing import Any, Self

    from .engine.pipes import Listener
    from .engine.pool import Pool as EnginePool

    OnOutput = Callable[[str], object]


class Output(Value):
    """A piece of what a program printed."""

    stream: str
    """stdout or stderr."""
    text: str


class AsyncFiles:
    """The files of a sandbox's workspace. Paths are relative to it; no link is followed.

    Every method raises SpecError where a path is not below the workspace, does not exist, or is of the wrong kind.
    """

    def __init__(self, box: Callable[[], Box]) -> None:
        self._box = box

    @property
    def _files(self) -> Files:
        return self._box().files

    async def read(self, path: str) -> bytes:
        """The content of a file, at most 64 MiB; `download` copies larger ones."""
        return await self._files.read(path)

    async def read_text(self, path: str) -> str:
        """The content of a file as text."""
        return (await self._files.read(path)).decode("utf-8", "replace")

    async def write(self, path: str, data: bytes | str) -> None:
        """Put a file in place in one step, with the directories above it."""
        await self._files.write(path, data)

    async def list(self, path: str = ".") -> list[Entry]:
        """What is in a directory, by name."""
        return await self._files.list(path)

    async def stat(self, path: str) -> Entry:
        """What a path is. A link is described, not followed."""
        return await self._files.stat(path)

    async def exists(self, path: str) -> bool:
        """Whether there is something at a path."""
        return await self._files.exists(path)

    async def mkdir(self, path: str) -> None:
        """Make a directory, and those above it."""
        await self._files.mkdir(path)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, an empty directory, or with recursive a directory and all below it."""
        await self._files.remove(path, recursive=recursive)

    async def move(self, path: str, to: str) -> None:
        """Give a file or directory another place in the workspace."""
        await self._files.move(path, to)

    async def upload(self, host_path: str, path: str = ".") -> Transfer:
        """Copy a file or a directory of the host into the workspace. Links in it are skipped, and named."""
        return await self._files.upload(host_path, path)

    async def download(self, path: str, host_path: str) -> Transfer:
        """Copy a file or a directory of the workspace to the host. Links in it are skipped, and named."""
        return await self._files.download(path, host_path)


class AsyncProcess:
    """A command that runs in a sandbox, and that is talked to."""

    def __init__(self, program: Program, outputs: asyncio.Queue[Output | None]) -> None:
        self._program = program
        self._outputs = outputs

    @property
    def pid(self) -> int:
        """Its number inside the sandbox; 0 if it could not be started."""
        return self._program.pid

    async def write(self, data: bytes | str) -> None:
        """Write to its standard input, or type on its terminal."""
        await self._program.write_stdin(_bytes(data))

    async def close_stdin(self) -> None:
        """Tell it that there is no more input."""
        await self._program.close_stdin()

    async def signal(self, number: int) -> bool:
        """Send a signal to it and its process group. False if it is gone."""
        return await self._program.signal(number)

    def resize(self, rows: int, columns: int) -> None:
        """Tell it the size of its terminal."""
        self._program.resize(rows, columns)

    async def wait(self) -> Result:
        """Wait for its end."""
        return await self._program.wait()

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Its output as it comes, to the end. Whoever stops in between goes on where that was."""
        while (output := await self._outputs.get()) is not None:
            yield output
        self._outputs.put_nowait(None)  # whoever asks again finds the end again


class AsyncRunning:
    """A run whose output is read while it lasts. Ends the run when it is left early."""

    def __init__(self, start: Callable[[Listener], asyncio.Task[Result]]) -> None:
        self._start = start
        self._task: asyncio.Task[Result] | None = None

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Its output as it comes."""
        if self._task is not None:
            raise SpecError("the run was read already", code="spec.running", hint="call stream() for another run")
        outputs: asyncio.Queue[Output | None] = asyncio.Queue()
        listener = _to_queue(outputs)
        task = self._task = self._start(listener)
        task.add_done_callback(lambda _: outputs.put_nowait(None))
        try:
            while (output := await outputs.get()) is not None:
                yield output
            await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    @property
    def result(self) -> Result:
        """What came of it, once its output was read to the end."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            raise SpecError("the run is not over", code="spec.running", hint="read its output to the end first")
        return self._task.result()


class AsyncSandbox:
    """A sandbox that stays: state, files and processes live from one call to the next.

    ``async with AsyncSandbox("python", memory_mb=512) as box: await box.run("print(1)")``
    """

    def __init__(self, environment: str | None = None, *, session: str | None = None, **request: Any) -> None:
        """Describe it. Nothing is started yet.

        Args:
            environment: python (the default), shell, node, or another of the configuration.
            session: the name or id of a session, whose files are kept on disk. Made if there is none.
            **request: any key of the schema (docs/spec.md), such as memory_mb=256 or network="full".

        Raises:
            SpecError: the request is wrong.
        """
        self._request = dict(request)
        if environment is not None:
            self._request["environment"] = environment
        elif session is None:
            self._request["environment"] = "python"
        self._session = session
        self._spec = parse({"environment": "python", **self._request})
        self._box: Box | None = None
        self._is_reconnecting = False
        self._is_closed = False
        self.files = AsyncFiles(self._require_box)

    @classmethod
    def reconnect(cls, session: str) -> Self:
        """A session that exists, by id or name; SessionError when it is used and there is none."""
        box = cls(session=session)
        box._is_reconnecting = True
        return box

    # ---- life ----

    async def start(self) -> Self:
        """Begin. `async with` does that.

        Raises:
            SessionError: the session does not exist, is held by another process, or is of another kind.
            HostError, StartError: the sandbox cannot be started.
        """
        if self._box is None:
            house = House.of_this_loop()
            if self._session is None:
                self._box = Box(house.engine, self._spec)
            else:
                wanted = None if self._is_reconnecting else self._request
                self._box = await house.sessions().open(self._session, wanted, create=not self._is_reconnecting)
                self._spec = self._box.spec
            try:
                live = await self._box.start()
                live.interpreter(self._spec.environment.interpreter).start()  # while we wait for the rest
                await asyncio.shield(live.started)
            except BaseException:
                await self.close()
                self._box, self._is_closed = None, False
                raise
        return self

    async def close(self) -> None:
        """End it, and wait until nothing of it is left; the files of a session stay."""
        if self._is_closed:
            return
        self._is_closed = True
        if isinstance(self._box, Session):
            await House.of_this_loop().sessions().close(self._box)
        elif self._box is not None:
            await self._box.close()

    async def destroy(self) -> None:
        """End it, and remove a session's files as well."""
        if isinstance(self._box, Session) and not self._is_closed:
            self._is_closed = True
            await House.of_this_loop().sessions().destroy(self._box)
        else:
            await self.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def id(self) -> str | None:
        """The session's id, for `reconnect`; None for a sandbox that keeps nothing."""
        return self._box.id if isinstance(self._box, Session) else None

    # ---- code ----

    async def run(
        self,
        code: str,
        *,
        interpreter: str | None = None,
        stdin: bytes | str = b"",
        timeout_seconds: float | EllipsisType | None = ...,
        echo: bool = False,
        check: bool = False,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
    ) -> Result:
        """Run code with the state that earlier runs left.

        Args:
            code: the program.
            interpreter: python, bash or node; by default that of the environment.
            stdin: what it reads.
            timeout_seconds: at which it is interrupted, and killed if that does not help; by default the sandbox's.
            echo: print the value of the last expression, as a REPL does.
            check: raise where the outcome is not ok.
            on_stdout, on_stderr: called with each piece of output as it comes.

        Raises:
            CommandError: with check, the outcome is not ok.
            SpecError: the request is wrong.
            HostError, StartError: the sandbox cannot be started, or has no such interpreter.
            GoneError: it was closed meanwhile.
        """
        data = _bytes(stdin)
        result = await _call_back(
            on_stdout,
            on_stderr,
            lambda listener: self._run(code, interpreter, data, timeout_seconds, echo=echo, listener=listener),
        )
        return result.check() if check else result

    def stream(
        self,
        code: str,
        *,
        interpreter: str | None = None,
        stdin: bytes | str = b"",
        timeout_seconds: float | EllipsisType | None = ...,
    ) -> AsyncRunning:
        """Run code, and read its output while it lasts: ``async for output in box.stream(code)``."""

        def start(listener: Listener) -> asyncio.Task[Result]:
            running = self._run(code, interpreter, _bytes(stdin), timeout_seconds, echo=False, listener=listener)
            return asyncio.get_running_loop().create_task(running)

        return AsyncRunning(start)

    async def _run(
        self,
        code: str,
        interpreter: str | None,
        stdin: bytes,
        timeout_seconds: float | EllipsisType | None,
        *,
        echo: bool,
        listener: Listener | None,
    ) -> Result:
        run = make_run(self._spec.policy.limits, code, stdin, timeout_seconds, echo=echo)
        return await self._require_box().run(run, interpreter, listener)

    async def interrupt(self, interpreter: str | None = None) -> bool:
        """End what an interpreter runs now, as Ctrl-C would; its state stays. False if it runs nothing."""
        return await self._require_box().interrupt(interpreter)

    # ---- commands ----

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        stdin: bytes | str = b"",
        timeout_seconds: float | None = None,
        check: bool = False,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
    ) -> Result:
        """Run a command to its end, beside whatever else runs.

        Args:
            argv: the program and its arguments; no shell is involved.
            env: variables beside the sandbox's own.
            cwd: where it starts, relative to the workspace.
            stdin: what it reads.
            timeout_seconds: at which it is killed; None for no limit.
            check: raise where the outcome is not ok.
            on_stdout, on_stderr: called with each piece of output as it comes.

        Raises:
            CommandError: with check, the outcome is not ok.
            SpecError: the request is wrong.
            GoneError: the sandbox was closed meanwhile.
        """
        command = make_command(self._spec.policy.limits, argv, env, cwd, _bytes(stdin), timeout_seconds, None)
        box = self._require_box()
        result = await _call_back(on_stdout, on_stderr, lambda listener: box.execute(command, listener))
        return result.check() if check else result

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_seconds: float | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> AsyncProcess:
        """Start a command and talk to it: write to it, read it, send it signals.

        Args:
            argv, env, cwd, timeout_seconds: as of `exec`.
            terminal: rows and columns, for a program that wants a terminal.

        Raises:
            SpecError: the request is wrong.
            GoneError: the sandbox was closed.
        """
        command = make_command(self._spec.policy.limits, argv, env, cwd, None, timeout_seconds, terminal)
        outputs: asyncio.Queue[Output | None] = asyncio.Queue()
        program = await self._require_box().start_program(command, _to_queue(outputs))
        program.on_end(lambda: outputs.put_nowait(None))
        return AsyncProcess(program, outputs)

    async def processes(self) -> list[Mapping[str, Any]]:
        """What runs in it: pid, argv, memory_bytes, cpu_seconds of each process, in the background too."""
        from .engine import census

        live = self._require_box().live
        return [] if live is None else [entry.to_json() for entry in census.find_programs(live.child_pid)]

    async def kill(self, pid: int, number: int = 9) -> bool:
        """Send a signal to a process of `processes`. False if there is none."""
        return await self._require_box().kill(pid, number)

    def _require_box(self) -> Box:
        if self._box is None:
            raise SpecError(
                "the sandbox was not started", code="spec.started", hint="use it in a with block, or call start()"
            )
        if self._is_closed:
            raise GoneError("the sandbox was closed", code="sandbox.closed", hint="make a new one")
        return self._box


class AsyncPool:
    """Fresh sandboxes that wait, ready, each for one run.

    ``async with AsyncPool("python", size=8) as pool: await pool.run("print(1)")``
    """

    def __init__(self, environment: str = "python", *, size: int = DEFAULT_SIZE, **request: Any) -> None:
        """Describe it. Nothing is started yet.

        Args:
            environment: python, shell, node, or another of the configuration.
            size: how many sandboxes wait.
            **request: any key of the schema (docs/spec.md).

        Raises:
            SpecError: the request is wrong.
        """
        if not 0 <= size <= 1024:
            raise SpecError(f"size {size} is not between 0 and 1024", code="spec.pool-size", hint="size=8")
        self._spec = parse({"environment": environment, **request})
        self._size = size
        self._pool: EnginePool | None = None

    async def start(self) -> Self:
        """Begin to fill it. `async with` does that."""
        if self._pool is None:
            from .engine.pool import Pool

            self._pool = Pool(House.of_this_loop().engine, self._spec, self._size)
        return self

    async def close(self) -> None:
        """End the sandboxes that wait."""
        if self._pool is not None:
            await self._pool.close()
            self._pool = None

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run(
        self,
        code: str,
        *,
        stdin: bytes | str = b"",
        timeout_seconds: float | EllipsisType | None = ...,
        check: bool = False,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
    ) -> Result:
        """Run code in a sandbox of its own, as a script; nothing of it stays.

        Raises:
            CommandError: with check, the outcome is not ok.
            SpecError: the request is wrong.
            HostError, StartError: no sandbox could be started, or the machine is full.
        """
        if self._pool is None:
            raise SpecError("the pool was not started", code="spec.started", hint="use it in a with block")
        run = make_run(self._spec.policy.limits, code, _bytes(stdin), timeout_seconds, echo=False).replace(once=True)
        pool = self._pool
        result = await _call_back(on_stdout, on_stderr, lambda listener: pool.run(run, listener))
        return result.check() if check else result

    async def map(self, codes: Iterable[str], **options: Any) -> list[Result]:
        """Run many programs, as many at once as the machine takes, and return one Result each, in order.

        Args:
            codes: the programs.
            **options: as of `run`, for all of them.
        """
        turns = asyncio.Semaphore(max(self._size, 1) * 4)

        async def one(code: str) -> Result:
            async with turns:
                return await self.run(code, **options)

        tasks = [asyncio.get_running_loop().create_task(one(code)) for code in codes]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise


# ---- what an event loop has -----------------------------------------------------------------------------------------


class House:
    """The engine and the sessions of one event loop."""

    _all: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, House] = weakref.WeakKeyDictionary()

    _is_forgotten_in_forks = False

    def __init__(self) -> None:
        self.engine = Engine()
        self._sessions: Sessions | None = None

    @classmethod
    def of_this_loop(cls) -> House:
        """That of the loop that runs now."""
        loop = asyncio.get_running_loop()
        if loop not in cls._all:
            for other in [other for other in cls._all if other.is_closed()]:
                del cls._all[other]  # what is in a house may know its loop, and keep it from being collected
            cls._all[loop] = cls()
            loop.run_in_executor(None, state.clear_stale)  # what those left who were killed
            if not cls._is_forgotten_in_forks:
                cls._is_forgotten_in_forks = True
                os.register_at_fork(after_in_child=cls._forget_all)
        return cls._all[loop]

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> House | None:
        """That of a loop, if it has one."""
        return cls._all.get(loop)

    @classmethod
    def _forget_all(cls) -> None:
        """In a forked child: let go of what the parent holds, or no sandbox would end before we do."""
        for house in cls._all.values():
            for sandbox in house.engine.alive:
                sandbox.forget()
            for session in house._sessions.held if house._sessions is not None else ():
                session.forget()
        cls._all.clear()

    def sessions(self) -> Sessions:
        """The sessions of the data directory."""
        if self._sessions is None:
            self._sessions = Sessions(self.engine, Store(data_directory()))
        return self._sessions

    async def close(self) -> None:
        """End everything."""
        try:
            if self._sessions is not None:
                await self._sessions.close_all()
        finally:
            await self.engine.close()


def make_run(
    limits: Limits, code: str, stdin: bytes, timeout_seconds: float | EllipsisType | None, *, echo: bool
) -> Run:
    """A request to an interpreter, checked.

    Raises:
        SpecError: the code, the input or the time is not possible.
    """
    check_code(code)
    if len(stdin) > STDIN_BYTES:
        raise SpecError(
            f"stdin has {len(stdin)} bytes",
            code="spec.stdin-size",
            hint="write large inputs to a file: box.files.upload",
        )
    seconds = limits.timeout_seconds if timeout_seconds is ... else _require_time(timeout_seconds)
    return Run(code=code, limits=limits, stdin=stdin, timeout_seconds=seconds, echo=echo)


def make_command(
    limits: Limits,
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    cwd: str,
    stdin: bytes | None,
    timeout_seconds: float | None,
    terminal: tuple[int, int] | None,
) -> Command:
    """A command, checked.

    Raises:
        SpecError: it is not possible.
    """
    if isinstance(argv, str):
        raise SpecError(
            "a command is a list of words, not one text",
            code="spec.command",
            hint='for example ["sh", "-c", "ls | wc"]',
        )
    return Command(
        argv=tuple(argv),
        limits=limits,
        variables=parse({"env": dict(env)}).policy.variables if env else (),
        cwd=cwd,
        stdin=stdin,
        timeout_seconds=None if timeout_seconds is None else _require_time(timeout_seconds),
        terminal=terminal,
    )


def _require_time(seconds: float | None) -> float | None:
    return parse({"timeout_seconds": "none" if seconds is None else seconds}).policy.limits.timeout_seconds


def _bytes(data: bytes | str) -> bytes:
    try:
        return data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    except UnicodeEncodeError as error:
        raise SpecError(
            f"the input holds half a letter ({error.reason})",
            code="spec.text",
            hint="use text that can be encoded, or bytes",
        ) from error


_STREAMS = ("stdout", "stderr")


def _decoders() -> tuple[codecs.IncrementalDecoder, codecs.IncrementalDecoder]:
    make = codecs.getincrementaldecoder("utf-8")
    return make("replace"), make("replace")


async def _call_back(
    on_stdout: OnOutput | None,
    on_stderr: OnOutput | None,
    start: Callable[[Listener | None], Coroutine[Any, Any, Result]],
) -> Result:
    """Run something with callbacks. What one of them raises ends the run, and is raised here."""
    if on_stdout is None and on_stderr is None:
        return await start(None)
    decoders = _decoders()
    callbacks = (on_stdout, on_stderr)
    faults: list[BaseException] = []

    def listen(index: int, chunk: bytes) -> None:
        callback = callbacks[index]
        text = decoders[index].decode(chunk)
        if callback is None or not text or faults:
            return
        try:
            callback(text)
        except BaseException as error:  # noqa: BLE001 - it is not ours to judge, and must not stop whoever reads
            faults.append(error)
            task.cancel()

    task = asyncio.get_running_loop().create_task(start(listen))
    try:
        result = await task
    except asyncio.CancelledError:
        if faults:
            raise faults[0] from None
        raise
    if faults:
        raise faults[0]
    return result


def _to_queue(outputs: asyncio.Queue[Output | None]) -> Listener:
    decoders = _decoders()

    def listen(index: int, chunk: bytes) -> None:
        text = decoders[index].decode(chunk)
        if text:
            outputs.put_nowait(Output(stream=_STREAMS[index], text=text))

    return listen

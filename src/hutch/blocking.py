"""The Python API for programs without an event loop: a thin face of `sandbox.py`.

All blocking callers of a process share one event loop in a thread of its own, started when it is first needed. That
makes it safe from any thread, from a notebook or a running event loop, and after a fork: a child has a loop of its own,
and what its parent started stays its parent's.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, get_ident

from .engine import supervisor
from .engine.planning import prepare
from .errors import GoneError
from .model import Result
from .spec import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
    from types import EllipsisType, TracebackType
    from typing import Any, Self, TypeVar

    from .engine.files import Entry, Transfer
    from .sandbox import AsyncFiles, AsyncPool, AsyncProcess, AsyncSandbox, OnOutput, Output

    T = TypeVar("T")


def run(
    code: str, environment: str = "python", *, stdin: bytes | str = b"", check: bool = False, **request: Any
) -> Result:
    """Run code in a fresh sandbox that is gone afterwards.

    Args:
        code: the program.
        environment: python, shell or node.
        stdin: what the program reads.
        check: raise where the outcome is not ok.
        **request: any key of the schema (docs/spec.md), for example ``memory_mb=256`` or ``network="full"``.

    Raises:
        CommandError: with check, the outcome is not ok.
        SpecError: the request is wrong.
        HostError: this machine cannot isolate it as asked.
        StartError: the sandbox did not start.
    """
    spec = parse({"environment": environment, **request})
    prepared = prepare(spec, code)
    data = stdin.encode() if isinstance(stdin, str) else stdin
    result = supervisor.run(prepared.plan, prepared.warden, supervisor.Streams(stdin=data), prepared.token)
    return result.check() if check else result


# ---- the loop -------------------------------------------------------------------------------------------------------


class _Portal:
    """The event loop of all blocking callers of this process."""

    _current: _Portal | None = None

    def __init__(self) -> None:
        import asyncio
        import atexit
        import threading

        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        # Sandboxes die with the thread that started them, unless the warden sees that its process lives: it does.
        self._thread = threading.Thread(target=self._loop.run_forever, name="hutch", daemon=True)
        self._thread.start()
        atexit.register(self._close)

    @classmethod
    def current(cls) -> _Portal:
        """That of this process."""
        with _lock:
            if cls._current is None or cls._current._pid != os.getpid() or not cls._current._thread.is_alive():
                cls._current = cls()
            return cls._current

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Have it done in the loop.

        Raises:
            GoneError: there is no loop any more, or it is another process's.
        """
        import asyncio

        if self._pid == os.getpid() and self._thread.is_alive():
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        if self._pid != os.getpid():
            raise GoneError(
                "this sandbox belongs to the process that this one was forked from",
                code="sandbox.forked",
                hint="make a sandbox of its own in each process",
            )
        raise GoneError("the sandbox was closed", code="sandbox.closed", hint="make a new one")

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Have it done in the loop, and wait. Interrupted, it is cancelled there, too."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            end(future)
            raise

    def soon(self, work: Callable[[], object]) -> None:
        """Have something called in the loop."""
        self._loop.call_soon_threadsafe(work)

    @property
    def is_here(self) -> bool:
        """Whether this is the thread of the loop, which must not wait for itself."""
        return self._thread.ident == get_ident()

    def _close(self) -> None:
        if self._pid != os.getpid() or not self._thread.is_alive():
            return
        from .sandbox import House

        house = House.of(self._loop)
        if house is not None:
            self.call(house.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


_lock = allocate_lock()


def _renew_lock() -> None:
    """In a forked child, whose parent may have held it."""
    global _lock
    _lock = allocate_lock()


os.register_at_fork(after_in_child=_renew_lock)


def end(future: concurrent.futures.Future[Any]) -> None:
    """Cancel what nobody waits for any more, and give it a moment to clean up."""
    import concurrent.futures

    if not future.done():
        future.cancel()
        concurrent.futures.wait([future], timeout=5)


class _Relay:
    """Hands output from the loop to the thread that waits for it, so that callbacks run where they are expected."""

    def __init__(self, portal: _Portal, on_stdout: OnOutput | None, on_stderr: OnOutput | None) -> None:
        import queue

        self._portal = portal
        self._callbacks = (on_stdout, on_stderr)
        self._queue: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()

    @property
    def options(self) -> dict[str, Any]:
        if self._callbacks == (None, None):
            return {}
        return {
            "on_stdout": lambda text: self._queue.put((0, text)),
            "on_stderr": lambda text: self._queue.put((1, text)),
        }

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._callbacks == (None, None):
            return self._portal.call(work)
        future = self._portal.submit(work)
        future.add_done_callback(lambda _: self._queue.put(None))
        try:
            while (item := self._queue.get()) is not None:
                callback = self._callbacks[item[0]]
                if callback is not None:
                    callback(item[1])
            return future.result()
        finally:
            end(future)


# ---- the faces ------------------------------------------------------------------------------------------------------


class FilesView:
    """The files of a sandbox's workspace. Paths are relative to it; no link is followed.

    Every method raises SpecError where a path is not below the workspace, does not exist, or is of the wrong kind.
    """

    def __init__(self, portal: _Portal, files: AsyncFiles) -> None:
        self._portal = portal
        self._files = files

    def read(self, path: str) -> bytes:
        """The content of a file, at most 64 MiB; `download` copies larger ones."""
        return self._portal.call(self._files.read(path))

    def read_text(self, path: str) -> str:
        """The content of a file as text."""
        return self._portal.call(self._files.read_text(path))

    def write(self, path: str, data: bytes | str) -> None:
        """Put a file in place in one step, with the directories above it."""
        self._portal.call(self._files.write(path, data))

    def list(self, path: str = ".") -> list[Entry]:
        """What is in a directory, by name."""
        return self._portal.call(self._files.list(path))

    def stat(self, path: str) -> Entry:
        """What a path is. A link is described, not followed."""
        return self._portal.call(self._files.stat(path))

    def exists(self, path: str) -> bool:
        """Whether there is something at a path."""
        return self._portal.call(self._files.exists(path))

    def mkdir(self, path: str) -> None:
        """Make a directory, and those above it."""
        self._portal.call(self._files.mkdir(path))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, an empty directory, or with recursive a directory and all below it."""
        self._portal.call(self._files.remove(path, recursive=recursive))

    def move(self, path: str, to: str) -> None:
        """Give a file or directory another place in the workspace."""
        self._portal.call(self._files.move(path, to))

    def upload(self, host_path: str, path: str = ".") -> Transfer:
        """Copy a file or a directory of the host into the workspace. Links in it are skipped, and named."""
        return self._portal.call(self._files.upload(host_path, path))

    def download(self, path: str, host_path: str) -> Transfer:
        """Copy a file or a directory of the workspace to the host. Links in it are skipped, and named."""
        return self._portal.call(self._files.download(path, host_path))


class Process:
    """A command that runs in a sandbox, and that is talked to."""

    def __init__(self, portal: _Portal, process: AsyncProcess) -> None:
        self._portal = portal
        self._process = process

    @property
    def pid(self) -> int:
        """Its number inside the sandbox; 0 if it could not be started."""
        return self._process.pid

    def write(self, data: bytes | str) -> None:
        """Write to its standard input, or type on its terminal."""
        self._portal.call(self._process.write(data))

    def close_stdin(self) -> None:
        """Tell it that there is no more input."""
        self._portal.call(self._process.close_stdin())

    def signal(self, number: int) -> bool:
        """Send a signal to it and its process group. False if it is gone."""
        return self._portal.call(self._process.signal(number))

    def resize(self, rows: int, columns: int) -> None:
        """Tell it the size of its terminal."""

        async def resize() -> None:
            self._process.resize(rows, columns)

        self._portal.call(resize())

    def wait(self) -> Result:
        """Wait for its end."""
        return self._portal.call(self._process.wait())

    def __iter__(self) -> Iterator[Output]:
        """Its output as it comes, to the end. Whoever stops in between goes on where that was."""
        return _iterate(self._portal, self._process.__aiter__())


class Running:
    """A run whose output is read while it lasts. Ends the run when it is left early."""

    def __init__(self, portal: _Portal, running: Any) -> None:
        self._portal = portal
        self._running = running

    def __iter__(self) -> Iterator[Output]:
        """Its output as it comes."""
        return _iterate(self._portal, self._running.__aiter__())

    @property
    def result(self) -> Result:
        """What came of it, once its output was read to the end."""
        result: Result = self._running.result
        return result


def _iterate(portal: _Portal, outputs: Any) -> Iterator[Output]:
    async def following() -> Output | None:
        async for output in outputs:
            return output  # type: ignore[no-any-return]
        return None

    try:
        while (output := portal.call(following())) is not None:
            yield output
    finally:
        # Whoever collects what is left of a loop may be any thread, at any time.
        try:
            closing = portal.submit(outputs.aclose())
            if not portal.is_here:
                closing.result()
        except GoneError:
            pass  # it is closed


class Sandbox:
    """A sandbox that stays: state, files and processes live from one call to the next.

    ``with Sandbox("python", memory_mb=512) as box: box.run("print(1)")``

    May be used from several threads: runs of one interpreter wait for each other, everything else goes side by side.
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
        from .sandbox import AsyncSandbox

        self._take(AsyncSandbox(environment, session=session, **request))

    def _take(self, box: AsyncSandbox) -> None:
        self._box = box
        self._portal = _Portal.current()
        self.files = FilesView(self._portal, box.files)

    @classmethod
    def reconnect(cls, session: str) -> Self:
        """A session that exists, by id or name; SessionError when it is used and there is none."""
        from .sandbox import AsyncSandbox

        box = cls.__new__(cls)
        box._take(AsyncSandbox.reconnect(session))
        return box

    def start(self) -> Self:
        """Begin. `with` does that.

        Raises:
            SessionError: the session does not exist, is held by another process, or is of another kind.
            HostError, StartError: the sandbox cannot be started.
        """
        self._portal.call(self._box.start())
        return self

    def close(self) -> None:
        """End it, and wait until nothing of it is left; the files of a session stay."""
        self._portal.call(self._box.close())

    def destroy(self) -> None:
        """End it, and remove a session's files as well."""
        self._portal.call(self._box.destroy())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def id(self) -> str | None:
        """The session's id, for `reconnect`; None for a sandbox that keeps nothing."""
        return self._box.id

    def run(
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
            on_stdout, on_stderr: called in this thread with each piece of output as it comes.

        Raises:
            CommandError: with check, the outcome is not ok.
            SpecError: the request is wrong.
            HostError, StartError: the sandbox cannot be started, or has no such interpreter.
            GoneError: it was closed meanwhile.
        """
        relay = _Relay(self._portal, on_stdout, on_stderr)
        work = self._box.run(
            code,
            interpreter=interpreter,
            stdin=stdin,
            timeout_seconds=timeout_seconds,
            echo=echo,
            check=check,
            **relay.options,
        )
        return relay.call(work)

    def stream(
        self,
        code: str,
        *,
        interpreter: str | None = None,
        stdin: bytes | str = b"",
        timeout_seconds: float | EllipsisType | None = ...,
    ) -> Running:
        """Run code, and read its output while it lasts: ``for output in box.stream(code)``."""
        running = self._box.stream(code, interpreter=interpreter, stdin=stdin, timeout_seconds=timeout_seconds)
        return Running(self._portal, running)

    def interrupt(self, interpreter: str | None = None) -> bool:
        """End what an interpreter runs now, as Ctrl-C would; its state stays. False if it runs nothing."""
        return self._portal.call(self._box.interrupt(interpreter))

    def exec(
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
            on_stdout, on_stderr: called in this thread with each piece of output as it comes.

        Raises:
            CommandError: with check, the outcome is not ok.
            SpecError: the request is wrong.
            GoneError: the sandbox was closed meanwhile.
        """
        relay = _Relay(self._portal, on_stdout, on_stderr)
        work = self._box.exec(
            argv, env=env, cwd=cwd, stdin=stdin, timeout_seconds=timeout_seconds, check=check, **relay.options
        )
        return relay.call(work)

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_seconds: float | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> Process:
        """Start a command and talk to it: write to it, read it, send it signals.

        Args:
            argv, env, cwd, timeout_seconds: as of `exec`.
            terminal: rows and columns, for a program that wants a terminal.

        Raises:
            SpecError: the request is wrong.
            GoneError: the sandbox was closed.
        """
        work = self._box.spawn(argv, env=env, cwd=cwd, timeout_seconds=timeout_seconds, terminal=terminal)
        return Process(self._portal, self._portal.call(work))

    def processes(self) -> list[Mapping[str, Any]]:
        """What runs in it: pid, argv, memory_bytes, cpu_seconds of each process, in the background too."""
        return self._portal.call(self._box.processes())

    def kill(self, pid: int, number: int = 9) -> bool:
        """Send a signal to a process of `processes`. False if there is none."""
        return self._portal.call(self._box.kill(pid, number))


class Pool:
    """Fresh sandboxes that wait, ready, each for one run.

    ``with Pool("python", size=8) as pool: pool.run("print(1)")``
    """

    def __init__(self, environment: str = "python", *, size: int = 2, **request: Any) -> None:
        """Describe it. Nothing is started yet.

        Args:
            environment: python, shell, node, or another of the configuration.
            size: how many sandboxes wait.
            **request: any key of the schema (docs/spec.md).

        Raises:
            SpecError: the request is wrong.
        """
        from .sandbox import AsyncPool

        self._pool: AsyncPool = AsyncPool(environment, size=size, **request)
        self._portal = _Portal.current()

    def start(self) -> Self:
        """Begin to fill it. `with` does that."""
        self._portal.call(self._pool.start())
        return self

    def close(self) -> None:
        """End the sandboxes that wait."""
        self._portal.call(self._pool.close())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
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
        relay = _Relay(self._portal, on_stdout, on_stderr)
        work = self._pool.run(code, stdin=stdin, timeout_seconds=timeout_seconds, check=check, **relay.options)
        return relay.call(work)

    def map(self, codes: Iterable[str], **options: Any) -> list[Result]:
        """Run many programs, as many at once as the machine takes, and return one Result each, in order.

        Args:
            codes: the programs.
            **options: as of `run`, for all of them.
        """
        return self._portal.call(self._pool.map(codes, **options))

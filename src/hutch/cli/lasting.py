"""`hutch run -s` and `hutch run -i`: code in a sandbox that lasts from one run to the next.

A session lives in the daemon; with --no-daemon, in this process. Without a session, --interactive has a sandbox of its
own in this process. All three are talked to in the same way.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from ..engine.output import cannot_write
from ..engine.planning import STDIN_BYTES, check_code
from ..errors import HutchError, SpecError
from ..model import MIB, Limits, Outcome, Result, Value
from ..spec import PER_RUN, parse, parse_mount
from . import print_json, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable, Coroutine, Mapping
    from typing import Any, Self, TypeVar

    from ..serve.client import OnOutput

    T = TypeVar("T")


def main(options: argparse.Namespace) -> int:
    """Carry out `hutch run` with -s or -i."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, run._leave)
    if options.interactive:
        from . import repl

        return repl.main(options)
    code = run._code(options)
    check_code(code)
    place = open_place(options)
    try:
        with Interrupts() as interrupts:
            ran = place.run(code, _stdin(options), interrupts, None if options.json else pass_on)
    finally:
        place.close()
    if options.json:
        print_json(ran.result.to_json())
    say_how_it_went(ran, told_of_loss=not options.no_daemon)
    return 130 if interrupts.count else run.exit_code(ran.result)


def _stdin(options: argparse.Namespace) -> bytes:
    """All of standard input, if it is to be passed on."""
    if not options.stdin:
        return b""
    with open(0, "rb", closefd=False) as stream:
        data = stream.read(STDIN_BYTES + 1)
    if len(data) > STDIN_BYTES:
        raise SpecError(
            f"standard input has more than {STDIN_BYTES // MIB} MiB",
            code="spec.stdin-size",
            hint="mount large inputs as files: --mount DIR:/data",
        )
    return data


# ---- what is asked for ----------------------------------------------------------------------------------------------


def open_place(options: argparse.Namespace) -> Place:
    """Where the code shall run; nothing is started yet.

    Raises:
        SpecError: the request is wrong.
    """
    asked = run._asked(options)
    flags = asked.flags
    if options.interactive and options.timeout is None:
        flags = {**flags, "timeout_seconds": None}  # a person waits, and has Ctrl-C
    if options.session is None:
        return Fresh(run.join_requests(asked.settings, flags))
    given = _absolute(run.join_requests(asked.named, flags))
    lasting = {key: value for key, value in flags.items() if key not in PER_RUN}
    create = _absolute(run.join_requests(asked.settings, lasting))
    return (Near if options.no_daemon else Distant)(options.session, given, create)


def _absolute(request: Mapping[str, Any]) -> dict[str, Any]:
    """A request that means the same in every directory.

    Raises:
        SpecError: it is wrong.
    """
    parse(request)
    absolute = dict(request)
    for key in ("project", "workspace"):
        if key in absolute:
            absolute[key] = _absolute_path(absolute[key])
    if "mounts" in absolute:
        mounts = [parse_mount(mount) for mount in absolute["mounts"]]
        absolute["mounts"] = [
            {"host": _absolute_path(mount.host_path), "guest": mount.guest_path, "writable": mount.writable}
            for mount in mounts
        ]
    return absolute


def _absolute_path(path: str) -> str:
    try:
        return os.path.abspath(os.path.expanduser(path))
    except FileNotFoundError as error:
        raise SpecError(
            f"{path}: the current directory no longer exists",
            code="mount.missing",
            hint="cd to an existing directory, or give an absolute path",
        ) from error


# ---- places ---------------------------------------------------------------------------------------------------------


class Ran(Value):
    """A result, and the limits that it was held to."""

    result: Result
    limits: Limits
    session: str | None = None
    """What its user calls it."""


class Interrupts:
    """Ctrl-C while something runs: the first ends it, with its state kept; the second gives it up.

    A signal that comes just before a system call that waits would be noticed only after it. So whoever waits here
    waits for a pipe as well, into which the interpreter writes when a signal comes.
    """

    def __init__(self) -> None:
        self.count = 0
        self.act: Callable[[], object] | None = None
        """What ends it."""

    def __enter__(self) -> Self:
        self.fd, self._wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before = signal.signal(signal.SIGINT, self._hear)
        self._woken_before = signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_exception: object) -> None:
        signal.set_wakeup_fd(self._woken_before)
        signal.signal(signal.SIGINT, self._before)
        os.close(self.fd)
        os.close(self._wakes)

    def _hear(self, _number: int, _frame: object) -> None:
        self.count += 1
        if self.count > 1 or self.act is None:
            raise KeyboardInterrupt
        try:
            self.act()
        except OSError:
            raise KeyboardInterrupt from None

    def wake(self) -> None:
        """From another thread: there is something to look at."""
        try:
            os.write(self._wakes, b"!")
        except OSError:
            pass  # it is full, and so will be noticed; or nobody waits any more

    def wait(self) -> None:
        """Wait for a signal, or to be woken."""
        select.select([self.fd], [], [])
        os.read(self.fd, 4096)


class Place:
    """Somewhere code runs with the state of what ran before."""

    def start(self) -> Mapping[str, Any]:
        """Make it ready, and say which environment and interpreter it has."""
        raise NotImplementedError

    def run(self, code: str, stdin: bytes, interrupts: Interrupts, on_output: OnOutput | None) -> Ran:
        """Run code."""
        raise NotImplementedError

    def evaluate(self, code: str, interrupts: Interrupts, on_output: OnOutput) -> Ran:
        """Run code, and show the value of its last expression."""
        raise NotImplementedError

    def execute(self, argv: list[str], stdin: bytes, interrupts: Interrupts) -> Result:
        """Execute a program beside what runs; for us, not for its user."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of it."""


class _Session(Place):
    """A session, talked to by messages."""

    def __init__(self, word: str, given: Mapping[str, Any], create: Mapping[str, Any]) -> None:
        self._common = {"session": word, "given": given, "create": create}

    def start(self) -> Mapping[str, Any]:
        with Interrupts() as interrupts:
            told: Mapping[str, Any] = self.ask({"op": "open", **self._common}, interrupts, None)
        return told

    def run(self, code: str, stdin: bytes, interrupts: Interrupts, on_output: OnOutput | None) -> Ran:
        return self._run({"code": code, **_encoded(stdin)}, interrupts, on_output)

    def evaluate(self, code: str, interrupts: Interrupts, on_output: OnOutput) -> Ran:
        return self._run({"code": code, "echo": True}, interrupts, on_output)

    def _run(self, what: Mapping[str, Any], interrupts: Interrupts, on_output: OnOutput | None) -> Ran:
        told = self.ask({"op": "run", **self._common, **what}, interrupts, on_output)
        return Ran(
            result=Result.from_json(told["result"]),
            limits=Limits(**told["limits"]),
            session=told["name"] or told["id"],
        )

    def execute(self, argv: list[str], stdin: bytes, interrupts: Interrupts) -> Result:
        message = {"op": "exec", **self._common, "argv": argv, "quiet": True, **_encoded(stdin)}
        return Result.from_json(self.ask(message, interrupts, None)["result"])

    def ask(self, message: Mapping[str, Any], interrupts: Interrupts, on_output: OnOutput | None) -> Any:
        """Send a message to whoever holds the session, and wait for the answer."""
        raise NotImplementedError


def _encoded(stdin: bytes) -> dict[str, str]:
    import binascii

    return {"stdin": binascii.b2a_base64(stdin, newline=False).decode("ascii")} if stdin else {}


class Distant(_Session):
    """A session in the daemon."""

    def ask(self, message: Mapping[str, Any], interrupts: Interrupts, on_output: OnOutput | None) -> Any:
        from ..serve import client

        with client.connect() as connection:
            try:
                connection.send(message)
            except OSError:
                pass  # why, or that nobody is there, is what comes back
            interrupts.act = lambda: connection.send({"op": "interrupt"})
            try:
                return connection.finish(on_output, interrupts.fd)
            except HutchError as error:
                if error.code == "sandbox.interrupted":
                    raise KeyboardInterrupt from error
                raise
            finally:
                interrupts.act = None


class _Thread:
    """The thread of the event loop in which sandboxes of this process live."""

    def __init__(self) -> None:
        from ..blocking import _Portal

        self._portal = _Portal.current()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Have something done there."""
        return self._portal.call(work)

    def attend(
        self,
        start: Callable[[OnOutput], Coroutine[Any, Any, T]],
        interrupt: Callable[[], Awaitable[bool]],
        interrupts: Interrupts,
        on_output: OnOutput | None,
    ) -> T:
        """Have something done there, and see to its output, and to Ctrl-C, here."""
        import asyncio
        from collections import deque

        from ..blocking import end

        outputs: deque[tuple[int, bytes]] = deque()

        def listen(index: int, chunk: bytes) -> None:
            outputs.append((index, chunk))
            interrupts.wake()

        async def act() -> None:
            if not await interrupt():
                future.cancel()

        interrupts.act = lambda: self._portal.submit(act())
        future = self._portal.submit(start(listen))
        future.add_done_callback(lambda _: interrupts.wake())
        try:
            while outputs or not future.done():
                while outputs:
                    index, chunk = outputs.popleft()
                    if on_output is not None:
                        on_output(index, chunk)
                if not future.done():
                    interrupts.wait()
            return future.result()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            interrupts.act = None
            end(future)


class Near(_Session):
    """A session in this process."""

    def __init__(self, word: str, given: Mapping[str, Any], create: Mapping[str, Any]) -> None:
        super().__init__(word, given, create)
        from ..serve.operations import Operations

        async def make() -> Operations:
            return Operations()

        self._thread = _Thread()
        self._operations = self._thread.call(make())

    def ask(self, message: Mapping[str, Any], interrupts: Interrupts, on_output: OnOutput | None) -> Any:
        from ..serve.operations import Job

        jobs: list[Job] = []

        def start(listen: OnOutput) -> Coroutine[Any, Any, Any]:
            jobs.append(Job(listen))
            return self._operations.do(message, jobs[0])

        async def interrupt() -> bool:
            return jobs[0].interrupt is not None and await jobs[0].interrupt()

        return self._thread.attend(start, interrupt, interrupts, on_output)

    def close(self) -> None:
        self._thread.call(self._operations.close())


class Fresh(Place):
    """A sandbox of its own, in this process, that keeps nothing."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        from ..sandbox import AsyncSandbox

        self._spec = parse(request)
        self._thread = _Thread()
        self._box = AsyncSandbox(**request)

    def start(self) -> Mapping[str, Any]:
        self._thread.call(self._box.start())
        environment = self._spec.environment
        return {"environment": environment.name, "interpreter": environment.interpreter}

    def evaluate(self, code: str, interrupts: Interrupts, on_output: OnOutput) -> Ran:
        def start(listen: OnOutput) -> Coroutine[Any, Any, Result]:
            return self._box.run(
                code,
                echo=True,
                on_stdout=lambda text: listen(0, text.encode()),
                on_stderr=lambda text: listen(1, text.encode()),
            )

        result = self._thread.attend(start, self._box.interrupt, interrupts, on_output)
        return Ran(result=result, limits=self._spec.policy.limits)

    def execute(self, argv: list[str], stdin: bytes, interrupts: Interrupts) -> Result:
        async def never() -> bool:
            return False

        return self._thread.attend(lambda _: self._box.exec(argv, stdin=stdin), never, interrupts, None)

    def close(self) -> None:
        self._thread.call(self._box.close())


# ---- what is shown --------------------------------------------------------------------------------------------------


def pass_on(index: int, data: bytes) -> None:
    """Write output to where ours goes, and wait for a slow reader."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(index + 1, rest) :]
        except BlockingIOError:
            ready = select.poll()
            ready.register(index + 1, select.POLLOUT)
            ready.poll()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise cannot_write(error) from error


def say_how_it_went(ran: Ran, *, told_of_loss: bool = True) -> None:
    """What a person has to know beside the output."""
    result = ran.result
    for weaker in result.unsafe:
        print(f"warning: weaker isolation: {weaker.replace('_', ' ')}", file=sys.stderr)
    run._say_once(result.source)
    if ran.session is None or result.outcome in (Outcome.TIMEOUT, Outcome.OUTPUT, Outcome.KILLED, Outcome.FAILED):
        run._say_why(result, ran.limits)
    elif result.outcome is not Outcome.OK:
        print(f"hutch: {result.explain()}; a session keeps the limits that it was made with", file=sys.stderr)
    run._say_what_is_obeyed(result)
    if result.state_lost and told_of_loss:
        where = f" in session {ran.session} is lost; its files are there" if ran.session else " is lost"
        print(f"hutch: the state that earlier runs left{where}", file=sys.stderr)

"""The daemon: one for each user and data directory, started by whoever needs it first, gone when nobody does.

It lives behind a socket that only its user can reach. One connection carries one request (operations.py); whoever hangs
up gives up what runs for him. It ends when nothing lives in it for a while, when code of another version comes, when
its socket is taken from it, or by SIGTERM; sandboxes end with it, the files of sessions stay. Garbage that it is sent
is answered, or hung up on.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import signal
import socket
import time
import traceback

from .. import __version__
from ..config import data_directory
from ..engine import state
from ..errors import HostError, HutchError, SandboxError, SpecError
from . import client, place
from .operations import Job, Operations, interrupted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

IDLE_SECONDS = 60.0
_HELLO_SECONDS = 10.0
_REQUEST_SECONDS = 60.0
_CLOSE_SECONDS = 1.5
_HANDOVER_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_BACKLOG = 512


def main(ready: int, directory: str) -> None:
    """Be the daemon.

    Args:
        ready: a pipe on which to say so, or what is wrong.
        directory: where the socket shall be.
    """
    os.setsid()
    os.chdir("/")
    os.umask(0o022)
    _set_name("hutch-daemon")
    _raise_descriptor_limit()
    try:
        asyncio.new_event_loop().run_until_complete(Daemon(directory, idle_seconds()).live(ready))
    except HutchError as error:
        log(f"cannot start: {error}")
        _say(ready, client.encode(client.write_error(error)))
        os._exit(1)
    os._exit(0)  # whatever is not over by now is not waited for


def _say(ready: int, line: bytes) -> None:
    try:
        os.write(ready, line)
        os.close(ready)
    except OSError:
        pass  # who started us gave up, or was told already


def idle_seconds() -> float:
    """For how long it waits for work.

    Raises:
        SpecError: HUTCH_DAEMON_IDLE is no number of seconds.
    """
    text = os.environ.get("HUTCH_DAEMON_IDLE", "")
    try:
        seconds = float(text or IDLE_SECONDS)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise SpecError(
            f"HUTCH_DAEMON_IDLE={text} is not a number of seconds above 0",
            code="spec.setting",
            hint="unset HUTCH_DAEMON_IDLE",
        )
    return seconds


def _set_name(name: str) -> None:
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as file:
            file.write(name)
    except OSError:
        pass  # only for those who look at a list of processes


def _raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def log(text: str) -> None:
    """Write to the log, which stays short."""
    try:
        if os.fstat(2).st_size > place.LOG_BYTES:
            fd = place.open_log()
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.close(fd)
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        os.write(2, f"{moment} {os.getpid()} {text[:8192]}\n".encode("utf-8", "replace"))
    except (OSError, HostError):
        pass  # a full disk


class Daemon:
    """Everything between the socket and the sandboxes."""

    def __init__(self, directory: str, idle: float) -> None:
        self._directory = directory
        self._path = f"{directory}/{place.SOCKET}"
        self._idle_seconds = idle
        self._started = time.monotonic()
        self._code = place.code_identity()
        self._data = os.path.realpath(data_directory())
        self._conversations: set[asyncio.Task[None]] = set()
        self._jobs = 0
        self._ending: asyncio.Event
        self._operations: Operations

    async def live(self, ready: int) -> None:
        """From the first breath to the last."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_log_fault)
        self._ending = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.retire, signal.Signals(number).name)
        await self._become_the_only_one()
        self._operations = Operations()
        state.clear_stale()
        listener = self._listen()
        inode = os.stat(self._path).st_ino
        server = await asyncio.start_unix_server(self._converse, sock=listener, limit=client.LINE_BYTES)
        log(f"started, version {__version__}")
        _say(ready, b"ready\n")
        watching = loop.create_task(self._watch(inode))
        await self._ending.wait()
        watching.cancel()
        server.close()
        self._leave_place(inode)
        await self._close()

    # ---- its place ----

    async def _become_the_only_one(self) -> None:
        home = place.home_directory()
        place.require_private(home)
        self._alive = place.open_own(f"{home}/daemon.pid")  # never closed: held for as long as this process lives
        deadline = time.monotonic() + _HANDOVER_SECONDS
        while True:
            try:
                fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    pid = os.pread(self._alive, 20, 0).decode("ascii", "replace").strip()
                    raise HostError(
                        f"another daemon, process {pid}, does not end",
                        code="host.daemon",
                        hint=f"kill -9 {pid}; then try again",
                    ) from None
            await asyncio.sleep(0.01)
        os.ftruncate(self._alive, 0)
        os.pwrite(self._alive, f"{os.getpid()}\n".encode(), 0)

    def _listen(self) -> socket.socket:
        place.require_private(self._directory)
        address = f"{place.home_directory()}/address"
        for path in (self._path, address):
            _unlink(path)  # of one that was killed; nobody else can have it
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._path)
            os.chmod(self._path, 0o600)
            listener.listen(_BACKLOG)
            if self._directory != place.home_directory():
                os.symlink(self._directory, address)
        except OSError as error:
            raise HostError(
                f"no socket can be made at {self._path} ({error.strerror})",
                code="host.runtime",
                hint="set HUTCH_DATA_DIR to a directory on a local disk",
            ) from error
        return listener

    def _leave_place(self, inode: int) -> None:
        if _inode(self._path) == inode:
            _unlink(self._path)
        if self._directory != place.home_directory():
            _unlink(f"{place.home_directory()}/address")
            try:
                os.rmdir(self._directory)
            except OSError:
                pass  # somebody is about to start another one

    # ---- its end ----

    def retire(self, reason: str) -> None:
        """Begin to end."""
        if not self._ending.is_set():
            log(f"ends: {reason}")
            self._ending.set()

    async def _close(self) -> None:
        try:
            await asyncio.wait_for(self._operations.close(), _CLOSE_SECONDS)
        except TimeoutError:
            log("not everything ended in time")
        if self._conversations:  # to be told how their runs ended
            await asyncio.wait(self._conversations, timeout=0.2)

    async def _watch(self, inode: int) -> None:
        """End when there is nothing to do, and let go of what nobody uses."""
        idle_since = time.monotonic()
        while True:
            await asyncio.sleep(min(_LOOK_SECONDS, self._idle_seconds / 4))
            if _inode(self._path) != inode:
                self.retire("its socket was taken away")
            try:
                await self._operations.release(self._idle_seconds)
            except HutchError as error:
                log(f"a session could not be closed: {error}")
            if self._conversations or self._operations.engine.alive:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since >= self._idle_seconds:
                self.retire("idle")

    # ---- conversations ----

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            if client.peer_of(writer.get_extra_info("socket"))[1] == os.geteuid():
                await self._answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # who asked is gone, or never asked
        except HutchError as error:
            _send(writer, _failure(error))
        finally:
            try:
                writer.close()
                await writer.wait_closed()
            except OSError:
                pass
            self._conversations.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await _receive(reader, _HELLO_SECONDS)
        if first.get("retire") is True:
            self.retire("asked to")
        elif (difference := self._find_difference(first.get("hello"))) is not None:
            if self._jobs:
                raise HostError(
                    f"the daemon, process {os.getpid()}, is of {difference} and has {self._jobs} runs to finish",
                    code="host.daemon",
                    hint="wait for them, or end them: hutch ps, hutch kill",
                )
            self.retire(f"somebody came with {difference}")
        if self._ending.is_set():
            _send(writer, {"event": "retiring"})
            task = asyncio.current_task()
            assert task is not None
            self._conversations.discard(task)
            await asyncio.Event().wait()  # it hears of our end when the kernel hangs up for us
        _send(writer, {"event": "hello", "version": __version__, "pid": os.getpid()})
        message = await _receive(reader, _REQUEST_SECONDS)

        def pass_on(index: int, chunk: bytes) -> None:
            # Bytes that are no text come out as they went in.
            text = chunk.decode("utf-8", "surrogateescape")
            _send(writer, {"event": client.STREAMS[index], "data": text})

        job = Job(pass_on)
        self._jobs += 1
        try:
            _send(writer, await self._carry_out(message, job, reader))
            await writer.drain()
        finally:
            self._jobs -= 1

    def _find_difference(self, hello: object) -> str | None:
        """What tells whoever comes from us."""
        if not isinstance(hello, dict):
            raise SpecError("the first message is not a hello", code="spec.message", hint="say hello first")
        if hello.get("data") != self._data:
            return "another data directory"
        if hello.get("version") != __version__:
            return "another version of hutch"
        return "other code" if hello.get("code") != self._code else None

    async def _carry_out(self, message: Mapping[str, Any], job: Job, reader: asyncio.StreamReader) -> Mapping[str, Any]:
        if message.get("op") == "status":
            return {"event": "result", "result": self._status()}
        work = asyncio.get_running_loop().create_task(self._operations.do(message, job))
        attending = asyncio.get_running_loop().create_task(_attend(reader, job, work))
        await asyncio.wait([work])
        attending.cancel()
        if work.cancelled():
            return _failure(interrupted())
        error = work.exception()
        if error is None:
            return {"event": "result", "result": work.result()}
        if isinstance(error, HutchError):
            return _failure(error)
        told = "".join(traceback.format_exception(error)).strip()
        log(told)
        return _failure(
            SandboxError(
                f"the daemon failed ({type(error).__name__}: {error})",
                code="hutch.fault",
                details=told,
                hint="please report this, with the output of hutch doctor --json",
            )
        )

    def _status(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "version": __version__,
            "uptimeSeconds": round(time.monotonic() - self._started, 2),
            "sandboxes": len(self._operations.engine.alive),
            "sessions": self._operations.held,
            "runs": self._jobs - 1,
            "socket": self._path,
            "data": self._data,
        }


async def _receive(reader: asyncio.StreamReader, seconds: float | None) -> dict[str, Any]:
    """The next message.

    Raises:
        SpecError: what came is none.
        OSError, asyncio.IncompleteReadError: nothing came.
    """
    try:
        line = await asyncio.wait_for(reader.readuntil(b"\n"), seconds)
    except asyncio.LimitOverrunError as error:
        raise SpecError(
            f"a message has more than {client.LINE_BYTES} bytes", code="spec.message", hint="send less at once"
        ) from error
    return client.parse_message(line)


async def _attend(reader: asyncio.StreamReader, job: Job, work: asyncio.Task[Any]) -> None:
    """Hear what who asked has to say meanwhile: to interrupt it, or nothing more, which gives it up."""
    try:
        while (await _receive(reader, None)).get("op") == "interrupt":
            if job.interrupt is None or not await job.interrupt():
                break
    except (OSError, asyncio.IncompleteReadError, HutchError):
        pass
    work.cancel()


def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    if writer.is_closing():
        return
    line = client.encode(message)
    if len(line) > client.LINE_BYTES:
        line = client.encode(
            _failure(
                SpecError(f"the result has {len(line)} bytes", code="spec.message", hint="keep less of it: keep_kb")
            )
        )
    writer.write(line)


def _failure(error: HutchError) -> dict[str, Any]:
    return {"event": "error", "error": client.write_error(error)}


def _log_fault(_loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    error = context.get("exception")
    told = "".join(traceback.format_exception(error)).strip() if isinstance(error, BaseException) else ""
    log(f"{context.get('message')} {told}")


def _inode(path: str) -> int | None:
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass

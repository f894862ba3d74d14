"""Our end of the socket to a sandbox's agent, which is its pid 1 (isolation/init.c).

Requests are numbered packets with descriptors beside them; answers repeat the number. The agent is our own program and
the guest cannot reach it, yet what comes from inside is never trusted: an answer that was not asked for, or that is not
of the expected form, is a `ProtocolError`.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import signal
import socket

from ..errors import GoneError, HutchError, ProtocolError
from ..model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_ANSWER_BYTES = 64
_PACKET_BYTES = 16384


class Answer(Value):
    """What the agent said to a request that succeeded."""

    value: int
    fd: int
    """A descriptor that came along, now the caller's to close, or -1."""


class Child:
    """A program that the agent started."""

    def __init__(self, number: int, exited: asyncio.Future[int]) -> None:
        self.number = number
        self.pid = 0
        """As it is called inside."""
        self.exited = exited
        """Its wait status."""
        self.terminal = -1
        """Our end of its terminal, if it has one."""


class Agent:
    """Asks, and is told what becomes of it."""

    def __init__(self, ours: socket.socket, on_fault: Callable[[HutchError], None]) -> None:
        self._socket = ours
        os.set_blocking(ours.fileno(), False)
        self._loop = asyncio.get_running_loop()
        self._on_fault = on_fault
        self._next = 1
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._children: dict[int, Child] = {}
        self._loop.add_reader(self._socket.fileno(), self._read)

    async def request(self, verb: str, *words: str | int, fds: Sequence[int] = ()) -> Answer:
        """Ask, and wait for the answer.

        Raises:
            OSError: the agent could not do it.
            GoneError: the sandbox is gone.
        """
        number = self._number()
        try:
            return await self._post(number, verb, words, fds)
        except asyncio.CancelledError:
            # The answer comes all the same, and with it perhaps a descriptor that somebody must close.
            late = self._waiting[number] = self._loop.create_future()
            late.add_done_callback(_close_late)
            raise

    async def spawn(
        self,
        argv: Sequence[str | bytes],
        *,
        variables: Mapping[str, str],
        cwd: str,
        fds: Sequence[int] = (),
        terminal: tuple[int, int] | None = None,
    ) -> Child:
        """Start a program.

        Args:
            argv: the program, by path or by name, and its arguments.
            variables: its whole environment.
            cwd: the directory that it starts in.
            fds: what it gets as 0, 1, 2 and so on; they stay the caller's to close.
            terminal: rows and columns of a terminal of its own, in place of fds.

        Raises:
            OSError: it cannot be executed.
            GoneError: the sandbox is gone.
        """
        number = self._number()
        words: list[str | bytes] = [
            cwd,
            str(len(argv)),
            *argv,
            *(f"{name}={value}" for name, value in variables.items()),
        ]
        file = os.memfd_create("words", os.MFD_CLOEXEC)
        child = self._children[number] = Child(number, self._loop.create_future())
        try:
            data = memoryview(b"".join(os.fsencode(word) + b"\0" for word in words))
            while data:
                data = data[os.write(file, data) :]
            size = "-" if terminal is None else f"{terminal[0]}x{terminal[1]}"
            answered = self._post(number, "spawn", (size,), (file, *fds))
        except BaseException:
            self._children.pop(number, None)
            raise
        finally:
            os.close(file)
        try:
            answer = await answered
        except asyncio.CancelledError:
            # It starts all the same, and nobody is left to end it.
            answered = self._waiting[number] = self._loop.create_future()
            answered.add_done_callback(lambda late: self._abandon(child, late))
            raise
        except BaseException:
            self._children.pop(number, None)
            raise
        child.pid = answer.value
        child.terminal = answer.fd
        return child

    def _abandon(self, child: Child, late: asyncio.Future[Answer]) -> None:
        _close_late(late)
        if self._socket.fileno() >= 0 and not late.cancelled() and late.exception() is None:
            self._post(self._number(), "signal", (child.number, int(signal.SIGKILL), "session"), ()).add_done_callback(
                _close_late
            )

    async def signal(self, child: Child, number: int, scope: str) -> bool:
        """Send a signal to a child: to "one", its "group" or its "session". False if it is gone by now."""
        try:
            await self.request("signal", child.number, number, scope)
        except ProcessLookupError:
            return False
        return True

    async def stop(self, child: Child) -> None:
        """SIGKILL for a child and everything that stayed in its session."""
        await self.signal(child, signal.SIGKILL, "session")

    def close(self, error: HutchError) -> None:
        """Hang up. Whoever still waits gets the error."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
        for child in self._children.values():
            if not child.exited.done():
                child.exited.cancel()
        self._waiting.clear()
        self._children.clear()

    # ---- the wire ----

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _post(self, number: int, verb: str, words: Sequence[str | int], fds: Sequence[int]) -> asyncio.Future[Answer]:
        packet = b"".join(os.fsencode(str(word)) + b"\0" for word in (verb, number, *words))
        if len(packet) > _PACKET_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        if self._socket.fileno() < 0:
            raise gone()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([packet], rights)
        except BlockingIOError as error:
            # More requests than a socket holds are unanswered: pid 1 is stopped, or we ask in a frenzy.
            raise OSError(errno.EAGAIN, "the sandbox is too busy to take more requests") from error
        except OSError as error:
            raise gone() from error
        waiting = self._waiting[number] = self._loop.create_future()
        return waiting

    def _read(self) -> None:
        try:
            data, rights, flags, _ = self._socket.recvmsg(
                _ANSWER_BYTES + 1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, rights, flags = b"", [], 0
        if not data:
            # Why it is gone is known to others, who will close us with the reason.
            self._loop.remove_reader(self._socket.fileno())
            return
        fd = -1
        for _, _, content in rights:
            fd = int.from_bytes(content[:4], "little")
        words = data.split(b" ")
        well_formed = (
            len(words) == 3
            and len(data) <= _ANSWER_BYTES
            and not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
            and all(word.isdigit() for word in words[1:])
        )
        if not well_formed or not self._settle(words[0], int(words[1]), int(words[2]), fd):
            if fd >= 0:
                os.close(fd)
            fault = ProtocolError(
                "the sandbox's agent sent what it was not asked for; the sandbox was killed",
                code="protocol.agent",
                details=repr(data),
                hint="run it in a fresh sandbox; if it happens again, please report it",
            )
            self.close(fault)
            self._on_fault(fault)

    def _settle(self, word: bytes, number: int, value: int, fd: int) -> bool:
        if word == b"exit":
            child = self._children.pop(number, None)
            if child is None:
                return False
            if not child.exited.done():
                child.exited.set_result(value)
            return True
        waiting = self._waiting.pop(number, None)
        if waiting is None or word not in (b"ok", b"failed"):
            return False
        if waiting.done():
            return True
        if word == b"ok":
            waiting.set_result(Answer(value=value, fd=fd))
        else:
            waiting.set_exception(OSError(value, os.strerror(value)))
        return True


def _close_late(future: asyncio.Future[Answer]) -> None:
    if not future.cancelled() and future.exception() is None and future.result().fd >= 0:
        os.close(future.result().fd)


def gone() -> GoneError:
    """The error for whoever needs a sandbox that is not there any more."""
    return GoneError(
        "the sandbox is gone",
        code="sandbox.gone",
        hint="start a new one; hutch doctor shows whether the machine is short of memory",
    )

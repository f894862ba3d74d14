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
import struct

from ..errors import GoneError, HostError, HutchError, ProtocolError
from ..model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_ANSWER_BYTES = 64
_PACKET_BYTES = 16384
_UNANSWERED = 64
"""Requests that may lie in the socket; it holds some hundreds."""
_NUMBER_MAX = 2**31 - 1
_SILENCE_SECONDS = 60.0
"""After so long without an answer to a request, at most twice that, the sandbox is given up."""


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
        self._room = asyncio.Semaphore(_UNANSWERED)
        self._patience: asyncio.TimerHandle | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._children: dict[int, Child] = {}
        self._loop.add_reader(self._socket.fileno(), self._read)

    async def request(self, verb: str, *words: str | int, fds: Sequence[int] = ()) -> Answer:
        """Ask, and wait for the answer.

        Raises:
            OSError: the agent could not do it.
            GoneError: the sandbox is gone.
        """
        async with self._room:
            answered = self._post(self._number(), verb, words, fds)
            try:
                return await asyncio.shield(answered)
            except asyncio.CancelledError:
                # The answer comes all the same, and with it perhaps a descriptor that somebody must close.
                answered.add_done_callback(_close_late)
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
            HostError: this machine refused what is needed to ask for it.
            GoneError: the sandbox is gone.
        """
        number = self._number()
        words: list[str | bytes] = [
            cwd,
            str(len(argv)),
            *argv,
            *(f"{name}={value}" for name, value in variables.items()),
        ]
        size = "-" if terminal is None else f"{terminal[0]}x{terminal[1]}"
        child = Child(number, self._loop.create_future())
        try:
            file = os.memfd_create("words", os.MFD_CLOEXEC)
        except OSError as error:
            raise refused(error) from error
        try:
            data = memoryview(b"".join(os.fsencode(word) + b"\0" for word in words))
            while data:
                data = data[os.write(file, data) :]
            async with self._room:
                self._children[number] = child
                try:
                    answered = self._post(number, "spawn", (size,), (file, *fds))
                    answer = await asyncio.shield(answered)
                except asyncio.CancelledError:
                    # It starts all the same, and nobody is left to end it.
                    answered.add_done_callback(lambda late: self._abandon(child, late))
                    raise
                except BaseException:
                    self._children.pop(number, None)
                    raise
        finally:
            os.close(file)
        child.pid = answer.value
        child.terminal = answer.fd
        return child

    def _abandon(self, child: Child, late: asyncio.Future[Answer]) -> None:
        _close_late(late)
        if late.cancelled() or late.exception() is not None:
            self._children.pop(child.number, None)
            return
        try:
            words = (child.number, int(signal.SIGKILL), "session")
            self._post(self._number(), "signal", words, ()).add_done_callback(_close_late)
        except (HutchError, OSError):
            return  # it ends with the sandbox

    async def signal(self, child: Child, number: int, scope: str) -> bool:
        """Send a signal to a child: to "one", its "group" or its "session". False if it is gone by now."""
        try:
            await self.request("signal", child.number, number, scope)
        except ProcessLookupError:
            return False
        return True

    def close(self, error: HutchError) -> None:
        """Hang up. Whoever still waits gets the error."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if self._patience is not None:
            self._patience.cancel()
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
        if self._patience is None:
            self._patience = self._loop.call_later(_SILENCE_SECONDS, self._lose_patience, number)
        return waiting

    def _lose_patience(self, number: int) -> None:
        if number in self._waiting:
            self._give_up(
                GoneError(
                    "the sandbox does not answer any more, and was killed",
                    code="sandbox.silent",
                    hint="start a new one; a program in it may have kept it from answering",
                )
            )
            return
        self._patience = None
        for oldest in self._waiting:
            self._patience = self._loop.call_later(_SILENCE_SECONDS, self._lose_patience, oldest)
            break

    def _give_up(self, fault: HutchError) -> None:
        self.close(fault)
        self._on_fault(fault)

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
        fds = [fd for _, _, content in rights for (fd,) in struct.iter_unpack("i", content[: len(content) // 4 * 4])]
        words = data.split(b" ")
        well_formed = (
            len(words) == 3
            and len(data) <= _ANSWER_BYTES
            and len(fds) <= (words[0] == b"ok")
            and not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
            and all(word.isdigit() and int(word) <= _NUMBER_MAX for word in words[1:])
        )
        if not well_formed or not self._settle(words[0], int(words[1]), int(words[2]), fds[0] if fds else -1):
            for fd in fds:
                os.close(fd)
            self._give_up(
                ProtocolError(
                    "the sandbox's agent sent what it was not asked for; the sandbox was killed",
                    code="protocol.agent",
                    details=repr(data),
                    hint="run it in a fresh sandbox; if it happens again, please report it",
                )
            )

    def _settle(self, word: bytes, number: int, value: int, fd: int) -> bool:
        if word == b"exit":
            child = self._children.pop(number, None)
            if child is None:
                return False
            if not child.exited.done():
                child.exited.set_result(value)
            return True
        if word not in (b"ok", b"failed") or number not in self._waiting:
            return False
        waiting = self._waiting.pop(number)
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


def refused(error: OSError) -> HostError:
    """The error for whoever did not get from this machine what a sandbox, or a program in it, takes on our side."""
    is_files = error.errno in (errno.EMFILE, errno.ENFILE)
    return HostError(
        f"this machine refused what a sandbox needs ({error.strerror})",
        code="host.refused",
        details=str(error),
        hint="raise the limit of open files: ulimit -n 65536" if is_files else "hutch doctor shows what is missing",
    )

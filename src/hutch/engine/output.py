"""What a program prints, bounded while it is read."""

from __future__ import annotations

import os
import select
from collections import deque

from ..errors import HostError

READ_BYTES = 65536
"""A pipe holds this much; asking for more only costs."""


_MERGED_BYTES = 4096


class Stream:
    """Keeps the head and the tail of a stream in constant memory."""

    def __init__(self, keep_bytes: int) -> None:
        self.total = 0
        self._head_room = keep_bytes // 2
        self._tail_room = keep_bytes - keep_bytes // 2
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque()
        self._tail_size = 0

    def feed(self, chunk: bytes) -> None:
        """Take what was read."""
        self.total += len(chunk)
        if self._head_room:
            self._head.append(chunk[: self._head_room])
            chunk = chunk[self._head_room :]
            self._head_room -= len(self._head[-1])
        if chunk:
            self._tail_size += len(chunk)
            if self._tail and len(self._tail[-1]) + len(chunk) <= _MERGED_BYTES:
                chunk = self._tail.pop() + chunk  # many tiny pieces would cost many times their size
            self._tail.append(chunk)
            while self._tail_size - len(self._tail[0]) >= self._tail_room:
                self._tail_size -= len(self._tail.popleft())

    @property
    def dropped(self) -> int:
        """How many bytes are not kept."""
        return max(0, self._tail_size - self._tail_room) + self.total - sum(map(len, self._head)) - self._tail_size

    def text(self) -> str:
        """What was kept, with a marker where something is missing; bytes that are no UTF-8 are replaced."""
        head = b"".join(self._head)
        tail = b"".join(self._tail)[-self._tail_room :]
        if not self.dropped:
            return (head + tail).decode("utf-8", "replace")
        marker = f"\n[... {self.dropped} bytes dropped ...]\n"
        return head.decode("utf-8", "replace") + marker + tail.decode("utf-8", "replace")


def cannot_write(error: OSError) -> HostError:
    """The error for output that its reader can take no more of."""
    return HostError(
        f"the output cannot be written ({error.strerror})",
        code="host.output",
        hint="make room where the output goes, or send it elsewhere",
    )


class Sink:
    """Passes output on to a descriptor without ever waiting for its reader."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pending: deque[bytes] = deque()

    @property
    def is_blocked(self) -> bool:
        """Whether the reader has yet to take something."""
        return bool(self._pending)

    def feed(self, chunk: bytes) -> None:
        """Queue what was read."""
        self._pending.append(chunk)

    def flush_some(self) -> None:
        """Write as much as the descriptor surely takes at once, which may be nothing.

        It is asked anew: standard output and standard error are often one pipe, and what was true of both may have
        been used up by the first.

        Raises:
            OSError: the reader is gone.
        """
        ready = select.poll()
        ready.register(self.fd, select.POLLOUT)
        if not ready.poll(0):
            return
        chunk = self._pending.popleft()
        try:
            written = os.write(self.fd, chunk[:4096])
        except BlockingIOError:
            written = 0
        if written < len(chunk):
            self._pending.appendleft(chunk[written:])

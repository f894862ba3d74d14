"""Reading what programs in a live sandbox print, as it comes, without a thread and in constant memory."""

from __future__ import annotations

import asyncio
import fcntl
import os

from ..model import Limits
from .output import READ_BYTES, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Listener = Callable[[int, bytes], None]
    """Is told (0 for stdout, 1 for stderr; what came), and never raises: that would stop whoever reads."""

_PAUSE_SECONDS = 0.02
"""Between two looks at what nobody wants: a flood from the background is to cost us little."""


class Capture:
    """What one run prints: bounded, and passed on to whoever listens."""

    def __init__(self, limits: Limits, listener: Listener | None, on_flood: Callable[[], None]) -> None:
        self.streams = (Stream(limits.keep_bytes), Stream(limits.keep_bytes))
        self._room = limits.output_bytes
        self._listener = listener
        self._on_flood = on_flood

    def feed(self, index: int, chunk: bytes) -> None:
        """Take what was read."""
        if len(chunk) > self._room:
            flooded, chunk = self._room >= 0, chunk[: max(0, self._room)]
            self._room = -1
            if flooded:
                self._on_flood()
        else:
            self._room -= len(chunk)
        if chunk:
            self.streams[index].feed(chunk)
            if self._listener is not None:
                self._listener(index, chunk)

    def mute(self) -> None:
        """From now on nobody listens."""
        self._listener = None

    @property
    def total(self) -> tuple[int, int]:
        """Bytes of each stream."""
        return self.streams[0].total, self.streams[1].total


class Pipes:
    """Two pipes of which a program holds the other ends."""

    def __init__(self, count: int = 2) -> None:
        self._loop = asyncio.get_running_loop()
        self._ours: list[int] = []
        self._theirs: list[int] = []
        self.capture: Capture | None = None
        """Who gets what is read. Without one it is kept, as far as a pipe would, for the next."""
        self._kept: list[tuple[int, bytes]] = []
        self._kept_size = 0
        self._forget: Callable[[], object] = lambda: None
        try:
            for _ in range(count):
                ours, theirs = os.pipe2(os.O_CLOEXEC)
                self._ours.append(ours)
                self._theirs.append(theirs)
                os.set_blocking(ours, False)
        except OSError:
            self.close()
            raise
        for index, fd in enumerate(self._ours):
            self._loop.add_reader(fd, self._read, index)

    @property
    def theirs(self) -> tuple[int, ...]:
        """The ends to write to, until `hand_over`."""
        return tuple(self._theirs)

    def hand_over(self) -> None:
        """Close our copies of the ends that the program has now."""
        for fd in self._theirs:
            os.close(fd)
        self._theirs.clear()

    def begin(self, capture: Capture) -> None:
        """Give what comes, and what came since the last capture, to a new one."""
        self.capture = capture
        kept, self._kept, self._kept_size = self._kept, [], 0
        for index, chunk in kept:
            capture.feed(index, chunk)

    def end(self) -> None:
        """Read what is in the pipes now, and end the capture.

        No more than the pipes can hold: somebody in the background may go on writing for ever.
        """
        for index, fd in enumerate(self._ours):
            if fd < 0:
                continue
            left = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)  # each time: the other side may have changed it
            while left > 0:
                read = self._read(index)
                if not read:
                    break
                left -= read
        self.capture = None

    def drop(self) -> None:
        """Forget what came without a capture."""
        for index, fd in enumerate(self._ours):
            if fd >= 0:
                self._read(index)
        self._kept.clear()
        self._kept_size = min(self._kept_size, 0)

    def discard(self, on_end: Callable[[Callable[[], None]], Callable[[], object]]) -> None:
        """From now on nobody wants what comes, and whoever writes must not be stopped by that.

        Args:
            on_end: has us closed when the sandbox is over, and returns what takes that back.
        """
        self.capture = None
        self._kept.clear()
        self._kept_size = -1
        if self.is_open:
            self._forget = on_end(self.close)

    def close(self) -> None:
        """Close everything."""
        for fd in self._ours:
            if fd >= 0:
                self._loop.remove_reader(fd)
                os.close(fd)
        self._ours = [-1] * len(self._ours)
        self.hand_over()

    @property
    def is_open(self) -> bool:
        """Whether somebody may still write."""
        return any(fd >= 0 for fd in self._ours)

    def _read(self, index: int) -> int:
        fd = self._ours[index]
        if fd < 0:
            return 0
        try:
            chunk = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            chunk = b""
        if not chunk:
            self._loop.remove_reader(fd)
            os.close(fd)
            self._ours[index] = -1
            if not self.is_open:
                self._forget()
            return 0
        if self.capture is not None:
            self.capture.feed(index, chunk)
        elif 0 <= self._kept_size < READ_BYTES:
            self._kept.append((index, chunk))
            self._kept_size += len(chunk)
        else:
            self._loop.remove_reader(fd)
            self._loop.call_later(_PAUSE_SECONDS, self._resume, index, fd)
        return len(chunk)

    def _resume(self, index: int, fd: int) -> None:
        if self._ours[index] == fd:
            self._loop.add_reader(fd, self._read, index)

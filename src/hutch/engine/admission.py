"""How much may run at once: so many runs, so much memory, and a queue that is not endless."""

from __future__ import annotations

import asyncio
import os
from collections import deque

from ..errors import HostError
from ..isolation.usage import read_text
from ..model import MIB

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_RUNS_PER_CPU = 16
_WAITING = 1024
_SHARE_PERCENT = 90


def host_memory() -> int:
    """Bytes of memory that this machine has."""
    for line in read_text("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 1024 * MIB


class Admission:
    """Lets runs in, in the order in which they came."""

    def __init__(
        self, *, running: int | None = None, waiting: int | None = None, memory_bytes: int | None = None
    ) -> None:
        self._running = running or _RUNS_PER_CPU * len(os.sched_getaffinity(0))
        self._waiting = _WAITING if waiting is None else waiting
        self._memory = memory_bytes or host_memory() * _SHARE_PERCENT // 100
        self._active = 0
        self._reserved = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    def ask(self, memory_bytes: int) -> Turn:
        """A turn to wait for, with the memory that its sandbox may come to use."""
        return Turn(self, memory_bytes)

    async def enter(self, memory_bytes: int) -> None:
        """Wait for a turn.

        Raises:
            HostError: it can never come, or too many wait already.
        """
        if memory_bytes > self._memory:
            raise HostError(
                f"a sandbox of {memory_bytes // MIB} MiB does not fit the memory budget of {self._memory // MIB} MiB",
                code="host.memory",
                hint="lower memory_mb, or raise HUTCH_MEMORY_BUDGET_MB",
            )
        if not self._queue and self._fits(memory_bytes):
            self._take(memory_bytes)
            return
        if len(self._queue) >= self._waiting:
            raise HostError(
                f"busy: {self._active} runs are active and {len(self._queue)} wait",
                code="host.busy",
                details=f"{self._running} may run, within {self._memory // MIB} MiB, and {self._waiting} wait",
                hint="try again later, or raise HUTCH_MAX_RUNNING and HUTCH_MAX_WAITING",
            )
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((memory_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(memory_bytes)
            else:
                self._queue = deque(entry for entry in self._queue if not entry[1].done())
                self._admit()  # who waited behind it may be small enough
            raise

    def leave(self, memory_bytes: int) -> None:
        """Give a turn back."""
        self._active -= 1
        self._reserved -= memory_bytes
        self._admit()

    def _admit(self) -> None:
        """Let in whoever fits, in order."""
        while self._queue and (self._queue[0][1].done() or self._fits(self._queue[0][0])):
            wanted, turn = self._queue.popleft()
            if not turn.done():  # and not cancelled in this very moment
                self._take(wanted)
                turn.set_result(None)

    def _fits(self, memory_bytes: int) -> bool:
        return self._active < self._running and self._reserved + memory_bytes <= self._memory

    def _take(self, memory_bytes: int) -> None:
        self._active += 1
        self._reserved += memory_bytes


class Turn:
    """`async with`: wait for a turn, and give it back."""

    def __init__(self, admission: Admission, memory_bytes: int) -> None:
        self._admission = admission
        self._memory_bytes = memory_bytes

    async def __aenter__(self) -> None:
        await self._admission.enter(self._memory_bytes)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.leave(self._memory_bytes)

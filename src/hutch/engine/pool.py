"""Sandboxes that wait, ready, to be used once.

A run takes one, and it is killed afterwards, off the path of whoever waits for the result; then the pool fills up
again. Which sandboxes are alike is decided by the whole Spec.
"""

from __future__ import annotations

import asyncio
from collections import deque

from ..errors import GoneError, HutchError
from ..model import Result, Spec
from .interpreter import Run
from .live import LiveSandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .engine import Engine
    from .pipes import Listener

DEFAULT_SIZE = 2
_GROWTH = 4
"""A busy pool holds at most this many times its size."""
_SHRINK_SECONDS = 30.0
_PAUSE_SECONDS = 0.003
_LOSSES = 16
"""So many may go away while they wait; then something is wrong with them."""


class Pool:
    """Ready sandboxes of one Spec."""

    def __init__(
        self, engine: Engine, spec: Spec, size: int = DEFAULT_SIZE, *, keep_seconds: float | None = None
    ) -> None:
        """Begin to fill it.

        Args:
            engine: who starts sandboxes.
            spec: what they are.
            size: how many wait when nothing happens.
            keep_seconds: after so long without a run none wait any more; None keeps them for ever.
        """
        self.spec = spec
        self._engine = engine
        self._size = size
        self._wanted = size
        self._keep_seconds = keep_seconds
        self._interpreter = spec.environment.interpreter
        self._loop = asyncio.get_running_loop()
        self._ready: deque[LiveSandbox] = deque()
        self._filling: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Future[None]] = set()
        """Of runs that found none ready."""
        self._used: set[LiveSandbox] = set()
        self._leaving: set[asyncio.Future[None]] = set()
        """Of sandboxes that were used, and are not gone yet."""
        self._used_at = self._loop.time()
        self._is_open = True
        self._trouble = False
        """The last ones did not start, or did not stay: no more attempts until a run succeeded in being one."""
        self._losses = 0
        """How many went away while they waited, since the last run."""
        self._shrinking = self._loop.call_later(_SHRINK_SECONDS, self._shrink)
        engine.pools.add(self)
        self._fill()

    @property
    def ready(self) -> int:
        """How many wait."""
        return len(self._ready)

    async def run(self, run: Run, listener: Listener | None = None) -> Result:
        """Run code in a sandbox of its own.

        Raises:
            HostError, StartError: none could be started, or the machine is full.
            GoneError: the pool was closed meanwhile.
        """
        async with self._engine.admission.ask(self.spec.policy.limits.memory_bytes):
            sandbox = await self._take()
            try:
                result = await sandbox.interpreter(self._interpreter).run(run, listener)
                self._trouble, self._losses = False, 0
                return result
            finally:
                # Off the path of whoever waits for the result, in this thread or in another.
                self._loop.call_later(_PAUSE_SECONDS, self._renew, sandbox)

    async def wait_until_full(self) -> None:
        """Wait until as many are ready as are wanted, or cannot be."""
        while self._filling:
            await asyncio.wait(self._filling, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """End all, also those that run something, and wait until nothing is left of them."""
        self._is_open = False
        self._engine.pools.discard(self)
        self._shrinking.cancel()
        for task in self._filling:
            task.cancel()
        for sandbox in (*self._ready, *self._used):
            self._retire(sandbox)
        self._ready.clear()
        while doomed := self._leaving | self._filling | self._starting:
            await asyncio.wait(doomed)
            await asyncio.sleep(0)  # for those that take themselves out

    def _renew(self, used: LiveSandbox) -> None:
        self._retire(used)
        self._fill()

    def _retire(self, sandbox: LiveSandbox) -> None:
        self._used.discard(sandbox)
        self._leaving.add(sandbox.closed)
        sandbox.closed.add_done_callback(self._leaving.discard)
        sandbox.close()

    async def _take(self) -> LiveSandbox:
        self._used_at = self._loop.time()
        while self._ready:
            sandbox = self._ready.popleft()
            if sandbox.is_alive:
                self._used.add(sandbox)
                return sandbox
        if not self._trouble:
            self._wanted = min(self._wanted + 1, self._size * _GROWTH)
        started: asyncio.Future[None] = self._loop.create_future()
        self._starting.add(started)
        try:
            sandbox = await self._engine.start(self.spec)
            self._used.add(sandbox)
            if not self._is_open:
                self._retire(sandbox)
                raise GoneError("the pool was closed", code="sandbox.closed", hint="make a new one")
        finally:
            self._starting.discard(started)
            started.set_result(None)
        return sandbox

    def _fill(self) -> None:
        if not self._is_open or self._trouble:
            return
        for _ in range(self._wanted - len(self._ready) - len(self._filling)):
            task = self._loop.create_task(self._add())
            self._filling.add(task)
            task.add_done_callback(self._filling.discard)

    async def _add(self) -> None:
        try:
            sandbox = await self._engine.start(self.spec, self._interpreter)
        except HutchError:
            self._trouble = True
            return
        if not self._is_open:
            self._retire(sandbox)
            return
        self._ready.append(sandbox)
        sandbox.on_end(lambda: self._lose(sandbox))

    def _lose(self, sandbox: LiveSandbox) -> None:
        if sandbox in self._ready:
            self._ready.remove(sandbox)
            self._losses += 1
            self._trouble = self._trouble or self._losses > _LOSSES
            self._loop.call_soon(self._fill)

    def _shrink(self) -> None:
        self._shrinking = self._loop.call_later(_SHRINK_SECONDS, self._shrink)
        idle = self._loop.time() - self._used_at
        if idle < _SHRINK_SECONDS:
            return
        self._wanted = self._size
        if self._keep_seconds is not None and idle >= self._keep_seconds:
            self._wanted = 0
        while len(self._ready) > self._wanted:
            self._retire(self._ready.pop())

"""All sandboxes of one event loop: started a few at a time, let in by turns, and ended with it."""

from __future__ import annotations

import asyncio
import os

from ..errors import SpecError, StartError
from ..model import Spec
from . import planning
from .admission import Admission
from .live import LiveSandbox
from .pool import DEFAULT_SIZE, Pool

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..isolation.mounts import CheckedMount

_SPAWNS_PER_CPU = 2


class Engine:
    """Starts sandboxes and knows those that live."""

    def __init__(self, admission: Admission | None = None) -> None:
        self.admission = admission or Admission(
            running=_setting("HUTCH_MAX_RUNNING"),
            waiting=_setting("HUTCH_MAX_WAITING"),
            memory_bytes=(_setting("HUTCH_MEMORY_BUDGET_MB") or 0) * 1024 * 1024 or None,
        )
        self._spawning = asyncio.Semaphore(_SPAWNS_PER_CPU * len(os.sched_getaffinity(0)))
        self._alive: set[LiveSandbox] = set()
        self._creating = asyncio.Lock()
        self.pools: set[Pool] = set()
        """Those that are open, whoever made them."""
        self._pools: dict[Spec, Pool] = {}

    async def start(
        self, spec: Spec, ready: str | None = None, own: tuple[CheckedMount, ...] = (), label: str = "-"
    ) -> LiveSandbox:
        """Start a sandbox.

        Args:
            spec: what it is.
            ready: an interpreter to wait for. Without one nothing is waited for but a turn: requests lie in a socket
                until the sandbox is there.
            own: directories of hutch's own that it gets.
            label: who it belongs to, for those who list sandboxes.

        Raises:
            SpecError, HostError, StartError: it cannot be started.
        """
        await self._spawning.acquire()
        sandbox: LiveSandbox | None = None
        try:
            # One in each turn of the loop, for others want to be served, too: the kernel takes its time.
            async with self._creating:
                sandbox = LiveSandbox(planning.prepare(spec, None, own), label)
                self._alive.add(sandbox)
                sandbox.closed.add_done_callback(lambda _: self._alive.discard(sandbox))
                await asyncio.sleep(0)
        except BaseException:
            self._spawning.release()
            if sandbox is not None:
                sandbox.close()
                await asyncio.wait([sandbox.closed])
            raise
        if ready is None:
            sandbox.started.add_done_callback(lambda _: self._spawning.release())
            return sandbox
        try:
            waiting = sandbox.interpreter(ready).start()
            await asyncio.wait([waiting])
            if waiting.cancelled():
                sandbox.verdict()
                await sandbox.started
                raise StartError(
                    f"{ready} ended before it was ready",
                    code="start.interpreter",
                    hint="run something in a sandbox like this one: its error says more",
                )
        except BaseException:
            sandbox.close()
            await asyncio.wait([sandbox.closed])
            raise
        finally:
            self._spawning.release()
        return sandbox

    def pool(self, spec: Spec, size: int = DEFAULT_SIZE, *, keep_seconds: float | None = None) -> Pool:
        """The pool for a Spec, made when it is first asked for."""
        if spec not in self._pools:
            self._pools[spec] = Pool(self, spec, size, keep_seconds=keep_seconds)
        return self._pools[spec]

    @property
    def alive(self) -> tuple[LiveSandbox, ...]:
        """Those that are not wholly gone."""
        return tuple(self._alive)

    async def close(self) -> None:
        """End everything, and wait until nothing is left."""
        await asyncio.gather(*(pool.close() for pool in self.pools))
        self._pools.clear()
        for sandbox in self.alive:
            sandbox.close()
        while self._alive:
            await asyncio.wait([sandbox.closed for sandbox in self._alive])
            await asyncio.sleep(0)


def _setting(name: str) -> int | None:
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdigit() or int(text) == 0:
        raise SpecError(f"{name}={text} is not a number above 0", code="spec.setting", hint=f"unset {name}")
    return int(text)

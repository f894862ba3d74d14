"""What is measured as a whole and not in rounds: a flood of output, and many sandboxes at once or in turn."""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import time
from typing import TYPE_CHECKING

import hutch
from hutch.isolation import limits
from hutch.sandbox import House

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

PRINT = "print(1)"
POOL_SIZE = 2


def require(result: hutch.Result) -> None:
    """What was measured is what was meant."""
    if not result.ok or result.stdout != "1\n":
        raise RuntimeError(f"not the expected result: {result}")


async def measure_output(megabytes: int) -> dict[str, float]:
    """What it costs this process to take so much output, beside what waiting costs."""
    # In one piece as large as a pipe, as a program that copies a file writes it.
    flood = "import os\nchunk = b'x' * 65536\nfor _ in range({} * 1000000 // 65536): os.write(1, chunk)"
    async with hutch.AsyncSandbox(max_output_mb=megabytes * 2) as box:
        require(await box.run(PRINT))
        require_ok(await box.run(flood.format(4)))  # as much as is kept
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started, before = time.perf_counter(), time.process_time()
        result = await box.run(flood.format(megabytes))
        spent, used = time.perf_counter() - started, time.process_time() - before
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        require_ok(result)
        assert result.dropped_bytes > (megabytes - 3) * 1000000, result.dropped_bytes
        before = time.process_time()
        require_ok(await box.run(f"import time; time.sleep({spent})"))
        idle = time.process_time() - before
    return {
        "cpu_ms": (used - idle) * 1000,
        "idle_cpu_ms": idle * 1000,
        "wall_ms": spent * 1000,
        "growth_mb": (peak - held) / 1024,
    }


def require_ok(result: hutch.Result) -> None:
    """It ran to its end."""
    if not result.ok:
        raise RuntimeError(f"not the expected result: {result.replace(stdout='', stderr=result.stderr[-500:])}")


class Ticker:
    """Notices when the event loop is kept from running."""

    def __init__(self, pause: float = 0.001) -> None:
        self._pause = pause
        self._gaps: list[float] = []

    async def _tick(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(self._pause)
            now = time.perf_counter()
            self._gaps.append(now - last - self._pause)
            last = now

    async def watch(self, work: Coroutine[Any, Any, Any]) -> dict[str, float]:
        """The longest gap, and the one that 19 of 20 are below, in ms, while something is done."""
        ticking = asyncio.get_running_loop().create_task(self._tick())
        started = time.perf_counter()
        try:
            await work
        finally:
            ticking.cancel()
        gaps = sorted(self._gaps)
        return {
            "wall_ms": (time.perf_counter() - started) * 1000,
            "max_ms": gaps[-1] * 1000,
            "p95_ms": gaps[int(len(gaps) * 0.95)] * 1000,
        }


async def measure_gap(count: int) -> dict[str, float]:
    """How long an event loop stands still while so many sandboxes start at once and answer."""
    boxes: list[hutch.AsyncSandbox] = []

    async def one() -> None:
        box = hutch.AsyncSandbox()
        boxes.append(box)
        await box.start()
        require(await box.run(PRINT))

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    await one()  # imports
    try:
        seen = await Ticker().watch(all_of_them())
        idle = await Ticker().watch(asyncio.sleep(seen["wall_ms"] / 1000))
    finally:
        await asyncio.gather(*(box.close() for box in boxes))
    return {**seen, "idle_max_ms": idle["max_ms"]}


# ---- many -----------------------------------------------------------------------------------------------------------


class Crowd:
    """Many live sandboxes."""

    def __init__(self) -> None:
        self.boxes: list[hutch.AsyncSandbox] = []

    async def grow(self, count: int) -> dict[str, Any]:
        """Have so many, each with an interpreter that ran something."""

        async def one() -> None:
            box = await hutch.AsyncSandbox().start()
            self.boxes.append(box)
            require(await box.run(PRINT))

        started = time.perf_counter()
        tasks = [asyncio.create_task(one()) for _ in range(count - len(self.boxes))]
        await asyncio.gather(*tasks)
        spent = time.perf_counter() - started
        wardens = [sandbox._warden.pid for sandbox in House.of_this_loop().engine.alive]
        return {"seconds": spent, "wardens": wardens, **inventory()}

    async def visit(self, numbers: list[int]) -> dict[str, Any]:
        """Seconds of one run in each of these."""
        times = []
        for number in numbers:
            box = self.boxes[number % len(self.boxes)]
            started = time.perf_counter()
            result = await box.run(PRINT)
            times.append(time.perf_counter() - started)
            require(result)
        return {"times": times}

    async def rest(self, seconds: float) -> dict[str, Any]:
        """What looking after them costs while nobody uses them: CPU in percent, and gaps of the loop."""
        before = time.process_time()
        seen = await Ticker(0.01).watch(asyncio.sleep(seconds))
        return {"cpu_percent": (time.process_time() - before) / seconds * 100, **seen}

    async def leave(self) -> dict[str, Any]:
        """End them all."""
        started = time.perf_counter()
        await asyncio.gather(*(box.close() for box in self.boxes))
        self.boxes.clear()
        return {"seconds": time.perf_counter() - started, **inventory()}


def inventory() -> dict[str, int]:
    """What this process has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    children = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
            children += len(file.read().split())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,
        "processes": children,
        "threads": len(os.listdir("/proc/self/task")),
        "cgroups": sum(
            name.startswith(f"hutch-{os.getpid()}-") for path in limits.cgroup_roots() for name in os.listdir(path)
        ),
        "memory_kb": resident // 1024,
    }


async def run_many(count: int) -> dict[str, Any]:
    """So many runs, one after the other, each in a sandbox of its own; what this process has before and after."""

    async def some(count: int) -> list[float]:
        times = []
        async with hutch.AsyncPool(size=POOL_SIZE) as pool:
            for _ in range(count):
                started = time.perf_counter()
                result = await pool.run(PRINT)
                times.append(time.perf_counter() - started)
                require(result)
        alive = [sandbox.closed for sandbox in House.of_this_loop().engine.alive]
        if alive:
            await asyncio.wait(alive)
        return times

    await some(min(200, count))  # caches, and memory that Python keeps once it had it
    before = inventory()
    began = time.perf_counter()
    times = await some(count)
    spent = time.perf_counter() - began
    return {"before": before, "after": inventory(), "seconds": spent, "median_ms": statistics.median(times) * 1000}

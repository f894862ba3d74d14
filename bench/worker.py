"""The process that measures: a host program that uses hutch for a long time, and starts commands beside it.

Every row is a method that returns seconds. What a row sets in motion has ended when it returns: the pool is full again
and what was used is gone, so that the next row has the machine to itself.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import tempfile
import time
from typing import TYPE_CHECKING

from protocol import serve

import hutch
from hutch.blocking import _Portal
from hutch.engine import planning
from hutch.isolation import limits
from hutch.sandbox import House
from hutch.spec import parse

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

PRINT = "print(1)"
POOL_SIZE = 2
MIB = 1024 * 1024


class Commands:
    """Programs that are executed and waited for."""

    def __init__(self) -> None:
        self.table: dict[str, list[str]] = {}
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as we are
        variables = {
            name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "PYTHONPATH")
        }
        self._variables = variables

    def time(self, name: str) -> float:
        """Seconds that a command takes."""
        argv = self.table[name]
        self._said.seek(0)
        self._said.truncate()
        streams = ((self._null, 0), (self._null, 1), (self._said.fileno(), 2))
        actions = [(os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in streams]
        started = time.perf_counter()
        pid = os.posix_spawn(argv[0], argv, self._variables, file_actions=actions)
        _, status = os.waitpid(pid, 0)
        spent = time.perf_counter() - started
        if status != 0:
            self._said.seek(0)
            said = self._said.read(4000).decode("utf-8", "replace").strip()
            raise RuntimeError(f"exit code {os.waitstatus_to_exitcode(status)}: {said}")
        return spent


class Async:
    """The rows of the async API, in a loop that runs while one of them is measured."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pools: dict[int, hutch.AsyncPool] = {}
        self._boxes: dict[str | None, hutch.AsyncSandbox] = {}
        self._started: set[str] = set()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Have something done in the loop."""
        return self._loop.run_until_complete(work)

    async def close(self) -> None:
        """End everything."""
        for pool in self._pools.values():
            await pool.close()
        await House.of_this_loop().close()

    async def cold_pool(self) -> float:
        """A run that finds no sandbox ready."""
        return await self._pool_run(0)

    async def hit(self) -> float:
        """A run that finds one."""
        return await self._pool_run(POOL_SIZE)

    async def _pool_run(self, size: int) -> float:
        if size not in self._pools:
            self._pools[size] = await hutch.AsyncPool(size=size).start()
        pool = self._pools[size]
        await settle(pool, size)
        started = time.perf_counter()
        result = await pool.run(PRINT)
        spent = time.perf_counter() - started
        require(result)
        await settle(pool, size)
        return spent

    async def cold_sandbox(self, session: str | None = None) -> float:
        """From nothing to the first result."""
        await breathe()
        started = time.perf_counter()
        box = await hutch.AsyncSandbox(session=session).start()
        result = await box.run(PRINT)
        spent = time.perf_counter() - started
        await box.close()
        require(result)
        return spent

    async def cold_session(self) -> float:
        """The same, with files on disk from earlier."""
        if "cold" not in self._boxes:
            self._boxes["cold"] = hutch.AsyncSandbox(session="cold")
            await self.cold_sandbox("cold")
        return await self.cold_sandbox("cold")

    async def _box(self, session: str | None) -> hutch.AsyncSandbox:
        if session not in self._boxes:
            self._boxes[session] = await hutch.AsyncSandbox(session=session).start()
            require(await self._boxes[session].run(PRINT))
        return self._boxes[session]

    async def live(self, session: str | None = None) -> float:
        """One more run."""
        box = await self._box(session)
        await breathe()
        started = time.perf_counter()
        result = await box.run(PRINT)
        spent = time.perf_counter() - started
        require(result)
        return spent

    async def live_session(self) -> float:
        """One more run of a session that is on disk."""
        return await self.live("live")

    async def live_bash(self) -> float:
        """One more run of another interpreter beside it."""
        return await self._other("bash", "echo 1")

    async def live_node(self) -> float:
        """And of another one."""
        return await self._other("node", "console.log(1)")

    async def _other(self, interpreter: str, code: str) -> float:
        box = await self._box(None)
        if interpreter not in self._started:
            self._started.add(interpreter)
            require(await box.run(code, interpreter=interpreter))
        await breathe()
        started = time.perf_counter()
        result = await box.run(code, interpreter=interpreter)
        spent = time.perf_counter() - started
        require(result)
        return spent

    async def live_exec(self) -> float:
        """One more command."""
        box = await self._box(None)
        await breathe()
        started = time.perf_counter()
        result = await box.exec(["/bin/true"])
        spent = time.perf_counter() - started
        assert result.ok, result
        return spent

    async def live_file(self) -> float:
        """A small file in and out."""
        box = await self._box(None)
        await breathe()
        started = time.perf_counter()
        await box.files.write("a/b.txt", "hello")
        data = await box.files.read("a/b.txt")
        spent = time.perf_counter() - started
        assert data == b"hello"
        return spent


class Blocking:
    """The rows of the blocking API."""

    def __init__(self) -> None:
        self._pool: hutch.Pool | None = None
        self._boxes: dict[str | None, hutch.Sandbox] = {}

    def close(self) -> None:
        """End everything."""
        if self._pool is not None:
            self._pool.close()

    def cold_run(self) -> float:
        """The function for those who want one result."""
        started = time.perf_counter()
        result = hutch.run(PRINT)
        spent = time.perf_counter() - started
        require(result)
        return spent

    def cold_sandbox_blocking(self) -> float:
        """From nothing to the first result."""
        started = time.perf_counter()
        box = hutch.Sandbox().start()
        result = box.run(PRINT)
        spent = time.perf_counter() - started
        box.close()
        require(result)
        return spent

    def hit_blocking(self) -> float:
        """A run that finds a sandbox ready."""
        if self._pool is None:
            self._pool = hutch.Pool(size=POOL_SIZE).start()
        portal, inner = _Portal.current(), self._pool._pool
        portal.call(settle(inner, POOL_SIZE))
        started = time.perf_counter()
        result = self._pool.run(PRINT)
        spent = time.perf_counter() - started
        require(result)
        portal.call(settle(inner, POOL_SIZE))
        return spent

    def _box(self, session: str | None) -> hutch.Sandbox:
        if session not in self._boxes:
            self._boxes[session] = hutch.Sandbox(session=session).start()
            require(self._boxes[session].run(PRINT))
        return self._boxes[session]

    def live_blocking(self, session: str | None = None) -> float:
        """One more run."""
        box = self._box(session)
        started = time.perf_counter()
        result = box.run(PRINT)
        spent = time.perf_counter() - started
        require(result)
        return spent

    def live_session_blocking(self) -> float:
        """One more run of a session that is on disk."""
        return self.live_blocking("live-blocking")

    def live_exec_blocking(self) -> float:
        """One more command."""
        box = self._box(None)
        started = time.perf_counter()
        result = box.exec(["/bin/true"])
        spent = time.perf_counter() - started
        assert result.ok, result
        return spent


def require(result: hutch.Result) -> None:
    """What was measured is what was meant."""
    if not result.ok or result.stdout != "1\n":
        raise RuntimeError(f"not the expected result: {result}")


async def breathe() -> None:
    """Let the loop do what came due while it stood still, which would otherwise be charged to the next row."""
    for _ in range(3):
        await asyncio.sleep(0)


async def settle(pool: hutch.AsyncPool, size: int) -> None:
    """Wait until a pool is full, and what was used is gone."""
    await breathe()
    inner = pool._pool
    assert inner is not None
    while inner.ready < size:
        await inner.wait_until_full()
        await asyncio.sleep(0.001)
    gone = [sandbox.closed for sandbox in House.of_this_loop().engine.alive if not sandbox.is_alive]
    if gone:
        await asyncio.wait(gone)


# ---- what is measured once ------------------------------------------------------------------------------------------


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

    await some(50)  # caches, and memory that Python keeps once it had it
    before = inventory()
    began = time.perf_counter()
    times = await some(count)
    spent = time.perf_counter() - began
    return {"before": before, "after": inventory(), "seconds": spent, "median_ms": statistics.median(times) * 1000}


# ---- the worker -----------------------------------------------------------------------------------------------------


class Bench:
    """Everything that this process can be told to do."""

    def __init__(self) -> None:
        self._commands = Commands()
        self._async = Async()
        self._blocking = Blocking()
        self._crowd = Crowd()

    def answer(self, do: str, request: dict[str, Any]) -> dict[str, Any]:
        """Do one thing."""
        answer: dict[str, Any] = getattr(self, f"do_{do}")(**request)
        return answer

    def do_hello(self) -> dict[str, Any]:
        """What is used here."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        plan = planning.prepare(parse({"environment": "python"}), None).plan
        base = limits.find_cgroup_base()
        return {
            "hutch": hutch.__version__,
            "enforced": dict(plan.enforced),
            "cgroups": base.version if base else None,
            "descriptors": (soft, hard),
        }

    def do_commands(self, table: dict[str, list[str]]) -> dict[str, Any]:
        """Learn command lines."""
        self._commands.table |= table
        return {}

    def do_time(self, row: str) -> dict[str, Any]:
        """Measure a row once."""
        method = row.replace("-", "_")
        if row in self._commands.table:
            return {"seconds": self._commands.time(row)}
        if hasattr(self._blocking, method):
            return {"seconds": getattr(self._blocking, method)()}
        return {"seconds": self._async.do(getattr(self._async, method)())}

    def do_output(self, megabytes: int) -> dict[str, Any]:
        return self._async.do(measure_output(megabytes))

    def do_gap(self, count: int) -> dict[str, Any]:
        return self._async.do(measure_gap(count))

    def do_many(self, count: int) -> dict[str, Any]:
        return self._async.do(run_many(count))

    def do_grow(self, count: int) -> dict[str, Any]:
        return self._async.do(self._crowd.grow(count))

    def do_visit(self, numbers: list[int]) -> dict[str, Any]:
        return self._async.do(self._crowd.visit(numbers))

    def do_rest(self, seconds: float) -> dict[str, Any]:
        return self._async.do(self._crowd.rest(seconds))

    def do_leave(self) -> dict[str, Any]:
        return self._async.do(self._crowd.leave())

    def close(self) -> None:
        """End what runs."""
        self._blocking.close()
        self._async.do(self._async.close())


if __name__ == "__main__":
    bench = Bench()
    serve(bench.answer)
    bench.close()

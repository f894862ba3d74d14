"""The process that measures: a host program that uses hutch for a long time, and starts commands beside it.

Every row is a method that returns seconds. What a row sets in motion has ended when it returns: the pool is full again
and what was used is gone, so that the next row has the machine to itself.
"""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import time
from typing import TYPE_CHECKING

from probes import POOL_SIZE, PRINT, Crowd, measure_gap, measure_output, require, run_many
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
        """One more run, right after another."""
        require(await (await self._box(session)).run(PRINT))
        return await self.live_rested(session)

    async def live_rested(self, session: str | None = None) -> float:
        """One more run, after others had the processor for a while."""
        box = await self._box(session)
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
        """One more run, right after another."""
        box = self._box(session)
        require(box.run(PRINT))
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

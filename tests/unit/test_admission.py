"""How many may run at once: in order, never too many, and never fewer than could."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch.engine import admission as module
from hutch.engine.admission import Admission, host_memory
from hutch.errors import HostError
from hutch.model import MIB


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    asyncio.run(main())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Crowd:
    """Runs that stay until they are told to leave."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.inside: list[str] = []
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}

    def come(self, name: str, memory: int = 1) -> None:
        self._leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.ensure_future(self._stay(name, memory))

    async def _stay(self, name: str, memory: int) -> None:
        async with self.admission.ask(memory):
            self.inside.append(name)
            self.order.append(name)
            try:
                await self._leave[name].wait()
            finally:
                self.inside.remove(name)

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await settle()

    async def all_leave(self) -> None:
        for event in self._leave.values():
            event.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


def test_as_many_as_may_run_and_the_others_in_the_order_in_which_they_came() -> None:
    async def work() -> None:
        crowd = Crowd(Admission(running=2, memory_bytes=100))
        for name in "abcde":
            crowd.come(name)
        await settle()
        assert crowd.inside == ["a", "b"]
        await crowd.leave("b")
        assert crowd.inside == ["a", "c"]
        await crowd.all_leave()
        assert "".join(crowd.order) == "abcde"

    run(work)


def test_whoever_is_one_too_many_is_told_at_once() -> None:
    async def work() -> None:
        crowd = Crowd(Admission(running=1, waiting=2, memory_bytes=100))
        for name in "abcd":
            crowd.come(name)
        await settle()
        error = crowd.tasks["d"].exception()
        assert isinstance(error, HostError)
        assert error.code == "host.busy"
        assert "1 runs are active and 2 wait" in error.message
        await crowd.all_leave()
        assert "".join(crowd.order) == "abc"

    run(work)


def test_nobody_waits_where_nobody_may() -> None:
    async def work() -> None:
        admission = Admission(running=1, waiting=0, memory_bytes=100)
        async with admission.ask(1):
            with pytest.raises(HostError, match="busy"):
                await admission.enter(1)
        async with admission.ask(1):
            pass

    run(work)


def test_memory_is_promised_once() -> None:
    async def work() -> None:
        crowd = Crowd(Admission(running=10, memory_bytes=10))
        crowd.come("large", 7)
        crowd.come("small", 3)
        crowd.come("tiny", 1)
        await settle()
        assert crowd.inside == ["large", "small"]
        await crowd.leave("small")
        assert crowd.inside == ["large", "tiny"]
        await crowd.all_leave()

    run(work)


def test_the_small_do_not_overtake_the_large() -> None:
    async def work() -> None:
        crowd = Crowd(Admission(running=10, memory_bytes=10))
        for name, memory in (("a", 8), ("large", 9), ("small", 1)):
            crowd.come(name, memory)
        await settle()
        assert crowd.inside == ["a"], "or the large would wait for ever"
        await crowd.leave("a")
        assert crowd.inside == ["large", "small"]
        await crowd.all_leave()

    run(work)


def test_what_never_fits_is_refused_even_when_nobody_is_there() -> None:
    async def work() -> None:
        with pytest.raises(HostError) as caught:
            await Admission(memory_bytes=10 * MIB).enter(11 * MIB)
        assert caught.value.code == "host.memory"

    run(work)


def test_whoever_stops_waiting_makes_room_for_those_behind() -> None:
    async def work() -> None:
        crowd = Crowd(Admission(running=10, memory_bytes=10))
        for name, memory in (("a", 8), ("large", 9), ("small", 1)):
            crowd.come(name, memory)
        await settle()
        crowd.tasks["large"].cancel()
        await settle()
        assert crowd.inside == ["a", "small"]
        await crowd.all_leave()

    run(work)


def test_whoever_stops_waiting_leaves_the_queue() -> None:
    async def work() -> None:
        crowd = Crowd(Admission(running=1, waiting=2, memory_bytes=100))
        for name in "abc":
            crowd.come(name)
        await settle()
        crowd.tasks["b"].cancel()
        await settle()
        crowd.come("d")
        await settle()
        await crowd.all_leave()
        assert "".join(crowd.order) == "acd"

    run(work)


def test_a_turn_that_comes_in_the_moment_of_a_cancellation_is_not_lost() -> None:
    async def work() -> None:
        for order in ("cancel first", "leave first"):
            crowd = Crowd(Admission(running=1, memory_bytes=100))
            for name in "abc":
                crowd.come(name)
            await settle()
            if order == "cancel first":
                crowd.tasks["b"].cancel()
                crowd._leave["a"].set()
            else:
                crowd._leave["a"].set()
                await asyncio.sleep(0)
                crowd.tasks["b"].cancel()
            await settle()
            assert crowd.tasks["b"].cancelled(), order
            assert crowd.inside == ["c"], order
            await crowd.all_leave()
            assert (crowd.admission._active, crowd.admission._reserved) == (0, 0)

    run(work)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 6)),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("turn"), st.integers(0, 3)),
    ),
    max_size=40,
)


@given(actions, st.integers(1, 3), st.integers(0, 5))
def test_whatever_happens_the_bounds_hold_and_nobody_is_forgotten(
    actions: list[tuple[str, int]], running: int, waiting: int
) -> None:
    async def work() -> None:
        admission = Admission(running=running, waiting=waiting, memory_bytes=6)
        crowd = Crowd(admission)
        sizes: dict[str, int] = {}
        for number, (act, value) in enumerate(actions):
            names = list(crowd.tasks)
            if act == "come":
                sizes[str(number)] = value
                crowd.come(str(number), value)
            elif act == "leave" and names:
                crowd._leave[names[value % len(names)]].set()
            elif act == "cancel" and names:
                crowd.tasks[names[value % len(names)]].cancel()
            for _ in range(value if act == "turn" else 0):
                await asyncio.sleep(0)
            assert len(crowd.inside) <= running
            assert sum(sizes[name] for name in crowd.inside) <= 6
        await settle()
        await crowd.all_leave()
        assert (admission._active, admission._reserved, len(admission._queue)) == (0, 0, 0)
        for task in crowd.tasks.values():
            assert task.cancelled() or task.exception() is None or isinstance(task.exception(), HostError)

    run(work)


def test_without_a_word_the_machine_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = Admission()
    assert admission._running >= 16
    assert 0 < admission._memory < host_memory()
    monkeypatch.setattr(module, "read_text", lambda _: "nothing")
    assert host_memory() == 1024 * MIB


def test_a_queue_may_be_empty_on_purpose() -> None:
    made: Any = Admission(running=3, waiting=0, memory_bytes=7)
    assert (made._running, made._waiting, made._memory) == (3, 0, 7)

"""Our end of the agent's socket, with one of our own in its place: whatever comes, nothing is believed or leaked."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hutch.engine import agent as module
from hutch.engine.agent import Agent, gone
from hutch.errors import GoneError, HutchError, ProtocolError


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= set(before)


class Inside:
    """Stands where pid 1 of a sandbox would."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(10)
        self.faults: list[HutchError] = []
        self.agent = Agent(ours, self.faults.append)

    def hear(self) -> tuple[list[str], int]:
        """A request: its words, and how many descriptors came with it."""
        data, fds, _, _ = socket.recv_fds(self.socket, 20_000, 16)
        for fd in fds:
            os.close(fd)
        return data.decode(errors="surrogateescape").split("\0")[:-1], len(fds)

    def say(self, text: str | bytes, fds: tuple[int, ...] = ()) -> None:
        data = text.encode() if isinstance(text, str) else text
        socket.send_fds(self.socket, [data], fds) if fds else self.socket.send(data)

    async def settle(self) -> None:
        """Let everything happen that can."""
        for _ in range(10):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def inside() -> AsyncIterator[Inside]:
    found = Inside()
    try:
        yield found
    finally:
        found.agent.close(gone())
        found.socket.close()
        await asyncio.sleep(0)


def run(work: Callable[[Inside], Coroutine[Any, Any, None]]) -> None:
    """Run a test, in which asyncio must find nothing to complain of."""
    complaints: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with inside() as found:
            await work(found)

    asyncio.run(main())
    assert complaints == []


# ---- answers --------------------------------------------------------------------------------------------------------


def test_answers_find_who_asked_in_any_order() -> None:
    async def work(inside: Inside) -> None:
        asked = [asyncio.ensure_future(inside.agent.request("kill", pid, 9)) for pid in (5, 6)]
        await inside.settle()
        first, second = inside.hear()[0], inside.hear()[0]
        assert (first[0], first[2:], second[2:]) == ("kill", ["5", "9"], ["6", "9"])
        inside.say(f"ok {second[1]} 7")
        inside.say(f"failed {first[1]} {errno.ESRCH}")
        assert (await asked[1]).value == 7
        with pytest.raises(ProcessLookupError):
            await asked[0]

    run(work)


def test_a_descriptor_comes_with_its_answer_and_is_not_inherited() -> None:
    async def work(inside: Inside) -> None:
        asked = asyncio.ensure_future(inside.agent.request("open", 0, "0", "x"))
        await inside.settle()
        words, _ = inside.hear()
        reader, writer = os.pipe()
        inside.say(f"ok {words[1]} 0", (writer,))
        os.close(writer)
        fd = (await asked).fd
        assert not os.get_inheritable(fd)
        os.write(fd, b"x")
        assert os.read(reader, 1) == b"x"
        for one in (fd, reader):
            os.close(one)

    run(work)


def test_a_program_is_started_with_its_words_and_descriptors_and_its_end_is_heard() -> None:
    async def work(inside: Inside) -> None:
        argv = ["cat", "a b", ""]
        asked = asyncio.ensure_future(inside.agent.spawn(argv, variables={"A": "1"}, cwd="/w", fds=(0, 1, 2)))
        await inside.settle()
        words, count = inside.hear()
        assert (words[0], words[2], count) == ("spawn", "-", 4)
        inside.say(f"ok {words[1]} 42")
        child = await asked
        assert (child.pid, child.terminal) == (42, -1)
        inside.say(f"exit {words[1]} 256")
        assert await child.exited == 256

    run(work)


def test_a_program_that_cannot_be_executed_is_an_error_of_the_system() -> None:
    async def work(inside: Inside) -> None:
        asked = asyncio.ensure_future(inside.agent.spawn(["x"], variables={}, cwd="/"))
        await inside.settle()
        inside.say(f"failed {inside.hear()[0][1]} {errno.ENOENT}")
        with pytest.raises(FileNotFoundError):
            await asked
        assert inside.agent._children == {}

    run(work)


def test_more_requests_than_a_socket_holds_wait_for_room() -> None:
    async def work(inside: Inside) -> None:
        asked = [asyncio.ensure_future(inside.agent.request("kill", 9, 9)) for _ in range(1000)]
        answered = 0
        while answered < 1000:
            await inside.settle()
            inside.say(f"ok {inside.hear()[0][1]} {answered}")
            answered += 1
        assert sorted(answer.value for answer in await asyncio.gather(*asked)) == list(range(1000))

    run(work)


def test_a_request_that_is_too_long_is_refused_and_spoils_nothing() -> None:
    async def work(inside: Inside) -> None:
        with pytest.raises(OSError, match="too long"):
            await inside.agent.request("open", 0, "0", "x" * 20_000)
        asked = asyncio.ensure_future(inside.agent.request("kill", 9, 9))
        await inside.settle()
        inside.say(f"ok {inside.hear()[0][1]} 0")
        await asked

    run(work)


# ---- who does not wait any more -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before the answer", "with the answer", "after it was sent"])
def test_a_descriptor_for_nobody_is_closed(moment: str) -> None:
    async def work(inside: Inside) -> None:
        asked = asyncio.ensure_future(inside.agent.request("open", 0, "0", "x"))
        await inside.settle()
        words, _ = inside.hear()
        reader, writer = os.pipe()
        if moment == "before the answer":
            asked.cancel()
            await inside.settle()
        inside.say(f"ok {words[1]} 0", (writer,))
        os.close(writer)
        if moment == "with the answer":
            asked.cancel()
        elif moment == "after it was sent":
            inside.agent._read()
            asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await inside.settle()
        assert os.read(reader, 1) == b"", "the other end is closed"
        os.close(reader)
        assert inside.faults == []
        assert inside.agent._waiting == {}

    run(work)


@pytest.mark.parametrize("moment", ["before the answer", "with the answer", "after it was sent"])
def test_a_program_for_nobody_is_killed(moment: str) -> None:
    async def work(inside: Inside) -> None:
        asked = asyncio.ensure_future(inside.agent.spawn(["sleep"], variables={}, cwd="/"))
        await inside.settle()
        words, _ = inside.hear()
        if moment == "before the answer":
            asked.cancel()
            await inside.settle()
        inside.say(f"ok {words[1]} 42")
        if moment == "with the answer":
            asked.cancel()
        elif moment == "after it was sent":
            inside.agent._read()
            asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await inside.settle()
        kill, _ = inside.hear()
        assert (kill[0], kill[2:]) == ("signal", [words[1], "9", "session"])
        inside.say(f"ok {kill[1]} 0")
        inside.say(f"exit {words[1]} 9")
        await inside.settle()
        assert inside.faults == []
        assert (inside.agent._waiting, inside.agent._children) == ({}, {})

    run(work)


def test_whoever_waits_when_it_is_over_is_told() -> None:
    async def work(inside: Inside) -> None:
        asked = [asyncio.ensure_future(inside.agent.request("kill", 9, 9)) for _ in range(100)]
        spawning = asyncio.ensure_future(inside.agent.spawn(["x"], variables={}, cwd="/"))
        await inside.settle()
        inside.agent.close(gone())
        for one in (*asked, spawning):
            with pytest.raises(GoneError):
                await one
        with pytest.raises(GoneError):
            await inside.agent.request("kill", 9, 9)

    run(work)


def test_the_end_of_a_program_is_no_secret_when_all_is_over() -> None:
    async def work(inside: Inside) -> None:
        asked = asyncio.ensure_future(inside.agent.spawn(["x"], variables={}, cwd="/"))
        await inside.settle()
        inside.say(f"ok {inside.hear()[0][1]} 42")
        child = await asked
        inside.agent.close(gone())
        await inside.settle()
        assert child.exited.cancelled()

    run(work)


@pytest.mark.parametrize("has_answered", [False, True])
def test_whoever_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch, has_answered: bool) -> None:
    monkeypatch.setattr(module, "_SILENCE_SECONDS", 0.05)

    async def work(inside: Inside) -> None:
        if has_answered:
            first = asyncio.ensure_future(inside.agent.request("kill", 9, 9))
            await inside.settle()
            inside.say(f"ok {inside.hear()[0][1]} 0")
            await first
        with pytest.raises(GoneError) as caught:
            await asyncio.wait_for(inside.agent.request("kill", 9, 9), 10)
        assert caught.value.code == "sandbox.silent"
        assert inside.faults == [caught.value]

    run(work)


def test_whoever_answers_slowly_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SILENCE_SECONDS", 0.3)

    async def work(inside: Inside) -> None:
        for _ in range(5):
            asked = asyncio.ensure_future(inside.agent.request("kill", 9, 9))
            await asyncio.sleep(0.1)
            inside.say(f"ok {inside.hear()[0][1]} 0")
            await asked
        assert inside.faults == []

    run(work)


# ---- what is not believed -------------------------------------------------------------------------------------------

LIES = [
    b"ok",
    b"ok 2",
    b"ok 2 0 0",
    b"ok 999 0",
    b"ok -2 0",
    b"ok 2 -1",
    b"ok 2 +1",
    b"ok 2 0\n",
    b" ok 2 0",
    b"ok  2 0",
    b"OK 2 0",
    b"fine 2 0",
    b"exit 2 0",
    b"exit 999 0",
    b"failed 999 2",
    b"failed 2 99999999999999999999",
    b"ok 2 99999999999999999999",
    b"ok 2 2147483648",
    b"failed 2 \xc2\xb2",
    b"\0",
    b"ok\x002\x000",
    b"ok 2 " + b"0" * 60,
    b"x" * 65536,
]


@pytest.mark.parametrize("lie", LIES, ids=[ascii(lie[:30]) for lie in LIES])
def test_what_was_not_asked_for_ends_the_sandbox(lie: bytes) -> None:
    async def work(inside: Inside) -> None:
        asked = asyncio.ensure_future(inside.agent.request("kill", 9, 9))
        await inside.settle()
        assert inside.hear()[0][1] == "2"
        inside.say(lie)
        with pytest.raises(ProtocolError) as caught:
            await asked
        assert inside.faults == [caught.value]
        assert len(caught.value.details) < 500

    run(work)


@pytest.mark.parametrize(
    ("text", "count"),
    [("ok 2 0", 2), ("ok 2 0", 3), ("ok 2 0", 30), ("failed 2 2", 1), ("exit 2 0", 1), ("nonsense", 1), ("ok 3 0", 1)],
)
def test_descriptors_that_were_not_asked_for_are_closed(text: str, count: int) -> None:
    async def work(inside: Inside) -> None:
        asked = asyncio.ensure_future(inside.agent.request("open", 0, "0", "x"))
        await inside.settle()
        inside.hear()
        reader, writer = os.pipe()
        inside.say(text, (writer,) * count)
        os.close(writer)
        with pytest.raises((ProtocolError, OSError)):
            await asked
        await inside.settle()
        assert os.read(reader, 1) == b"", "the other end is closed"
        os.close(reader)

    run(work)


answers = st.one_of(
    st.binary(max_size=100),
    st.from_regex(rb"(ok|failed|exit) [0-9]{1,22} [0-9]{1,22}", fullmatch=True),
    st.sampled_from([b"ok 2 0", b"failed 2 2", b"ok 3 7", b"exit 3 0", b"exit 3 9", b"ok 4 1", b"failed 4 13"]),
)


@given(st.lists(st.tuples(answers, st.integers(0, 3)), max_size=12))
@example([(b"ok 3 7", 0), (b"exit 3 0", 0), (b"exit 3 0", 0)])
@example([(b"exit 3 0", 0), (b"ok 3 7", 1)])
def test_whatever_comes_is_an_answer_or_a_fault(packets: list[tuple[bytes, int]]) -> None:
    before = sorted(os.listdir("/proc/self/fd"))

    async def work(inside: Inside) -> None:
        asked = [
            asyncio.ensure_future(inside.agent.request("open", 0, "0", "x")),
            asyncio.ensure_future(inside.agent.spawn(["x"], variables={}, cwd="/")),
            asyncio.ensure_future(inside.agent.request("kill", 9, 9)),
        ]
        await inside.settle()
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for data, fds in packets:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                inside.say(data or b"\0", (null,) * fds)
        os.close(null)
        await inside.settle()
        for _ in packets:
            await inside.settle()
        inside.agent.close(gone())
        for one in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(one, BaseException):
                assert isinstance(one, (HutchError, OSError)), repr(one)
            else:
                fd = getattr(one, "fd", getattr(one, "terminal", -1))
                if fd >= 0:
                    os.close(fd)
        assert len(inside.faults) <= 1

    run(work)
    assert set(os.listdir("/proc/self/fd")) <= set(before)

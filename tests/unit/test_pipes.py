"""Reading what programs print: bounded, in order, and for nobody else than who asked."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch.engine import pipes as module
from hutch.engine.output import READ_BYTES
from hutch.engine.pipes import Capture, Pipes
from hutch.model import Limits


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= set(before)


def limits(keep: int = 1000, output: int = 10_000) -> Limits:
    return Limits(keep_bytes=keep, output_bytes=output)


def capture(**sizes: int) -> Capture:
    return Capture(limits(**sizes), None, lambda: None)


def run(work: Callable[[Pipes, list[int]], Coroutine[Any, Any, None]]) -> None:
    """With two pipes, and copies of their other ends as a program would have them."""

    async def main() -> None:
        pipes = Pipes()
        theirs = [os.dup(fd) for fd in pipes.theirs]
        pipes.hand_over()
        try:
            await work(pipes, theirs)
        finally:
            pipes.close()
            for fd in theirs:
                os.close(fd)

    asyncio.run(main())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0.001)


# ---- one run --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 1), st.binary(max_size=300)), max_size=40), st.integers(0, 4000))
def test_a_capture_passes_on_what_fits_and_says_once_when_it_does_not(
    chunks: list[tuple[int, bytes]], room: int
) -> None:
    heard: list[tuple[int, bytes]] = []
    floods: list[None] = []
    taken = Capture(limits(keep=4000, output=room), lambda *piece: heard.append(piece), lambda: floods.append(None))
    for index, chunk in chunks:
        taken.feed(index, chunk)
    sent = b"".join(chunk for _, chunk in chunks)
    passed = b"".join(chunk for _, chunk in heard)
    assert passed == sent[:room]
    assert len(floods) == (len(sent) > room)
    assert sum(taken.total) == len(passed)
    assert all(chunk for _, chunk in heard)


def test_a_capture_that_nobody_listens_to_any_more_keeps_what_it_keeps() -> None:
    heard: list[bytes] = []
    taken = Capture(limits(), lambda _, chunk: heard.append(chunk), lambda: None)
    taken.feed(0, b"a")
    taken.mute()
    taken.feed(0, b"b")
    assert (heard, taken.streams[0].text()) == ([b"a"], "ab")


def test_output_goes_to_the_capture_of_its_time() -> None:
    async def work(pipes: Pipes, theirs: list[int]) -> None:
        first, second = capture(), capture()
        pipes.begin(first)
        os.write(theirs[0], b"one")
        os.write(theirs[1], b"complaint")
        pipes.end()
        os.write(theirs[0], b"between")
        await settle()
        pipes.begin(second)
        os.write(theirs[0], b"two")
        pipes.end()
        assert [stream.text() for stream in first.streams] == ["one", "complaint"]
        assert [stream.text() for stream in second.streams] == ["betweentwo", ""]

    run(work)


def test_the_end_of_a_run_is_not_put_off_by_who_writes_for_ever() -> None:
    async def work(pipes: Pipes, theirs: list[int]) -> None:
        reads = 0
        real = os.read

        def read(fd: int, size: int) -> bytes:
            nonlocal reads
            data = real(fd, size)
            if fd == pipes._ours[0]:
                reads += 1
                os.write(theirs[0], b"x" * 4096)  # as fast as we are
            return data

        taken = capture(keep=100, output=10**9)
        pipes.begin(taken)
        os.write(theirs[0], b"x" * 4096)
        module.os.read, kept = read, module.os.read  # type: ignore[assignment]
        try:
            pipes.end()
        finally:
            module.os.read = kept
        assert reads <= fcntl.fcntl(theirs[0], fcntl.F_GETPIPE_SZ) // 4096

    run(work)


@given(st.integers(0, 300_000))
def test_everything_that_lies_in_a_pipe_at_the_end_is_read(size: int) -> None:
    async def work(pipes: Pipes, theirs: list[int]) -> None:
        room = fcntl.fcntl(theirs[0], fcntl.F_SETPIPE_SZ, 1 << 19)
        taken = capture(keep=1 << 20, output=1 << 20)
        pipes.begin(taken)
        assert size <= room
        if size:
            assert os.write(theirs[0], b"x" * size) == size
        pipes.end()
        assert taken.total == (size, 0)

    run(work)


# ---- between runs ---------------------------------------------------------------------------------------------------


def test_what_comes_between_runs_is_bounded() -> None:
    async def work(pipes: Pipes, theirs: list[int]) -> None:
        for _ in range(20):
            os.write(theirs[0], b"x" * READ_BYTES)
            for _ in range(100):
                await asyncio.sleep(0.001)
                if not _waiting(pipes._ours[0]):
                    break
        taken = capture(keep=1 << 22, output=1 << 24)
        pipes.begin(taken)
        assert READ_BYTES <= taken.total[0] <= 3 * READ_BYTES

    run(work)


def test_what_nobody_wants_is_read_at_leisure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.05)

    async def work(pipes: Pipes, theirs: list[int]) -> None:
        pipes.discard(lambda _: lambda: None)
        os.set_blocking(theirs[0], False)
        written, deadline = 0, asyncio.get_running_loop().time() + 0.5
        while asyncio.get_running_loop().time() < deadline:
            try:
                written += os.write(theirs[0], b"x" * READ_BYTES)
            except BlockingIOError:
                await asyncio.sleep(0.001)
        assert 2 * READ_BYTES < written < 30 * READ_BYTES, "the writer goes on, but not at our cost"

    run(work)


def test_what_was_discarded_closes_when_its_writers_do_and_says_so() -> None:
    async def main() -> None:
        pipes = Pipes()
        forgotten: list[None] = []
        closing: list[Callable[[], None]] = []

        def on_end(callback: Callable[[], None]) -> Callable[[], object]:
            closing.append(callback)
            return lambda: forgotten.append(None)

        pipes.discard(on_end)
        assert closing == [pipes.close]
        pipes.hand_over()
        await settle()
        assert not pipes.is_open
        assert forgotten == [None]

    asyncio.run(main())


def test_what_is_closed_already_asks_for_nothing() -> None:
    async def main() -> None:
        pipes = Pipes()
        pipes.hand_over()
        await settle()
        pipes.discard(lambda _: pytest.fail("there is nothing left to close"))
        pipes.close()
        pipes.close()

    asyncio.run(main())


def test_what_came_for_a_run_that_does_nothing_is_dropped() -> None:
    async def work(pipes: Pipes, theirs: list[int]) -> None:
        os.write(theirs[1], b"KeyboardInterrupt\n")
        pipes.drop()
        taken = capture()
        pipes.begin(taken)
        os.write(theirs[0], b"own")
        pipes.end()
        assert [stream.text() for stream in taken.streams] == ["own", ""]

    run(work)


def test_a_machine_without_descriptors_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        real, made = os.pipe2, []

        def pipe2(flags: int) -> tuple[int, int]:
            if made:
                raise OSError(24, "Too many open files")
            made.append(real(flags))
            return made[0]

        monkeypatch.setattr(module.os, "pipe2", pipe2)
        with pytest.raises(OSError, match="Too many open files"):
            Pipes()

    asyncio.run(main())


def _waiting(fd: int) -> bool:
    import array
    import termios

    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0] > 0

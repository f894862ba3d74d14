"""What is kept of a stream, to the byte, however it arrives."""

from __future__ import annotations

import os
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch.engine.output import READ_BYTES, Sink, Stream

MARKER = re.compile(r"\n\[\.\.\. (\d+) bytes dropped \.\.\.\]\n")


def fed(keep: int, chunks: list[bytes]) -> Stream:
    stream = Stream(keep)
    for chunk in chunks:
        stream.feed(chunk)
    return stream


def expected(keep: int, whole: bytes) -> str:
    if len(whole) <= keep:
        return whole.decode("utf-8", "replace")
    head, tail = whole[: keep // 2], whole[len(whole) - (keep - keep // 2) :]
    marker = f"\n[... {len(whole) - keep} bytes dropped ...]\n"
    return head.decode("utf-8", "replace") + marker + tail.decode("utf-8", "replace")


@given(st.integers(1, 40), st.lists(st.binary(min_size=1, max_size=30), max_size=12))
def test_head_and_tail_are_kept_however_the_stream_is_cut(keep: int, chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    stream = fed(keep, chunks)
    assert stream.total == len(whole)
    assert stream.dropped == max(0, len(whole) - keep)
    assert stream.text() == expected(keep, whole)


@given(st.text(max_size=60), st.integers(1, 50), st.integers(1, 7))
def test_characters_of_several_bytes_may_be_cut_anywhere(text: str, keep: int, step: int) -> None:
    whole = text.encode("utf-8", "surrogatepass")
    chunks = [whole[at : at + step] for at in range(0, len(whole), step)]
    assert fed(keep, chunks).text() == expected(keep, whole)


def test_a_character_split_over_two_reads_is_whole_again() -> None:
    assert fed(100, [b"caf\xc3", b"\xa9"]).text() == "café"


def test_a_character_at_the_border_of_head_and_tail_is_whole_when_nothing_is_dropped() -> None:
    assert fed(4, ["aéb".encode()]).text() == "aéb"
    assert fed(5, ["aaéb".encode()]).text() == "aaéb"


def test_bytes_that_are_no_utf_8_are_replaced() -> None:
    assert fed(100, [b"a\xff\xfeb\x00"]).text() == "a\ufffd\ufffdb\x00"


def test_an_empty_stream_is_empty() -> None:
    stream = Stream(10)
    assert (stream.text(), stream.dropped, stream.total) == ("", 0, 0)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_the_marker_counts_what_is_missing(extra: int) -> None:
    text = fed(10, [b"x" * (10 + extra)]).text()
    found = MARKER.search(text)
    assert (int(found[1]) if found else 0) == extra
    assert len(MARKER.sub("", text)) == 10


def test_memory_stays_bounded_for_a_long_stream() -> None:
    stream = Stream(1000)
    chunk = b"y" * READ_BYTES
    for _ in range(300):
        stream.feed(chunk)
    held = sum(sys.getsizeof(part) for part in (*stream._head, *stream._tail))
    assert held < 3 * READ_BYTES
    assert stream.total == 300 * READ_BYTES
    assert stream.dropped == stream.total - 1000


# ---- passing on -----------------------------------------------------------------------------------------------------


def test_a_sink_writes_everything_in_order_and_in_small_steps() -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        sink = Sink(write)
        assert not sink.is_blocked
        for chunk in (b"a" * 5000, b"b", b"c" * 4096):
            sink.feed(chunk)
        got = []
        while sink.is_blocked:
            sink.flush_some()
            got.append(os.read(read, 65536))
        assert [len(part) for part in got] == [4096, 904, 1, 4096]
        assert b"".join(got) == b"a" * 5000 + b"b" + b"c" * 4096
    finally:
        os.close(read)
        os.close(write)


def test_a_sink_keeps_what_the_reader_did_not_take() -> None:
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        sink = Sink(write)
        sink.feed(b"x" * 1_000_000)
        got = 0
        while sink.is_blocked and got < 1_000_000:
            for _ in range(20):  # more than the pipe takes
                try:
                    if sink.is_blocked:
                        sink.flush_some()
                except BlockingIOError:
                    break
            got += len(os.read(read, 1_000_000))
        assert got == 1_000_000
    finally:
        os.close(read)
        os.close(write)


def test_a_reader_that_is_gone_is_an_os_error() -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    os.close(read)
    try:
        sink = Sink(write)
        sink.feed(b"x")
        with pytest.raises(BrokenPipeError):
            sink.flush_some()
    finally:
        os.close(write)

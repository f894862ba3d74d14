"""The log of a session: whole records from many writers, bounded files, and readers that miss nothing."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hutch
from hutch.engine import audit
from hutch.engine.audit import Log, Tail, describe_argv, describe_code, follow, read

SOURCE = Path(hutch.__file__).parent.parent


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before  # what others left may be collected meanwhile


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "audit.jsonl")


@pytest.fixture
def log(path: str) -> Iterator[Log]:
    log = Log(path)
    yield log
    log.close()


def numbers(records: Any) -> list[int]:
    return [record["n"] for record in records]


# ---- records --------------------------------------------------------------------------------------------------------


def test_a_record_is_one_line_of_json(log: Log, path: str) -> None:
    old = os.umask(0)
    try:
        assert log.append("run", outcome="ok", exit_code=0, duration_ms=1.5, limit=None, argv=["a", "b\n"])
    finally:
        os.umask(old)
    text = Path(path).read_text()
    assert (text.count("\n"), text[-1]) == (1, "\n")
    record = json.loads(text)
    assert list(record) == ["ts", "event", "outcome", "exit_code", "duration_ms", "limit", "argv"]
    assert record["argv"] == ["a", "b\n"]
    assert list(read(path)) == [record]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_times_are_utc_with_milliseconds(log: Log, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit.time, "time_ns", lambda: 1_767_348_672_007_999_999)
    log.append("run")
    assert [record["ts"] for record in read(path)] == ["2026-01-02T10:11:12.007Z"]


def test_fields_do_not_replace_what_every_record_has(log: Log, path: str) -> None:
    log.append("run", ts="never", event="other", **{"event ": 1})
    record = next(read(path))
    assert record["event"] == "run"
    assert record["ts"] != "never"


def test_a_program_is_known_by_its_head_and_its_digest() -> None:
    code = "print('é')\n" * 1000
    assert describe_code(code) == {
        "code_sha256": hashlib.sha256(code.encode()).hexdigest(),
        "code_head": code[:200],
    }
    assert describe_code("\ud800")["code_head"] == "\ud800"


def test_a_command_line_is_cut() -> None:
    assert describe_argv(["ls", "-la"]) == {"argv": ["ls", "-la"]}
    fields = describe_argv(["x" * 10_000] * 10_000)
    assert (len(fields["argv"]), {len(word) for word in fields["argv"]}, fields["argv_words"]) == (32, {200}, 10_000)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.just(object()),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), values))
def test_whatever_the_fields_it_is_one_short_line(fields: dict[str, Any]) -> None:
    log = Log("/nonexistent/audit.jsonl")
    assert log.append("run", **fields) is False
    line = log._encode({"ts": "t", "event": "run", **{name: audit._bound(value) for name, value in fields.items()}})
    assert line.count(b"\n") == 1
    assert len(line) <= 33 * 1024
    assert json.loads(line, parse_constant=pytest.fail)["event"] == "run"


LARGE = {
    "wide": "\U0001f600" * 100_000,
    "many": ["x" * 5000] * 5000,
    "deep": {"a": [[[[["x"]]]]]},
    "number": 10**5000,
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_a_large_value_is_cut(value: object, log: Log, path: str) -> None:
    assert log.append("run", value=value, more=[value] * 100)
    assert os.stat(path).st_size < 40_000
    assert [record["event"] for record in read(path)] == ["run"]


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", ['{"ts":"x","event":"ru', '{"ts":"x","event":"run"}', "\n{", "nonsense\n\n"])
def test_half_a_record_costs_no_other(torn: str, log: Log, path: str) -> None:
    log.append("run", n=1)
    with open(path, "a") as file:
        file.write(torn)
    log.append("run", n=2)
    other = Log(path)
    with open(path, "a") as file:
        file.write(torn)
    other.append("run", n=3)
    other.close()
    assert numbers(record for record in read(path) if "n" in record) == [1, 2, 3]
    assert "\n\n\n" not in Path(path).read_text()


def test_half_a_record_that_comes_between_costs_no_other(log: Log, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append("run", n=1)
    real = os.write

    def killed_first(fd: int, line: bytes) -> int:
        monkeypatch.setattr(os, "write", real)
        with open(path, "a") as file:
            file.write('{"ts":"x","event":"ru')
        return real(fd, line)

    monkeypatch.setattr(os, "write", killed_first)
    assert log.append("run", n=2)
    assert log.append("run", n=3)
    assert numbers(read(path)) == [1, 2, 3]


NO_RECORDS = {
    "list": "[]",
    "number": "1",
    "timeless": '{"event":"x"}',
    "time is a number": '{"ts":1,"event":"x"}',
    "deep": "[" * 100_000,
    "long number": "9" * 9999,
    "no UTF-8": "\xff",
}


@pytest.mark.parametrize("line", NO_RECORDS.values(), ids=NO_RECORDS)
def test_a_line_that_is_no_record_is_passed_over(line: str, log: Log, path: str) -> None:
    Path(path).write_bytes(line.encode("latin-1") + b"\n")
    log.append("run", n=1)
    assert numbers(read(path)) == [1]


def test_a_log_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert list(read(str(tmp_path / "none"))) == []
    assert list(read("/nonexistent/none")) == []
    assert list(Tail("/nonexistent/none").poll()) == []


def test_a_directory_that_is_gone_ends_no_run_and_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = Log(str(tmp_path / "logs" / "audit.jsonl"))
    assert log.append("run", n=1)
    (tmp_path / "logs" / "audit.jsonl").unlink()
    (tmp_path / "logs").rmdir()
    assert [log.append("run", n=number) for number in (2, 3)] == [False, False]
    assert not (tmp_path / "logs").exists()
    (tmp_path / "logs").mkdir()
    assert log.append("run", n=4)
    assert log.append("run", n=5)
    log.close()
    assert [(record["n"], record.get("lost")) for record in read(log.path)] == [(4, 2), (5, None)]


def test_a_link_in_the_place_of_the_log_is_not_followed(log: Log, path: str, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    os.symlink(tmp_path / "precious", path)
    assert not log.append("run")
    assert (tmp_path / "precious").read_text() == "keep"
    assert list(read(path)) == []


FULL = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from hutch.engine.audit import Log, read
log = Log(sys.argv[2])
said = [log.append("run", n=0)]
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # one record, and part of the next
said += [log.append("run", n=n) for n in (1, 2, 3)]
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
said += [log.append("run", n=n) for n in (4, 5)]
print(said, [(record["n"], record.get("lost")) for record in read(sys.argv[2])])
"""


def test_a_full_disk_is_told_as_soon_as_there_is_room(path: str) -> None:
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", FULL, str(SOURCE), path], capture_output=True, text=True, check=True
    )
    assert said.stdout == "[True, False, False, False, True, True] [(0, None), (4, 3), (5, None)]\n"


# ---- rotation -------------------------------------------------------------------------------------------------------


def fill(log: Log, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        assert log.append("run", n=number)


def test_files_are_bounded_and_read_in_order(path: str, tmp_path: Path) -> None:
    log = Log(path, max_bytes=1000, keep=3)
    fill(log, 200)
    log.close()
    files = {file.name: file.stat() for file in tmp_path.iterdir()}
    assert sorted(files) == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2", "audit.jsonl.3"]
    assert all(found.st_size <= 1000 and stat.S_IMODE(found.st_mode) == 0o600 for found in files.values())
    kept = numbers(read(path))
    assert kept == list(range(kept[0], 200))
    assert len(kept) > 50


def test_a_kill_between_two_renames_costs_nothing(path: str) -> None:
    log = Log(path, max_bytes=1000, keep=3)
    fill(log, 45)
    os.rename(f"{path}.1", f"{path}.2")  # as far as a rotation came
    before = numbers(read(path))
    fill(log, 12, 45)
    log.close()
    assert os.path.exists(f"{path}.1")
    assert numbers(read(path)) == [*before, *range(45, 57)]


def test_what_is_not_a_rotated_file_is_left_alone(path: str) -> None:
    for name in ("old", "1x", "", "²", "-1"):
        Path(f"{path}.{name}").write_text('{"ts":"x","event":"x","n":99}\n')
    log = Log(path, max_bytes=1000, keep=1)
    fill(log, 30)
    log.close()
    assert 99 not in numbers(read(path))
    assert Path(f"{path}.old").exists()


def test_another_process_may_rotate_or_remove_the_file(log: Log, path: str) -> None:
    fill(log, 1)
    os.rename(path, f"{path}.1")
    fill(log, 1, 1)
    os.unlink(path)
    fill(log, 1, 2)
    assert numbers(read(path)) == [0, 2]


def test_a_rotation_that_another_is_at_is_left_to_it(path: str) -> None:
    import fcntl

    log, other = Log(path, max_bytes=500), Log(path, max_bytes=500)
    fill(log, 1)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fill(other, 20, 1)
        assert not os.path.exists(f"{path}.1")
    fill(other, 1, 21)
    assert os.path.exists(f"{path}.1")
    fill(log, 1, 22)
    log.close()
    other.close()
    assert numbers(read(path)) == list(range(23))


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from hutch.engine.audit import Log
log = Log(sys.argv[2], max_bytes=5000, keep=500)
print("ready", flush=True)
sys.stdin.readline()
n = 0
while n < int(sys.argv[4]):
    if log.append("run", who=int(sys.argv[3]), n=n, text="x" * (n % 90)):
        n += 1
"""


def writers(path: str, count: int, each: int) -> list[subprocess.Popen[str]]:
    children = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WRITER, str(SOURCE), path, str(number), str(each)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    return children


def test_many_processes_write_and_rotate_and_nothing_is_lost(path: str) -> None:
    for child in writers(path, 4, 400):
        child.communicate()
        assert child.returncode == 0
    assert len(os.listdir(os.path.dirname(path))) > 5
    found = [(record["who"], record["n"]) for record in read(path)]
    assert sorted(found) == [(who, n) for who in range(4) for n in range(400)]
    for who in range(4):
        own = [n for writer, n in found if writer == who]
        assert own == sorted(own)


def test_killed_writers_cost_no_record_of_others(path: str) -> None:
    children = writers(path, 3, 10**9)
    tail = Tail(path)
    seen = []
    while len(seen) < 2000:
        seen += [(record["who"], record["n"]) for record in tail.poll()]
    for child in children:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    log = Log(path, max_bytes=5000, keep=500)
    fill(log, 1, 10**9)
    log.close()
    seen += [(record.get("who", 9), record["n"]) for record in tail.poll()]
    for who in range(3):
        own = [n for writer, n in seen if writer == who]
        assert own == list(range(len(own)))
    assert seen[-1] == (9, 10**9)


def test_many_threads_may_share_a_log(path: str) -> None:
    log = Log(path, max_bytes=5000, keep=500)
    threads = [threading.Thread(target=fill, args=(log, 200, start)) for start in range(0, 800, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert sorted(numbers(read(path))) == list(range(800))


# ---- followed -------------------------------------------------------------------------------------------------------


def test_a_follower_survives_rotation(path: str) -> None:
    log = Log(path, max_bytes=1000, keep=20)
    fill(log, 30)
    records = follow(path, from_start=True)
    assert numbers(islice(records, 30)) == list(range(30))
    fill(log, 1, 30)
    assert numbers(islice(records, 1)) == [30]
    fill(log, 100, 31)  # several files at once
    assert numbers(islice(records, 100)) == list(range(31, 131))
    log.close()


def test_a_follower_begins_with_what_is_new(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(path, max_bytes=1000, keep=20)
    fill(log, 30)
    with open(path, "a") as file:
        file.write('{"ts":')
    tail = Tail(path, from_start=False)
    assert list(tail.poll()) == []
    fill(log, 40, 30)
    log.close()
    assert numbers(tail.poll()) == list(range(30, 70))
    monkeypatch.setattr(audit.time, "sleep", lambda _seconds: fill(log, 1, 99))
    assert numbers(islice(follow(path), 2)) == [99, 99]
    log.close()


def test_a_follower_waits_for_the_end_of_a_line(path: str) -> None:
    tail = Tail(path)
    with open(path, "a") as file:
        for piece in ('{"ts":"t","ev', 'ent":"run",', '"n":7}'):
            file.write(piece)
            file.flush()
            assert list(tail.poll()) == []
        file.write("\n")
    assert numbers(tail.poll()) == [7]
    assert list(tail.poll()) == []


def test_a_follower_sees_what_is_written_late_to_a_rotated_file(path: str) -> None:
    log = Log(path)
    fill(log, 1)
    tail = Tail(path)
    assert numbers(tail.poll()) == [0]
    slow = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.rename(path, f"{path}.1")
    fill(log, 1, 1)
    assert numbers(tail.poll()) == [1]
    os.write(slow, b'{"ts":"t","event":"run","n":2}\n')
    os.close(slow)
    assert numbers(tail.poll()) == [2]
    log.close()


def test_a_follower_takes_a_file_that_was_cut_for_a_new_one(log: Log, path: str) -> None:
    fill(log, 10)
    tail = Tail(path)
    assert len(list(tail.poll())) == 10
    os.truncate(path, 0)
    fill(log, 1, 50)
    assert numbers(tail.poll()) == [50]


def test_a_reader_sees_every_record_once_while_files_move(path: str) -> None:
    log = Log(path, max_bytes=2000, keep=500)
    fill(log, 500)
    done = threading.Event()

    def write() -> None:
        number = 500
        while not done.is_set():
            fill(log, 1, number)
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(20):
            found = numbers(read(path))
            assert found == list(range(len(found)))
            assert len(found) >= 500
    finally:
        done.set()
        thread.join()
        log.close()


def test_writing_a_record_loads_no_more_than_it_needs() -> None:
    script = "import sys; sys.path.insert(0, sys.argv[1]); from hutch.engine.audit import Log\n"
    script += "print(sorted({'json', 'hashlib', 'threading', 'typing', 'datetime', 'contextlib'} & set(sys.modules)))"
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, str(SOURCE)], capture_output=True, text=True, check=True
    )
    assert said.stdout == "[]\n"

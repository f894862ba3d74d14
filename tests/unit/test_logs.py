"""`hutch logs`: which records, in which order, and nothing of a guest raw on a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hutch
from hutch.cli import logs, main
from hutch.engine import audit
from hutch.engine.audit import Log, describe_argv, describe_code
from hutch.engine.store import Store

Captured = pytest.CaptureFixture[str]
SOURCE = Path(hutch.__file__).parent.parent


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "data"))
    return Store(str(tmp_path / "data"))


class Clock:
    def __init__(self) -> None:
        self.now = 1_767_348_672_000_000_000

    def __call__(self) -> int:
        self.now += 1_000_000_000
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit.time, "time_ns", Clock())


def log_of(store: Store, session: str) -> Log:
    return Log(store.path(session, "logs", "audit.jsonl"))


@pytest.fixture
def two(store: Store) -> Iterator[dict[str, Log]]:
    """Two sessions, in which things are done by turns."""
    made = {name: store.create(name, "python", {}) for name in ("one", "two")}
    opened = {name: log_of(store, record.id) for name, record in made.items()}
    for number in range(3):
        for name, log in opened.items():
            log.append("file", path=f"{name}{number}")
    yield opened
    for log in opened.values():
        log.close()


def said(capsys: Captured, *words: str) -> list[str]:
    assert main(["logs", *words]) == 0
    return capsys.readouterr().out.splitlines()


# ---- which ----------------------------------------------------------------------------------------------------------


def test_all_sessions_are_merged_by_time(two: dict[str, Log], capsys: Captured) -> None:
    order = ["one0", "two0", "one1", "two1", "one2", "two2"]
    assert [line.rpartition("path=")[2] for line in said(capsys)] == order
    assert [json.loads(line)["path"] for line in said(capsys, "--json")] == order
    assert [json.loads(line)["path"] for line in said(capsys, "--json", "--last", "2")] == order[-2:]
    assert said(capsys, "--last", "0") == []


@pytest.mark.parametrize("how", ["name", "id", "beginning"])
def test_one_session_is_named_as_everywhere(how: str, two: dict[str, Log], store: Store, capsys: Captured) -> None:
    session = store.find("two").id
    word = {"name": "two", "id": session, "beginning": session[:7]}[how]
    records = [json.loads(line) for line in said(capsys, word, "--json")]
    assert [(record["session"], record["path"]) for record in records] == [(session, f"two{n}") for n in range(3)]
    assert [line.rpartition("path=")[2] for line in said(capsys, word, "--last", "1")] == ["two2"]


def test_a_raw_record_is_what_was_written_and_its_session(two: dict[str, Log], store: Store, capsys: Captured) -> None:
    two["one"].append("run", session="another", **describe_code("print(1)"), outcome="ok")
    last = json.loads(said(capsys, "--json")[-1])
    assert last == {**list(audit.read(two["one"].path))[-1], "session": store.find("one").id}


def test_a_session_that_cannot_be_read_still_has_a_log(two: dict[str, Log], store: Store, capsys: Captured) -> None:
    Path(store.path(store.find("one").id, "metadata.json")).write_text("{")
    assert len(said(capsys)) == 6


def test_nothing_done_is_told_beside_the_output(store: Store, capsys: Captured) -> None:
    assert main(["logs"]) == 0
    assert capsys.readouterr() == ("", "hutch: nothing was done yet\n")


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["nne"], 125, 'did you mean "one"?'),
        (["--last", "-1"], 2, "--last -1 is no number of events"),
        (["--last", "x"], 2, "invalid int value"),
        (["one", "two"], 2, "too many words"),
    ],
)
def test_a_wrong_request_is_told(
    words: list[str], code: int, problem: str, two: dict[str, Log], capsys: Captured
) -> None:
    assert main(["logs", *words]) == code
    out, err = capsys.readouterr()
    assert (out, problem in err, "hint: " in err) == ("", True, True)


# ---- lines ----------------------------------------------------------------------------------------------------------

RUN = {"event": "run", "outcome": "ok", "duration_ms": 12.4, "exit_code": 0, **describe_code("print(1)")}
LINES: list[tuple[dict[str, Any], str | None, str]] = [
    (RUN, "myname", "2026-01-02 10:11:12  ab12cd34 myname        run      ok            12 ms  print(1)"),
    (
        {"event": "created", "environment": "python"},
        None,
        "-             created                       environment=python",
    ),
    (
        {"event": "exec", "outcome": "timeout", **describe_argv(["a b", "c"])},
        "x",
        "exec     timeout              'a b' c",
    ),
    ({"event": "file", "path": "a", "bytes": 3, "limit": None}, "x", "path=a bytes=3"),
    ({"event": "limit", "limit": "memory"}, "x", "limit=memory"),
    ({"event": "closed", "lost": 3}, "x", "(events lost before this: 3)"),
    ({"event": "run", "code_head": "x" * 200}, "x", "x" * 97 + "..."),
    ({"event": "run", "code_head": "\n  a\n  b\n"}, "x", r"a\n  b"),
    ({"event": "run", "outcome": ["x"], "duration_ms": "y", "argv": [1, None]}, "x", "['x']                1 None"),
]


@pytest.mark.parametrize(("record", "name", "end"), LINES)
def test_an_event_is_one_line(record: dict[str, Any], name: str | None, end: str) -> None:
    line = logs.to_line({"ts": "2026-01-02T10:11:12.345Z", "session": "ab12cd34", **record}, name)
    assert line.endswith(end)
    assert line.startswith("2026-01-02 10:11:12  ab12cd34 ")


HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\r\b\x7f\n\u202e\u2066\u200b\u2028\ud800\0"


def test_control_characters_do_not_reach_a_terminal(two: dict[str, Log], capsys: Captured) -> None:
    two["one"].append(HOSTILE, outcome=HOSTILE, path=HOSTILE, **{HOSTILE: HOSTILE})
    two["one"].append("run", **describe_code(HOSTILE))
    two["one"].append("exec", **describe_argv([HOSTILE]))
    lines = said(capsys)
    assert len(lines) == 9
    assert all(line.isprintable() for line in lines)
    assert r"\x1b[2J\x1b]0;title\x07\x9b31m\r\x08\x7f\n\u202e\u2066\u200b\u2028\ud800\x00" in lines[-1]
    assert all(line.isprintable() and line.isascii() for line in said(capsys, "--json") if "title" not in line)


def test_a_terminal_that_knows_few_letters_is_enough(two: dict[str, Log], store: Store) -> None:
    two["one"].append("run", code_head="é€😀")
    assert run(store, "--last", "1", PYTHONIOENCODING="latin-1").stdout.rstrip().endswith(b"\xe9\\u20ac\\U0001f600")


# ---- followed -------------------------------------------------------------------------------------------------------


def command(*words: str) -> list[str]:
    script = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from hutch.cli import main; sys.exit(main())"
    return [sys.executable, "-I", "-S", "-c", script, "logs", *words]


def variables(store: Store, **more: str) -> dict[str, str]:
    return {"HUTCH_DATA_DIR": os.path.dirname(store.directory), "HOME": "/nonexistent", **more}


def run(store: Store, *words: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    # The isolated mode of the interpreter would not look at the encoding asked for.
    argv = [word for word in command(*words) if word != "-I"]
    return subprocess.run(argv, env=variables(store, **more), capture_output=True, check=True)


@pytest.fixture
def following(store: Store) -> Iterator[Any]:
    children: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            command("--follow", *words),
            env=variables(store),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()


def next_path(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return str(json.loads(child.stdout.readline())["path"])


def test_a_follower_goes_on_and_finds_new_sessions(two: dict[str, Log], store: Store, following: Any) -> None:
    child = following("--json", "--last", "1")
    assert next_path(child) == "two2"
    two["one"].append("file", path="later")
    assert next_path(child) == "later"
    log = log_of(store, store.create("three", "python", {}).id)
    log.append("file", path="newest")
    log.close()
    assert next_path(child) == "newest"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate()
    assert (child.returncode, out, err) == (130, "", "")


def test_following_a_session_ends_with_it(two: dict[str, Log], store: Store, following: Any) -> None:
    child = following("one", "--json")
    assert [next_path(child) for _ in range(3)] == ["one0", "one1", "one2"]
    two["two"].append("file", path="of another")
    store.remove(store.find("one").id)
    out, err = child.communicate()
    assert (child.returncode, out, err) == (0, "", "")


def test_a_follower_notices_that_nobody_reads(two: dict[str, Log], following: Any) -> None:
    child = following()
    assert child.stdout is not None
    assert "one0" in child.stdout.readline()
    child.stdout.close()
    child.stdout = None
    _, err = child.communicate()
    assert (child.returncode, err) == (141, "")

"""Which open files the program starts with."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import PYTHON, Hutch

LIST = """
import os
for name in sorted(os.listdir("/proc/self/fd"), key=int):
    try:
        print(name, os.readlink(f"/proc/self/fd/{name}"))
    except FileNotFoundError:
        pass  # the one that listed the directory
"""


@pytest.mark.parametrize("number", [5, 10, 63, 200, 201, 250, 900])
def test_no_inherited_descriptor(hutch: Hutch, number: int) -> None:
    # The descriptor is opened by a shell that then becomes hutch: its number is free there.
    script = f'exec {number}</; exec "$@"'
    words = ["bash", "-c", script, "bash", PYTHON]
    with hutch.popen([*words, "-m", "hutch", "run", LIST]) as child, hutch.popen([*words, "-c", LIST]) as control:
        inside, outside = child.communicate(timeout=50)[0], control.communicate(timeout=50)[0]
    assert f"{number} /\n" in outside, "a program that is not sandboxed inherits it"
    assert [line.split()[0] for line in inside.splitlines()] == ["0", "1", "2"]


def test_standard_streams_are_pipes_and_an_empty_input(hutch: Hutch) -> None:
    lines = dict(line.split(" ", 1) for line in hutch.run(LIST).out.splitlines())
    assert lines["0"] == "/dev/null"
    assert lines["1"].startswith("pipe:")
    assert lines["2"].startswith("pipe:")
    assert lines["1"] != lines["2"]


def test_no_descriptor_of_a_mount_stays_open(hutch: Hutch, project: Path) -> None:
    other = hutch.write(project.parent / "other" / "file").parent
    ran = hutch.run(LIST, "--workspace", project, "--mount", f"{other}:/data")
    assert [line.split()[0] for line in ran.out.splitlines()] == ["0", "1", "2"]


def test_standard_input_is_not_handed_over_unless_asked(hutch: Hutch) -> None:
    code = "import sys; print(repr(sys.stdin.read()))"
    assert hutch.run(code, stdin="from outside").out == "''\n"
    assert hutch.run(code, "--stdin", stdin="from outside").out == "'from outside'\n"


def test_standard_input_cannot_be_written_back(hutch: Hutch, tmp_path: Path) -> None:
    kept = tmp_path / "input"
    kept.write_text("original")
    with kept.open("r+") as file:
        code = "import os; print(os.readlink('/proc/self/fd/0')); os.write(0, b'x')"
        with hutch.start("run", "--stdin", code, stdin=file) as child:
            out, err = child.communicate(timeout=50)
    assert out.startswith("pipe:")
    assert "Bad file descriptor" in err
    assert kept.read_text() == "original"


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_standard_stream_is_not_replaced_by_something_of_ours(hutch: Hutch, closed: int) -> None:
    script = f'exec {closed}>&-; exec {PYTHON} -m hutch run "$1"'
    with hutch.popen(["sh", "-c", script, "sh", LIST]) as child:
        out, err = child.communicate(timeout=50)
    assert child.returncode == 0, err
    if closed != 1:
        assert [line.split()[0] for line in out.splitlines()] == ["0", "1", "2"]
    assert "socket:" not in out
    assert "memfd" not in out

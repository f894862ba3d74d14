"""The warden that is shipped is the one that its source makes, byte for byte, and needs nothing to run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

from hutch import process
from hutch.isolation import jail

TOP = Path(__file__).resolve().parents[2]
MAKEFILE = (TOP / "Makefile").read_text().replace("\\\n", " ")
SOURCE = Path(jail.__file__).parent / "warden.c"
COMPILER_VERSION = "12.2.0"


class Machine(NamedTuple):
    name: str
    compiler: str
    needs: str
    """What HUTCH_MUST calls the compiler."""


MACHINES = (Machine("x86_64", "gcc", "gcc"), Machine("aarch64", "aarch64-linux-gnu-gcc", "aarch64-gcc"))
each_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)


def go_without(component: str, reason: str) -> NoReturn:
    """Skip where a component is missing, unless it was said that it must be there."""
    must = os.environ.get("HUTCH_MUST", "").split(",")
    if component in must or "all" in must:
        pytest.fail(reason)
    pytest.skip(reason)


def require(component: str, program: str) -> str:
    return shutil.which(program) or go_without(component, f"{program} is not installed")


def require_compiler(machine: Machine) -> str:
    compiler = require(machine.needs, machine.compiler)
    version = process.run([compiler, "-dumpfullversion"], variables={"PATH": os.defpath}).stdout.strip()
    if version != COMPILER_VERSION:
        go_without(machine.needs, f"{machine.compiler} is {version}, and only {COMPILER_VERSION} makes the same bytes")
    return compiler


def shipped(machine: Machine) -> Path:
    return Path(jail.find_warden(machine.name))


def flags(machine: Machine) -> list[str]:
    """What the Makefile gives to the compiler of a machine."""
    common = re.search(r"^WARDEN_FLAGS :?= (.*)$", MAKEFILE, re.MULTILINE)
    line = re.search(rf"^\t{re.escape(machine.compiler)} \$\(WARDEN_FLAGS\) (.*)-o ", MAKEFILE, re.MULTILINE)
    assert common is not None
    assert line is not None
    return [*common[1].split(), *line[1].split()]


@each_machine
def test_the_source_makes_the_shipped_bytes(machine: Machine, tmp_path: Path) -> None:
    compiler = require_compiler(machine)
    made = tmp_path / "warden"
    subprocess.run([compiler, *flags(machine), "-o", str(made), str(SOURCE)], check=True)
    assert made.read_bytes() == shipped(machine).read_bytes()


@each_machine
def test_the_shipped_warden_can_be_executed(machine: Machine) -> None:
    assert os.access(shipped(machine), os.X_OK)


# ---- the file, read by hand: nothing but its own bytes is needed ----------------------------------------------------


class Segment(NamedTuple):
    kind: int
    flags: int


LOAD, DYNAMIC, INTERPRETER, STACK = 1, 2, 3, 0x6474E551
EXECUTE, WRITE = 1, 2


def segments(file: Path) -> list[Segment]:
    content = file.read_bytes()
    assert content[:6] == b"\x7fELF\x02\x01"  # 64 bits, little end first

    def number(at: int, size: int) -> int:
        return int.from_bytes(content[at : at + size], "little")

    start, size, count = number(32, 8), number(54, 2), number(56, 2)
    return [Segment(number(at, 4), number(at + 4, 4)) for at in range(start, start + size * count, size)]


@each_machine
def test_the_warden_is_for_its_machine(machine: Machine) -> None:
    assert (
        int.from_bytes(shipped(machine).read_bytes()[18:20], "little") == {"x86_64": 62, "aarch64": 183}[machine.name]
    )


@each_machine
def test_the_warden_needs_no_library(machine: Machine) -> None:
    kinds = {segment.kind for segment in segments(shipped(machine))}
    assert LOAD in kinds
    assert not {DYNAMIC, INTERPRETER} & kinds


@each_machine
def test_readelf_finds_no_dynamic_section(machine: Machine) -> None:
    readelf = require("gcc", "readelf")
    said = process.run([readelf, "-d", str(shipped(machine))])
    assert "There is no dynamic section in this file" in said.stdout


@each_machine
def test_no_memory_of_the_warden_is_both_written_and_executed(machine: Machine) -> None:
    found = segments(shipped(machine))
    assert [segment.flags & EXECUTE for segment in found if segment.kind == STACK] == [0]
    assert not any(segment.flags & EXECUTE and segment.flags & WRITE for segment in found)


# ---- as pid 1 would run it ------------------------------------------------------------------------------------------


@pytest.fixture(params=MACHINES, ids=lambda machine: machine.name)
def runner(request: pytest.FixtureRequest) -> list[str]:
    """The words before the warden's own: itself, or the emulator of another machine and itself."""
    machine: Machine = request.param
    if machine.name == os.uname().machine:
        return [str(shipped(machine))]
    component = f"qemu-{machine.name}"
    return [require(component, f"qemu-{machine.name}-static"), str(shipped(machine))]


def as_init(runner: list[str], *words: str, limits: str = "-") -> tuple[int, str]:
    """The exit code, and what was reported on the status descriptor."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    read, write = os.pipe2(os.O_CLOEXEC)
    argv = [*runner, "init", str(write), limits, "-", *words]
    child = process.spawn(argv, stdin=null, stdout=null, stderr=null, fds=(write,), variables={"PATH": os.defpath})
    os.close(write)
    try:
        status = child.wait()
        reported = b""
        while chunk := os.read(read, 4096):
            reported += chunk
    finally:
        os.close(read)
        os.close(null)
    return os.waitstatus_to_exitcode(status), reported.decode()


@pytest.mark.parametrize(
    ("script", "code", "status"),
    [("exit 0", 0, 0), ("exit 3", 3, 3 << 8), ("kill -9 $$", 137, 9), ("sleep 0.05 & exit 5", 5, 5 << 8)],
)
def test_init_reports_how_its_program_ended(script: str, code: int, status: int, runner: list[str]) -> None:
    assert as_init(runner, "/bin/sh", "-c", script) == (code, f"started 0\nexit {status}\n")


def test_init_reports_a_program_that_cannot_be_executed(runner: list[str]) -> None:
    assert as_init(runner, "/nonexistent/x") == (127, f"started 0\nexec 2\nexit {127 << 8}\n")


def test_the_program_does_not_hold_the_status_descriptor(runner: list[str]) -> None:
    script = "for fd in 3 4 5 6 7 8 9; do [ -p /proc/self/fd/$fd ] && exit 1; done; exit 0"
    assert as_init(runner, "/bin/sh", "-c", script)[0] == 0


def test_init_sets_the_limits_of_its_program(runner: list[str]) -> None:
    # 7 is RLIMIT_NOFILE, 4 is RLIMIT_CORE
    script = '[ "$(ulimit -n)" = 33 ] && [ "$(ulimit -c)" = 0 ]'
    assert as_init(runner, "/bin/sh", "-c", script, limits="4=0,7=33")[0] == 0


def test_too_few_words_are_refused(runner: list[str]) -> None:
    assert process.run([*runner, "init", "-"]).exit_code == 125


def test_words_without_a_program_are_refused(runner: list[str]) -> None:
    assert process.run([*runner, "keep", "5"]).exit_code == 125
    assert process.run([*runner, "no-such-operation"]).exit_code == 125

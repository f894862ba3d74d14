"""One run from start to end, with a stand-in for the warden: what is reported decides, never a guess."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from threading import Thread

import pytest

from hutch.engine import supervisor
from hutch.engine.supervisor import Streams
from hutch.errors import HostError
from hutch.isolation.usage import tree_pids
from hutch.model import HostPath, Limits, Outcome, Plan, Result

PLAN = Plan(
    operations=(),
    bwrap=("bwrap",),
    command=("init", "init", "200", "-", "-", "/usr/bin/python3", "x"),
    limits=Limits(timeout_seconds=20.0, keep_bytes=1000, output_bytes=100_000),
    enforced=(("memory", "tree"),),
    environment="python",
)

PROLOGUE = """\
#!/bin/sh
word() { tr '\\0' '\\n' < /proc/self/fd/$args | sed -n "$1p"; }
args=$2
status=/proc/self/fd/$(word 2)
lifeline=/proc/self/fd/$(word 4)
until_killed() { cat $lifeline > /dev/null; }
report() { echo "$@" > $status; }
report child $$
"""


class StandIn:
    """Speaks as the warden does, and does what a test says instead of starting a sandbox."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "warden"
        self.group = directory / "group"

    def run(self, script: str, plan: Plan = PLAN, **streams: object) -> Result:
        self.path.write_text(f"{PROLOGUE}group={self.group}\n{script}\nrm -rf $group\nreport ended 0\n")
        self.path.chmod(0o755)
        return supervisor.run(plan, HostPath(str(self.path)), Streams(**streams))

    def run_in_group(self, script: str) -> Result:
        return self.run(script, PLAN.replace(cgroups=((HostPath(str(self.group)), ()),)))


@pytest.fixture
def warden(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


@pytest.mark.parametrize(
    ("script", "outcome", "exit_code", "signal_name"),
    [
        ("report started 0; report exit 0", Outcome.OK, 0, None),
        (f"report started 0; report exit {3 << 8}", Outcome.FAILED, 3, None),
        (f"report started 0; report exit {137 << 8}", Outcome.FAILED, 137, None),
        ("report started 0; report exit 11", Outcome.FAILED, None, "SIGSEGV"),
        ("report started 0; report exit 9", Outcome.FAILED, None, "SIGKILL"),
        (f"report started 0; report exit {int(signal.SIGXFSZ)}", Outcome.DISK, None, "SIGXFSZ"),
        ("report started 0; report exit 40", Outcome.FAILED, None, "SIG40"),
        ("report started 0", Outcome.KILLED, None, None),
    ],
)
def test_how_the_program_ended_is_how_it_is_told(
    script: str, outcome: Outcome, exit_code: int | None, signal_name: str | None, warden: StandIn
) -> None:
    result = warden.run(script)
    assert (result.outcome, result.exit_code, result.signal) == (outcome, exit_code, signal_name)
    assert (result.env, result.enforced, result.limits_hit) == ("python", (("memory", "tree"),), ())


@pytest.mark.parametrize(
    ("evidence", "ending", "outcome", "hit"),
    [
        ("memory.events oom_kill 1", "9", Outcome.MEMORY, ("memory",)),
        ("memory.events oom_kill 1", "256", Outcome.MEMORY, ("memory",)),
        ("memory.events oom_kill 1", "0", Outcome.OK, ("memory",)),
        ("memory.events oom_kill 1", None, Outcome.MEMORY, ("memory",)),
        ("memory.events oom_kill 0", "9", Outcome.FAILED, ()),
        ("pids.events max 3", "256", Outcome.PIDS, ("pids",)),
        ("pids.events max 3", "0", Outcome.OK, ("pids",)),
    ],
)
def test_a_limit_is_blamed_only_on_evidence(
    evidence: str, ending: str | None, outcome: Outcome, hit: tuple[str, ...], warden: StandIn
) -> None:
    file, _, text = evidence.partition(" ")
    # The counters are there until hutch has read them, which it does when it hears of the end.
    script = f"report started 0; echo {text} > $group/{file}; "
    script += f"report exit {ending}; " if ending is not None else ""
    script += "report ended 0; exec < /dev/null > /dev/null 2>&1; until_killed"
    result = warden.run_in_group(script)
    assert (result.outcome, result.limits_hit) == (outcome, hit)
    assert not warden.group.exists()


def test_the_time_limit_ends_the_run(warden: StandIn) -> None:
    started = time.monotonic()
    plan = PLAN.replace(limits=PLAN.limits.replace(timeout_seconds=0.2))
    result = warden.run("report started 0; echo before; until_killed", plan)
    assert time.monotonic() - started < 15
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.TIMEOUT, None, "before\n")
    assert result.limits_hit == ("timeout",)
    assert 200 <= result.duration_ms < 15_000


def test_the_output_limit_ends_the_run(warden: StandIn) -> None:
    result = warden.run("report started 0; head -c 300000 /dev/zero & until_killed")
    assert (result.outcome, result.truncated, result.limits_hit) == (Outcome.OUTPUT, True, ("output",))
    assert len(result.stdout) < 1100
    assert result.dropped_bytes == 100_000 - 1000


def test_long_output_is_shortened_and_says_so(warden: StandIn) -> None:
    result = warden.run("report started 0; head -c 1500 /dev/zero | tr '\\0' x; echo e >&2; report exit 0")
    assert (result.outcome, result.truncated, result.dropped_bytes) == (Outcome.OK, True, 500)
    assert "[... 500 bytes dropped ...]" in result.stdout
    assert result.stderr == "e\n"


def test_the_input_is_passed_on_to_its_end(warden: StandIn) -> None:
    data = b"0123456789" * 20_000
    assert warden.run("report started 0; wc -c; report exit 0", stdin=data).stdout.strip() == "200000"
    assert warden.run("report started 0; wc -c; report exit 0").stdout.strip() == "0"


def test_a_program_that_does_not_read_its_input_is_no_failure(warden: StandIn) -> None:
    assert warden.run("exec <&-; report started 0; report exit 0", stdin=b"x" * 1_000_000).ok


def test_input_is_copied_from_a_descriptor(warden: StandIn) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    os.write(write, b"from outside")
    os.close(write)
    try:
        assert warden.run("report started 0; cat; report exit 0", stdin_fd=read).stdout == "from outside"
    finally:
        os.close(read)


def test_output_is_passed_on_as_it_is_kept(warden: StandIn) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        result = warden.run("report started 0; echo both ways; report exit 0", stdout_fd=write)
        assert result.stdout == "both ways\n"
        assert os.read(read, 100) == b"both ways\n"
    finally:
        os.close(read)
        os.close(write)


def test_a_reader_that_is_gone_ends_the_run(warden: StandIn) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    os.close(read)
    try:
        with pytest.raises(BrokenPipeError):
            warden.run("report started 0; echo x; until_killed", stdout_fd=write)
    finally:
        os.close(write)


class StalledReader:
    """One pipe for both outputs, as 2>&1 makes it, that nobody reads before something happened."""

    def __init__(self, *, blocking: bool) -> None:
        self.read, first = os.pipe2(os.O_CLOEXEC)
        self.writes = (first, os.dup(first))
        os.set_blocking(first, blocking)
        os.write(first, b"x" * 65536)
        self.got = -65536
        self.was_in_time = False

    def start(self, awaited: Path) -> Thread:
        def drain() -> None:
            # Room for one page while both outputs wait: whichever comes second finds the pipe full again.
            time.sleep(0.15)
            self.got += len(os.read(self.read, 4096))
            deadline = time.monotonic() + 3
            while not awaited.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            self.was_in_time = awaited.exists()
            while chunk := os.read(self.read, 65536):
                self.got += len(chunk)

        thread = Thread(target=drain)
        thread.start()
        return thread

    def close(self) -> None:
        for fd in self.writes:
            os.close(fd)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_stalls_stops_neither_the_clock_nor_the_output(
    blocking: bool, warden: StandIn, tmp_path: Path
) -> None:
    plan = PLAN.replace(limits=PLAN.limits.replace(timeout_seconds=0.3, output_bytes=10_000_000))
    script = "report started 0; head -c 300000 /dev/zero & one=$!; head -c 300000 /dev/zero >&2 & two=$!"
    script += f"; until_killed; touch {tmp_path}/ended; kill $one $two"
    reader = StalledReader(blocking=blocking)
    draining = reader.start(tmp_path / "ended")
    try:
        result = warden.run(script, plan, stdout_fd=reader.writes[0], stderr_fd=reader.writes[1])
    finally:
        reader.close()
        draining.join()
        os.close(reader.read)
    assert result.outcome is Outcome.TIMEOUT
    assert reader.was_in_time
    assert reader.got == result.dropped_bytes + 2 * PLAN.limits.keep_bytes


@pytest.mark.parametrize(
    "script", ["report started 0; report exit 0", "report error unshare 1 user", "report started 0"]
)
def test_a_run_leaves_no_descriptor_and_no_child(script: str, warden: StandIn) -> None:
    others = set(tree_pids(os.getpid()))
    before = len(os.listdir("/proc/self/fd"))
    try:
        warden.run(script)
    except HostError:
        pass
    assert len(os.listdir("/proc/self/fd")) <= before
    assert set(tree_pids(os.getpid())) <= others


def test_a_warden_that_cannot_be_executed_leaves_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    work, group = tmp_path / "work", tmp_path / "group"
    plan = PLAN.replace(
        cgroups=((HostPath(str(group)), ()),), work_directories=((HostPath(str(work)), os.geteuid(), os.getegid()),)
    )
    with pytest.raises(HostError) as caught:
        supervisor.run(plan, HostPath("/nonexistent/warden"))
    assert caught.value.code == "host.exec"
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before

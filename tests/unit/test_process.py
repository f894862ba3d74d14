"""Helper programs: always bounded, always waited for; and who is alive."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch import process
from hutch.errors import HostError
from hutch.isolation.usage import tree_pids

SH = "/bin/sh"
CAP = process._OUTPUT_CAP


def sh(script: str, **options: object) -> process.Completed:
    return process.run([SH, "-c", script], **options)  # type: ignore[arg-type]


WORDS = st.text(st.characters(blacklist_characters="\0"), max_size=12)


@given(WORDS)
def test_a_quoted_word_is_what_shlex_would_write(word: str) -> None:
    assert process.quote(word) == shlex.quote(word)


@given(st.lists(WORDS, max_size=6))
def test_a_joined_line_reads_back_as_its_words(words: list[str]) -> None:
    assert shlex.split(process.join(words)) == words


def test_both_outputs_and_the_exit_code_come_back() -> None:
    said = sh("echo out; echo err >&2; exit 3")
    assert said == process.Completed(exit_code=3, stdout="out\n", stderr="err\n", timed_out=False)


def test_death_by_a_signal_is_a_negative_code() -> None:
    assert sh("kill -TERM $$").exit_code == -signal.SIGTERM


def test_standard_input_is_empty() -> None:
    assert sh("cat; echo end").stdout == "end\n"


def test_the_environment_is_built_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUTCH_TEST_SECRET", "x")
    assert process.run(["/usr/bin/env"]).stdout == ""
    assert process.run(["/usr/bin/env"], variables={"A": "1"}).stdout == "A=1\n"


@pytest.mark.parametrize(
    "inheritable",
    [False, True],
)
def test_no_descriptor_leaks_into_the_child(inheritable: bool) -> None:
    fd = os.open("/", os.O_RDONLY)
    os.set_inheritable(fd, inheritable)
    try:
        assert sh(f"[ -e /proc/self/fd/{fd} ] && echo leaked").stdout == ""
    finally:
        os.close(fd)


def test_bytes_that_are_no_text_do_not_crash() -> None:
    assert sh(r"printf 'a\377b'").stdout == "a\ufffdb"


def test_the_deadline_kills() -> None:
    started = time.monotonic()
    said = sh("echo before; exec sleep 60", timeout_seconds=0.2)
    assert time.monotonic() - started < 30
    assert (said.timed_out, said.exit_code, said.stdout) == (True, -signal.SIGKILL, "before\n")


def test_a_grandchild_that_holds_the_pipe_does_not_outwait_the_deadline() -> None:
    started = time.monotonic()
    said = sh("sleep 60 & echo $!; exit 0", timeout_seconds=0.2)
    os.kill(int(said.stdout), signal.SIGKILL)
    assert said.timed_out
    assert time.monotonic() - started < 30


def test_the_deadline_holds_for_a_program_that_closed_its_outputs() -> None:
    assert sh("exec >&- 2>&-; exec sleep 60", timeout_seconds=0.1).timed_out


def test_output_is_bounded_and_the_program_still_ends() -> None:
    said = sh(f"head -c {4 * CAP} /dev/zero; exit 5")
    assert said.exit_code == 5
    # The chunk that crosses the line is kept whole.
    assert CAP <= len(said.stdout) < CAP + 65536


def test_a_program_that_is_not_there_is_a_host_error() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(HostError, match=r"cannot execute /nonexistent/x \(No such file") as caught:
        process.run(["/nonexistent/x", "a b"])
    assert caught.value.code == "host.exec"
    assert caught.value.details == "/nonexistent/x 'a b'"
    assert "/nonexistent/x" in caught.value.hint
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_run_leaves_no_descriptor_and_no_child() -> None:
    others = set(tree_pids(os.getpid()))
    before = os.listdir("/proc/self/fd")
    sh("true")
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert set(tree_pids(os.getpid())) <= others


def test_a_child_sees_exactly_the_descriptors_it_was_given() -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        child = process.spawn(
            [SH, "-c", f"echo given > /proc/self/fd/{write}"], stdin=null, stdout=null, stderr=null, fds=(write,)
        )
        assert child.wait() == 0
        assert child.poll() == 0
        assert os.read(read, 100) == b"given\n"
        child.kill()  # known to be gone: nothing may be sent to whoever has its number now
    finally:
        for fd in (null, read, write):
            os.close(fd)


def test_a_killed_child_is_waited_for() -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        child = process.spawn(["/bin/sleep", "60"], stdin=null, stdout=null, stderr=null)
        assert child.poll() is None
        child.kill()
        assert os.WTERMSIG(child.wait()) == signal.SIGKILL
    finally:
        os.close(null)


# ---- who is alive ---------------------------------------------------------------------------------------------------


def test_a_token_names_a_living_process_and_chance() -> None:
    one, other = process.make_token(), process.make_token()
    assert one != other
    assert one.split("-")[:2] == [str(os.getpid()), str(process.start_time(os.getpid()))]
    assert process.is_alive(one)


def test_a_start_time_is_that_of_the_kernel() -> None:
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    assert process.start_time(os.getpid()) == int(fields[19])
    assert process.start_time(2**30) == 0


def test_a_process_name_with_brackets_does_not_confuse_the_start_time() -> None:
    code = "import sys; open('/proc/self/comm', 'w').write(') 1 2 (x'); sys.path.insert(0, sys.argv[1])\n"
    code += "from hutch import process; import os; print(process.start_time(os.getpid()) > 0, process.make_token())"
    source = os.path.dirname(os.path.dirname(process.__file__))
    said = process.run([sys.executable, "-I", "-S", "-c", code, source])
    known, token = said.stdout.split()
    assert known == "True"
    assert not process.is_alive(token)


def test_a_number_used_again_is_another_process() -> None:
    pid, start, *rest = process.make_token().split("-")
    assert not process.is_alive("-".join([pid, str(int(start) - 1), *rest]))


def test_the_pids_of_another_container_mean_nothing_here() -> None:
    _, _, namespace, chance = process.make_token().split("-")
    assert not process.is_alive(f"1073741823-5-{namespace}-{chance}")
    assert process.is_alive(f"1073741823-5-{int(namespace) + 1}-{chance}")


@pytest.mark.parametrize("name", ["", "supervisors", "a-b-c", "1-2", "-1-2", "1-x-00"])
def test_what_is_no_token_counts_as_alive(name: str) -> None:
    assert process.is_alive(name)

"""The agent itself (isolation/init.c), without a sandbox, on both architectures: what it does and what it refuses."""

from __future__ import annotations

import array
import errno
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_warden_build import MACHINES, Machine, go_without, require, shipped

from hutch import process

CONTROL_FD = 205
DEADLINE_SECONDS = 20


class Inside:
    """One agent and our end of its socket."""

    def __init__(self, runner: list[str], workspace: Path) -> None:
        self.workspace = workspace
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(DEADLINE_SECONDS)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(theirs.fileno(), CONTROL_FD, inheritable=False)
        argv = [*runner, "agent", "-", "-", "-", str(workspace)]
        self.process = process.spawn(argv, stdin=null, stdout=null, stderr=null, fds=(CONTROL_FD,))
        for fd in (null, CONTROL_FD):
            os.close(fd)
        theirs.close()
        self._number = 0
        self.exits: dict[int, int] = {}

    def send(self, verb: str, *words: object, fds: tuple[int, ...] = ()) -> int:
        self._number += 1
        text = b"".join(os.fsencode(str(word)) + b"\0" for word in (verb, self._number, *words))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.ours.sendmsg([text], rights)
        return self._number

    def hear(self) -> tuple[str, int, int, int]:
        """(word, number, value, descriptor or -1)"""
        data, rights, _, _ = self.ours.recvmsg(100, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        word, number, value = data.decode().split(" ")
        fd = array.array("i", rights[0][2])[0] if rights else -1
        return word, int(number), int(value), fd

    def ask(self, verb: str, *words: object, fds: tuple[int, ...] = ()) -> tuple[str, int, int]:
        """(word, value, descriptor) of the answer to this."""
        number = self.send(verb, *words, fds=fds)
        while True:
            word, answered, value, fd = self.hear()
            if word == "exit":
                self.exits[answered] = value
            elif answered == number:
                return word, value, fd

    def exit_of(self, number: int) -> int:
        """The wait status of what a request started."""
        while number not in self.exits:
            word, answered, value, _ = self.hear()
            assert word == "exit"
            self.exits[answered] = value
        return self.exits[number]

    def spawn(
        self, *argv: str, fds: tuple[int, ...] | None = None, terminal: str = "-", **variables: str
    ) -> tuple[str, int, int]:
        words = os.memfd_create("words", os.MFD_CLOEXEC)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        listed = [str(self.workspace), str(len(argv)), *argv, *(f"{name}={value}" for name, value in variables.items())]
        os.write(words, b"".join(os.fsencode(word) + b"\0" for word in listed))
        try:
            given = () if terminal != "-" else fds if fds is not None else (null, null, null)
            return self.ask("spawn", terminal, fds=(words, *given))
        finally:
            os.close(words)
            os.close(null)

    def close(self) -> None:
        self.ours.close()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=MACHINES, ids=lambda machine: machine.name)
def inside(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Inside]:
    machine: Machine = request.param
    if machine.name == os.uname().machine:
        runner = [str(shipped(machine))]
    elif machine.name == "aarch64":
        runner = [require("qemu-aarch64", "qemu-aarch64-static"), str(shipped(machine))]
    else:
        go_without("x86_64", "this is not an x86_64 machine")
    agent = Inside(runner, tmp_path)
    yield agent
    agent.close()


def failed(number: int) -> tuple[str, int, int]:
    return ("failed", number, -1)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_files_are_opened_made_moved_and_removed(inside: Inside) -> None:
    word, _, fd = inside.ask("open", os.O_WRONLY | os.O_CREAT | os.O_EXCL, "644", "new")
    assert word == "ok"
    os.write(fd, b"text")
    os.close(fd)
    assert (inside.workspace / "new").read_bytes() == b"text"
    assert inside.ask("mkdir", "0755", "directory")[0] == "ok"
    assert inside.ask("rename", "new", "directory/moved")[0] == "ok"
    assert (inside.workspace / "directory" / "moved").read_bytes() == b"text"
    assert inside.ask("remove", 0, "directory/moved")[0] == "ok"
    assert inside.ask("remove", 0x200, "directory")[0] == "ok"
    assert list(inside.workspace.iterdir()) == []


def test_no_link_is_followed_at_any_step(inside: Inside) -> None:
    (inside.workspace / "real").mkdir()
    (inside.workspace / "real" / "file").write_text("x")
    (inside.workspace / "link").symlink_to("real")
    (inside.workspace / "out").symlink_to("/etc/passwd")
    for path in ("link/file", "out", "link"):
        assert inside.ask("open", os.O_RDONLY, "0", path) == failed(errno.ELOOP)
    assert inside.ask("mkdir", "0755", "link/new") == failed(errno.ELOOP)
    assert inside.ask("remove", 0, "link/file") == failed(errno.ELOOP)
    assert inside.ask("rename", "link/file", "real/other") == failed(errno.ELOOP)
    assert inside.ask("rename", "real/file", "link/other") == failed(errno.ELOOP)


@pytest.mark.parametrize("path", ["..", "../x", "a/../../x", "a/..", "/etc/passwd", "a//b", ""])
def test_no_path_leads_out(inside: Inside, path: str) -> None:
    (inside.workspace / "a").mkdir()
    for request in (("open", os.O_RDONLY, "0"), ("mkdir", "0755"), ("remove", 0), ("remove", 0x200)):
        word, _, fd = inside.ask(*request, path)
        assert (word, fd) == ("failed", -1), request
    assert inside.ask("rename", "a", path)[0] == "failed"
    assert (inside.workspace / "a").is_dir()


def test_a_name_that_is_too_long_is_refused(inside: Inside) -> None:
    assert inside.ask("open", os.O_RDONLY, "0", "x" * 256) == failed(errno.ENAMETOOLONG)
    assert inside.ask("mkdir", "0755", f"{'x' * 256}/y") == failed(errno.ENAMETOOLONG)


def test_a_pipe_in_the_way_does_not_stop_it(inside: Inside) -> None:
    os.mkfifo(inside.workspace / "pipe")
    word, _, fd = inside.ask("open", os.O_RDONLY, "0", "pipe")
    assert word == "ok"
    os.close(fd)
    assert inside.ask("open", os.O_WRONLY, "0", "pipe") == failed(errno.ENXIO)


# ---- programs -------------------------------------------------------------------------------------------------------


def test_a_program_has_its_streams_its_variables_and_its_directory(inside: Inside) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    script = 'pwd; echo "$A"; ls /proc/self/fd'
    word, pid, _ = inside.spawn("sh", "-c", script, fds=(null, write, write), PATH="/usr/bin:/bin", A="b c")
    os.close(write)
    os.close(null)
    with open(read, "rb") as output:
        assert output.read().decode().split("\n") == [str(inside.workspace), "b c", "0", "1", "2", "3", ""]
    assert word == "ok"
    assert pid > 1
    assert inside.exit_of(inside._number) == 0


def test_further_descriptors_come_after_the_streams(inside: Inside) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    inside.spawn("/bin/sh", "-c", "echo three >&3; echo four >&4", fds=(null, null, null, write, write))
    os.close(write)
    os.close(null)
    with open(read, "rb") as output:
        assert output.read() == b"three\nfour\n"


def test_how_a_program_ended_is_told(inside: Inside) -> None:
    assert inside.spawn("/bin/sh", "-c", "exit 7")[0] == "ok"
    assert inside.exit_of(inside._number) == 7 << 8
    assert inside.spawn("/bin/sh", "-c", "kill -TERM $$")[0] == "ok"
    assert inside.exit_of(inside._number) == signal.SIGTERM


@pytest.mark.parametrize(
    ("argv", "number"),
    [
        (("/nonexistent",), errno.ENOENT),
        (("nonexistent",), errno.ENOENT),
        (("/etc/passwd",), errno.EACCES),
        (("",), errno.ENOENT),
        (("/bin/true", "x" * 200_000), errno.E2BIG),
    ],
)
def test_what_cannot_be_executed_is_said_at_once(inside: Inside, argv: tuple[str, ...], number: int) -> None:
    assert inside.spawn(*argv, PATH="/usr/bin") == failed(number)


def test_a_terminal_comes_with_its_size(inside: Inside) -> None:
    word, _, master = inside.spawn("/bin/sh", "-c", "stty size; tty", terminal="33x44", PATH="/usr/bin:/bin")
    assert word == "ok"
    seen = b""
    while seen.count(b"\n") < 2:
        seen += os.read(master, 1000)
    assert seen.split() == [b"33", b"44", seen.split()[2]]
    assert seen.split()[2].startswith(b"/dev/pts/")
    os.close(master)


def test_signals_reach_one_a_group_and_a_session(inside: Inside) -> None:
    for scope in ("one", "group", "session"):
        assert inside.spawn("/bin/sleep", "100")[0] == "ok"
        started = inside._number
        assert inside.ask("signal", started, int(signal.SIGTERM), scope)[0] == "ok"
        assert inside.exit_of(started) == signal.SIGTERM
    assert inside.ask("signal", 9999, 9, "one") == failed(errno.ESRCH)


def test_a_session_ends_with_all_that_stayed_in_it(inside: Inside) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    inside.spawn("/bin/sh", "-c", "sleep 100 & sleep 100 & echo $!; wait", fds=(null, write, null))
    started = inside._number
    os.close(write)
    os.close(null)
    assert os.read(read, 100)
    inside.send("signal", started, int(signal.SIGKILL), "session")
    with open(read, "rb") as output:
        assert output.read() == b"", "whoever held the other end is gone"


def test_it_can_be_told_to_kill_neither_itself_nor_all(inside: Inside) -> None:
    for pid in ("1", "0", "-1"):
        assert inside.ask("kill", pid, 0) == failed(errno.EPERM)
    assert inside.ask("kill", 2**22 + 1, 0) == failed(errno.ESRCH)


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("spawn",),
        ("spawn", "-"),
        ("signal", 1),
        ("open", 0),
        ("kill",),
        ("mkdir", "0755"),
        ("rename", "a"),
    ],
)
def test_a_request_of_the_wrong_form_is_refused_and_the_next_one_served(
    inside: Inside, words: tuple[object, ...]
) -> None:
    assert inside.ask(str(words[0]), *words[1:]) == failed(errno.EINVAL)
    assert inside.ask("mkdir", "0755", "after")[0] == "ok"


def test_descriptors_that_nobody_asked_for_are_closed(inside: Inside) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    inside.ask("mkdir", "0755", "a", fds=(write, write, write))
    os.close(write)
    with open(read, "rb") as output:
        assert output.read() == b""


def test_it_ends_when_nobody_is_left_to_ask(inside: Inside) -> None:
    inside.ours.close()
    assert os.waitstatus_to_exitcode(inside.process.wait()) == 0

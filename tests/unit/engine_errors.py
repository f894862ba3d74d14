"""Ways to make the engine fail, for the table of test_errors.py."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hutch import blocking, sandbox, spec
from hutch.engine import agent as agent_module
from hutch.engine import engine, session
from hutch.engine.admission import Admission
from hutch.engine.agent import Agent, Answer
from hutch.engine.files import Files
from hutch.engine.interpreter import Interpreter, Run, _Process
from hutch.engine.record import Record
from hutch.errors import GoneError, HostError, HutchError, ProtocolError, SessionError, SpecError, StartError
from hutch.isolation import usage
from hutch.model import MIB, HostPath, Limits, Outcome, Plan, Result
from hutch.sources import host

Provoke = Callable[[Any], Any]


def awaits(work: Callable[[Any], Awaitable[Any]]) -> Provoke:
    async def begin(scene: Any) -> None:
        await work(scene)

    return lambda scene: asyncio.run(begin(scene))


class Inside:
    """Stands where pid 1 of a sandbox would: opens files of a directory, and follows no link."""

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace

    async def request(self, verb: str, *words: Any) -> Answer:
        if verb == "open":
            return Answer(value=0, fd=os.open(self._workspace / words[2], words[0] | os.O_NOFOLLOW, 0o644))
        if verb == "mkdir":
            os.mkdir(self._workspace / words[1])
        elif verb == "remove":
            os.unlink(self._workspace / words[1])
        else:
            os.rename(self._workspace / words[0], self._workspace / words[1])
        return Answer(value=0, fd=-1)


def files(work: Callable[[Files], Awaitable[Any]]) -> Provoke:
    async def begin(scene: Any) -> None:
        (scene.path / "full").mkdir()
        (scene.path / "full" / "file").write_bytes(b"content")
        (scene.path / "link").symlink_to("full")

        async def agent() -> Any:
            return Inside(scene.path)

        await work(Files(agent))

    return awaits(begin)


async def crowd(_scene: Any) -> None:
    admission = Admission(running=1, waiting=0)
    await admission.enter(MIB)
    await admission.enter(MIB)


async def lie_as_agent(_scene: Any) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    faults: list[HutchError] = []
    agent = Agent(ours, faults.append)
    with theirs:
        theirs.send(b"ok 99 0")
        agent._read()
    raise faults[0]


async def ask_the_gone(_scene: Any) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent = Agent(ours, lambda _: None)
    theirs.close()
    try:
        await agent.request("kill", 2, 9)
    finally:
        agent.close(GoneError("over", code="", hint=""))


class Around:
    """Stands where a live sandbox would: an agent that never answers, and an ear for faults."""

    def __init__(self) -> None:
        self.faults: list[HutchError] = []
        self.plan = Plan(operations=(), bwrap=(), command=(), environment="python")
        self.agent = SimpleNamespace(spawn=self._never)
        self.hits: dict[str, int] = {}
        self.fail = self.faults.append
        self.is_alive = False

    async def _never(self, *_words: Any, **_options: Any) -> None:
        await asyncio.get_running_loop().create_future()

    def on_end(self, _callback: Any) -> Any:
        return lambda: None

    def result(self, *_words: Any, **_options: Any) -> Result:
        return Result(outcome=Outcome.FAILED, exit_code=1)


async def lie_as_interpreter(_scene: Any) -> None:
    around: Any = Around()
    process = _Process(around, "python", "/usr/bin/python3", lambda _: None)
    process._handed_over[1].send(b"done nothing 0\n")
    process._read()
    process.end(None)
    raise around.faults[0]


async def end_before_it_is_ready(_scene: Any) -> None:
    around: Any = Around()
    process = _Process(around, "python", "/usr/bin/python3", lambda _: None)
    asyncio.get_running_loop().call_soon(process.end, 256)
    try:
        await process.run(Run(code="1", limits=Limits()), None)
    finally:
        process._pipes.close()
        process._task.cancel()


async def find_no_room(_scene: Any) -> None:
    around: Any = Around()

    async def refuse(*_words: Any, **_options: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "")

    around.agent.spawn = refuse
    process = _Process(around, "python", "/usr/bin/python3", lambda _: None)
    await process._task
    process.end(None)
    raise around.faults[0]


async def run_out_of_descriptors(scene: Any) -> None:
    def refuse(*_words: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    around: Any = Around()
    around.plan = around.plan.replace(interpreters=(("python", "/usr/bin/python3"),))
    scene.patch.setattr(os, "memfd_create", refuse)
    Interpreter(around, "python").start()


async def say_nothing(scene: Any) -> None:
    scene.patch.setattr(agent_module, "_SILENCE_SECONDS", 0.01)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        await Agent(ours, lambda _: None).request("kill", 2, 9)


async def want_a_missing_interpreter(_scene: Any) -> None:
    around: Any = Around()
    Interpreter(around, "node")


def use_after_close(_scene: Any) -> None:
    box = sandbox.AsyncSandbox()
    box._box = SimpleNamespace()  # type: ignore[assignment]
    box._is_closed = True
    box._require_box()


def use_after_fork(_scene: Any) -> None:
    async def nothing() -> None:
        return

    portal = object.__new__(blocking._Portal)
    portal._pid = -1
    portal.call(nothing())


def kept(request: dict[str, Any]) -> Record:
    made = "2026-01-02T10:11:12Z"
    return Record(id="0123abcd", environment="python", request=request, created_at=made, workspace=HostPath("/w"))


def use_a_closed_session(_scene: Any) -> None:
    closed = object.__new__(session.Session)
    closed.record = kept({})
    raise closed._closed()


def without_room(scene: Any) -> None:
    scene.patch.setattr(sandbox, "STDIN_BYTES", 1)
    sandbox.make_run(Limits(), "1", b"12", None, echo=False)


def with_setting(scene: Any) -> None:
    scene.patch.setenv("HUTCH_MAX_RUNNING", "many")
    engine._setting("HUTCH_MAX_RUNNING")


def without_program(_scene: Any) -> None:
    asked = {"environment": "shell", "packages": ["no-such-program"]}
    host.realise(spec.parse(asked).environment)


def look_without_descriptors(scene: Any) -> None:
    def refuse(*_words: Any, **_options: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    scene.patch.setattr(usage, "open", refuse, raising=False)
    usage.read_text("/proc/self/stat")


# code, class, what provokes it, a part of the hint
ROWS: list[tuple[str, type[HutchError], Provoke, str]] = [
    ("files.missing", SpecError, files(lambda files: files.read("none")), "files.list()"),
    ("files.link", SpecError, files(lambda files: files.read("link")), "the path it leads to"),
    ("files.kind", SpecError, files(lambda files: files.read("full")), "regular files"),
    ("files.path", SpecError, files(lambda files: files.read("../x")), "relative to /workspace"),
    ("files.path", SpecError, files(lambda files: files.read("x" * 300)), "shorter"),
    ("files.path", SpecError, files(lambda files: files.write("full/", "x")), "name a file"),
    ("files.size", SpecError, files(lambda files: files.read("full/file", max_bytes=1)), "download"),
    ("files.refused", SpecError, files(lambda files: files.move("full/file", "full/file/x")), "files.stat()"),
    ("files.text", SpecError, files(lambda files: files.write("file", "\ud800")), "bytes"),
    ("files.host", SpecError, files(lambda files: files.upload("/nonexistent/x", "y")), "exists"),
    ("host.busy", HostError, awaits(crowd), "HUTCH_MAX_WAITING"),
    ("host.memory", HostError, awaits(lambda _: Admission(memory_bytes=MIB).enter(2 * MIB)), "HUTCH_MEMORY_BUDGET_MB"),
    ("host.refused", HostError, awaits(run_out_of_descriptors), "ulimit -n"),
    ("host.interpreter", HostError, awaits(want_a_missing_interpreter), "has node"),
    ("protocol.agent", ProtocolError, awaits(lie_as_agent), "fresh sandbox"),
    ("protocol.interpreter", ProtocolError, awaits(lie_as_interpreter), "fresh one"),
    ("start.interpreter", StartError, awaits(end_before_it_is_ready), "--version"),
    ("start.full", StartError, awaits(find_no_room), "pids"),
    ("sandbox.silent", GoneError, awaits(say_nothing), "start a new one"),
    ("sandbox.gone", GoneError, awaits(ask_the_gone), "start a new one"),
    ("sandbox.closed", GoneError, use_after_close, "make a new one"),
    ("sandbox.forked", GoneError, use_after_fork, "each process"),
    ("session.closed", SessionError, use_a_closed_session, "0123abcd"),
    (
        "session.environment",
        SessionError,
        lambda _: session._require_same(kept({}), {"environment": "node"}),
        "-e python",
    ),
    ("session.request", SessionError, lambda _: session._require_same(kept({}), {"memory_mb": 1}), "memory_mb"),
    (
        "spec.command",
        SpecError,
        lambda _: sandbox.make_command(Limits(), "ls", None, ".", b"", None, None),
        '["sh", "-c"',
    ),
    ("spec.text", SpecError, lambda _: sandbox.make_run(Limits(), "\ud800", b"", None, echo=False), "encoded"),
    ("spec.package", SpecError, lambda _: spec.parse({"packages": ["a b"]}), "letters, digits"),
    ("host.descriptors", HostError, look_without_descriptors, "ulimit -n"),
    ("host.package", HostError, without_program, "apt install no-such-program"),
    ("spec.pool-size", SpecError, lambda _: sandbox.AsyncPool(size=-1), "size=8"),
    ("spec.running", SpecError, lambda _: sandbox.AsyncSandbox().stream("1").result, "to the end"),
    ("spec.started", SpecError, lambda _: sandbox.AsyncSandbox()._require_box(), "with block"),
    ("spec.stdin-size", SpecError, without_room, "files.upload"),
    ("spec.setting", SpecError, with_setting, "unset HUTCH_MAX_RUNNING"),
]

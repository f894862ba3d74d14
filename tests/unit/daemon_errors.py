"""Ways to make the daemon and its doors fail, for the table of test_errors.py."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hutch.cli import build_parser, lasting, live, repl
from hutch.engine.census import Living
from hutch.errors import GoneError, HostError, HutchError, SessionError, SpecError
from hutch.serve import client, daemon, operations, place

Provoke = Callable[[Any], Any]


def at_home(act: Callable[[Any], Any]) -> Provoke:
    """With a data directory of its own."""

    def provoke(scene: Any) -> None:
        scene.patch.setenv("HUTCH_DATA_DIR", str(scene.path / "data"))
        scene.patch.delenv("XDG_RUNTIME_DIR", raising=False)
        scene.patch.setattr(place, "_PATH_BYTES", 1000)  # a test's own directory may have a long name
        act(scene)

    return provoke


def open_to_others(scene: Any) -> None:
    (scene.path / "data" / "run").mkdir(parents=True, mode=0o755)
    client.connect()


def with_a_file_in_the_way(scene: Any) -> None:
    (scene.path / "data").touch()
    client.connect()


def without_python(scene: Any) -> None:
    scene.patch.setattr("sys.executable", "")
    client.connect()


def with_a_python_that_fails(scene: Any) -> None:
    scene.patch.setattr("sys.executable", scene.program("python", "echo it broke >&2; exit 1"))
    with pytest.raises(HostError) as caught:
        client.connect()
    assert caught.value.details == "it broke"
    raise caught.value


def answered(reply: bytes) -> Provoke:
    """A daemon that says something of its own when it was greeted."""

    def provoke(_scene: Any) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(reply)
            theirs.shutdown(socket.SHUT_WR)
            client.Connection(ours, 0).finish()

    return at_home(provoke)


def silent(scene: Any) -> None:
    scene.patch.setattr(client, "_HELLO_SECONDS", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client._greet(client.Connection(ours, 77))


def too_long(scene: Any) -> None:
    scene.patch.setattr(client, "LINE_BYTES", 10)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client.Connection(ours, 0).send({"code": "x" * 100})


def with_idle(text: str) -> Provoke:
    def provoke(scene: Any) -> None:
        scene.patch.setenv("HUTCH_DAEMON_IDLE", text)
        daemon.idle_seconds()

    return provoke


def told_of(error: HutchError) -> Provoke:
    """An error as it comes back over the socket."""

    def provoke(_scene: Any) -> None:
        raise client.read_error(client.write_error(error))

    return provoke


def living(**fields: Any) -> Living:
    usual = {"id": "0a0a0a0a", "pid": os.getpid(), "environment": "python", "session": None, "name": None, "owner": 1}
    usual |= {"uid": os.geteuid(), "processes": 1, "memory_bytes": 1, "cpu_seconds": 0.0, "age_seconds": 1.0}
    return Living(**{**usual, **fields})


def kills(*words: str, there: tuple[Living, ...] = ()) -> Provoke:
    def provoke(scene: Any) -> None:
        scene.patch.setattr(live.census, "find_sandboxes", lambda: list(there))
        live.main(build_parser("kill").parse_args(list(words)))

    return provoke


def that_does_not_go(scene: Any) -> None:
    scene.patch.setattr(live, "_PATIENCE_SECONDS", 0.01)
    scene.patch.setattr(live.signal, "pidfd_send_signal", lambda _process, _number: None)
    kills("0a0a0a0a", there=(living(),))(scene)


def talks(*words: str) -> Provoke:
    return lambda _scene: repl.main(build_parser("run").parse_args(["-i", *words]))


def with_long_input(scene: Any) -> None:
    reading, writing = os.pipe()
    threading.Thread(target=lambda: (os.write(writing, b"1234"), os.close(writing))).start()
    scene.patch.setattr(lasting, "STDIN_BYTES", 3)
    with open(reading, "rb") as stream:
        scene.patch.setattr(lasting, "open", lambda *_, **__: stream, raising=False)
        lasting._stdin(SimpleNamespace(stdin=True))  # type: ignore[arg-type]


def onto_a_full_disk(scene: Any) -> None:
    real = os.write
    with open("/dev/full", "wb") as full:
        scene.patch.setattr(os, "write", lambda _fd, data: real(full.fileno(), data))
        lasting.pass_on(0, b"x")


def without_a_directory(scene: Any) -> None:
    before = os.getcwd()
    gone = scene.path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        lasting._absolute({"workspace": "here"})
    finally:
        os.chdir(before)


ROWS: list[tuple[str, type[HutchError], Provoke, str]] = [
    ("host.runtime", HostError, at_home(open_to_others), "ls -ld"),
    ("host.runtime", HostError, at_home(with_a_file_in_the_way), "HUTCH_DATA_DIR"),
    ("host.daemon", HostError, at_home(without_python), "--no-daemon"),
    ("host.daemon", HostError, at_home(with_a_python_that_fails), "daemon.log"),
    ("host.daemon", HostError, answered(b"[]\n"), "--no-daemon"),
    ("host.daemon", HostError, answered(b'{"event": "else"}\n'), "--no-daemon"),
    ("host.daemon", HostError, at_home(silent), "kill 77"),
    ("sandbox.daemon", GoneError, answered(b""), "do it again"),
    ("sandbox.interrupted", GoneError, told_of(operations.interrupted()), "run it again"),
    ("spec.message", SpecError, lambda _: client.parse_message(b"x"), "one JSON object a line"),
    ("spec.message", SpecError, lambda _: client.parse_message(b"[]"), "one JSON object a line"),
    ("spec.message", SpecError, too_long, "--mount"),
    ("spec.setting", SpecError, with_idle("soon"), "unset HUTCH_DAEMON_IDLE"),
    ("spec.setting", SpecError, with_idle("nan"), "unset HUTCH_DAEMON_IDLE"),
    ("spec.stdin-size", SpecError, with_long_input, "--mount"),
    ("host.output", HostError, onto_a_full_disk, "make room"),
    ("mount.missing", SpecError, without_a_directory, "absolute path"),
    ("host.kill", HostError, that_does_not_go, "kill -9 "),
    ("cli.usage", SpecError, kills(), "hutch ps"),
    ("cli.usage", SpecError, kills("x", "--all"), "hutch ps"),
    ("spec.unknown", SpecError, kills("x"), "hutch ps"),
    ("spec.unknown", SpecError, kills("x", there=(living(name="one"),)), "use one of: 0a0a0a0a, one"),
    ("spec.unknown", SpecError, kills("0a0a0a0a", there=(living(uid=os.geteuid() + 1),)), "hutch ps"),
    (
        "session.ambiguous",
        SessionError,
        kills("a", there=(living(name="a", session="1"), living(id="b1", name="a", session="2"))),
        "0a0a0a0a, b1",
    ),
    ("cli.usage", SpecError, talks("print(1)"), "give one"),
    ("cli.usage", SpecError, talks("--json"), "leave out --json"),
]

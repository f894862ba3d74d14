"""The way to the daemon: where it lives, which code it is, and what its messages look like."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import hutch
from hutch.engine.record import Record
from hutch.errors import HostError, HutchError, SandboxError, SessionError, SpecError
from hutch.model import HostPath
from hutch.serve import client, operations, place


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory with a short name, so that a socket fits into it."""
    monkeypatch.setattr(place, "_PATH_BYTES", len(str(tmp_path)) + 60)
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path / "data"


# ---- places ---------------------------------------------------------------------------------------------------------


def test_the_socket_lies_in_the_runtime_directory_if_that_is_ours(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.socket_directory() == f"{data}/run"
    runtime = data.parent / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    chosen = place.socket_directory()
    assert chosen.startswith(f"{runtime}/hutch-")
    monkeypatch.setenv("HUTCH_DATA_DIR", str(data / "other"))
    assert place.socket_directory() != chosen
    for elsewhere in ("relative", "/nonexistent", "/proc"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", elsewhere)
        assert place.socket_directory() == f"{data}/other/run"
    runtime.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert place.socket_directory() == f"{data}/other/run"


def test_a_link_to_the_data_directory_leads_to_the_same_daemon(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = place.socket_directory()
    data.mkdir()
    (data.parent / "link").symlink_to(data)
    monkeypatch.setenv("HUTCH_DATA_DIR", str(data.parent / "link"))
    assert place.socket_directory() == before


def test_a_path_that_no_socket_can_have_is_replaced(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_PATH_BYTES", 107)
    monkeypatch.setenv("HUTCH_DATA_DIR", str(data / ("x" * 100)))
    directory = place.socket_directory()
    assert directory.startswith(f"/tmp/hutch-{os.geteuid()}-")
    assert len(f"{directory}/{place.SOCKET}") < 107


def test_a_directory_is_made_for_us_alone(data: Path) -> None:
    place.require_private(f"{data}/run")
    place.require_private(f"{data}/run")
    assert stat.S_IMODE((data / "run").stat().st_mode) == 0o700
    (data / "run").chmod(0o710)
    with pytest.raises(HostError, match="only you can enter"):
        place.require_private(f"{data}/run")
    (data / "link").symlink_to(data / "run")
    with pytest.raises(HostError, match="only you can enter"):
        place.require_private(f"{data}/link")


def test_the_log_stays_short(data: Path) -> None:
    data.mkdir()
    script = "from hutch.serve import daemon, place\nplace.LOG_BYTES = 1000\n"
    script += "for number in range(100): daemon.log(f'{number} ' + 'x' * 50)\ndaemon.log('y' * 100_000)"
    log = place.open_log()
    subprocess.run([sys.executable, "-c", script], check=True, stderr=log)
    os.close(log)
    sizes = {path.name: path.stat().st_size for path in data.iterdir()}
    assert set(sizes) == {"daemon.log", "daemon.log.1"}
    assert max(sizes.values()) < 1000 + 8192 + 100
    assert stat.S_IMODE((data / "daemon.log").stat().st_mode) == 0o600


def test_the_identity_of_the_code_is_cheap_and_changes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "hutch"
    shutil.copytree(Path(hutch.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(place, "__file__", str(package / "serve" / "place.py"))
    before = place.code_identity()
    started = time.process_time()
    assert place.code_identity() == before
    assert time.process_time() - started < 0.1
    (package / "serve" / "__pycache__").mkdir()
    (package / "serve" / "__pycache__" / "x.pyc").touch()
    assert place.code_identity() == before
    file = package / "guest" / "bash.sh"
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))
    touched = place.code_identity()
    assert touched != before
    (package / "new.py").touch()
    assert place.code_identity() not in (before, touched)


def test_the_daemon_finds_modules_as_we_do_but_not_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = str(Path(hutch.__file__).parent.parent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", str(tmp_path), "relative", "/usr/lib/a:b", package])
    assert client._module_paths() == ["/usr/lib/a:b", package]
    monkeypatch.setattr("sys.path", ["/usr/lib"])
    assert client._module_paths() == [package, "/usr/lib"]
    monkeypatch.chdir(package)
    monkeypatch.setattr("sys.path", [package])
    assert client._module_paths() == [package]


def test_the_daemon_gets_few_variables(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data.parent)
    wanted = {"PATH": "/bin", "HOME": "/h", "HUTCH_BWRAP": "/b", "XDG_CACHE_HOME": "/c", "HUTCH_CACHE_DIR": "here"}
    for name in os.environ:
        monkeypatch.delenv(name)
    for name, text in {**wanted, "API_KEY": "secret", "LD_PRELOAD": "x", "PYTHONPATH": "y"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("HUTCH_DATA_DIR", "data")
    kept = client._clean_variables()
    assert kept == {**wanted, "HUTCH_CACHE_DIR": f"{data.parent}/here", "HUTCH_DATA_DIR": str(data)}


# ---- messages -------------------------------------------------------------------------------------------------------


def test_messages_come_through_in_pieces_and_together() -> None:
    ours, theirs = socket.socketpair()
    connection = client.Connection(ours, 0)  # type: ignore[arg-type]
    with ours, theirs:
        first, second = {"code": "é\ud8ff\n" * 9}, {"event": "x"}
        line = client.encode(first) + client.encode(second)
        assert line.count(b"\n") == 2
        theirs.sendall(line[:7])
        with pytest.raises(TimeoutError):
            connection.receive(0.01)
        theirs.sendall(line[7:])
        assert connection.receive() == first
        assert connection.receive() == second
        theirs.shutdown(socket.SHUT_WR)
        assert connection.receive() is None


def test_output_is_handed_over_byte_by_byte() -> None:
    ours, theirs = socket.socketpair()
    got: list[tuple[int, bytes]] = []
    with ours, theirs:
        for index, data in ((0, bytes(range(256))), (1, "é".encode()[:1]), (1, "é".encode()[1:])):
            text = data.decode("utf-8", "surrogateescape")
            theirs.sendall(client.encode({"event": client.STREAMS[index], "data": text}))
        theirs.sendall(client.encode({"event": "result", "result": 7}))
        assert client.Connection(ours, 0).finish(lambda *one: got.append(one)) == 7  # type: ignore[arg-type]
    assert got == [(0, bytes(range(256))), (1, b"\xc3"), (1, b"\xa9")]


@pytest.mark.parametrize("kind", [SpecError, SessionError, SandboxError])
def test_an_error_comes_back_as_it_was(kind: type[HutchError]) -> None:
    error = kind("it broke", code="x.y", details="a\nb", hint="mend it")
    back = client.read_error(client.write_error(error))
    assert (type(back), back.to_json()) == (kind, error.to_json())


@pytest.mark.parametrize("name", ["SystemExit", "os", "HutchErr", None])
def test_no_other_class_is_made_of_an_error(name: str | None) -> None:
    assert type(client.read_error({"class": name, "message": "m", "code": "c", "hint": "h"})) is SandboxError
    assert type(client.read_error([])) is HostError


# ---- what is asked of a session -------------------------------------------------------------------------------------

HAS = {"environment": "python", "mounts": ["/a:/a", "/b:/b:rw"], "env": {"A": "1", "B": "2"}, "pids": 9}
ASKS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"environment": "python"}, ["environment"]),
    ({"pids": 9, "memory_mb": 512, "network": "off"}, []),
    ({"pids": 10}, ["pids"]),
    ({"mounts": [{"host": "/b", "guest": "/b", "writable": True}]}, []),
    ({"mounts": ["/b:/b"]}, ["mounts"]),
    ({"env": {"B": "2"}}, []),
    ({"env": {"B": "3"}}, ["env"]),
    ({"env": {"C": "2"}}, ["env"]),
    ({"workspace": "/w"}, ["workspace"]),
    ({"timeout_seconds": 1, "max_output_mb": 9, "keep_kb": 7}, []),
]


@pytest.mark.parametrize(("given", "news"), ASKS)
def test_only_what_a_session_does_not_have_is_news(given: dict[str, Any], news: list[str]) -> None:
    record = Record(
        id="0" * 8, environment="python", request=HAS, created_at="2026-01-02T10:11:12Z", workspace=HostPath("/w")
    )
    assert list(operations._news(record, given)) == news


def test_a_run_chooses_its_own_time_and_output() -> None:
    message = {"given": {"timeout_seconds": None, "max_output_mb": 2, "memory_mb": 999}}
    limits = operations._limits({"memory_mb": 64, "timeout_seconds": 5}, message)
    assert (limits.timeout_seconds, limits.output_bytes, limits.memory_bytes) == (None, 2 << 20, 64 << 20)

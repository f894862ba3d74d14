"""The plan of a jail is pure: from hand-made values comes exactly what would be executed, in an order that matters."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import Any

import pytest

from hutch import spec
from hutch.cli.run import render
from hutch.errors import HostError, StartError
from hutch.isolation import jail, seccomp
from hutch.isolation.bwrap import Bwrap
from hutch.isolation.limits import CgroupBase
from hutch.isolation.mounts import PROTECTED, CheckedMount
from hutch.model import Bind, File, HostPath, Plan, Rootfs, Source

WARDEN = HostPath("/opt/hutch/warden")
CGROUPS = CgroupBase(version=2, directories=tuple((name, HostPath("/cg")) for name in ("memory", "pids", "cpu")))
USER = jail.Host(
    bwrap=Bwrap(path=HostPath("/usr/bin/bwrap"), version=(0, 11, 0), root=HostPath("/usr/bin/bwrap")),
    warden=WARDEN,
    machine="x86_64",
    uid=1000,
    gid=1000,
    cgroups=CGROUPS,
    cpus=(4, 5, 6, 7),
    token="1-2-abc",
    stage=HostPath("/mnt"),
)
ROOT = USER.replace(uid=0, gid=0, hidden=(HostPath("/opt/python"),))
ROOTFS = Rootfs(
    source=Source.HOST,
    binds=(
        Bind(host_path=HostPath("/usr"), guest_path="/usr"),
        Bind(host_path=HostPath("/opt/python"), guest_path="/opt/python"),
    ),
    symlinks=(("usr/bin", "/bin"),),
    files=(
        File(guest_path="/etc/passwd", text="root\n"),
        File(guest_path="/etc/localtime", host_path=HostPath("/etc/localtime")),
    ),
    variables=(("PATH", "/usr/bin"),),
    interpreter=("/usr/bin/python3",),
    code_path="/run/hutch/main.py",
)
READ_ONLY = CheckedMount(
    host_path="/data", guest_path="/data", writable=False, directory=True, device="8:1", inode=5, uid=1000, gid=1000
)
WRITABLE_FILE = READ_ONLY.replace(host_path="/notes", guest_path="/notes", writable=True, directory=False, inode=6)
GUARDED = READ_ONLY.replace(
    host_path="/home/me/code",
    guest_path="/workspace",
    writable=True,
    inode=7,
    guarded=True,
    present=(".git", "sub/.git"),
    absent=tuple(name for name in PROTECTED if name != ".git"),
    work_directory="/home/me/.hutch-work-t",
)
SECRET = "s3cr3t value"


def plan(host: jail.Host = USER, checked: tuple[CheckedMount, ...] = (), code: str = "print(1)", **asked: Any) -> Plan:
    return jail.plan(spec.parse(asked), ROOTFS, checked, host, code)


def names(planned: Plan) -> list[str]:
    return [operation[0] for operation in planned.operations]


CASES = {
    f"{who} {what} {network}": plan(host, checked, network=network, env={"API_KEY": SECRET, "A": "--"})
    for who, host in (("user", USER), ("root", ROOT), ("root of 65534", ROOT.replace(gid=65534)))
    for what, checked in (("plain", ()), ("shown", (READ_ONLY, WRITABLE_FILE)), ("guarded", (GUARDED, READ_ONLY)))
    for network in ("off", "full", "host")
}
each_case = pytest.mark.parametrize("planned", CASES.values(), ids=CASES.keys())


# ---- what holds for every plan --------------------------------------------------------------------------------------


@each_case
def test_nothing_is_mounted_after_the_root_became_read_only(planned: Plan) -> None:
    words = planned.bwrap
    assert words[-4:] == ("--remount-ro", "/", "--chdir", "/workspace")
    assert words.count("--remount-ro") == 2


@each_case
def test_every_size_is_that_of_a_tmpfs_and_every_tmpfs_has_one(planned: Plan) -> None:
    words = planned.bwrap
    sizes = [at for at, word in enumerate(words) if word == "--size"]
    assert sizes
    assert [at + 2 for at in sizes] == [at for at, word in enumerate(words) if word == "--tmpfs"]


@each_case
def test_every_wall_stands(planned: Plan) -> None:
    words = planned.bwrap
    for wall in (
        ("--unshare-all",),
        ("--unshare-user",),
        ("--disable-userns",),
        ("--new-session",),
        ("--die-with-parent",),
        ("--as-pid-1",),
        ("--clearenv",),
        ("--cap-drop", "ALL"),
        ("--uid", "1000"),
        ("--gid", "1000"),
        ("--proc", "/proc"),
        ("--dev", "/dev"),
    ):
        at = words.index(wall[0])
        assert words[at : at + len(wall)] == wall
    assert words.count("--seccomp") == 1


@each_case
def test_nothing_that_weakens_is_among_the_options(planned: Plan) -> None:
    options = {word for word in planned.bwrap if word.startswith("--")}
    weak = {
        "--cap-add",
        "--dev-bind",
        "--dev-bind-try",
        "--not-a-security-boundary",
        "--args",
        "--bind-try",
        "--exec-label",
    }
    assert options & weak == set()
    assert not any("-try" in option and "bind" in option for option in options)


@each_case
def test_the_environment_is_cleared_before_anything_is_set(planned: Plan) -> None:
    words = planned.bwrap
    assert words.index("--clearenv") < words.index("--setenv")
    assert "--unsetenv" not in words


@each_case
def test_every_descriptor_is_made_once_and_before_it_is_used(planned: Plan) -> None:
    made = [operation[1] for operation in planned.operations if operation[0] in ("text", "file", "pin")]
    assert len(made) == len(set(made))
    used = [planned.bwrap[at + 1] for at, word in enumerate(planned.bwrap) if word in ("--file", "--seccomp")]
    used += [planned.bwrap[at + 1] for at, word in enumerate(planned.bwrap) if word.endswith("bind-fd")]
    kept = [operation[1] for operation in planned.operations if operation[0] == "keep"]
    assert sorted(used) == sorted(kept)
    assert set(used) <= set(made)
    assert all(2 < int(fd) < jail.STATUS_FD for fd in made)


@each_case
def test_limits_hold_before_anything_else_is_done(planned: Plan) -> None:
    assert names(planned)[:3] == ["deadline", "oom", "cgroup"]


@each_case
def test_a_secret_is_seen_only_as_the_value_of_a_variable(planned: Plan) -> None:
    at = planned.bwrap.index(SECRET)
    assert planned.bwrap[at - 2 : at] == ("--setenv", "API_KEY")
    assert planned.bwrap.count(SECRET) == 1
    assert SECRET not in repr(planned.command) + repr(planned.operations) + repr(planned.cgroups)


@each_case
def test_the_printed_script_reads_back_as_the_very_command(planned: Plan) -> None:
    script = render(planned, WARDEN)
    command = script[script.index("\nenv -i ") :]
    # Nothing but slirp4netns opens the gate, and a script has none.
    wanted = planned.replace(operations=tuple(operation for operation in planned.operations if operation != ("hold",)))
    assert shlex.split(command.replace(" \\\n", " ")) == ["env", "-i", *jail.to_argv(wanted, WARDEN)]
    for directory, files in planned.cgroups:
        assert f"mkdir {directory}" in script
        assert all(f"> {directory}/{name}" in script for name, _ in files)
    for path, _, _ in planned.work_directories:
        assert f"mkdir -m 711 {path} && mkdir -m 700 {path}/{jail.WORK} " in script


def test_a_shell_reads_the_printed_script_as_the_very_command() -> None:
    planned = CASES["root guarded off"]
    script = render(planned, WARDEN)
    command = script[script.index("\nenv -i ") :].replace("env -i", r"printf '%s\0'", 1)
    said = subprocess.run(["/bin/sh", "-c", command], check=True, capture_output=True, text=True)
    assert said.stdout.split("\0")[:-1] == jail.to_argv(planned, WARDEN)


@each_case
def test_the_words_for_the_warden_say_the_same_as_the_plan(planned: Plan) -> None:
    words = jail.to_words(planned, status=3, lifeline=4, gate=5).decode().split("\0")
    flat = [word for operation in planned.operations for word in operation]
    assert words[:6] == ["status", "3", "lifeline", "4", "gate", "5"]
    # The number of options tells where they end: a value of an option may look like anything.
    options = ["bwrap", str(len(planned.bwrap) - 1), *planned.bwrap]
    assert words[6:] == [*flat, *options, *planned.command, ""]


def test_the_same_input_gives_the_same_plan() -> None:
    assert plan(ROOT, (GUARDED,), network="full") == plan(ROOT, (GUARDED,), network="full")
    assert hash(plan(USER)) == hash(plan(USER))


def test_a_plan_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_arguments: object, **_options: object) -> None:
        raise AssertionError("the plan touched the machine")

    for name in ("stat", "lstat", "open", "listdir", "access", "geteuid", "readlink", "scandir"):
        monkeypatch.setattr(os, name, touched)
    monkeypatch.setattr("builtins.open", touched)
    plan(ROOT, (GUARDED, READ_ONLY), network="full")


# ---- who starts it --------------------------------------------------------------------------------------------------


def test_a_user_needs_no_namespace_of_the_warden_without_guarded_mounts() -> None:
    assert set(names(plan(USER, (READ_ONLY, WRITABLE_FILE)))) & {"unshare", "stage", "drop", "clone"} == set()


def test_a_user_with_a_guarded_mount_gets_a_user_namespace_first() -> None:
    planned = plan(USER, (GUARDED,))
    assert ("unshare", "user,mount") in planned.operations
    assert names(planned).index("unshare") < names(planned).index("stage") < names(planned).index("overlay")
    assert not {"drop", "idmap"} & set(names(planned))


@pytest.mark.parametrize("network", ["off", "full", "host"])
@pytest.mark.parametrize("checked", [(), (READ_ONLY,), (GUARDED, READ_ONLY)], ids=len)
def test_root_gives_up_its_uid_after_all_mounts_and_before_the_gate(
    checked: tuple[CheckedMount, ...], network: str
) -> None:
    done = names(plan(ROOT, checked, network=network))
    drop = done.index("drop")
    assert {"stage", "clone"} & set(done[:drop])
    assert set(done[drop + 1 :]) <= {"unshare", "hold", "unreachable"}
    assert done.count("drop") == 1
    assert ("hold" in done) is (network == "full")


def test_root_becomes_nobody() -> None:
    assert ("drop", "65534", "65534") in plan(ROOT).operations


def test_files_are_opened_before_any_namespace_is_entered() -> None:
    done = names(plan(ROOT, (GUARDED,)))
    opened = [at for at, name in enumerate(done) if name in ("file", "text")]
    assert max(opened) < done.index("unshare")


def test_root_shows_what_only_root_can_reach_through_the_stage() -> None:
    planned = plan(ROOT)
    assert "/opt/python" not in planned.bwrap[: planned.bwrap.index("/opt/python") - 1]
    at = planned.bwrap.index("/opt/python")
    assert planned.bwrap[at - 2 : at] == ("--ro-bind", "/mnt/root1")
    assert plan(USER).bwrap.count("/opt/python") == 2


def test_root_stages_nothing_where_all_is_open() -> None:
    done = names(plan(ROOT.replace(hidden=())))
    assert {"stage", "clone"} & set(done) == set()
    assert "drop" in done


def test_root_runs_a_bubblewrap_of_its_own_home_from_the_stage() -> None:
    inside = Bwrap(path=HostPath("/root/v/b/_bin/bwrap"), version=(0, 12, 0), root=HostPath("/root/v"))
    planned = plan(ROOT.replace(bwrap=inside, hidden=(inside.root,)))
    assert planned.bwrap[0] == "/mnt/bwrap/b/_bin/bwrap"
    assert any(operation[0] == "pin" and operation[2] == "/root/v" for operation in planned.operations)
    assert plan(USER.replace(bwrap=inside)).bwrap[0] == inside.path


# ---- network --------------------------------------------------------------------------------------------------------


def text_of(planned: Plan, guest_path: str) -> str:
    fd = planned.bwrap[planned.bwrap.index(guest_path) - 1]
    return next(operation[2] for operation in planned.operations if operation[:2] == ("text", fd))


def test_without_network_no_namespace_is_shared() -> None:
    assert "--share-net" not in plan(network="off").bwrap
    assert text_of(plan(network="off"), "/etc/resolv.conf") == ""


@pytest.mark.parametrize(
    ("host", "namespaces"), [(USER, ["user,net"]), (ROOT, ["mount", "user,net"])], ids=["user", "root"]
)
def test_a_full_network_is_a_namespace_of_its_own_that_waits(host: jail.Host, namespaces: list[str]) -> None:
    planned = plan(host, network="full")
    assert [operation[1] for operation in planned.operations if operation[0] == "unshare"] == namespaces
    after = [operation[0] for operation in planned.operations[planned.operations.index(("hold",)) + 1 :]]
    assert set(after) == {"unreachable"}
    assert text_of(planned, "/etc/resolv.conf") == "nameserver 10.0.2.3\n"


def test_a_full_network_reaches_neither_this_machine_nor_the_credentials_of_a_cloud() -> None:
    planned = plan(USER.replace(addresses=("192.0.2.7",)), network="full")
    unreachable = [operation[1:] for operation in planned.operations if operation[0] == "unreachable"]
    assert unreachable == [("169.254.0.0", "16"), ("127.0.0.0", "8"), ("192.0.2.7", "32")]


def test_the_warden_keeps_the_time_a_little_longer_than_hutch() -> None:
    assert ("deadline", "3500") in plan(timeout_seconds=2.5).operations
    assert "deadline" not in names(plan(timeout_seconds=None))


def test_the_network_of_the_host_is_printed_as_weaker() -> None:
    planned = plan(USER.replace(resolver="nameserver 192.0.2.1\n"), network="host")
    assert planned.unsafe == ("network_host",)
    assert "hold" not in names(planned)
    assert text_of(planned, "/etc/resolv.conf") == "nameserver 192.0.2.1\n"


def test_certificates_come_with_the_network() -> None:
    planned = plan(USER.replace(bundle=HostPath("/etc/ssl/all.crt")), network="full")
    at = planned.bwrap.index("SSL_CERT_FILE")
    assert planned.bwrap[at + 1] == "/run/hutch/ca-bundle.crt"
    assert any(operation[0] == "file" and operation[2] == "/etc/ssl/all.crt" for operation in planned.operations)


# ---- mounts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [USER, ROOT], ids=["user", "root"])
def test_every_protected_path_is_masked_after_the_overlay(host: jail.Host) -> None:
    planned = plan(host, (GUARDED,))
    done = names(planned)
    masks = [operation for operation in planned.operations if operation[0] == "mask"]
    assert [mask[2] for mask in masks] == [*GUARDED.present, *GUARDED.absent]
    assert {mask[1] for mask in masks} == {"/mnt/mount0"}
    assert {mask[3] for mask in masks} == {"ro"}
    assert done.index("overlay") < done.index("mask")
    assert set(done[done.index("mask") : done.index("mask") + len(masks)]) == {"mask"}
    at = planned.bwrap.index("/workspace")
    assert planned.bwrap[at - 2 : at] == ("--bind", "/mnt/mount0")
    assert planned.protected == "prevented"


def test_stubs_stand_for_what_is_absent_and_for_the_parents_of_the_rest() -> None:
    made = {operation[1]: operation[2] for operation in plan(USER, (GUARDED,)).operations if operation[0] == "mkdir"}
    stubs = {path.removeprefix("/mnt/stubs0/"): mode for path, mode in made.items() if path.startswith("/mnt/stubs0/")}
    # A parent that is merged with a stub cannot be renamed away with what is protected in it.
    assert stubs == {**dict.fromkeys(GUARDED.absent, "0555"), ".github": "0755", "sub": "0755"}


def test_a_guarded_mount_leaves_nothing_behind() -> None:
    planned = plan(USER, (GUARDED,))
    assert planned.work_directories == (("/home/me/.hutch-work-t", 1000, 1000),)
    assert ("remove", "/home/me/.hutch-work-t") in planned.operations
    assert [operation for operation in planned.operations if operation[0] == "scrub"] == [
        ("scrub", "/home/me/code", "8:1", "7"),
    ]


def test_without_guarded_mounts_nothing_is_claimed_to_be_protected() -> None:
    assert plan(USER, (READ_ONLY, WRITABLE_FILE)).protected is None


def test_mounts_are_opened_as_what_they_were_when_looked_at() -> None:
    planned = plan(USER, (READ_ONLY, WRITABLE_FILE))
    pins = [operation for operation in planned.operations if operation[0] == "pin"]
    assert [pin[2:] for pin in pins] == [("/data", "8:1", "5"), ("/notes", "8:1", "6")]
    for pin, option, guest in zip(pins, ("--ro-bind-fd", "--bind-fd"), ("/data", "/notes"), strict=True):
        at = planned.bwrap.index(guest)
        assert planned.bwrap[at - 2 : at] == (option, pin[1])


def test_root_shows_a_mount_under_the_uid_of_the_sandbox() -> None:
    planned = plan(ROOT, (WRITABLE_FILE, READ_ONLY))
    done = names(planned)
    assert ("idmap", "1000", "1000", "65534", "65534") in planned.operations
    clones = [operation for operation in planned.operations if operation[0] == "clone"]
    flags = {operation[2]: operation[3] for operation in clones}
    assert (flags["/mnt/mount0"], flags["/mnt/mount1"]) == ("idmap", "ro,try-idmap")
    assert done.index("idmap") < done.index("drop")


def test_what_belongs_to_nobody_is_not_mapped() -> None:
    planned = plan(ROOT, (WRITABLE_FILE.replace(uid=65534, gid=65534),))
    assert "idmap" not in names(planned)


def test_writable_mounts_are_watched() -> None:
    assert plan(USER, (READ_ONLY, WRITABLE_FILE)).watched[0][0] == "/notes"


def test_a_mounted_workspace_has_no_tmpfs_below_it() -> None:
    words = plan(USER, (GUARDED,)).bwrap
    tmpfs = [words[at + 1] for at, word in enumerate(words) if word == "--tmpfs"]
    assert tmpfs == ["/dev/shm", "/tmp", "/home/sandbox"]


@pytest.mark.parametrize(("checked", "writable"), [((), False), ((READ_ONLY,), False), ((WRITABLE_FILE,), True)])
def test_the_filter_is_the_stricter_one_where_the_host_can_be_written(
    checked: tuple[CheckedMount, ...], writable: bool
) -> None:
    planned = plan(USER, checked)
    fd = planned.bwrap[planned.bwrap.index("--seccomp") + 1]
    assert ("file", fd, seccomp.path("x86_64", host_writable=writable)) in planned.operations


def test_too_many_mounts_are_refused() -> None:
    many = tuple(READ_ONLY.replace(guest_path=f"/d{index}") for index in range(jail.STATUS_FD))
    with pytest.raises(StartError) as caught:
        plan(USER, many)
    assert caught.value.code == "start.descriptors"


# ---- the rest -------------------------------------------------------------------------------------------------------


def test_strict_limits_without_a_cgroup_are_refused() -> None:
    with pytest.raises(HostError) as caught:
        plan(USER.replace(cgroups=None), strict_limits=True)
    assert caught.value.code == "host.limits"


def test_strict_limits_refuse_a_writable_mount() -> None:
    with pytest.raises(HostError, match="disk"):
        plan(USER, (GUARDED,), strict_limits=True)
    assert plan(USER, (READ_ONLY,), strict_limits=True) == plan(USER, (READ_ONLY,))


def test_without_a_cgroup_no_cgroup_is_joined() -> None:
    planned = plan(USER.replace(cgroups=None))
    assert "cgroup" not in names(planned)
    assert next(words[1] for words in planned.operations if words[0] == "affinity") in map(str, USER.cpus)
    assert dict(planned.enforced)["memory"] == "sampled"


def test_the_command_is_our_init_with_the_limits_and_the_program() -> None:
    command = plan().command
    assert command[:3] == ("/run/hutch/init", "init", str(jail.STATUS_FD))
    assert "7=1024" in command[3].split(",")
    assert command[4].split(":")[:3] == ["/dev", "/proc", "/tmp"]
    assert command[5:] == ("/usr/bin/python3", "/run/hutch/main.py")


def test_the_code_is_a_file_that_the_program_can_only_read() -> None:
    planned = plan(code="print('é\n')")
    assert text_of(planned, "/run/hutch/main.py") == "print('é\n')"
    at = planned.bwrap.index("/run/hutch/main.py")
    assert planned.bwrap[at - 4 : at - 1] == ("--perms", "0444", "--file")


def test_empty_code_is_a_program_too() -> None:
    assert text_of(plan(code=""), "/run/hutch/main.py") == ""


def test_variables_of_the_request_stand_over_all_others() -> None:
    words = plan(env={"PATH": "/mine", "HOME": "/elsewhere"}).bwrap
    values = {words[at + 1]: words[at + 2] for at, word in enumerate(words) if word == "--setenv"}
    assert (values["PATH"], values["HOME"], values["USER"]) == ("/mine", "/elsewhere", "sandbox")


def test_switches_that_weaken_are_in_the_plan() -> None:
    planned = plan(unsafe_writable_home=True, unsafe_unprotected_mounts=True)
    assert planned.unsafe == ("unsafe_writable_home", "unsafe_unprotected_mounts")

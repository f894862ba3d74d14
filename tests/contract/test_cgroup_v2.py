"""Limits under version 2 of cgroups, whatever the machine of the suite has: asked of a kernel in a virtual machine.

The guest runs once and reports; each test reads its part. What runs there, and as whom, is in fixtures/vm/guest.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fixtures.vm import kernel, machine

from .harness import COMPONENTS, Hutch, need

DEADLINE_SECONDS = 240
WHO = ("root", "user")
pytestmark = pytest.mark.timeout(DEADLINE_SECONDS + 30)

COMPONENTS["vm"] = (
    lambda: machine.is_there() and kernel.find() is not None,
    "make setup (apt install qemu-system-x86 busybox-static, and a kernel to boot)",
)


class Guest(NamedTuple):
    """What the virtual machine said."""

    reports: dict[str, Any]
    console: str

    def __getitem__(self, name: str) -> Any:
        assert name in self.reports, f"the guest did not get to {name!r}; its console: {self.console[-4000:]}"
        value = self.reports[name]
        assert "crash" not in value, value["crash"]
        return value


@pytest.fixture(scope="module")
def guest(identities: dict[str, Hutch], tmp_path_factory: pytest.TempPathFactory) -> Guest:
    """One boot for all tests."""
    need("vm")
    image = kernel.find()
    assert image is not None
    arena = identities["user"].arena
    shutil.copyfile(Path(kernel.__file__).with_name("guest.py"), arena.root / "guest.py")
    return Guest(*machine.boot(image, arena.root, tmp_path_factory.mktemp("vm"), DEADLINE_SECONDS))


def strengths(result: dict[str, Any]) -> list[str]:
    """How the limits that a cgroup can hold were held."""
    return [result["enforced"][name] for name in ("memory", "pids", "cpus")]


TREE = ["tree", "tree", "tree"]


# ---- each limit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", WHO)
def test_memory_bomb_is_named(guest: Guest, who: str) -> None:
    ran = guest[f"{who} limits"]["memory"]
    assert (ran["exit_code"], ran["json"]["outcome"], ran["json"]["limits_hit"]) == (137, "memory", ["memory"])
    assert strengths(ran["json"]) == TREE
    assert "32 MiB" in ran["stderr"]


@pytest.mark.parametrize("who", WHO)
def test_a_grandchild_out_of_memory_ends_the_whole_sandbox(guest: Guest, who: str) -> None:
    """The kernel is asked to kill a group as one: a program never goes on beside a part that was killed."""
    ran = guest[f"{who} limits"]["grandchild"]["json"]
    assert (ran["outcome"], ran["limits_hit"], ran["stdout"]) == ("memory", ["memory"], "")


@pytest.mark.parametrize("who", WHO)
def test_a_refused_process_is_evidence(guest: Guest, who: str) -> None:
    ran = guest[f"{who} limits"]["pids"]["json"]
    assert ran["stdout"] == "11 11\n", "eleven beside the program itself, then EAGAIN"
    assert (ran["outcome"], ran["limits_hit"], ran["exit_code"]) == ("pids", ["pids"], 1)


@pytest.mark.parametrize("who", WHO)
def test_two_burners_share_one_cpu(guest: Guest, who: str) -> None:
    spent = float(guest[f"{who} limits"]["cpus"]["json"]["stdout"])
    assert 0.2 < spent < 1.5, "of one second on each of two processors"


@pytest.mark.parametrize("who", WHO)
def test_the_limits_stand_in_the_group_of_the_sandbox(guest: Guest, who: str) -> None:
    during = guest[f"{who} killed"]
    (files,) = during["during"].values()
    assert files == {
        "memory.max": str(100 << 20),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "22",
        "cpu.max": "100000 100000",
    }
    assert list(during["processes"].values()) == [3], "bubblewrap, pid 1, and the program; hutch itself is not counted"


# ---- what is left ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", WHO)
def test_no_group_is_left_when_hutch_is_killed(guest: Guest, who: str) -> None:
    ran = guest[f"{who} killed"]
    assert ran["first"] == "ready\n", ran["stderr"]
    assert ran["gone"], ran["left"]


@pytest.mark.parametrize("check", ["many", "limits", "killed", "shell", "api"])
def test_a_delegated_group_keeps_one_leaf_and_no_more(guest: Guest, check: str) -> None:
    assert guest[f"user {check}"]["left"] == [f"users/{check}/hutch-supervisors"]


@pytest.mark.parametrize("name", ["root many", "root limits", "root killed", "user plain", "user unit.scope"])
def test_elsewhere_nothing_is_left(guest: Guest, name: str) -> None:
    assert guest[name]["left"] == []


# ---- whose group ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", WHO)
def test_many_begin_at_once_in_a_fresh_group(guest: Guest, who: str) -> None:
    runs = [run["json"] for run in guest[f"{who} many"]["runs"]]
    assert [run["stdout"] for run in runs] == ["0\n", "1\n", "2\n"]
    assert [strengths(run) for run in runs] == [TREE] * 3


def test_looking_changes_nothing(guest: Guest) -> None:
    """`hutch plan` says what a run would do, `hutch gc` clears away; neither prepares a group for sandboxes."""
    ran = guest["user shell"]
    assert ran["stdout"].partition("looked")[0] == "0::/users/shell\n", "the shell where it was, no leaf, no controller"
    assert strengths(ran["plan"]) == TREE


def test_a_shell_with_jobs_can_start_sandboxes(guest: Guest) -> None:
    """Only a group without processes can pass controllers on, so the shell and its jobs are moved, and live on."""
    ran = guest["user shell"]
    assert [ran[name]["stdout"] for name in ("first", "second")] == ["1\n", "2\n"], ran["stderr"]
    assert ran["stdout"].partition("looked\n")[2] == "0::/users/shell/hutch-supervisors\nalive\n"


def test_a_program_that_starts_many_stays_in_one_leaf(guest: Guest) -> None:
    leaf = "0::/users/api/hutch-supervisors"
    assert guest["user api"]["stdout"] == f"ok 0 {leaf}\nok 1 {leaf}\n", guest["user api"]["stderr"]


def test_processes_of_a_unit_are_moved_only_where_it_is_marked_as_delegated(guest: Guest) -> None:
    assert guest["user unit.scope"]["stdout"] == "False\nTrue\n", guest["user unit.scope"]["stderr"]


def test_without_a_delegated_group_limits_are_weaker_and_said_to_be(guest: Guest) -> None:
    ran = guest["user plain"]["memory"]
    assert (ran["exit_code"], ran["json"]["outcome"]) == (137, "memory")
    assert strengths(ran["json"]) == ["sampled", "process", "process"]


def test_without_a_delegated_group_strict_limits_are_refused(guest: Guest) -> None:
    ran = guest["user plain"]["strict"]
    assert (ran["exit_code"], ran["json"]["error"]["code"]) == (125, "host.limits")
    assert "Delegate=yes" in ran["json"]["error"]["hint"]


def test_root_of_a_container_has_limits(guest: Guest) -> None:
    """Its top is one group among others, with processes in it."""
    ran = guest["root container"]
    assert (ran["own"]["stdout"], strengths(ran["own"])) == ("1\n", TREE), ran["stderr"]
    assert ran["stdout"] == "0::/\n0::/hutch-supervisors\n", "a job, before and after"


def test_a_mount_from_outside_a_container_is_not_used(guest: Guest) -> None:
    """Root can make groups there, but its processes can never enter them."""
    ran = guest["root container"]["foreign"]
    assert (ran["stdout"], strengths(ran)) == ("0\n", ["sampled", "process", "process"])


# ---- what else depends on the kernel --------------------------------------------------------------------------------


def test_protected_paths_hold_on_this_kernel(guest: Guest) -> None:
    ran = guest["user workspace"]
    assert ran["json"].get("outcome") == "ok", ran["stderr"]
    assert ran["files"] == ["made"]
    assert "Seccomp:\t2" in ran["json"]["stdout"]


def test_a_project_on_tmpfs_is_shown_to_roots_sandbox_or_refused_with_a_reason(guest: Guest) -> None:
    """Before Linux 6.3 tmpfs cannot be mounted under another owner."""
    ran = guest["root workspace"]
    if tuple(map(int, guest["kernel"].split(".")[:2])) < (6, 3):
        assert (ran["exit_code"], ran["json"]["error"]["code"], ran["files"]) == (125, "host.idmap", [])
    else:
        assert (ran["json"]["outcome"], ran["files"]) == ("ok", ["made"])


def test_a_network_of_its_own_comes_up(guest: Guest) -> None:
    need("slirp4netns")
    ran = guest["root network"]["json"]
    assert ran["outcome"] == "ok"
    assert "tap0:" in ran["stdout"]

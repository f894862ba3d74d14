"""Limits: what is written where, what is claimed of it, and what counts as evidence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hutch.errors import HostError
from hutch.isolation import limits
from hutch.isolation.limits import CgroupBase
from hutch.model import HostPath, Limits

MIB = 1024 * 1024
BOUNDS = Limits(memory_bytes=64 * MIB, pids=20, cpus=1.5, timeout_seconds=10.0, file_bytes=MIB, open_files=99)

V2 = CgroupBase(version=2, directories=tuple((name, HostPath("/g")) for name in ("memory", "pids", "cpu")))
V1 = CgroupBase(
    version=1, directories=(("memory", HostPath("/m")), ("pids", HostPath("/p")), ("cpu", HostPath("/c,cpuacct")))
)


def plan(
    base: CgroupBase | None,
    bounds: Limits = BOUNDS,
    *,
    cpus: tuple[int, ...] = (2, 3, 5, 7),
    strict: bool = False,
    host_writable: bool = False,
) -> limits.LimitPlan:
    return limits.plan_limits(bounds, base, "1-2-abc", cpus, strict=strict, host_writable=host_writable)


def rlimits(planned: limits.LimitPlan) -> dict[int, int]:
    pairs = (pair.split("=") for pair in planned.rlimits.split(","))
    return {int(resource): int(value) for resource, value in pairs}


# ---- planning -------------------------------------------------------------------------------------------------------


def test_version_2_has_one_directory_with_all_limits() -> None:
    assert plan(V2).cgroups == (
        (
            "/g/hutch-1-2-abc",
            (
                ("memory.max", str(64 * MIB)),
                ("memory.swap.max", "0"),
                ("memory.oom.group", "1"),
                ("pids.max", "22"),
                ("cpu.max", "150000 100000"),
            ),
        ),
    )


def test_version_2_without_the_cpu_controller_binds_to_cpus() -> None:
    base = CgroupBase(version=2, directories=V2.directories[:2])
    planned = plan(base)
    assert "cpu.max" not in dict(planned.cgroups[0][1])
    assert planned.affinity == "2,7"
    assert dict(planned.enforced)["cpus"] == "process"


def test_version_1_has_one_directory_for_each_controller() -> None:
    assert plan(V1).cgroups == (
        (
            "/m/hutch-1-2-abc",
            (
                ("memory.limit_in_bytes", str(64 * MIB)),
                ("memory.memsw.limit_in_bytes", str(64 * MIB)),
                ("memory.swappiness", "0"),
                ("memory.kmem.tcp.limit_in_bytes", str(64 * MIB)),
            ),
        ),
        ("/p/hutch-1-2-abc", (("pids.max", "22"),)),
        ("/c,cpuacct/hutch-1-2-abc", (("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "150000"))),
    )


def test_the_plain_limit_of_version_1_comes_before_the_one_with_swap() -> None:
    # The kernel refuses a memory limit above the one for memory and swap together.
    names = [name for name, _ in plan(V1).cgroups[0][1]]
    assert names.index("memory.limit_in_bytes") < names.index("memory.memsw.limit_in_bytes")


def test_a_tiny_share_of_a_cpu_is_one_the_kernel_accepts() -> None:
    assert dict(plan(V2, BOUNDS.replace(cpus=0.001)).cgroups[0][1])["cpu.max"] == "1000 100000"


@pytest.mark.parametrize("host_writable", [False, True])
@pytest.mark.parametrize(
    ("base", "memory", "pids", "cpus"),
    [
        (V2, "tree", "tree", "tree"),
        (V1, "tree", "tree", "tree"),
        (CgroupBase(version=1, directories=V1.directories[1:2]), "sampled", "tree", "process"),
        (None, "sampled", "process", "process"),
    ],
    ids=["v2", "v1", "pids only", "none"],
)
def test_no_more_is_claimed_than_holds(
    base: CgroupBase | None, memory: str, pids: str, cpus: str, host_writable: bool
) -> None:
    assert dict(plan(base, host_writable=host_writable).enforced) == {
        "timeout": "tree",
        "memory": memory,
        "pids": pids,
        "cpus": cpus,
        "tmp": "tree",
        "disk": "sampled" if host_writable else "tree",
        "output": "tree",
    }


@pytest.mark.parametrize("base", [V1, V2], ids=["v1", "v2"])
def test_strict_limits_are_fine_where_all_hold(base: CgroupBase) -> None:
    assert plan(base, strict=True) == plan(base)


@pytest.mark.parametrize(
    ("base", "weak"),
    [
        (None, "memory, pids, cpus"),
        (CgroupBase(version=1, directories=V1.directories[:1]), "pids, cpus"),
        (CgroupBase(version=2, directories=V2.directories[:2]), "cpus"),
    ],
)
def test_strict_limits_name_what_would_not_hold(base: CgroupBase | None, weak: str) -> None:
    with pytest.raises(HostError, match=f"strict limits: {weak} cannot") as caught:
        plan(base, strict=True)
    assert caught.value.code == "host.limits"
    assert "systemd-run" in caught.value.hint


def test_strict_limits_refuse_a_directory_whose_growth_is_only_watched() -> None:
    with pytest.raises(HostError, match="strict limits: disk cannot"):
        plan(V2, strict=True, host_writable=True)


def test_each_process_is_bounded_too() -> None:
    values = rlimits(plan(V2))
    assert values == {0: 20, 1: MIB, 4: 1, 6: 84, 7: 99, 8: 65536, 12: 819200, 13: 0, 14: 0}


def test_without_a_cgroup_each_process_is_bounded_more_closely() -> None:
    values = rlimits(plan(None))
    assert values[6] == 22
    assert values[2] == 64 * MIB + 256 * MIB
    assert rlimits(plan(None, BOUNDS.replace(memory_bytes=1024 * MIB)))[2] == 2048 * MIB


def test_address_space_is_never_bounded() -> None:
    # RLIMIT_AS (9) stops every runtime that reserves address space.
    assert not any(9 in rlimits(plan(base)) for base in (V1, V2, None))


def test_without_a_wall_time_there_is_no_cpu_time() -> None:
    assert 0 not in rlimits(plan(V2, BOUNDS.replace(timeout_seconds=None)))


@pytest.mark.parametrize(
    ("cpus", "allowed", "count"),
    [
        (1.0, (0, 1, 2, 3), 1),
        (0.1, (4, 6), 1),
        (2.0, (4, 6, 8), 2),
        (4.0, (0, 1, 2, 3), None),
        (8.0, (0, 1), None),
        (1.0, (3,), None),
    ],
)
def test_without_the_cpu_controller_a_sandbox_is_bound_to_cpus_that_we_may_use(
    cpus: float, allowed: tuple[int, ...], count: int | None
) -> None:
    affinity = plan(None, BOUNDS.replace(cpus=cpus), cpus=allowed).affinity
    bound = None if affinity is None else {int(cpu) for cpu in affinity.split(",")}
    assert bound is None if count is None else bound is not None
    assert bound is None or (len(bound) == count and bound <= set(allowed))


def test_sandboxes_are_spread_over_the_cpus() -> None:
    bounds = BOUNDS.replace(cpus=1.0)
    planned = [limits.plan_limits(bounds, None, f"1-2-{n:08x}", (0, 1, 2, 3), strict=False) for n in range(40)]
    assert {plan.affinity for plan in planned} == {"0", "1", "2", "3"}


def test_with_the_cpu_controller_nothing_is_bound() -> None:
    assert plan(V2).affinity is None


# ---- finding --------------------------------------------------------------------------------------------------------


class FakeSystem:
    """Files of /proc that say what a test wants; everything else is the real file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.own = ""
        self.mounts = ""
        real = limits.read_text
        texts = {"/proc/self/cgroup": lambda: self.own, "/proc/self/mountinfo": lambda: self.mounts}
        monkeypatch.setattr(limits, "read_text", lambda path: texts[path]() if path in texts else real(path))

    def add_v2(self, own: str = "/") -> Path:
        self.mounts += f"30 23 0:26 / {self.root} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
        self.own += f"0::{own}\n"
        return self.group(own)

    def group(self, own: str, controllers: str = "cpuset cpu io memory pids", enabled: str = "cpu memory pids") -> Path:
        directory = self.root / own.lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "cgroup.procs").touch()
        (directory / "cgroup.controllers").write_text(controllers + "\n")
        (directory / "cgroup.subtree_control").write_text(enabled + "\n")
        return directory

    def add_v1(self, controllers: str, own: str = "/") -> Path:
        mount = self.root / controllers
        self.mounts += f"31 23 0:27 / {mount} rw,nosuid shared:5 - cgroup cgroup rw,{controllers}\n"
        self.own += f"4:{controllers}:{own}\n"
        directory = mount / own.lstrip("/")
        directory.mkdir(parents=True)
        return directory


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSystem:
    return FakeSystem(monkeypatch, tmp_path)


def become(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)


def test_no_cgroup_at_all(system: FakeSystem) -> None:
    assert limits.find_cgroup_base() is None
    assert limits.cgroup_roots() == []


def test_root_uses_the_top_of_version_2(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, 0)
    system.group("/")
    system.add_v2("/user.slice/a.scope")
    found = limits.find_cgroup_base()
    assert found == CgroupBase(
        version=2, directories=tuple((name, HostPath(str(system.root))) for name in ("memory", "pids", "cpu"))
    )
    assert limits.cgroup_roots() == [str(system.root)]


def test_a_user_uses_the_group_that_was_delegated(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, 1000)
    own = system.add_v2("/user.slice/a.scope")
    found = limits.find_cgroup_base()
    assert found is not None
    assert {directory for _, directory in found.directories} == {str(own)}


def test_a_run_that_sits_in_the_leaf_uses_the_group_above(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, 1000)
    own = system.group("/a.scope")
    system.add_v2("/a.scope/hutch-supervisors")
    assert limits.cgroup_roots() == [str(own)]


@pytest.mark.parametrize(
    ("name", "kind", "processes", "usable"),
    [
        ("a", "domain", "", True),
        ("a", "domain", "me", True),
        ("a", "domain", "me\n1", True),
        ("a.scope", "domain", "me", True),
        ("a.scope", "domain", "me\n1", False),  # not marked as left to us, so the others are not ours to move
        ("a", "domain", "me\n0", False),  # outside of our pid namespace, and so out of reach
        ("a", "domain threaded", "", False),
        ("a", "threaded", "", False),
        ("a", "", "1\n2", True),  # the top of all groups
    ],
)
def test_finding_tells_whether_controllers_could_be_enabled_and_changes_nothing(
    name: str, kind: str, processes: str, usable: bool, system: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, 1000)
    own = system.add_v2(f"/{name}")
    for file, text in (
        ("subtree_control", ""),
        ("type", f"{kind}\n"),
        ("procs", processes.replace("me", str(os.getpid()))),
    ):
        (own / f"cgroup.{file}").write_text(text)
    before = {path: path.read_text() for path in own.iterdir()}
    assert (limits.find_cgroup_base() is not None) is usable
    assert {path: path.read_text() for path in own.iterdir()} == before


def test_others_processes_are_ours_to_move_in_a_unit_that_was_left_to_us(
    system: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, 1000)
    own = system.add_v2("/a.scope")
    for file, text in (("subtree_control", ""), ("type", "domain\n"), ("procs", "1\n2\n")):
        (own / f"cgroup.{file}").write_text(text)
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"1" if (path, name) == (str(own), "user.delegate") else b"")
    assert limits.find_cgroup_base() is not None


def test_a_group_without_the_memory_controller_is_none(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, 1000)
    system.add_v2("/a")
    system.group("/a", controllers="cpu pids", enabled="cpu pids")
    assert limits.find_cgroup_base() is None


def test_a_group_that_may_not_be_written_is_none(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, 1000)
    system.add_v2("/a")
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    assert limits.find_cgroup_base() is None


def test_version_1_is_found_by_controller(system: FakeSystem) -> None:
    memory = system.add_v1("memory", "/a")
    cpu = system.add_v1("cpu,cpuacct")
    system.add_v1("freezer")
    assert limits.find_cgroup_base() == CgroupBase(
        version=1, directories=(("memory", HostPath(str(memory))), ("cpu", HostPath(str(cpu))))
    )


def test_version_1_stands_in_where_version_2_holds_no_controllers(
    system: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, 1000)
    memory = system.add_v1("memory", "/a")
    system.add_v2("/a")
    system.group("/a", controllers="", enabled="")
    found = limits.find_cgroup_base()
    assert found == CgroupBase(version=1, directories=(("memory", HostPath(str(memory))),))


# ---- doing ----------------------------------------------------------------------------------------------------------


class BusyGroup:
    """A group that passes controllers on only when no process sits in it, as the kernel has it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, *processes: str) -> None:
        self.directory = directory
        self.processes = list(processes)
        self.wrote: list[tuple[str, str]] = []
        (directory / "cgroup.subtree_control").touch()
        self._list_processes()
        monkeypatch.setattr(limits, "_write", self.write)

    def _list_processes(self) -> None:
        (self.directory / "cgroup.procs").write_text("\n".join(self.processes))

    def write(self, path: str, text: str) -> None:
        name = os.path.relpath(path, self.directory)
        self.wrote.append((name, text))
        if name == "hutch-supervisors/cgroup.procs":
            self.processes.remove(text)
            self._list_processes()
            if text == "gone":
                raise ProcessLookupError(3, "No such process")
        elif name == "cgroup.subtree_control":
            if self.processes:
                raise OSError(16, "Device or resource busy")
            (self.directory / name).write_text(text.replace("+", ""))

    def make(self) -> None:
        limits.make_cgroups([(HostPath(f"{self.directory}/a"), (("memory.max", "5"), ("pids.max", "7")))])


def test_processes_move_to_a_leaf_before_controllers_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = BusyGroup(tmp_path, monkeypatch, "11", "gone", "12")
    group.make()
    assert group.wrote == [
        ("cgroup.subtree_control", "+memory +pids"),
        ("hutch-supervisors/cgroup.procs", "11"),
        ("hutch-supervisors/cgroup.procs", "gone"),
        ("hutch-supervisors/cgroup.procs", "12"),
        ("cgroup.subtree_control", "+memory +pids"),
        ("a/memory.max", "5"),
        ("a/pids.max", "7"),
    ]


def test_controllers_that_are_passed_on_already_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = BusyGroup(tmp_path, monkeypatch, "11")
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids")
    group.make()
    assert [name for name, _ in group.wrote] == ["a/memory.max", "a/pids.max"]


def test_a_group_that_never_empties_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = BusyGroup(tmp_path, monkeypatch, "11")
    monkeypatch.setattr(limits, "_evacuate", lambda _directory: None)
    with pytest.raises(HostError, match="busy"):
        group.make()
    assert not (tmp_path / "a").exists()


def test_limits_are_written_into_new_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrote: dict[str, str] = {}
    monkeypatch.setattr(limits, "_write", lambda path, text: wrote.update({os.path.basename(path): text}))
    limits.make_cgroups([(HostPath(f"{tmp_path}/a"), (("memory.max", "5"), ("pids.max", "7")))])
    assert wrote == {"memory.max": "5", "pids.max": "7"}
    assert (tmp_path / "a").is_dir()


@pytest.mark.parametrize("name", sorted(limits._OPTIONAL))
def test_files_that_not_every_kernel_has_may_be_missing(name: str, tmp_path: Path) -> None:
    limits.make_cgroups([(HostPath(f"{tmp_path}/a"), ((name, "0"),))])


def test_a_limit_that_cannot_be_written_removes_what_was_made(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot set up a cgroup") as caught:
        limits.make_cgroups(
            [(HostPath(f"{tmp_path}/a"), ()), (HostPath(f"{tmp_path}/b"), (("memory.max", "5"),))],
        )
    assert caught.value.code == "host.cgroup"
    assert "doctor" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_removing_leaves_groups_that_are_in_use(tmp_path: Path) -> None:
    (tmp_path / "used" / "child").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    limits.remove_cgroups([str(tmp_path / name) for name in ("gone", "used", "empty")])
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


@pytest.mark.parametrize(
    ("files", "hit"),
    [
        ({}, ()),
        ({"memory.events": "low 0\nhigh 3\nmax 9\noom 1\noom_kill 0\n"}, ()),
        ({"memory.events": "oom 1\noom_kill 1\noom_group_kill 1\n"}, ("memory",)),
        ({"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}, ("memory",)),
        ({"memory.oom_control": "oom_kill_disable 1\nunder_oom 1\noom_kill 0\n"}, ()),
        ({"pids.events": "max 0\n"}, ()),
        ({"pids.events": "max 12\n"}, ("pids",)),
        ({"pids.events": "max 1\n", "memory.events": "oom_kill 1\n"}, ("memory", "pids")),
        ({"pids.events": "max\n", "memory.events": "oom_kill many\n"}, ()),
    ],
    ids=repr,
)
def test_evidence_is_what_the_kernel_counted(files: dict[str, str], hit: tuple[str, ...], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert limits.read_evidence([HostPath(str(tmp_path))]) == hit


def test_a_group_that_is_gone_is_no_evidence(tmp_path: Path) -> None:
    assert limits.read_evidence([HostPath(f"{tmp_path}/gone")]) == ()

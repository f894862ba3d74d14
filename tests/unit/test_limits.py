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


def plan(base: CgroupBase | None, bounds: Limits = BOUNDS, *, cpus: int = 4, strict: bool = False) -> limits.LimitPlan:
    return limits.plan_limits(bounds, base, "1-2-abc", cpus, strict=strict)


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
    assert planned.affinity == "0,1"
    assert dict(planned.enforced)["cpus"] == "process"


def test_version_1_has_one_directory_for_each_controller() -> None:
    assert plan(V1).cgroups == (
        (
            "/m/hutch-1-2-abc",
            (
                ("memory.limit_in_bytes", str(64 * MIB)),
                ("memory.memsw.limit_in_bytes", str(64 * MIB)),
                ("memory.swappiness", "0"),
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
def test_no_more_is_claimed_than_holds(base: CgroupBase | None, memory: str, pids: str, cpus: str) -> None:
    assert dict(plan(base).enforced) == {
        "timeout": "tree",
        "memory": memory,
        "pids": pids,
        "cpus": cpus,
        "tmp": "tree",
        "disk": "sampled",
        "files": "process",
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


def test_each_process_is_bounded_too() -> None:
    values = rlimits(plan(V2))
    assert values == {0: 20, 1: MIB, 4: 0, 6: 84, 7: 99, 8: 65536, 12: 819200, 13: 0, 14: 0}


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
    ("cpus", "count", "affinity"),
    [(1.0, 4, "0"), (0.1, 4, "0"), (2.0, 4, "0,1"), (4.0, 4, None), (8.0, 4, None), (1.0, 1, None)],
)
def test_without_the_cpu_controller_a_sandbox_is_bound_to_cpus(cpus: float, count: int, affinity: str | None) -> None:
    assert plan(None, BOUNDS.replace(cpus=cpus), cpus=count).affinity == affinity


def test_with_the_cpu_controller_nothing_is_bound() -> None:
    assert plan(V2).affinity is None


# ---- finding --------------------------------------------------------------------------------------------------------


class FakeSystem:
    """Files of /proc that say what a test wants; everything else is the real file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.own = ""
        self.mounts = ""
        real = limits._read
        texts = {"/proc/self/cgroup": lambda: self.own, "/proc/self/mountinfo": lambda: self.mounts}
        monkeypatch.setattr(limits, "_read", lambda path: texts[path]() if path in texts else real(path))

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


def test_controllers_are_enabled_where_that_is_still_to_be_done(
    system: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, 1000)
    own = system.add_v2("/a")
    (own / "cgroup.subtree_control").write_text("")
    wrote: list[tuple[str, str]] = []

    def write(path: str, text: str) -> None:
        wrote.append((os.path.relpath(path, own), text))
        if path.endswith("subtree_control"):
            if not any(name == "hutch-supervisors/cgroup.procs" for name, _ in wrote):
                raise OSError(16, "busy: processes sit in the group itself")
            (own / "cgroup.subtree_control").write_text(text.replace("+", ""))

    monkeypatch.setattr(limits, "_write", write)
    found = limits.find_cgroup_base()
    assert found is not None
    assert found.controllers == {"memory", "pids", "cpu"}
    assert wrote == [
        ("cgroup.subtree_control", "+memory +pids +cpu"),
        ("hutch-supervisors/cgroup.procs", str(os.getpid())),
        ("cgroup.subtree_control", "+memory +pids +cpu"),
    ]


def test_a_group_whose_controllers_cannot_be_enabled_is_none(
    system: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, 1000)
    own = system.add_v2("/a")
    (own / "cgroup.subtree_control").write_text("")

    def refuse(_path: str, _text: str) -> None:
        raise OSError(16, "busy")

    monkeypatch.setattr(limits, "_write", refuse)
    assert limits.find_cgroup_base() is None


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


# ---- sampling -------------------------------------------------------------------------------------------------------


def fake_proc(monkeypatch: pytest.MonkeyPatch, texts: dict[str, str]) -> None:
    monkeypatch.setattr(limits, "_read", lambda path: texts.get(path, ""))
    monkeypatch.setattr(limits, "_tasks", lambda pid: ["1", "2"] if f"/proc/{pid}/status" in texts else [])


def test_memory_of_a_tree_counts_the_children_of_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_proc(
        monkeypatch,
        {
            "/proc/5/status": "Name:\tx\nRssAnon:\t100 kB\nRssFile:\t900 kB\nRssShmem:\t10 kB\nVmSwap:\t1 kB\n",
            "/proc/5/task/1/children": "6 ",
            "/proc/5/task/2/children": "7 ",
            "/proc/6/status": "RssAnon:\t1000 kB\n",
            "/proc/7/status": "RssAnon:\t10000 kB\n",
        },
    )
    assert limits.tree_memory(5) == (111 + 1000 + 10000) * 1024


def test_shared_pages_of_large_processes_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/5/status": "RssAnon:\t40000 kB\n"}
    fake_proc(monkeypatch, texts)
    assert limits.tree_memory(5) == 40000 * 1024
    texts["/proc/5/smaps_rollup"] = "Rss: 40000 kB\nPss_Anon:\t20000 kB\nPss_Shmem:\t5 kB\nSwapPss:\t1 kB\n"
    assert limits.tree_memory(5) == 20006 * 1024


def test_a_process_that_is_gone_uses_nothing() -> None:
    assert limits.tree_memory(2**30) == 0


def test_this_process_uses_something() -> None:
    assert limits.tree_memory(os.getpid()) > MIB


def test_disk_use_counts_blocks_and_does_not_follow_links(tmp_path: Path) -> None:
    empty = limits.tree_disk(str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "sparse").touch()
    os.truncate(tmp_path / "a" / "sparse", 1 << 40)
    (tmp_path / "a" / "up").symlink_to("/usr")
    few = limits.tree_disk(str(tmp_path))
    assert empty == 0 < few < MIB
    with open(tmp_path / "a" / "full", "wb") as file:
        file.write(os.urandom(2 * MIB))
        os.fsync(file.fileno())  # some filesystems count a block when it is on disk
    assert limits.tree_disk(str(tmp_path)) >= few + 2 * MIB


def test_the_look_at_the_disk_is_bounded(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / str(index)).touch()
    assert limits.tree_disk(str(tmp_path), 5) < limits.tree_disk(str(tmp_path))
    assert limits.tree_disk(f"{tmp_path}/gone") == 0

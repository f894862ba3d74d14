"""Bounding what a sandbox uses: which mechanism this machine offers, what to write, and what was hit.

    tree      a cgroup counts every process of the sandbox
    sampled   hutch looks at the whole tree again and again, and kills it
    process   a resource limit that each process has for itself (processes: each user namespace)

Which limit was hit is read from counters of the kernel or from a decision of our own, never guessed from exit code 137.
"""

from __future__ import annotations

import errno
import os

from ..errors import HostError
from ..model import MIB, HostPath, Limits, Value
from .usage import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_CONTROLLERS = ("memory", "pids", "cpu")
_SUPERVISORS = "hutch-supervisors"
"""A leaf for the processes of a delegated group: in version 2 only a group that has none can pass controllers on."""
_EVACUATIONS = 10
_CPU_PERIOD_US = 100_000
_OVERHEAD_PIDS = 2
"""bubblewrap's monitor and pid 1 count too, and are not the program's."""

# resource numbers of prlimit(2), the same on x86_64 and aarch64
_CPU, _FSIZE, _DATA, _CORE, _NPROC, _NOFILE, _MEMLOCK, _MSGQUEUE, _NICE, _RTPRIO = 0, 1, 2, 4, 6, 7, 8, 12, 13, 14


class CgroupBase(Value):
    """Where a cgroup for a sandbox can be made."""

    version: int
    directories: tuple[tuple[str, HostPath], ...]
    """(controller, directory); version 2 has one directory for all."""

    @property
    def controllers(self) -> frozenset[str]:
        """The controllers that hold in it."""
        return frozenset(name for name, _ in self.directories)


class LimitPlan(Value):
    """How one sandbox will be bounded."""

    cgroups: tuple[tuple[HostPath, tuple[tuple[str, str], ...]], ...]
    rlimits: str
    affinity: str | None
    enforced: tuple[tuple[str, str], ...]


# ---- detection ------------------------------------------------------------------------------------------------------


def find_cgroup_base() -> CgroupBase | None:
    """The strongest cgroup that this process may use, or None."""
    own = _own_cgroups()
    mounts = _cgroup_mounts()
    if "" in mounts:
        base = _find_v2(mounts[""], own.get("", "/"))
        if base:
            return base
    found = []
    for controller in _CONTROLLERS:
        directory = _find_v1(controller, mounts, own)
        if directory is not None and os.access(directory, os.W_OK):
            found.append((controller, directory))
    return CgroupBase(version=1, directories=tuple(found)) if found else None


def _find_v1(controller: str, mounts: dict[str, str], own: dict[str, str]) -> HostPath | None:
    """Our own group of one controller, also where only the part below it is mounted, as in a container."""
    mount = mounts.get(controller)
    if mount is None:
        return None
    path = own.get(controller, "/")
    top, _, target = mount.partition(":")
    if top != "/" and f"{path}/".startswith(f"{top}/"):
        path = path[len(top) :]
    return HostPath(os.path.normpath(f"{target}/{path}"))


def _find_v2(mount: str, own: str) -> CgroupBase | None:
    """Root makes sandboxes' groups at the top; others need a group that was delegated to them. Looks, and no more."""
    # Whoever started a sandbox before sits in the leaf, and was delegated the group above.
    given = "/" if os.geteuid() == 0 else own.removesuffix(f"/{_SUPERVISORS}")
    directory = os.path.normpath(f"{mount}/{given}")
    if not os.access(f"{directory}/cgroup.procs", os.W_OK) or not os.access(directory, os.W_OK):
        return None
    available = read_text(f"{directory}/cgroup.controllers").split()
    wanted = tuple(name for name in _CONTROLLERS if name in available)
    if not set(_CONTROLLERS[:2]) <= set(wanted) or not _can_enable(directory, wanted):
        return None
    return CgroupBase(version=2, directories=tuple((name, HostPath(directory)) for name in wanted))


def _can_enable(directory: str, wanted: Sequence[str]) -> bool:
    """Whether `_enable` would succeed."""
    control = f"{directory}/cgroup.subtree_control"
    if set(wanted) <= set(read_text(control).split()):
        return True
    kind = read_text(f"{directory}/cgroup.type").strip()
    if kind not in ("", "domain") or not os.access(control, os.W_OK):
        return False
    processes = set(read_text(f"{directory}/cgroup.procs").split())
    # The top of all groups has no type, and may pass controllers on beside any processes. "0" stands for a process
    # outside our pid namespace, which nobody here can move.
    return not kind or ("0" not in processes and (processes <= {str(os.getpid())} or _is_given(directory)))


def _is_given(directory: str) -> bool:
    """Whether others' processes in a group are ours to move: systemd marks the units that it leaves to somebody."""
    if not directory.endswith((".scope", ".service", ".slice")):
        return True
    try:
        return os.getxattr(directory, "user.delegate") == b"1"
    except OSError:
        return False


def _enable(directory: str, wanted: set[str]) -> None:
    """Let groups below a group of version 2 have controllers; its own processes must then sit in a leaf."""
    control = f"{directory}/cgroup.subtree_control"
    text = " ".join(f"+{name}" for name in _CONTROLLERS if name in wanted)
    for attempt in range(_EVACUATIONS):
        if wanted <= set(read_text(control).split()):
            return
        try:
            _write(control, text)
        except OSError as error:
            # Whatever was started meanwhile needs another round.
            if error.errno != errno.EBUSY or attempt == _EVACUATIONS - 1:
                raise
            _evacuate(directory)


def _evacuate(directory: str) -> None:
    leaf = f"{directory}/{_SUPERVISORS}"
    os.makedirs(leaf, exist_ok=True)
    for pid in read_text(f"{directory}/cgroup.procs").split():
        try:
            _write(f"{leaf}/cgroup.procs", pid)
        except ProcessLookupError:
            continue


def _own_cgroups() -> dict[str, str]:
    groups = {}
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _cgroup_mounts() -> dict[str, str]:
    """By controller, what is mounted and where, as TOP:TARGET; "" is version 2, of which the target alone matters."""
    mounts = {}
    for line in read_text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        words = right.split(" ")
        if words[0] == "cgroup2":
            top, target = left.split(" ")[3:5]
            # A mount that begins above our cgroup namespace holds groups which we may make, and never join.
            if not top.startswith("/.."):
                mounts[""] = target
        elif words[0] == "cgroup":
            for option in words[2].split(","):
                if option in _CONTROLLERS:
                    mounts[option] = ":".join(left.split(" ")[3:5])
    return mounts


def cgroup_roots() -> list[str]:
    """Every directory in which a cgroup of ours may lie."""
    base = find_cgroup_base()
    return sorted({directory for _, directory in base.directories}) if base else []


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def start_priming() -> None:
    """Make the kernel ready to move a process between cgroups, while we go on.

    The first move in a while waits for a grace period of several milliseconds; one right after it does not. Writing our
    own pid where it already is changes nothing and takes that wait, off the path of the sandbox.
    """
    if os.geteuid() != 0:
        return
    directory = _find_v1("pids", _cgroup_mounts(), _own_cgroups())
    if directory is not None:
        import _thread

        _thread.start_new_thread(_prime, (directory,))


def _prime(directory: str) -> None:
    try:
        _write(f"{directory}/cgroup.procs", "0")
    except OSError:
        return


# ---- planning: pure -------------------------------------------------------------------------------------------------


def plan_limits(
    limits: Limits,
    base: CgroupBase | None,
    token: str,
    cpus: tuple[int, ...],
    *,
    strict: bool,
    host_writable: bool = False,
    stays: bool = False,
) -> LimitPlan:
    """How the limits will hold, given what the machine offers.

    A sandbox that stays outlives its programs: it has no time of its own, and memory is taken from one of them, not
    from all.

    Raises:
        HostError: strict was asked for, and a limit would not hold for the whole sandbox.
    """
    controllers = base.controllers if base else frozenset()
    own_pids = _OVERHEAD_PIDS + host_writable  # whoever refreshes a guarded mount counts, too
    enforced = {
        "timeout": "tree",
        "memory": "tree" if "memory" in controllers else "sampled",
        "pids": "tree" if "pids" in controllers else "process",
        "cpus": "tree" if "cpu" in controllers else "process",
        "tmp": "tree",
        "disk": "sampled" if host_writable else "tree",
        "output": "tree",
    }
    weak = [name for name, how in enforced.items() if how != "tree"]
    if strict and weak:
        remedies = []
        if host_writable:
            remedies.append("mount nothing writable")
        if set(weak) - {"disk"}:
            remedies.append("use a delegated group: systemd-run --user --scope -p Delegate=yes hutch ...")
        raise HostError(
            f"strict limits: {', '.join(weak)} cannot be bounded for the whole sandbox here",
            code="host.limits",
            details="a cgroup counts memory, pids and cpus; nothing counts what is written to a directory of the host",
            hint="; ".join(remedies),
        )
    affinity = None
    if "cpu" not in controllers and limits.cpus < len(cpus):
        # Not the same ones for all sandboxes.
        first = sum(token.encode()) % len(cpus)
        count = max(1, round(limits.cpus))
        affinity = ",".join(str(cpu) for cpu in sorted((cpus[first:] + cpus[:first])[:count]))
    return LimitPlan(
        cgroups=_control_files(limits, base, token, limits.pids + own_pids, stays=stays) if base else (),
        rlimits=_rlimits(limits.replace(timeout_seconds=None) if stays else limits, controllers, own_pids),
        affinity=affinity,
        enforced=tuple(enforced.items()),
    )


def _control_files(
    limits: Limits, base: CgroupBase, token: str, pids: int, *, stays: bool
) -> tuple[tuple[HostPath, tuple[tuple[str, str], ...]], ...]:
    quota = max(1000, int(limits.cpus * _CPU_PERIOD_US))
    if base.version == 2:
        directory = HostPath(f"{base.directories[0][1]}/hutch-{token}")
        files = [
            ("memory.max", str(limits.memory_bytes)),
            ("memory.swap.max", "0"),
            ("memory.oom.group", "0" if stays else "1"),
            ("pids.max", str(pids)),
        ]
        if "cpu" in base.controllers:
            files.append(("cpu.max", f"{quota} {_CPU_PERIOD_US}"))
        return ((directory, tuple(files)),)
    by_controller = {
        "memory": (
            ("memory.limit_in_bytes", str(limits.memory_bytes)),
            ("memory.memsw.limit_in_bytes", str(limits.memory_bytes)),
            ("memory.swappiness", "0"),
            ("memory.kmem.tcp.limit_in_bytes", str(limits.memory_bytes)),  # what sockets hold is counted apart
        ),
        "pids": (("pids.max", str(pids)),),
        "cpu": (("cpu.cfs_period_us", str(_CPU_PERIOD_US)), ("cpu.cfs_quota_us", str(quota))),
    }
    return tuple(
        (HostPath(f"{directory}/hutch-{token}"), by_controller[controller])
        for controller, directory in base.directories
    )


def _rlimits(limits: Limits, controllers: frozenset[str], own_pids: int) -> str:
    values = {
        _NOFILE: limits.open_files,
        _CORE: 1,  # 0 would still start a program that the host pipes cores to; 1 is too small for a file
        _FSIZE: limits.file_bytes,
        _MEMLOCK: 65536,
        _MSGQUEUE: 819200,
        _NICE: 0,
        _RTPRIO: 0,
        # Where a cgroup counts, this one stays above it: refused forks must show in the cgroup's counter.
        _NPROC: limits.pids + (64 if "pids" in controllers else own_pids),
    }
    if limits.timeout_seconds is not None:
        values[_CPU] = int(limits.timeout_seconds * max(1.0, limits.cpus)) + 5
    if "memory" not in controllers:
        # The sampler decides at the limit itself; this is the net below it. RLIMIT_AS would stop every runtime that
        # reserves address space (node, java, go).
        values[_DATA] = max(2 * limits.memory_bytes, limits.memory_bytes + 256 * MIB)
    return ",".join(f"{resource}={value}" for resource, value in sorted(values.items()))


# ---- doing ----------------------------------------------------------------------------------------------------------


_OPTIONAL = (
    "memory.memsw.limit_in_bytes",
    "memory.swappiness",
    "memory.kmem.tcp.limit_in_bytes",
    "memory.swap.max",
    "memory.oom.group",
)
"""Absent where the kernel has no swap accounting."""


def make_cgroups(cgroups: Sequence[tuple[HostPath, tuple[tuple[str, str], ...]]]) -> None:
    """Make the directories of a plan and write its limits.

    Raises:
        HostError: one cannot be made. What was made before is removed again.
    """
    made: list[str] = []
    try:
        for directory, files in cgroups:
            parent = os.path.dirname(directory)
            if os.path.exists(f"{parent}/cgroup.subtree_control"):  # version 2
                _enable(parent, {name.partition(".")[0] for name, _ in files})
            os.mkdir(directory, 0o755)
            made.append(directory)
            for name, text in files:
                try:
                    _write(f"{directory}/{name}", text)
                except FileNotFoundError:
                    if name not in _OPTIONAL:
                        raise
    except OSError as error:
        remove_cgroups(made)
        raise HostError(
            f"cannot set up a cgroup ({error.strerror})",
            code="host.cgroup",
            details=str(error.filename or (made and made[-1]) or cgroups[0][0]),
            hint="hutch doctor shows which limits this machine can hold",
        ) from error


def remove_cgroups(directories: Sequence[str]) -> None:
    """Remove empty cgroups; those that are gone or still in use are left."""
    for directory in directories:
        try:
            os.rmdir(directory)
        except OSError:
            continue


def members(cgroups: Sequence[HostPath]) -> list[int]:
    """The processes in cgroups of ours."""
    return [int(pid) for directory in cgroups for pid in read_text(f"{directory}/cgroup.procs").split()]


def read_evidence(cgroups: Sequence[HostPath]) -> tuple[str, ...]:
    """The limits that the kernel counted as hit, for cgroups that still exist."""
    hit = {
        limit for directory in cgroups for limit, _, file, key in _HIT_COUNTERS if _counter(f"{directory}/{file}", key)
    }
    return tuple(sorted(hit))


_HIT_COUNTERS = (
    # limit, the file that sets it, the file that counts, and the word in that
    ("memory", "memory.limit_in_bytes", "memory.oom_control", "oom_kill"),
    ("memory", "memory.max", "memory.events", "oom_kill"),
    ("pids", "pids.max", "pids.events", "max"),
)


def hit_counters(cgroups: Sequence[tuple[HostPath, tuple[tuple[str, str], ...]]]) -> tuple[tuple[str, str, str], ...]:
    """Where the kernel counts what a plan's cgroups refuse: (limit, path, word)."""
    return tuple(
        (limit, f"{directory}/{counter}", key)
        for directory, files in cgroups
        for limit, setting, counter, key in _HIT_COUNTERS
        if any(name == setting for name, _ in files)
    )


def count_hits(counters: Sequence[tuple[str, str, str]]) -> dict[str, int]:
    """How often each limit was hit so far."""
    return {limit: _counter(path, key) for limit, path, key in counters}


def _counter(path: str, name: str) -> int:
    # Asked for after every run, so without the layers of a text file.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        words = os.read(fd, 4096).split()
    except OSError:
        return 0
    finally:
        os.close(fd)
    wanted = name.encode()
    for key, value in zip(words[::2], words[1::2], strict=False):
        if key == wanted and value.isdigit():
            return int(value)
    return 0

"""The `jail` backend: bubblewrap, prepared and guarded by the warden.

`plan` is pure: given what was asked for and what was found on the host, it says exactly what will be executed. The
order of the steps matters more than it seems to; each group below says why it stands where it does.
"""

from __future__ import annotations

import os
import stat

from ..errors import HostError, StartError
from ..model import GuestPath, HostPath, Network, Plan, Rootfs, Spec, Value
from . import limits, network, seccomp
from .bwrap import Bwrap, require_bwrap
from .mounts import CheckedMount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

STATUS_FD = 200
"""Where the warden puts the status descriptor, and where pid 1 finds it."""

SANDBOX_ID = 1000
"""Uid and gid inside. Not 65534: that is how unmapped owners look, and /usr would seem to be the program's own."""

DROP_ID = 65534
"""Uid and gid on the host when hutch was started by root."""

WORK = "layer"
"""The part of a work directory that overlayfs gets. The rest stays ours, so that nobody can move it away."""

INIT = GuestPath("/run/hutch/init")
RUNS = GuestPath("/run/hutch/runs")
"""Where interpreters that stay keep the code of their runs."""
_RUNS_BYTES = 16 * 1024 * 1024
WORKSPACE = GuestPath("/workspace")
_BUNDLE = GuestPath("/run/hutch/ca-bundle.crt")
_SHM_BYTES = 64 * 1024 * 1024
_STAGES = ("/mnt", "/srv", "/media", "/opt", "/tmp")


def _driver(name: str) -> tuple[HostPath, GuestPath]:
    package = os.path.dirname(os.path.dirname(__file__))
    return HostPath(f"{package}/guest/{name}"), GuestPath(f"/run/hutch/guest/{name}")


DRIVERS = {"python": _driver("python.py"), "bash": _driver("bash.sh"), "node": _driver("node.js")}
"""What keeps an interpreter alive: its file here, and inside."""


class Host(Value):
    """What the plan needs to know of this machine."""

    bwrap: Bwrap
    warden: HostPath
    machine: str
    uid: int
    gid: int
    cgroups: limits.CgroupBase | None
    cpus: tuple[int, ...]
    """The CPUs that we may use."""
    token: str
    stage: HostPath
    """A directory that the warden covers, in a mount namespace of its own, to assemble mounts in."""
    hidden: tuple[HostPath, ...] = ()
    """Of what every sandbox needs, that which only we can reach, such as what lies in root's home."""
    addresses: tuple[str, ...] = ()
    """The host's own, for a sandbox that can reach others."""
    bundle: HostPath | None = None
    resolver: str = ""

    @property
    def is_root(self) -> bool:
        """Whether the sandbox must be given another uid than ours."""
        return self.uid == 0


def find_warden(machine: str) -> HostPath:
    """The warden for a machine.

    Raises:
        HostError: there is none for this architecture.
    """
    path = f"{os.path.dirname(__file__)}/data/warden-{machine}"
    if not os.path.exists(path):
        raise HostError(
            f"hutch has no warden for {machine}",
            code="host.architecture",
            hint="use an x86_64 or aarch64 machine",
        )
    return HostPath(path)


def inspect_host(token: str, wanted: Network, rootfs: Rootfs, paths: Iterable[str] = ()) -> Host:
    """Look at this machine.

    Args:
        token: the name of this run.
        wanted: what network the sandbox is to have.
        rootfs: what it is made of.
        paths: what will be mounted, and must not be covered by the stage.

    Raises:
        HostError: it lacks something that every sandbox needs.
    """
    machine = os.uname().machine
    resolver = ""
    if wanted is Network.HOST:
        try:
            with open("/etc/resolv.conf", encoding="utf-8", errors="replace") as file:
                resolver = file.read(65536).replace("\0", "")
        except OSError:
            resolver = ""
    bwrap = require_bwrap()
    needed = [bwrap.root, *(bind.host_path for bind in rootfs.binds)]
    return Host(
        bwrap=bwrap,
        warden=find_warden(machine),
        machine=machine,
        uid=os.geteuid(),
        gid=os.getegid(),
        cgroups=limits.find_cgroup_base(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        token=token,
        stage=_find_stage((*paths, *needed)),
        hidden=tuple(path for path in needed if not _is_open_to_all(path)),
        addresses=network.host_addresses() if wanted is Network.FULL else (),
        bundle=network.find_bundle() if wanted is not Network.OFF else None,
        resolver=resolver,
    )


def _is_open_to_all(path: str) -> bool:
    """Whether any uid can reach a path."""
    while True:
        mode = os.stat(path).st_mode
        if not mode & stat.S_IXOTH:
            return False
        if path == "/":
            return True
        path = os.path.dirname(path)


def _find_stage(paths: tuple[str, ...]) -> HostPath:
    for path in _STAGES:
        if os.path.isdir(path) and not os.path.islink(path) and not any(f"{p}/".startswith(f"{path}/") for p in paths):
            return HostPath(path)
    raise HostError(
        "no directory is left to assemble mounts in",
        code="host.stage",
        details=f"looked at {', '.join(_STAGES)}",
        hint="make an empty directory /mnt, or mount nothing below it",
    )


# ---- the plan -------------------------------------------------------------------------------------------------------


class _Draft:
    """A plan in the making: operations, bubblewrap's options, and the descriptors that both name."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, ...]] = []
        self.options: list[str] = []
        self._next_fd = 10

    def do(self, *words: str) -> None:
        self.operations.append(words)

    def new_fd(self, *, keep: bool) -> str:
        fd = str(self._next_fd)
        self._next_fd += 1
        if self._next_fd > STATUS_FD:
            raise StartError(
                "too many mounts", code="start.descriptors", hint="mount a common parent directory instead"
            )
        if keep:
            self.do("keep", fd)
        return fd

    def text(self, content: str) -> str:
        fd = self.new_fd(keep=True)
        self.do("text", fd, content)
        return fd

    def file(self, path: HostPath) -> str:
        fd = self.new_fd(keep=True)
        self.do("file", fd, path)
        return fd


def plan(spec: Spec, rootfs: Rootfs, mounts: tuple[CheckedMount, ...], host: Host, code: str | None) -> Plan:
    """What will be executed.

    Args:
        spec: what was asked for.
        rootfs: what the sandbox is made of.
        mounts: what was found where it asks for mounts.
        host: what was found on this machine.
        code: the program; None plans a sandbox that stays, with an agent that starts programs when told to.

    Raises:
        HostError: strict limits were asked for and would not hold.
    """
    policy = spec.policy
    host_writable = any(mount.writable for mount in mounts)
    limit_plan = limits.plan_limits(
        policy.limits,
        host.cgroups,
        host.token,
        host.cpus,
        strict=policy.strict_limits,
        host_writable=host_writable,
        stays=code is None,
    )
    staged = any(mount.guarded for mount in mounts) or (host.is_root and bool(mounts or host.hidden))
    draft = _Draft()
    if policy.limits.timeout_seconds is not None and code is not None:
        # hutch keeps the time itself. The warden does so a little later, should hutch be stopped or stuck.
        draft.do("deadline", str(int(policy.limits.timeout_seconds * 1000) + 1000))
    # Before anything else: what the sandbox does to get ready is charged to it, too.
    draft.do("oom", "500")
    for directory, _ in limit_plan.cgroups:
        draft.do("cgroup", directory)
    if limit_plan.affinity:
        draft.do("affinity", limit_plan.affinity)
    _namespace_options(draft, policy.network)
    variables = _variables(spec, rootfs, host)
    for name, value in variables.items():
        draft.options += ["--setenv", name, value]
    # Files are opened while we are still who we are, in the mount namespace that we came from.
    _root_files(draft, rootfs, host, policy.network)
    if code is not None:
        draft.options += ["--perms", "0444", "--file", draft.text(code), rootfs.code_path]
    else:
        for name, _ in rootfs.interpreters:
            draft.options += ["--perms", "0444", "--file", draft.file(DRIVERS[name][0]), DRIVERS[name][1]]
    counted = dict(limit_plan.enforced)["memory"] == "tree"
    draft.options += [
        "--seccomp",
        draft.file(HostPath(seccomp.path(host.machine, host_writable=host_writable, counted=counted))),
    ]
    _unshare(draft, host, policy.network, staged=staged)
    program = _stage(draft, host) if staged else host.bwrap.path
    _binds(draft, rootfs, host)
    temporary = _own_filesystems(draft, spec, mounts)
    if code is None:
        draft.options += ["--perms", "0755", "--size", str(_RUNS_BYTES), "--tmpfs", RUNS]
        temporary += (RUNS,)
    for index, mount in enumerate(mounts):
        _mount(draft, mount, index, host, staged=staged)
    guarded = [f"{host.stage}/mount{index}" for index, mount in enumerate(mounts) if mount.guarded]
    if guarded:
        draft.do("refresh", ",".join(guarded))
    # Dropping the uid comes after all mount work, which needs root, and before the network: its namespace must belong
    # to the uid that enters it.
    if host.is_root:
        draft.do("drop", str(DROP_ID), str(DROP_ID))
        if policy.network is Network.FULL:
            draft.do("unshare", "user,net")
    if policy.network is Network.FULL:
        draft.do("hold")
        for address, prefix in (*network.NEVER_REACHED, *((local, "32") for local in host.addresses)):
            draft.do("unreachable", address, prefix)
    # Nothing can be mounted after this.
    draft.options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/workspace"]
    bounds = (str(STATUS_FD), limit_plan.rlimits, _writable(temporary, mounts))
    return Plan(
        operations=tuple(draft.operations),
        bwrap=(program, *draft.options),
        command=(INIT, "init", *bounds, *rootfs.interpreter, rootfs.code_path)
        if code is not None
        else (INIT, "agent", *bounds, WORKSPACE),
        cgroups=limit_plan.cgroups,
        work_directories=tuple(
            (mount.work_directory, mount.uid if host.is_root else host.uid, mount.gid if host.is_root else host.gid)
            for mount in mounts
            if mount.work_directory
        ),
        network=policy.network,
        limits=policy.limits,
        enforced=limit_plan.enforced,
        protected="prevented" if any(mount.guarded for mount in mounts) else None,
        watched=tuple((mount.host_path, mount.guest_path) for mount in mounts if mount.writable),
        temporary=temporary,
        variables=tuple(variables.items()),
        interpreters=rootfs.interpreters if code is None else (),
        unsafe=_unsafe(spec),
        environment=spec.environment.name,
        source=rootfs.source,
    )


def _writable(temporary: tuple[GuestPath, ...], mounts: tuple[CheckedMount, ...]) -> str:
    """Everything below which files may change, for the second layer; the first is how it all is mounted."""
    paths = ["/dev", "/proc", *temporary, *(mount.guest_path for mount in mounts if mount.writable)]
    # A list of paths has no way to write a colon. Where there is one, the first layer stands alone.
    return "-" if any(":" in path for path in paths) else ":".join(paths)


def _unsafe(spec: Spec) -> tuple[str, ...]:
    switches = tuple(switch.value for switch in spec.policy.unsafe)
    return (*switches, "network_host") if spec.policy.network is Network.HOST else switches


def _namespace_options(draft: _Draft, wanted: Network) -> None:
    draft.options += [
        "--unshare-all",
        "--unshare-user", "--disable-userns",
        "--uid", str(SANDBOX_ID), "--gid", str(SANDBOX_ID),
        "--new-session", "--die-with-parent", "--as-pid-1",
        "--cap-drop", "ALL",
        "--hostname", "hutch",
        "--clearenv",
    ]  # fmt: skip
    if wanted is not Network.OFF:
        draft.options += ["--share-net"]


def _variables(spec: Spec, rootfs: Rootfs, host: Host) -> dict[str, str]:
    variables = {
        "HOME": "/home/sandbox",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
        "TERM": "dumb",
        "SHELL": "/bin/bash",
        **dict(rootfs.variables),
    }
    if host.bundle:
        variables.update(dict.fromkeys(network.BUNDLE_VARIABLES, _BUNDLE))
    variables.update(dict(spec.policy.variables))
    return variables


def _root_files(draft: _Draft, rootfs: Rootfs, host: Host, wanted: Network) -> None:
    for file in rootfs.files:
        fd = draft.file(file.host_path) if file.host_path else draft.text(file.text or "")
        draft.options += ["--perms", "0444", "--file", fd, file.guest_path]
    resolver = {Network.OFF: "", Network.FULL: f"nameserver {network.NAMESERVER}\n", Network.HOST: host.resolver}[
        wanted
    ]
    draft.options += ["--perms", "0444", "--file", draft.text(resolver), "/etc/resolv.conf"]
    draft.options += ["--perms", "0555", "--file", draft.file(host.warden), INIT]
    if host.bundle:
        draft.options += ["--perms", "0444", "--file", draft.file(host.bundle), _BUNDLE]


def _unshare(draft: _Draft, host: Host, wanted: Network, *, staged: bool) -> None:
    namespaces = ["mount"] if staged else []
    if not host.is_root:
        if wanted is Network.FULL:
            namespaces.append("net")
        if namespaces:
            namespaces.insert(0, "user")
    if namespaces:
        draft.do("unshare", ",".join(namespaces))


def _stage(draft: _Draft, host: Host) -> str:
    """Cover the stage and return where bubblewrap is found there: a dropped uid cannot reach into root's home."""
    root = host.bwrap.root
    if not host.is_root or root not in host.hidden:
        draft.do("stage", host.stage, "size=16m,mode=755")
        return host.bwrap.path
    pin = draft.new_fd(keep=False)
    draft.do("pin", pin, root, "-", "-")
    draft.do("stage", host.stage, "size=16m,mode=755")
    target = f"{host.stage}/bwrap"
    _target(draft, target, directory=root != host.bwrap.path)
    draft.do("clone", pin, target, "ro,flat")
    return target + host.bwrap.path.removeprefix(root)


def _target(draft: _Draft, path: str, *, directory: bool) -> None:
    draft.do("mkdir", path, "0755") if directory else draft.do("write", path, "0644", "")


def _binds(draft: _Draft, rootfs: Rootfs, host: Host) -> None:
    for index, bind in enumerate(rootfs.binds):
        source: str = bind.host_path
        if host.is_root and source in host.hidden:
            pin = draft.new_fd(keep=False)
            source = f"{host.stage}/root{index}"
            draft.do("pin", pin, bind.host_path, "-", "-")
            _target(draft, source, directory=True)
            draft.do("clone", pin, source, "ro")
        draft.options += ["--ro-bind", source, bind.guest_path]
    for target, link in rootfs.symlinks:
        draft.options += ["--symlink", target, link]


def _own_filesystems(draft: _Draft, spec: Spec, mounts: tuple[CheckedMount, ...]) -> tuple[GuestPath, ...]:
    """Mount what is the sandbox's own, and say which of it lives in memory."""
    taken = {mount.guest_path for mount in mounts}
    tmp = str(spec.policy.limits.tmp_bytes)
    draft.options += ["--proc", "/proc", "--dev", "/dev"]
    draft.options += ["--perms", "1777", "--size", str(_SHM_BYTES), "--tmpfs", "/dev/shm"]
    draft.options += ["--perms", "1777", "--size", tmp, "--tmpfs", "/tmp"]
    own = tuple(GuestPath(path) for path in ("/home/sandbox", "/workspace") if path not in taken)
    for path in own:
        draft.options += ["--perms", "0755", "--size", tmp, "--tmpfs", path]
    draft.options += ["--symlink", "/tmp", "/var/tmp"]
    return (GuestPath("/tmp"), GuestPath("/dev/shm"), *own)


# ---- mounts ---------------------------------------------------------------------------------------------------------


def _mount(draft: _Draft, mount: CheckedMount, index: int, host: Host, *, staged: bool) -> None:
    option = "--bind" if mount.writable else "--ro-bind"
    if not staged:
        pin = _pin(draft, mount.host_path, mount, keep=True)
        draft.options += [f"{option}-fd", pin, mount.guest_path]
        return
    target = f"{host.stage}/mount{index}"
    if mount.guarded:
        _guarded(draft, mount, index, host, target)
    else:
        flags = [] if mount.writable else ["ro"]
        if host.is_root and mount.uid != DROP_ID:
            flags.append("idmap" if mount.writable else "try-idmap")
            _idmap(draft, mount)
        pin = _pin(draft, mount.host_path, mount, keep=False)
        _target(draft, target, directory=mount.directory)
        draft.do("clone", pin, target, ",".join(flags) or "-")
    draft.options += [option, target, mount.guest_path]


def _pin(draft: _Draft, path: str, mount: CheckedMount, *, keep: bool) -> str:
    pin = draft.new_fd(keep=keep)
    draft.do("pin", pin, path, mount.device, str(mount.inode))
    return pin


def _idmap(draft: _Draft, mount: CheckedMount) -> None:
    """The owner on disk, whoever that is, appears as the uid that the sandbox runs with, and owns what it makes."""
    draft.do("idmap", str(mount.uid), str(mount.gid), str(DROP_ID), str(DROP_ID))


def _guarded(draft: _Draft, mount: CheckedMount, index: int, host: Host, target: str) -> None:
    """The project as the upper layer of an overlay whose lower layer is nothing but stubs of the protected paths.

    Stubs make paths that do not exist yet into mount points without creating anything in the project, and a mount on
    an overlay survives when someone on the host replaces the file beneath it; a mount on the file itself would not.
    """
    assert mount.work_directory is not None
    stubs = f"{host.stage}/stubs{index}"
    _target(draft, stubs, directory=True)
    # Directories even where a file is expected: git would commit empty files, and never sees empty directories. What
    # exists has no stub of its own, but its parents do: a directory that is merged cannot be renamed away.
    parents = [path.rpartition("/")[0] for path in mount.present if "/" in path]
    for path in _with_parents((*mount.absent, *parents)):
        draft.do("mkdir", f"{stubs}/{path}", "0555" if path in mount.absent else "0755")
        if host.is_root and path not in mount.absent:
            draft.do("own", f"{stubs}/{path}", str(DROP_ID), str(DROP_ID))
    _target(draft, target, directory=True)
    project, work, covering = mount.host_path, mount.work_directory, ""
    if host.is_root and mount.uid != DROP_ID:
        # Overlayfs wants both layers under one mount, so a common ancestor of both is cloned, idmapped.
        ancestor = os.path.commonpath([project, work])
        covering = f"{host.stage}/layers{index}"
        pin = draft.new_fd(keep=False)
        draft.do("pin", pin, ancestor, "-", "-")
        _target(draft, covering, directory=True)
        _idmap(draft, mount)
        draft.do("clone", pin, covering, "idmap,flat")
        project, work = (HostPath(f"{covering}/{os.path.relpath(path, ancestor)}") for path in (project, work))
    # Now, so that no mark from elsewhere is obeyed, and again when all is over.
    draft.do("scrub", mount.host_path, mount.device, str(mount.inode))
    upper = _pin(draft, project, mount, keep=False)
    work_fd = draft.new_fd(keep=False)
    draft.do("pin", work_fd, f"{work}/{WORK}", "-", "-")
    draft.do("overlay", target, stubs, upper, work_fd, "-" if host.is_root else "userxattr")
    for path in (*mount.present, *mount.absent):
        draft.do("mask", target, path, "ro")
    if covering:
        draft.do("detach", covering)
    draft.do("remove", mount.work_directory)


def _with_parents(paths: Iterable[str]) -> list[str]:
    made: list[str] = []
    for path in paths:
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            step = "/".join(parts[:depth])
            if step not in made:
                made.append(step)
    return made


# ---- printing -------------------------------------------------------------------------------------------------------


def to_argv(plan: Plan, warden: HostPath) -> list[str]:
    """The whole run as one command line, for the eye and for a shell. It reports to no one."""
    words = [word for operation in plan.operations for word in operation]
    command = [*plan.command[:2], "-", *plan.command[3:]]
    return [warden, *words, "bwrap", str(len(plan.bwrap) - 1), *plan.bwrap, *command]


def to_words(plan: Plan, *, status: int, lifeline: int, gate: int, control: int | None = None) -> bytes:
    """The whole run as the warden reads it from a descriptor."""
    words = ["status", str(status), "lifeline", str(lifeline), "gate", str(gate)]
    if control is not None:
        words += ["control", str(control)]
    for operation in plan.operations:
        words += operation
    words += ["bwrap", str(len(plan.bwrap) - 1), *plan.bwrap, *plan.command]
    return os.fsencode("\0".join(words) + "\0")

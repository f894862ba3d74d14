"""The values that flow through hutch, in the order in which they appear.

    Spec (Environment + Policy) -> Rootfs -> Plan -> Result

All are frozen: compared by content, hashed, printed in full. They know nothing of where they came from and do no work.

`Value` stands where a frozen dataclass would: `dataclasses` imports `inspect`, which alone costs more than starting a
sandbox (docs/decisions/0002). Paths are strings of two types that cannot be mixed: `HostPath` and `GuestPath`.
"""

from __future__ import annotations

import enum

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar, NewType, Self, dataclass_transform

    HostPath = NewType("HostPath", str)
    GuestPath = NewType("GuestPath", str)
else:
    HostPath = GuestPath = str

    def dataclass_transform(**_options: object):
        return lambda cls: cls


MIB = 1024 * 1024
GIB = 1024 * MIB


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Value:
    """A frozen record: fields are the annotated names of the class, given by keyword."""

    __slots__: ClassVar[tuple[str, ...]] = ()
    fields_: ClassVar[tuple[str, ...]] = ()
    template_: ClassVar[dict[str, Any]] = {}
    """Every field in its order, with its default where it has one."""
    known_: ClassVar[frozenset[str]] = frozenset()
    required_: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        cls.fields_ = tuple(name for name in cls.__annotations__ if name[-1] != "_")
        cls.template_ = {name: cls.__dict__.get(name) for name in cls.fields_}
        cls.known_ = frozenset(cls.fields_)
        cls.required_ = frozenset(name for name in cls.fields_ if name not in cls.__dict__)

    def __init__(self, **values: Any) -> None:
        if not self.required_ <= values.keys():
            raise TypeError(f"{type(self).__name__} needs {', '.join(sorted(self.required_ - values.keys()))}")
        if not values.keys() <= self.known_:
            unknown = [name for name in values if name not in self.known_]
            raise TypeError(f"{type(self).__name__} has no {', '.join(unknown)}")
        state = self.__dict__
        state.update(self.template_)
        state.update(values)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; use replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({inner})"

    def replace(self, **changes: Any) -> Self:
        """The same value with some fields changed."""
        if not changes.keys() <= self.known_:
            raise TypeError(f"{type(self).__name__} has no {', '.join(changes.keys() - self.known_)}")
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__)
        changed.__dict__.update(changes)
        return changed


# ---- what is asked for ----------------------------------------------------------------------------------------------


class Network(enum.Enum):
    """What the sandbox can reach."""

    OFF = "off"
    """Nothing: a network namespace of its own with only a loopback interface."""
    FULL = "full"
    """The internet through a user-mode network stack; the host's loopback and abstract sockets stay out of reach."""
    HOST = "host"
    """The host's own network namespace. Weaker, and every result says so."""


class Source(enum.Enum):
    """Where an environment's software comes from."""

    HOST = "host"
    NIX = "nix"
    NPM = "npm"


class Unsafe(enum.Enum):
    """Switches that weaken the isolation. Each is asked for by name and printed in every result."""

    WRITABLE_HOME = "unsafe_writable_home"
    UNPROTECTED_MOUNTS = "unsafe_unprotected_mounts"


class Limits(Value):
    """What one run may use. How each limit holds on this machine is in `Result.enforced`."""

    timeout_seconds: float | None = 30.0
    memory_bytes: int = 512 * MIB
    pids: int = 128
    cpus: float = 1.0
    tmp_bytes: int = 256 * MIB
    """Size of each of /tmp, /home/sandbox and a /workspace that is not a mount."""
    file_bytes: int = 256 * MIB
    disk_bytes: int = 1024 * MIB
    """How much all writable mounts together may grow."""
    open_files: int = 1024
    keep_bytes: int = MIB
    """What is kept of each output stream, head and tail."""
    output_bytes: int = 16 * MIB
    """The run is killed when both streams together pass this."""


class Mount(Value):
    """A directory or file of the host, visible inside."""

    host_path: HostPath
    guest_path: GuestPath
    writable: bool = False


class Policy(Value):
    """What the program may touch."""

    network: Network = Network.OFF
    mounts: tuple[Mount, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    limits: Limits = Limits()
    strict_limits: bool = False
    unsafe: tuple[Unsafe, ...] = ()


class Environment(Value):
    """Which software exists."""

    name: str
    preset: str
    interpreter: str
    packages: tuple[str, ...] = ()
    """What must be there beside the interpreter."""
    source: Source | None = None
    """None: the best that is at hand."""


class Spec(Value):
    """All that a sandbox needs, as one value."""

    environment: Environment
    policy: Policy = Policy()
    backend: str = "jail"


# ---- what is really there -------------------------------------------------------------------------------------------


class Bind(Value):
    """A read-only directory or file of the host that belongs to an environment."""

    host_path: HostPath
    guest_path: GuestPath


class File(Value):
    """A file of an environment: a text of our own, or the content of a file of the host."""

    guest_path: GuestPath
    text: str | None = None
    host_path: HostPath | None = None


class Rootfs(Value):
    """An environment made real: everything that the sandbox's root is assembled from."""

    source: Source
    stamp: tuple[object, ...] = ()
    """What tells this content from another, where it cannot be read off the rest."""
    binds: tuple[Bind, ...] = ()
    symlinks: tuple[tuple[str, GuestPath], ...] = ()
    """(target, link)"""
    files: tuple[File, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    interpreter: tuple[str, ...] = ()
    """argv before the name of the code file."""
    interpreters: tuple[tuple[str, str], ...] = ()
    """(name, program) of every interpreter that can be kept alive in it."""
    code_path: GuestPath = GuestPath("/run/hutch/main")

    @property
    def id(self) -> str:
        """A name for the content, which changes when the content does."""
        from hashlib import sha256

        return f"{self.source.value}-{sha256(repr(self).encode()).hexdigest()[:32]}"


class Plan(Value):
    """Exactly what will be executed. Made without touching the machine, and printed by `hutch plan`."""

    operations: tuple[tuple[str, ...], ...]
    """What the warden does before bubblewrap starts, in order."""
    bwrap: tuple[str, ...]
    """The program and its options."""
    command: tuple[str, ...]
    """pid 1 inside, and the program that it runs."""
    cgroups: tuple[tuple[HostPath, tuple[tuple[str, str], ...]], ...] = ()
    """Directories to make, with the control files to write in each."""
    work_directories: tuple[tuple[HostPath, int, int], ...] = ()
    """Directories to make for overlayfs, with the owner that each must have."""
    network: Network = Network.OFF
    limits: Limits = Limits()
    enforced: tuple[tuple[str, str], ...] = ()
    protected: str | None = None
    """"prevented" when paths in a writable mount are guarded."""
    watched: tuple[tuple[HostPath, GuestPath], ...] = ()
    """Writable mounts whose growth is bounded by looking."""
    temporary: tuple[GuestPath, ...] = ()
    """Filesystems of the sandbox that live in memory."""
    variables: tuple[tuple[str, str], ...] = ()
    """What programs inside find in their environment."""
    interpreters: tuple[tuple[str, str], ...] = ()
    """For a sandbox that stays: (name, program) of what can be kept alive in it."""
    unsafe: tuple[str, ...] = ()
    environment: str = ""
    source: Source = Source.HOST


# ---- what came of it ------------------------------------------------------------------------------------------------


class Outcome(enum.Enum):
    """How one run ended, decided from evidence."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    PIDS = "pids"
    DISK = "disk"
    OUTPUT = "output"
    KILLED = "killed"


class Result(Value):
    """The outcome of one run. A failing program is a value, not an exception; `check()` makes it one."""

    outcome: Outcome
    exit_code: int | None
    signal: str | None = None
    stdout: str = ""
    stderr: str = ""
    truncated: bool = False
    dropped_bytes: int = 0
    duration_ms: int = 0
    limits_hit: tuple[str, ...] = ()
    """Every limit of which there is evidence, also where the program coped with it."""
    state_lost: bool = False
    session: str | None = None
    env: str = ""
    source: Source = Source.HOST
    enforced: tuple[tuple[str, str], ...] = ()
    protected: str | None = None
    reported: tuple[str, ...] = ()
    """Paths on the host that the run made or changed in a guarded mount, and that tools there obey."""
    unsafe: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the program ended with code 0 and no limit stopped it."""
        return self.outcome is Outcome.OK

    def check(self) -> Self:
        """Return the result itself.

        Raises:
            CommandError: the outcome is not ok.
        """
        if self.ok:
            return self
        from .errors import CommandError

        raise CommandError(
            f"the program did not succeed: {self.explain()}",
            code=f"command.{self.outcome.value}",
            details=self.stderr[-2000:],
            hint={
                Outcome.TIMEOUT: "raise timeout_seconds",
                Outcome.MEMORY: "raise memory_mb",
                Outcome.PIDS: "raise pids",
                Outcome.DISK: "raise disk_mb or file_mb",
                Outcome.OUTPUT: "raise max_output_mb",
                Outcome.KILLED: "find out who killed it, and run it again",
            }.get(self.outcome, "read result.stderr"),
        )

    def explain(self) -> str:
        """What happened, in one sentence without a full stop."""
        how = self.signal or f"exit code {self.exit_code}"
        return {
            Outcome.OK: "it ended normally",
            Outcome.FAILED: f"ended by {how}" if self.signal else how,
            Outcome.TIMEOUT: "stopped at the time limit",
            Outcome.MEMORY: "stopped at the memory limit",
            Outcome.PIDS: f"it could not start more processes ({how})",
            Outcome.DISK: "stopped at the disk limit",
            Outcome.OUTPUT: "stopped at the output limit",
            Outcome.KILLED: "it was killed",
        }[self.outcome]

    def to_json(self) -> Mapping[str, Any]:
        """The result as the doors print it."""
        state: dict[str, Any] = dict(self.__dict__)
        state["outcome"] = self.outcome.value
        state["source"] = self.source.value
        state["enforced"] = dict(self.enforced)
        for name in ("limits_hit", "reported", "unsafe", "files"):
            state[name] = list(state[name])
        return state

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """The opposite of `to_json`."""
        state: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in told.items()
        }
        state["outcome"] = Outcome(told["outcome"])
        state["source"] = Source(told["source"])
        state["enforced"] = tuple(told["enforced"].items())
        return cls(**state)

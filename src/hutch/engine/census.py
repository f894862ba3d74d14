"""Who lives: the sandboxes of this machine, and the programs in one, seen from outside.

Nothing is written down for this. The warden of every sandbox carries its name on its command line, where it cannot be
stale: who is listed there is alive.
"""

from __future__ import annotations

import os

from ..isolation import usage
from ..model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")


class Living(Value):
    """One sandbox."""

    id: str
    """What `hutch kill` takes."""
    pid: int
    """Its warden's."""
    environment: str
    session: str | None
    """The id of the session that it belongs to."""
    name: str | None
    owner: int
    """The process that started it, as a pid."""
    uid: int
    processes: int
    memory_bytes: int
    cpu_seconds: float
    age_seconds: float

    def to_json(self) -> dict[str, Any]:
        """As the doors print it."""
        return dict(self.__dict__)


class Running(Value):
    """One program in a sandbox."""

    pid: int
    """As it is called inside."""
    argv: tuple[str, ...]
    memory_bytes: int
    cpu_seconds: float

    def to_json(self) -> dict[str, Any]:
        """As the doors print it."""
        return {**self.__dict__, "argv": list(self.argv)}


def find_sandboxes() -> list[Living]:
    """Every sandbox that we may look at, oldest first."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        words = _command_line(int(name))
        if len(words) < 6 or words[1] != "--args" or not _is_warden(int(name), words[0]):
            continue
        living = _describe(int(name), words)
        if living is not None:
            found.append(living)
    return sorted(found, key=lambda living: -living.age_seconds)


def _is_warden(pid: int, program: str) -> bool:
    """Whether a process executes a warden, and not only says so."""
    try:
        executed = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
    return executed.removesuffix(" (deleted)") == os.path.basename(program) and executed.startswith("warden-")


def _describe(pid: int, words: list[str]) -> Living | None:
    token, environment, label = words[3:6]
    session, _, name = label.partition("/")
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    pids = usage.tree_pids(pid)
    return Living(
        id=token.rpartition("-")[2],
        pid=pid,
        environment=environment,
        session=None if session in ("", "-") else session,
        name=name or None,
        owner=int(token.partition("-")[0]),
        uid=uid,
        processes=len(pids) - 1,
        memory_bytes=usage.tree_memory(pids),
        cpu_seconds=round(sum(_cpu_seconds(one) for one in pids), 2),
        age_seconds=round(usage.age_seconds(pid), 2),
    )


def find_programs(pid: int) -> list[Running]:
    """The programs of a sandbox, given its first process on the host: all but bubblewrap and pid 1."""
    found = []
    for one in usage.tree_pids(pid):
        inside = _inner_pid(one)
        if inside > 1:
            found.append(
                Running(
                    pid=inside,
                    argv=tuple(_command_line(one)),
                    memory_bytes=usage.tree_memory([one]),
                    cpu_seconds=round(_cpu_seconds(one), 2),
                )
            )
    return sorted(found, key=lambda running: running.pid)


def _inner_pid(pid: int) -> int:
    for line in usage.read_text(f"/proc/{pid}/status").splitlines():
        if line.startswith("NSpid:"):
            numbers = line.split()[1:]
            return int(numbers[-1]) if len(numbers) > 1 else 0
    return 0


def _command_line(pid: int) -> list[str]:
    return usage.read_text(f"/proc/{pid}/cmdline").split("\0")[:-1]


def _cpu_seconds(pid: int) -> float:
    fields = usage.read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS if len(fields) > 12 else 0.0

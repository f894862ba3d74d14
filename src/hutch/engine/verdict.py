"""How a run ended, decided from evidence: wait statuses, counters of the kernel, and what was looked at meanwhile."""

from __future__ import annotations

import os
import signal
import time

from ..isolation import mounts, usage
from ..model import Outcome, Plan

SAMPLE_SECONDS = 0.025
_FILES_SECONDS = 0.1
_DISK_SECONDS = 1.0
_SIGNAL_NAMES = {member.value: member.name for member in signal.Signals}


def read_status(status: int) -> tuple[int | None, str | None]:
    """Exit code or name of the signal, from a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return None, _SIGNAL_NAMES.get(number, f"SIG{number}")
    return os.WEXITSTATUS(status), None


def judge(exit_code: int | None, signal_name: str | None, hit: tuple[str, ...]) -> Outcome:
    """The outcome of a run that nobody ended."""
    if exit_code == 0:
        return Outcome.OK
    if exit_code is None and signal_name is None:
        # The whole sandbox vanished: the kernel's memory killer took pid 1, or somebody killed it from outside.
        return Outcome.MEMORY if "memory" in hit else Outcome.KILLED
    if "memory" in hit:
        return Outcome.MEMORY
    if "pids" in hit:
        return Outcome.PIDS
    if signal_name == "SIGXFSZ":
        return Outcome.DISK
    return Outcome.FAILED


def look_for_obeyed(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Files in guarded mounts that tools on the host obey, each with what tells a change."""
    if plan.protected is None:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for path, _ in plan.watched:
        found |= {f"{path}/{name}": seen for name, seen in mounts.look_for_obeyed(path).items()}
    return found


def find_changed(before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Paths that are new or different."""
    return tuple(sorted(path for path, seen in after.items() if before.get(path) != seen))


class Sampler:
    """Looks at what no cgroup counts."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._memory = dict(plan.enforced).get("memory") == "sampled"
        self._disks = [usage.Disk(path, inside) for path, inside in plan.watched]
        now = time.monotonic()
        self._next_disk = now + _DISK_SECONDS
        self._next_files = now
        self.is_needed = self._memory or bool(self._disks)
        self.next_look = now
        self._file_bytes = 0
        self._last_seen: dict[int, str] = {}

    def is_asleep(self) -> bool:
        """Whether no process that was looked at last did anything since, so that all is as it was. Cheap."""
        return bool(self._last_seen) and usage.life_signs(tuple(self._last_seen)) == self._last_seen

    def look(self, now: float, pid: int) -> Outcome | None:
        """The limit that the processes from pid on are past, if it is time to look, and if they are."""
        if not self.is_needed or now < self.next_look or not pid:
            return None
        self.next_look = now + (SAMPLE_SECONDS if self._memory else _DISK_SECONDS)
        pids = usage.tree_pids(pid)
        self._last_seen = usage.life_signs(pids)
        if self._memory:
            used = usage.tree_memory(pids)
            if now >= self._next_files:
                self._next_files = now + _FILES_SECONDS
                self._file_bytes = usage.temporary_bytes(pids, self._plan.temporary)
            if used + self._file_bytes > self._plan.limits.memory_bytes:
                return Outcome.MEMORY
        if self._disks and now >= self._next_disk:
            unnamed = usage.look_at_descriptors(pids).unnamed
            grown = sum(disk.growth(unnamed) for disk in self._disks)
            # A large tree must not take more than a tenth of our time.
            self._next_disk = now + max(_DISK_SECONDS, 10 * (time.monotonic() - now))
            if grown > self._plan.limits.disk_bytes:
                return Outcome.DISK
        return None

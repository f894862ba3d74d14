"""What live sandboxes hold in memory: their processes' share of it, and the kernel's own."""

from __future__ import annotations

import os
from pathlib import Path

_KERNEL = ("Slab", "PageTables", "KernelStack", "Percpu", "Shmem")
"""Of /proc/meminfo, what a sandbox costs outside its processes. Shmem: files of its own that live in memory."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found, pending = [], [pid]
    while pending:
        current = pending.pop()
        found.append(current)
        try:
            for task in Path(f"/proc/{current}/task").iterdir():
                pending += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue  # ended meanwhile
    return found


def own_bytes(pids: list[int]) -> tuple[int, int]:
    """What processes hold, each page shared by n counted as 1/n; and how many would not tell, and count whole."""
    total = hidden = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except OSError:
            try:
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
                hidden += 1
            except OSError:
                continue
    return total, hidden


def kernel_bytes() -> int:
    """What the kernel holds now, for everybody."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in _KERNEL if name in fields)

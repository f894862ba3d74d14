"""What is measured, and what it may cost.

To add a row: an entry in ROWS, and what it does, as a command line in `commands` or as a method in worker.py.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arena import Arena, Identity

PRINT = "print(1)"
RAW = "raw"
COLD, RUN = 3.2, 12.0
LIVE, HIT, VERB = 0.06, 0.10, 6.5
WITH_SLOW_CGROUPS = {COLD: 6.0, RUN: 14.0}


class Row:
    """One line of the table."""

    def __init__(self, name: str, group: str, title: str, budget: float | None = None) -> None:
        self.name = name
        self.group = group
        self.title = title
        self._budget = budget

    def budget(self, *, slow_cgroups: bool) -> float | None:
        """The ratio to raw that it must not be above.

        Args:
            slow_cgroups: sandboxes join cgroups of version 1, which wait for the kernel.
        """
        if slow_cgroups and self._budget in WITH_SLOW_CGROUPS:
            return WITH_SLOW_CGROUPS[self._budget]
        return self._budget


BASELINES = "without hutch"
COMMANDS = "the command"
COLD_STARTS = "a sandbox that has to be started"
WARM_STARTS = "a sandbox that is there"
PEERS = "others"

ROWS = [
    Row(RAW, BASELINES, "bwrap /bin/true (raw)"),
    Row("python", BASELINES, "python, no sandbox"),
    Row("bwrap-python", BASELINES, "python in plain bwrap"),
    Row("jail-python", BASELINES, "python in hutch's jail, nothing around it"),
    Row("version", COMMANDS, "hutch --version", VERB),
    Row("run", COMMANDS, "hutch run 'print(1)'", RUN),
    Row("run-shell", COMMANDS, "hutch run -e shell true", RUN),
    Row("run-workspace", COMMANDS, "hutch run --workspace DIR", RUN),
    Row("run-network", COMMANDS, "hutch run --network full"),
    Row("cold-run", COLD_STARTS, "hutch.run()", COLD),
    Row("cold-pool", COLD_STARTS, "empty pool (async)", COLD),
    Row("cold-sandbox", COLD_STARTS, "sandbox to its first result (async)", COLD),
    Row("cold-sandbox-blocking", COLD_STARTS, "sandbox to its first result", COLD),
    Row("cold-session", COLD_STARTS, "session on disk to its first result (async)", COLD),
    Row("hit", WARM_STARTS, "pool hit (async)", HIT),
    Row("hit-blocking", WARM_STARTS, "pool hit", HIT),
    Row("live", WARM_STARTS, "one more run (async)", LIVE),
    Row("live-rested", WARM_STARTS, "one more run after a pause (async)"),
    Row("live-blocking", WARM_STARTS, "one more run", LIVE),
    Row("live-session", WARM_STARTS, "one more run, session on disk (async)", LIVE),
    Row("live-session-blocking", WARM_STARTS, "one more run, session on disk", LIVE),
    Row("live-bash", WARM_STARTS, "one more run, bash (async)"),
    Row("live-node", WARM_STARTS, "one more run, node (async)"),
    Row("live-exec", WARM_STARTS, "one more /bin/true (async)"),
    Row("live-exec-blocking", WARM_STARTS, "one more /bin/true"),
    Row("live-file", WARM_STARTS, "write and read a file (async)"),
]


def commands(arena: Arena, who: Identity) -> dict[str, list[str]]:
    """The command lines, by row."""
    from arena import HUTCH, PYTHON

    jail = [str(arena.bwrap), "--unshare-all", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for name in ("bin", "lib", "lib64"):
        jail += ["--symlink", f"usr/{name}", f"/{name}"]
    table = {
        RAW: [*jail, "/bin/true"],
        "python": [PYTHON, "-c", PRINT],
        "bwrap-python": [*jail, PYTHON, "-c", PRINT],
        "jail-python": _jail_argv(who),
        "version": [*HUTCH, "--version"],
        "run": [*HUTCH, "run", PRINT],
        "run-shell": [*HUTCH, "run", "-e", "shell", "true"],
        "run-workspace": [*HUTCH, "run", "--workspace", str(who.project), PRINT],
    }
    if _can_network(who):
        table["run-network"] = [*HUTCH, "run", "--network", "full", PRINT]
    return table


def _jail_argv(who: Identity) -> list[str]:
    """What `hutch run` executes, without the command around it and without the cgroup, which must exist first."""
    from arena import HUTCH

    said = who.run([*HUTCH, "plan", "--json", PRINT], check=True)
    argv: list[str] = json.loads(said.stdout)["argv"]
    while "cgroup" in argv:
        at = argv.index("cgroup")
        del argv[at : at + 2]
    return argv


def _can_network(who: Identity) -> bool:
    """Whether an identity may use slirp4netns."""
    if not os.path.exists("/usr/bin/slirp4netns") or not os.path.exists("/dev/net/tun"):
        return False
    return who.is_root or bool(os.stat("/dev/net/tun").st_mode & 0o002)

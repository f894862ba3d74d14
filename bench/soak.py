"""make soak: many runs, some killed at random moments, and then a look at what is left. Never part of the tests."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = int(os.environ.get("HUTCH_SOAK_RUNS", "500"))
HUTCH = [sys.executable, "-m", "hutch"]
PROGRAMS = [
    ["run", "print(1)"],
    ["run", "-e", "shell", "(sleep 60 &) ; echo x"],
    ["run", "import os\nfor _ in range(20): os.fork() or os.setsid()"],
    ["run", "--memory", "32M", "x = bytearray(10**8)"],
    ["run", "while True: print('x' * 1000)"],
]


def leftovers() -> set[str]:
    """Everything of hutch that is on the host now."""
    found = {str(path) for path in Path("/sys/fs/cgroup").rglob("hutch-*-*") if path.is_dir()}
    for place in ("/tmp", "/var/tmp"):
        found |= {str(path) for path in Path(place).glob(".hutch-work-*")}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"/isolation/data/warden-" in path.read_bytes():
                found.add(str(path.parent))
        except OSError:
            continue
    return found


def main() -> int:
    """Run, kill, look."""
    before = leftovers()
    chance = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="hutch-soak-") as project:
        for turn in range(RUNS):
            words = list(chance.choice(PROGRAMS))
            if chance.random() < 0.3:
                words[1:1] = ["--workspace", project]
            child = subprocess.Popen([*HUTCH, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if chance.random() < 0.7:
                time.sleep(chance.random() * 0.25)
                child.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
            child.wait()
            if turn % 50 == 49:
                print(f"{turn + 1} of {RUNS}", flush=True)
        deadline = time.monotonic() + 5
        while leftovers() - before and time.monotonic() < deadline:
            time.sleep(0.1)
        kept = os.listdir(project)
    subprocess.run([*HUTCH, "gc"], check=True)
    left = leftovers() - before
    print("\n".join(f"left: {name}" for name in sorted(left)) or "nothing is left")
    print(f"in the project: {kept or 'nothing'}")
    return 1 if left or kept else 0


if __name__ == "__main__":
    raise SystemExit(main())

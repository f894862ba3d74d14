"""make demo: real code in a real sandbox, each with a line saying what one sees."""

from __future__ import annotations

import os
import shlex
import sys

STEPS = [
    ("Python, in a sandbox that is gone afterwards", ["run", "print('6 * 7 =', 6 * 7)"]),
    ("A shell: another user, another root, no other processes", ["run", "-e", "shell", "id -un; ls /; ps ax | wc -l"]),
    (
        "The network is off: a connection fails at once",
        [
            "run",
            "import socket\ntry: socket.create_connection(('192.0.2.1', 443), 5)\nexcept OSError as e: print(e)",
        ],
    ),
    (
        "A program that eats memory is stopped, and hutch says why (exit code 137)",
        ["run", "--memory", "128M", "hog = []\nwhile True: hog.append(bytearray(10_000_000))"],
    ),
    ("Your home is not there", ["run", "-e", "shell", "ls -A ~ | wc -l; ls /home"]),
]


def main(program: str) -> int:
    """Run every step; fail when one could not be shown."""
    for title, words in STEPS:
        print(f"\n== {title}\n$ hutch {shlex.join(words)}", flush=True)
        status = os.waitstatus_to_exitcode(os.spawnv(os.P_WAIT, program, ["hutch", *words]) << 8)
        print(f"[exit code {status}]", flush=True)
        if status not in (0, 137) or (status == 137) != ("--memory" in words):
            print("the demo could not be shown; this machine may lack something:", flush=True)
            os.spawnv(os.P_WAIT, program, ["hutch", "doctor"])
            return 1
    print("\nEach ran in a fresh sandbox. `hutch doctor` shows the layers; the README the rest.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(os.path.abspath(sys.argv[1])))

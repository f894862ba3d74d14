"""Where the machine cannot isolate, hutch refuses, and names the command that changes that."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from .harness import PYTHON, Hutch

ENTER = """
import ctypes, os, sys
uid, forbid, home, library, *words = sys.argv[1:]
assert ctypes.CDLL(None).unshare(0x10000000) == 0
print("ready", flush=True)
sys.stdin.readline()
if forbid == "yes":
    with open("/proc/sys/user/max_user_namespaces", "w") as setting:
        setting.write("0")
if uid != "0":
    os.setgroups([])
    os.setresgid(*[int(uid)] * 3)
    os.setresuid(*[int(uid)] * 3)
os.execve(sys.executable, [sys.executable, "-m", "hutch", *words], {"HOME": home, "PYTHONPATH": library})
"""


def run_in_a_user_namespace(hutch: Hutch, mapping: str, *, forbid: bool) -> tuple[int, dict[str, str]]:
    """Run hutch in a user namespace, whose settings are not the machine's, and read the error that it prints."""
    place = [str(hutch.uid), "yes" if forbid else "no", str(hutch.home), str(hutch.arena.library)]
    argv = [PYTHON, "-c", ENTER, *place, "run", "--json", "print(1)"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, text=True, **pipes) as child:
        hutch.pids.append(child.pid)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for kind in ("uid", "gid"):
            Path(f"/proc/{child.pid}/{kind}_map").write_text(mapping)
        out, err = child.communicate("go\n", timeout=50)
    assert out, err
    return child.returncode, json.loads(out).get("error", {})


def test_no_user_namespaces_is_refused_with_the_setting_to_change(root: Hutch, user: Hutch) -> None:
    """`root` is here because only root can map more than itself."""
    assert root.is_root
    exit_code, error = run_in_a_user_namespace(user, "0 0 65536", forbid=True)
    assert (exit_code, error["code"]) == (125, "host.userns")
    assert error["hint"] == "sudo sysctl user.max_user_namespaces=15000"


def test_a_user_namespace_around_hutch_is_no_trouble(root: Hutch, user: Hutch) -> None:
    assert root.is_root
    assert run_in_a_user_namespace(user, "0 0 65536", forbid=False) == (0, {})


def test_a_root_that_cannot_become_another_user_is_refused(root: Hutch) -> None:
    exit_code, error = run_in_a_user_namespace(root, "0 0 1", forbid=False)
    assert (exit_code, error["code"]) == (125, "host.drop")
    assert "ordinary user" in error["hint"]

"""What the program can see of the host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .harness import Hutch

READ = """
import sys
try:
    print("READ", open({path!r}, "rb").read(200))
except OSError as error:
    print("refused", error.strerror)
"""


def test_a_program_runs_and_its_output_comes_back(hutch: Hutch) -> None:
    ran = hutch.run("import sys; print(6 * 7); print('oops', file=sys.stderr)")
    assert (ran.outcome, ran.exit_code, ran.out, ran.err) == ("ok", 0, "42\n", "oops\n")


def test_cannot_read_host_home(hutch: Hutch) -> None:
    secret = hutch.write(hutch.home / "secret.txt", "the key")
    assert secret.read_text() == "the key"
    assert "refused No such file" in hutch.run(READ.format(path=str(secret))).out
    secret.unlink()


@pytest.mark.parametrize("path", ["/etc/shadow", "/root", "/var", "/sys", "/boot", "/opt", "/srv", "/mnt", "/nix"])
def test_cannot_see(hutch: Hutch, path: str) -> None:
    # /var holds nothing but a link that makes temporary files land in the sandbox's own /tmp
    ran = hutch.run(f"import os; print(os.path.exists({path!r}) and sorted(os.listdir({path!r})))")
    assert ran.out.strip() == ("['tmp']" if path == "/var" else "False")


def test_the_root_directory_holds_only_what_the_sandbox_is_made_of(hutch: Hutch) -> None:
    names = set(hutch.run("import os; print(*os.listdir('/'))").out.split())
    system = {"bin", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "tmp", "usr"}
    assert {"usr", "workspace"} <= names <= {*system, "var", "workspace"}


def test_host_users_are_not_listed(hutch: Hutch) -> None:
    ran = hutch.run("import pwd; print(*sorted(entry.pw_name for entry in pwd.getpwall()))")
    assert ran.out.split() == ["nobody", "root", "sandbox"]


def test_cannot_see_host_processes(hutch: Hutch) -> None:
    ran = hutch.run("import os; print(*sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))")
    assert ran.out.split() == ["1", "2"]


def test_cannot_signal_host_processes(hutch: Hutch) -> None:
    os.kill(os.getpid(), 0)
    ran = hutch.run(f"import os; os.kill({os.getpid()}, 0)")
    assert "ProcessLookupError" in ran.err


def test_host_name_is_hidden(hutch: Hutch) -> None:
    assert hutch.run("import socket; print(socket.gethostname())").out == "hutch\n"


def test_pid_1_tells_nothing_of_the_host(hutch: Hutch, project: Path) -> None:
    ran = hutch.shell("tr '\\0' ' ' </proc/1/cmdline; cat /proc/1/cgroup /proc/1/status", "--workspace", project)
    assert "/run/hutch/init" in ran.out
    assert str(project) not in ran.out
    assert str(hutch.arena.root) not in ran.out


def test_a_writable_project_is_mounted_without_its_host_path_in_mountinfo(hutch: Hutch, project: Path) -> None:
    ran = hutch.run("print(open('/proc/self/mountinfo').read())", "--workspace", project)
    assert " /workspace " in ran.out
    assert str(project) not in ran.out


@pytest.mark.parametrize("name", ["environ", "mem", "maps", "fd", "root", "cwd", "exe", "ns/mnt", "map_files"])
def test_pid_1_cannot_be_looked_into(hutch: Hutch, name: str) -> None:
    code = f"""
import os
path = "/proc/1/{name}"
for look in (lambda: open(path, "rb"), lambda: os.listdir(path), lambda: os.readlink(path)):
    try:
        print("SAW", look())
    except OSError as error:
        print(error.strerror)
"""
    ran = hutch.run(code)
    assert "SAW" not in ran.out
    assert "Permission denied" in ran.out or "Operation not permitted" in ran.out
    own = hutch.run(code.replace("/proc/1/", "/proc/self/"))
    assert "SAW" in own.out, "the same look at oneself works"


def test_is_an_ordinary_uid_inside_without_groups_or_capabilities(hutch: Hutch) -> None:
    code = """
import os
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(os.getresuid(), os.getresgid(), os.getgroups())
print({status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")})
print(status["NoNewPrivs"].strip(), status["Seccomp"].strip())
"""
    ran = hutch.run(code)
    assert ran.out.splitlines() == ["(1000, 1000, 1000) (1000, 1000, 1000) []", "{'0000000000000000'}", "1 2"]


def test_all_namespaces_are_its_own(hutch: Hutch) -> None:
    kinds = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"]
    ran = hutch.run(f"import os\nfor kind in {kinds}: print(os.readlink('/proc/self/ns/' + kind))")
    ours = [os.readlink(f"/proc/self/ns/{kind}") for kind in kinds]
    assert not set(ran.out.split()) & set(ours)
    assert len(ran.out.split()) == len(kinds)


def test_never_runs_as_host_root(hutch: Hutch) -> None:
    with hutch.running("print('ready'); import time; time.sleep(60)") as live:
        seen = [Path(f"/proc/{pid}/status").read_text() for pid in live.inside()]
    assert seen
    uids = {tuple(line.split()[1:]) for text in seen for line in text.splitlines() if line.startswith(("Uid:", "Gid:"))}
    groups = {line.split(":")[1].strip() for text in seen for line in text.splitlines() if line.startswith("Groups:")}
    assert uids == {(str(hutch.host_uid),) * 4}
    assert groups == {""}

"""What a run may use up, and that the limit it met is named from evidence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .harness import Hutch, need

MEMORY_BOMB = """
import time
kept = []
while True:
    kept.append(bytearray(b"x") * (4 << 20))
    time.sleep(0.002)
"""
FORK_BOMB = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60); os._exit(0)
        made += 1
except OSError as error:
    print(made, error.errno, flush=True)
    raise SystemExit(1)
"""
THREADS = """
import threading, time
made = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); made += 1
except RuntimeError:
    print(made, flush=True)
    import os; os._exit(1)
"""
FILL = """
import os
path, total = {path!r}, 0
try:
    for index in range(400):
        with open(f"{{path}}/{{index}}", "wb") as file:
            for _ in range(4):
                total += file.write(bytes(1 << 20))
except OSError as error:
    print(total >> 20, error.errno)
"""


def write_config(hutch: Hutch, text: str) -> Path:
    return hutch.write(hutch.home / "limits.toml", f"[defaults]\n{text}\n")


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_memory_bomb_is_named(hutch: Hutch) -> None:
    ran = hutch.run(MEMORY_BOMB, "--memory", "64")
    assert (ran.outcome, ran.exit_code, ran.json["limits_hit"]) == ("memory", 137, ["memory"])
    assert "64 MiB" in ran.stderr
    assert "--memory" in ran.stderr


def test_memory_of_many_processes_counts_together(hutch: Hutch) -> None:
    code = "import os, time\nfor _ in range(6):\n"
    code += "    if os.fork() == 0:\n        kept = b'x' * (30 << 20); time.sleep(30)\n"
    ran = hutch.run(code + "time.sleep(0.5)\nos.wait(); raise SystemExit(1)", "--memory", "96", "--timeout", "20")
    assert ran.outcome == "memory"


def test_memory_of_shared_mappings_counts(hutch: Hutch) -> None:
    code = "import mmap, time\nshared = mmap.mmap(-1, 200 << 20)\n"
    code += "for at in range(0, 200 << 20, 4096): shared[at] = 1\ntime.sleep(1)"
    assert hutch.run(code, "--memory", "96").outcome == "memory"


def test_memory_in_files_that_nobody_mapped_counts(hutch: Hutch) -> None:
    """An anonymous file is memory that shows in no process's own account."""
    code = "import os, time\nfds = [os.memfd_create('x') for _ in range(4)]\n"
    code += "for fd in fds:\n    for _ in range(100): os.write(fd, bytes(1 << 20))\n"
    code += "time.sleep(1.5); raise SystemExit(7)"
    ran = hutch.run(code, "--memory", "96")
    assert ran.outcome == "memory"


def test_memory_in_temporary_files_counts(hutch: Hutch) -> None:
    code = "import time\nfor path in ('/tmp', '/home/sandbox', '/workspace'):\n"
    code += "    open(path + '/x', 'wb').write(bytes(90 << 20))\n"
    ran = hutch.run(code + "time.sleep(1.5); raise SystemExit(7)", "--memory", "96")
    assert ran.outcome == "memory"


def test_memory_is_not_named_without_evidence(hutch: Hutch) -> None:
    ran = hutch.run("raise MemoryError")
    assert (ran.outcome, ran.json["exit_code"], ran.json["limits_hit"]) == ("failed", 1, [])


def test_a_grandchild_killed_for_memory_is_evidence_but_not_the_programs_end(root: Hutch) -> None:
    need("cgroup")
    code = f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {MEMORY_BOMB!r}]).returncode)"
    ran = root.run(code, "--memory", "64")
    assert ran.json["limits_hit"] == ["memory"]
    # cgroup v2 ends the sandbox as a whole, v1 one process
    assert (ran.outcome, ran.out) in (("ok", "-9\n"), ("memory", ""))


def test_what_stays_within_memory_is_left_alone(hutch: Hutch) -> None:
    ran = hutch.run("x = b'x' * (60 << 20); import time; time.sleep(0.3); print(len(x))", "--memory", "128")
    assert (ran.outcome, ran.out) == ("ok", f"{60 << 20}\n")


def test_address_space_may_be_reserved_freely(hutch: Hutch) -> None:
    """Node, Java and Go reserve far more than they use."""
    ran = hutch.run("import mmap; m = mmap.mmap(-1, 8 << 30, flags=0x4022, prot=0); print(len(m))", "--memory", "128")
    assert ran.out == f"{8 << 30}\n"


# ---- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [FORK_BOMB, THREADS], ids=["processes", "threads"])
def test_fork_bomb_is_contained(hutch: Hutch, code: str) -> None:
    ran = hutch.run(code, "--pids", "24")
    made = int(ran.out.split()[0])
    assert 20 <= made <= 24
    assert ran.exit_code == 1, "the program's own"
    if ran.json["enforced"]["pids"] == "tree":
        assert (ran.outcome, ran.json["limits_hit"]) == ("pids", ["pids"])
        assert "--pids" in ran.stderr
    else:
        assert ran.outcome in ("failed", "pids")


def test_a_classic_fork_bomb_ends_with_the_run(hutch: Hutch) -> None:
    ran = hutch.shell("bomb() { bomb | bomb & }; bomb; sleep 30", "--pids", "32", "--timeout", "2")
    assert ran.outcome in ("timeout", "pids")
    assert ran.json["duration_ms"] < 20_000


def test_a_program_that_copes_with_refused_processes_is_ok_and_the_evidence_stays(root: Hutch) -> None:
    need("cgroup")
    ran = root.run(FORK_BOMB.replace("raise SystemExit(1)", "os._exit(0)"), "--pids", "16")
    assert (ran.outcome, ran.json["limits_hit"]) == ("ok", ["pids"])


def test_the_limit_of_one_sandbox_does_not_count_anothers_processes(hutch: Hutch) -> None:
    many = "import os, time\nfor _ in range(14):\n    if os.fork() == 0: time.sleep(60)\nprint('ready'); time.sleep(60)"
    with hutch.running(many, "--pids", "20"):
        assert hutch.run(many.replace("print('ready'); time.sleep(60)", ""), "--pids", "20").outcome == "ok"


# ---- processor and time ---------------------------------------------------------------------------------------------

BURN = """
import os, time
end = time.monotonic() + 2.0
pids = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        while time.monotonic() < end: pass
        os._exit(0)
    pids.append(pid)
for pid in pids: os.waitpid(pid, 0)
spent = os.times()
print(spent.children_user + spent.children_system)
"""


def test_two_burners_share_one_cpu(hutch: Hutch) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one CPU would hide the limit")
    spent = float(hutch.run(BURN).out)
    assert spent <= 2.5


def test_half_a_cpu_is_half_a_cpu(root: Hutch) -> None:
    need("cgroup")
    assert float(root.run(BURN, "--cpus", "0.5").out) <= 1.4


# ---- disk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "size"),
    [("/tmp", 16), ("/home/sandbox", 16), ("/workspace", 16), ("/dev/shm", 64), ("/var/tmp", 16)],
)
def test_disk_is_bounded(hutch: Hutch, path: str, size: int) -> None:
    ran = hutch.run(FILL.format(path=path), "--tmp", "16")
    written, error = map(int, ran.out.split())
    assert error == 28, "no space left"
    assert size - 4 <= written <= size


@pytest.mark.parametrize("path", ["/", "/dev", "/etc", "/run", "/run/hutch", "/proc", "/home", "/usr", "/var"])
def test_no_other_directory_can_be_filled(hutch: Hutch, path: str) -> None:
    ran = hutch.run(FILL.format(path=path))
    assert ran.out.split()[0] == "0"


def test_many_empty_files_are_bounded(hutch: Hutch) -> None:
    """Each costs the kernel memory, which no size of the filesystem counts."""
    code = """
import os
made = 0
try:
    for made in range(400_000):
        os.close(os.open(f"/tmp/{made:0200d}", os.O_CREAT))
except OSError as error:
    print(made, error.errno)
"""
    ran = hutch.run(code, "--memory", "64", "--tmp", "16", "--timeout", "25")
    assert ran.outcome == "memory" or ran.out.split()[1:] in (["28"], ["12"]), "killed, or no space left"


def test_a_writable_mount_cannot_grow_without_end(hutch: Hutch, project: Path) -> None:
    config = write_config(hutch, "disk_mb = 24")
    code = "import time\nfor i in range(60):\n    open(f'/workspace/{i}', 'wb').write(bytes(4 << 20)); time.sleep(0.1)"
    ran = hutch.run(code, "--workspace", project, "--config", config)
    assert (ran.outcome, ran.exit_code, ran.json["limits_hit"]) == ("disk", 137, ["disk"])
    assert "disk" in ran.stderr


def test_files_without_a_name_count_too(hutch: Hutch, project: Path) -> None:
    """What is unlinked and still open fills the disk like anything else."""
    config = write_config(hutch, "disk_mb = 24")
    code = "import os, time\nkept = []\nfor i in range(40):\n    kept.append(open('/workspace/x', 'wb'))\n"
    code += "    os.unlink('/workspace/x'); kept[-1].write(bytes(4 << 20)); kept[-1].flush(); time.sleep(0.1)"
    ran = hutch.run(code, "--workspace", project, "--config", config)
    assert ran.outcome == "disk"


def test_many_small_files_in_a_writable_mount_are_bounded(hutch: Hutch, project: Path) -> None:
    config = write_config(hutch, "disk_mb = 8")
    code = "import time\nfor i in range(40):\n"
    code += "    for j in range(400): open(f'/workspace/{i}-{j}', 'w').write('x')\n    time.sleep(0.15)"
    ran = hutch.run(code, "--workspace", project, "--config", config)
    assert ran.outcome == "disk"


def test_one_file_is_bounded(hutch: Hutch, project: Path) -> None:
    config = write_config(hutch, "file_mb = 4")
    ran = hutch.run("open('big', 'wb').write(bytes(9 << 20))", "--workspace", project, "--config", config)
    assert ran.outcome == "failed"
    assert "File too large" in ran.err
    assert (project / "big").stat().st_size <= 4 << 20
    killed = hutch.shell("head -c 9000000 /dev/zero > big", "--workspace", project, "--config", config)
    assert "File size limit" in killed.err or killed.outcome == "disk"


def test_what_was_there_before_does_not_count(hutch: Hutch, project: Path) -> None:
    hutch.write(project / "old", bytes(40 << 20))
    config = write_config(hutch, "disk_mb = 16")
    code = "open('new', 'wb').write(bytes(2 << 20)); import time; time.sleep(1.5)"
    assert hutch.run(code, "--workspace", project, "--config", config).outcome == "ok"


# ---- output ---------------------------------------------------------------------------------------------------------


def test_output_flood_is_stopped_and_marked(hutch: Hutch) -> None:
    code = "import sys\nprint('the beginning')\nwhile True: sys.stdout.write('x' * 65536)"
    ran = hutch.run(code, "--max-output", "3")
    assert (ran.outcome, ran.exit_code, ran.json["truncated"]) == ("output", 137, True)
    assert ran.out.startswith("the beginning\n")
    assert "bytes dropped" in ran.out
    assert len(ran.out) < 1_200_000
    assert "--max-output" in ran.stderr


def test_long_output_keeps_head_and_tail(hutch: Hutch) -> None:
    code = "print('head'); print(('y' * 99 + '\\n') * 30_000, end=''); print('tail')"
    ran = hutch.run(code)
    assert (ran.outcome, ran.exit_code, ran.json["truncated"]) == ("ok", 0, True)
    assert ran.out.startswith("head\n")
    assert ran.out.endswith("tail\n")
    kept = ran.out.partition("\n[... ")[0] + ran.out.partition(" dropped ...]\n")[2]
    assert len(kept) + ran.json["dropped_bytes"] == 3_000_010


def test_a_flood_on_both_streams_is_counted_together(hutch: Hutch) -> None:
    code = "import sys\nfor _ in range(200): sys.stdout.write('x' * 9999); sys.stderr.write('y' * 9999)"
    assert hutch.run(code, "--max-output", "2").outcome == "output"
    assert hutch.run(code, "--max-output", "5").outcome == "ok"


def test_streamed_output_stops_at_the_limit(hutch: Hutch) -> None:
    code = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
    ran = hutch.command("run", "--max-output", "2", code)
    assert ran.exit_code == 137
    assert len(ran.stdout) == 2 << 20
    assert "stopped after 2 MiB of output" in ran.stderr


def test_invalid_utf8_is_replaced(hutch: Hutch) -> None:
    ran = hutch.run("import sys; sys.stdout.buffer.write(b'a\\xff\\xfe\\x00b\\xe2\\x82')")
    assert (ran.outcome, ran.out) == ("ok", "a\ufffd\ufffd\0b\ufffd")


def test_without_json_bytes_pass_unchanged(hutch: Hutch) -> None:
    with hutch.start("run", "import sys; sys.stdout.buffer.write(bytes(range(256)))", text=False, errors=None) as child:
        out, _ = child.communicate(timeout=30)
    assert out == bytes(range(256))


# ---- what is said about limits --------------------------------------------------------------------------------------


def test_enforced_values_are_truthful(hutch: Hutch) -> None:
    said = hutch.run("print(1)", "--memory", "200", "--pids", "50").json["enforced"]
    assert {"timeout", "memory", "pids", "cpus", "tmp", "disk", "output"} <= set(said)
    assert set(said.values()) <= {"tree", "sampled", "process"}
    with hutch.running("print('ready'); import time; time.sleep(60)", "--memory", "200", "--pids", "50") as live:
        groups = Path(f"/proc/{live.inside()[0]}/cgroup").read_text()
        limits = Path(f"/proc/{live.inside()[0]}/limits").read_text()
        files = {path.name: path.read_text().strip() for path in cgroup_files(groups)}
    if said["memory"] == "tree":
        assert str(200 << 20) in (files.get("memory.limit_in_bytes"), files.get("memory.max"))
    else:
        assert said["memory"] == "sampled"
        assert "Max data size" in limits
        assert "unlimited" not in next(line for line in limits.splitlines() if line.startswith("Max data size"))
    assert (said["pids"] == "tree") == ("pids.max" in files)
    assert (said["cpus"] == "tree") == bool({"cpu.max", "cpu.cfs_quota_us"} & set(files))


def cgroup_files(groups: str) -> list[Path]:
    """The control files of the sandbox's own cgroups, whichever version holds them."""
    wanted = ("memory.limit_in_bytes", "memory.max", "pids.max", "cpu.max", "cpu.cfs_quota_us")
    lines = [line.split(":", 2) for line in groups.splitlines() if "/hutch-" in line and "supervisors" not in line]
    found = [Path(f"/sys/fs/cgroup/{controller}{path}/{name}") for _, controller, path in lines for name in wanted]
    return [path for path in found if path.exists()]


def test_root_has_limits_for_the_whole_tree(root: Hutch) -> None:
    need("cgroup")
    said = root.run("print(1)", "--strict-limits").json["enforced"]
    assert {said[name] for name in ("memory", "pids", "cpus", "timeout")} == {"tree"}


def test_strict_limits_are_an_error_where_they_do_not_hold(user: Hutch) -> None:
    if user.run("print(1)").json["enforced"]["memory"] == "tree":
        assert user.run("print(1)", "--strict-limits").outcome == "ok"
        return
    ran = user.run("print(1)", "--strict-limits")
    assert (ran.exit_code, ran.outcome) == (125, "host.limits")
    assert "Delegate=yes" in ran.json["error"]["hint"]


def test_open_files_are_bounded(hutch: Hutch) -> None:
    code = "kept = []\ntry:\n    while True: kept.append(open('/dev/null'))\n"
    code += "except OSError as error: print(len(kept), error.errno)"
    made, error = map(int, hutch.run(code).out.split())
    assert (made < 1024, error) == (True, 24)


def test_limits_cannot_be_raised_from_inside(hutch: Hutch) -> None:
    code = """
import resource
for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CORE", "RLIMIT_MEMLOCK"):
    try:
        resource.setrlimit(getattr(resource, name), (resource.RLIM_INFINITY,) * 2)
        print("RAISED", name)
    except (ValueError, OSError):
        print("refused")
"""
    assert hutch.run(code).out == "refused\n" * 5


def test_no_core_is_dumped(hutch: Hutch, project: Path) -> None:
    ran = hutch.run("import os; os.abort()", "--workspace", project)
    assert ran.json["signal"] == "SIGABRT"
    assert os.listdir(project) == []


CLOSED_DIRECTORY = """
import os
os.mkdir("d"); os.chmod("d", 0o300); os.chdir("d")
for n in range(40):
    with open(str(n), "wb") as file: file.write(bytes(10**7))
import time; time.sleep(5)
"""


def test_a_directory_closed_to_our_look_is_no_place_to_hide(hutch: Hutch, project: Path) -> None:
    ran = hutch.run(CLOSED_DIRECTORY, "--workspace", project, "--disk", "100M")
    assert ran.outcome == "disk"
    (project / "d").chmod(0o700)


def test_nor_is_the_mounted_directory_itself(hutch: Hutch, project: Path) -> None:
    code = "import os; os.chmod('.', 0o300)\n" + CLOSED_DIRECTORY
    assert hutch.run(code, "--workspace", project, "--disk", "100M").outcome == "disk"
    project.chmod(0o700)
    (project / "d").chmod(0o700)


FORGOTTEN_PAGES = """
import mmap, time
kept = []
for _ in range(30):
    area = mmap.mmap(-1, 16 << 20)
    area.write(b"x" * (16 << 20))
    area.madvise(mmap.MADV_DONTNEED)
    kept.append(area)
time.sleep(5)
"""


def test_shared_pages_that_nobody_maps_are_counted(hutch: Hutch) -> None:
    assert hutch.run(FORGOTTEN_PAGES, "--memory", "96M").outcome == "memory"


CLOSED_PROCESS = """
import ctypes, os, time
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
kept = [os.memfd_create("x") for _ in range(10)]
for fd in kept: os.write(fd, bytes(20 << 20))
time.sleep(3)
"""


def test_a_process_that_lets_nobody_look_hides_nothing(hutch: Hutch) -> None:
    assert hutch.run(CLOSED_PROCESS, "--memory", "96M").outcome == "memory"

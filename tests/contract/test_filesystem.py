"""What the program can write, and what may be mounted."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import PYTHON, Hutch, need, picture

TRY_WRITE = """
import sys
for path in sys.stdin.read().split():
    try:
        open(path, "w").write("x")
        print(path, "WRITTEN")
    except OSError as error:
        print(path, error.strerror)
"""
SYSTEM_FILES = [
    "/new", "/usr/new", "/usr/bin/new", "/etc/new", "/etc/passwd", "/etc/resolv.conf", "/bin/new", "/lib/new",
    "/run/new", "/run/hutch/init", "/run/hutch/main.py", "/dev/new", "/dev/pts/new", "/home/new", "/var/new",
    "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger",
    "/proc/1/oom_score_adj", "/proc/kcore", "/proc/sys/kernel/modprobe", "/proc/sys/net/ipv4/ip_forward",
]  # fmt: skip
GUEST_SYSTEM = [
    "/usr", "/usr/local", "/etc", "/etc/ssl", "/bin", "/proc", "/proc/sys", "/dev", "/dev/shm", "/run", "/run/hutch",
    "/tmp", "/tmp/x", "/var", "/lib", "/sbin", "/root", "/nix", "/sys", "/boot", "/home", "/home/other",
]  # fmt: skip


@pytest.fixture
def place(hutch: Hutch) -> Iterator[Path]:
    """A directory to make mount sources in."""
    path = hutch.home / "place"
    path.mkdir()
    hutch.give(path)
    yield path
    shutil.rmtree(path)


def test_system_files_cannot_be_written(hutch: Hutch) -> None:
    ran = hutch.run(TRY_WRITE, "--stdin", stdin=" ".join(SYSTEM_FILES))
    answers = dict(line.split(" ", 1) for line in ran.out.splitlines())
    assert set(answers) == set(SYSTEM_FILES)
    assert set(answers.values()) <= {
        "Read-only file system", "Permission denied", "No such file or directory", "Operation not permitted",
    }, answers  # fmt: skip


@pytest.mark.parametrize("directory", ["/workspace", "/home/sandbox", "/tmp", "/var/tmp", "/dev/shm"])
def test_own_directories_can_be_written_and_start_empty(hutch: Hutch, directory: str) -> None:
    code = f"import os; print(os.listdir({directory!r})); open({directory!r} + '/x', 'w').write('y')"
    for _ in range(2):
        ran = hutch.run(code)
        assert (ran.outcome, ran.out) == ("ok", "[]\n")


def test_the_working_directory_is_the_workspace(hutch: Hutch) -> None:
    assert hutch.run("import os; print(os.getcwd())").out == "/workspace\n"


def test_mounts_cannot_be_changed_from_inside(hutch: Hutch) -> None:
    commands = "'mount -o remount,rw /usr' 'umount /proc' 'mount -t tmpfs x /tmp'"
    ran = hutch.shell(f"for command in {commands}; do $command; echo $?; done")
    assert "0" not in ran.out.split()
    assert len(ran.out.split()) == 3
    assert ran.err


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o6755])
@pytest.mark.parametrize("mounted", [False, True], ids=["own", "host"])
def test_a_setuid_file_cannot_be_made(hutch: Hutch, place: Path, mode: int, mounted: bool) -> None:
    code = f"""
import os
open("/workspace/tool", "w").close()
os.chmod("/workspace/tool", 0o755)
for change in (
    lambda: os.chmod("/workspace/tool", {mode}),
    lambda: os.fchmod(os.open("/workspace/tool", os.O_RDWR), {mode}),
    lambda: os.open("/workspace/other", os.O_CREAT | os.O_WRONLY, {mode}),
):
    try:
        change()
    except PermissionError:
        print("refused")
print([oct(os.stat("/workspace/" + name).st_mode & 0o6000) for name in os.listdir("/workspace")])
"""
    ran = hutch.run(code, *(("--workspace", place) if mounted else ()))
    assert ran.outcome == "ok", ran.err
    assert ran.out.count("refused") >= 2
    assert not any(path.stat().st_mode & 0o6000 for path in place.iterdir())


def test_setuid_programs_gain_nothing(hutch: Hutch) -> None:
    ran = hutch.run("print([line for line in open('/proc/mounts') if 'nosuid' not in line])")
    assert ran.out == "[]\n"


# ---- read-only mounts -----------------------------------------------------------------------------------------------


def test_a_read_only_project_is_readable_and_not_writable(hutch: Hutch, place: Path) -> None:
    hutch.write(place / "kept.txt", "kept")
    before = picture(place)
    script = "cat /project/kept.txt; rm -rf /project/kept.txt; echo x >/project/kept.txt; echo x >/project/new; true"
    ran = hutch.shell(script, "--project", place)
    assert ran.out == "kept"
    assert ran.err.count("Read-only file system") == 3
    assert picture(place) == before


def test_a_read_only_mount_cannot_be_made_writable(hutch: Hutch, place: Path) -> None:
    ran = hutch.shell("mount -o remount,rw /data; echo x > /data/new", "--mount", f"{place}:/data")
    assert ran.outcome == "failed"
    assert "Read-only file system" in ran.err
    assert list(place.iterdir()) == []


def test_a_single_file_can_be_mounted(hutch: Hutch, place: Path) -> None:
    file = hutch.write(place / "one.txt", "just this")
    hutch.write(place / "two.txt", "not this")
    ran = hutch.shell("cat /data.txt; ls /; echo x >> /data.txt", "--mount", f"{file}:/data.txt")
    assert ran.out.startswith("just this")
    assert "Read-only file system" in ran.err
    assert "two.txt" not in ran.out


def test_a_file_of_mode_0600_below_a_closed_directory_can_be_mounted_by_its_owner(hutch: Hutch, place: Path) -> None:
    closed = hutch.write(place / "closed" / "one.txt", "just this").parent
    (closed / "one.txt").chmod(0o600)
    closed.chmod(0o700)
    assert hutch.shell("cat /data/one.txt", "--mount", f"{closed}:/data").out == "just this"


# ---- writable mounts ------------------------------------------------------------------------------------------------


def test_new_files_belong_to_the_owner_of_the_directory(hutch: Hutch, project: Path) -> None:
    script = "mkdir -p a/b; echo x > a/b/c; ln -s c a/b/l; mkfifo a/p; stat -c %u a a/b/c"
    ran = hutch.shell(script, "--workspace", project)
    assert (ran.outcome, ran.out) == ("ok", "1000\n1000\n")
    owners = {(path.lstat().st_uid, path.lstat().st_gid) for path in (*project.rglob("*"),)}
    assert len(list(project.rglob("*"))) == 5
    assert owners == {(hutch.uid, hutch.gid)}


def test_root_writes_a_users_directory_as_that_user(root: Hutch, user: Hutch) -> None:
    need("idmap", "overlay")
    theirs = user.write(user.home / "theirs" / "old.txt", "old").parent
    ran = root.shell("cat old.txt; echo new > new.txt; rm old.txt", "--workspace", theirs)
    info = (theirs / "new.txt").stat()
    names = os.listdir(theirs)
    shutil.rmtree(theirs)
    assert (ran.outcome, ran.out, names) == ("ok", "old", ["new.txt"])
    assert (info.st_uid, info.st_gid) == (user.uid, user.gid)


def test_root_can_mount_directories_of_two_owners_at_once(root: Hutch, user: Hutch) -> None:
    need("idmap", "overlay")
    ours = root.write(root.home / "two" / "old.txt", "root's").parent
    theirs = user.write(user.home / "two" / "old.txt", "user's").parent
    script = "cat /a/old.txt /b/old.txt; echo x > /a/new; echo x > /b/new"
    ran = root.shell(script, "--mount", f"{ours}:/a:rw", "--mount", f"{theirs}:/b:rw")
    owners = [path.stat().st_uid for path in (ours / "new", theirs / "new") if path.exists()]
    for path in (ours, theirs):
        shutil.rmtree(path)
    assert ran.outcome == "ok", ran
    assert ran.out == "root'suser's"
    assert owners == [0, user.uid]


def test_a_file_of_another_owner_in_a_writable_mount_stays_out_of_reach(root: Hutch, user: Hutch) -> None:
    need("idmap", "overlay")
    theirs = user.write(user.home / "mixed" / "own.txt", "own").parent
    secret = theirs / "secret.txt"
    secret.write_text("root's own")
    secret.chmod(0o600)
    ran = root.shell("cat secret.txt; echo x >> secret.txt; true", "--workspace", theirs)
    content = secret.read_text()
    shutil.rmtree(theirs)
    assert content == "root's own"
    assert "root's own" not in ran.out
    assert ran.err.count("Permission denied") == 2


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guest", GUEST_SYSTEM)
def test_nothing_is_mounted_over_the_sandbox_itself(hutch: Hutch, place: Path, guest: str) -> None:
    ran = hutch.run("print(1)", "--mount", f"{place}:{guest}")
    assert (ran.exit_code, ran.outcome) == (2, "spec.guest-system")
    assert "mount" in ran.json["error"]["hint"]


@pytest.mark.parametrize("guest", ["/data/../etc", "data", "/data/", "//etc", "/data//x", "/./etc", "/", ""])
def test_a_guest_path_that_is_not_plain_is_refused(hutch: Hutch, place: Path, guest: str) -> None:
    ran = hutch.run("print(1)", "--mount", f"{place}:{guest}")
    assert ran.exit_code == 2
    assert ran.outcome in ("spec.guest-path", "spec.mount", "spec.value", "spec.guest-system")
    assert ran.json["error"]["hint"]


@pytest.mark.parametrize("flag", ["--mount", "--project", "--workspace"])
def test_a_host_path_with_dots_is_refused(hutch: Hutch, place: Path, flag: str) -> None:
    words = f"{place}/../place" + (":/data" if flag == "--mount" else "")
    ran = hutch.run("print(1)", flag, words)
    assert (ran.exit_code, ran.outcome) == (2, "spec.host-path")


@pytest.mark.parametrize("where", ["itself", "above", "dangling"])
@pytest.mark.parametrize("suffix", ["", ":rw"])
def test_planted_symlink_is_refused(hutch: Hutch, place: Path, where: str, suffix: str) -> None:
    hutch.write(place / "real" / "inner" / "secret", "s")
    link = place / "link"
    link.symlink_to(place / ("nothing" if where == "dangling" else "real"))
    source = link / "inner" if where == "above" else link
    ran = hutch.run("print(1)", "--mount", f"{source}:/data{suffix}")
    assert (ran.exit_code, ran.outcome) == (2, "mount.symlink")
    if where != "dangling":
        assert str(place / "real") in ran.json["error"]["hint"]
        plain = hutch.run("print(1)", "--mount", f"{str(source).replace('link', 'real')}:/data{suffix}")
        assert plain.outcome == "ok"


@pytest.mark.parametrize("kind", ["socket", "fifo", "device"])
def test_a_source_that_is_no_file_or_directory_is_refused(hutch: Hutch, place: Path, kind: str) -> None:
    source = place / "thing"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(source))
    elif kind == "fifo":
        os.mkfifo(source)
    else:
        need("root")
        os.mknod(source, 0o020666, os.makedev(1, 3))
    ran = hutch.run("print(1)", "--mount", f"{source}:/data")
    assert (ran.exit_code, ran.outcome) == (2, "mount.kind")


@pytest.mark.parametrize("source", ["/proc", "/sys", "/dev", "/proc/self", "/sys/kernel", "/dev/shm", "/run"])
@pytest.mark.parametrize("suffix", ["", ":rw"])
def test_the_hosts_kernel_devices_and_services_are_never_shown(hutch: Hutch, source: str, suffix: str) -> None:
    ran = hutch.run("print(1)", "--mount", f"{source}:/data{suffix}")
    assert ran.exit_code == 2
    assert ran.outcome in ("mount.system", "mount.symlink")


def test_the_whole_machine_is_not_mounted(hutch: Hutch) -> None:
    for suffix in ("", ":rw"):
        ran = hutch.run("print(1)", "--mount", f"/:/data{suffix}")
        assert (ran.exit_code, ran.outcome) == (2, "mount.whole-machine")


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["home", "above", "far-above"])
def test_a_home_is_not_writable_without_saying_so(hutch: Hutch, depth: int) -> None:
    source = [hutch.home, *hutch.home.parents][depth]
    ran = hutch.run("print(1)", "--mount", f"{source}:/data:rw")
    assert (ran.exit_code, ran.outcome) == (2, "mount.home")
    assert "--unsafe-writable-home" in ran.json["error"]["hint"]


def test_an_unsafe_switch_is_printed_in_the_result(hutch: Hutch, place: Path) -> None:
    ran = hutch.run("print(1)", "--unsafe-writable-home", "--workspace", place)
    assert ran.json["unsafe"] == ["unsafe_writable_home"]
    assert "weaker isolation" in ran.stderr
    assert hutch.run("print(1)").json["unsafe"] == []


@pytest.mark.parametrize(
    "inner", [".config/hutch", ".cache/hutch", ".local/share/hutch", ".config", ".cache", ".local"]
)
def test_hutchs_own_files_are_never_writable(hutch: Hutch, inner: str) -> None:
    """A configuration names mounts: who can write it is out of the sandbox at the next run."""
    made = [hutch.home / name for name in (".config", ".local", ".local/share")]
    target = hutch.home / inner
    for path in (*made, target):
        path.mkdir(exist_ok=True)
        hutch.give(path)
    ran = hutch.run("print(1)", "--mount", f"{target}:/data:rw")
    for path in made[:2]:
        shutil.rmtree(path)
    assert (ran.exit_code, ran.outcome) == (2, "mount.private")


def test_two_mounts_cannot_cover_each_other(hutch: Hutch, place: Path) -> None:
    for guests in (("/data", "/data"), ("/data", "/data/inner"), ("/workspace/in", "/workspace")):
        flags = [word for guest in guests for word in ("--mount", f"{place}:{guest}")]
        assert hutch.run("print(1)", *flags).outcome == "spec.collision"


def test_a_source_that_does_not_exist_is_named(hutch: Hutch, place: Path) -> None:
    ran = hutch.run("print(1)", "--mount", f"{place}/absent:/data")
    assert (ran.exit_code, ran.outcome) == (2, "mount.missing")
    assert f"{place}/absent" in ran.json["error"]["message"]


def test_a_swapped_directory_never_leads_outside(hutch: Hutch, place: Path) -> None:
    """One process swaps a directory for a link to a secret while mounts of it are made, over and over."""
    hutch.write(place / "secret" / "file", "the secret")
    hutch.write(place / "open" / "file", "harmless")
    program = f"""
import os, itertools
os.chdir({str(place)!r})
os.symlink("secret", "link")
for _ in itertools.count():
    os.rename("open", "aside"); os.rename("link", "open")
    os.rename("open", "link"); os.rename("aside", "open")
"""
    with hutch.popen([PYTHON, "-c", program]) as swapper:
        try:
            for _ in range(12):
                ran = hutch.run("print(open('/data/file').read())", "--mount", f"{place / 'open'}:/data")
                seen = ran.out if "stdout" in ran.json else ran.outcome
                refusals = ("mount.symlink", "mount.changed", "mount.missing", "start.failed")
                assert seen.strip() in ("harmless", *refusals), ran
        finally:
            swapper.kill()
            swapper.wait()


def test_a_plan_shows_the_mounts_and_starts_nothing(hutch: Hutch, place: Path) -> None:
    ran = hutch.command("plan", "--json", "--project", place, "print(1)")
    assert ran.exit_code == 0
    assert str(place) in str(ran.json["operations"])
    assert "--unshare-all" in ran.json["bwrap"]

"""Which devices exist inside."""

from __future__ import annotations

import os

import pytest

from .harness import Hutch

PSEUDO = ["null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx", "shm"]
LINKS = ["core", "fd", "stdin", "stdout", "stderr"]
MKNOD = """
import os
for path in ("/workspace/x", "/tmp/x", "/home/sandbox/x", "/dev/x", "/dev/shm/x"):
    try:
        os.mknod(path, {kind} | 0o666, os.makedev({device}))
        print("MADE", path)
    except OSError as error:
        print(error.errno)
"""


def test_only_harmless_devices_exist(hutch: Hutch) -> None:
    names = set(hutch.run("import os; print(*os.listdir('/dev'))").out.split())
    assert names == {*PSEUDO, *LINKS}


@pytest.mark.parametrize(("kind", "device"), [(0o020000, "1, 3"), (0o020000, "10, 200"), (0o060000, "8, 0")])
def test_device_nodes_cannot_be_made(hutch: Hutch, kind: int, device: str) -> None:
    ran = hutch.run(MKNOD.format(kind=kind, device=device))
    assert set(ran.out.split()) <= {"1", "30"}, "EPERM, or a read-only /dev"
    assert len(ran.out.split()) == 5


def test_device_nodes_of_a_mount_cannot_be_opened(root: Hutch) -> None:
    directory = root.home / "nodes"
    directory.mkdir()
    os.mknod(directory / "full", 0o020666, os.makedev(1, 7))
    os.chmod(directory / "full", 0o666)
    try:
        (directory / "full").open("rb").close()
        ran = root.run("open('/data/full', 'rb')", "--mount", f"{directory}:/data")
    finally:
        (directory / "full").unlink()
        directory.rmdir()
    assert "PermissionError" in ran.err


def test_dev_itself_cannot_be_filled_or_changed(hutch: Hutch) -> None:
    ran = hutch.shell("echo x > /dev/file; mkdir /dev/dir; rm -f /dev/null; ln -sf /tmp /dev/pts/x; ls /dev | wc -l")
    assert ran.err.count("Read-only file system") >= 3
    assert ran.out.strip() == "14"


def test_usual_devices_work(hutch: Hutch) -> None:
    code = "for name, size in (('urandom', 9), ('zero', 2), ('null', 1)):\n"
    code += "    print(len(open('/dev/' + name, 'rb').read(size)))"
    assert hutch.run(code).out.split() == ["9", "2", "0"]


def test_disks_kernel_memory_and_virtualisation_are_absent(hutch: Hutch) -> None:
    paths = ["/dev/mem", "/dev/kmem", "/dev/kvm", "/dev/fuse", "/dev/net/tun", "/dev/sda", "/dev/vda", "/dev/loop0"]
    assert hutch.run(f"import os; print([path for path in {paths} if os.path.exists(path)])").out == "[]\n"

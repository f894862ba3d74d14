"""Which system calls the kernel still hears from inside."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import subprocess

import pytest

from .harness import PYTHON, Hutch, need

# name: number on x86_64, number on aarch64, arguments. The arguments are such that the call would be understood.
REFUSED = {
    "ptrace": (101, 117, "0, 0, 0, 0"),
    "process_vm_readv": (310, 270, "1, 0, 0, 0, 0, 0"),
    "process_vm_writev": (311, 271, "1, 0, 0, 0, 0, 0"),
    "kcmp": (312, 272, "1, 1, 0, 0, 0"),
    "pidfd_getfd": (438, 438, "0, 0, 0"),
    "keyctl": (250, 219, "0, -3, 1"),
    "add_key": (248, 217, "b'user', b'x', b'y', 1, -3"),
    "request_key": (249, 218, "b'user', b'x', 0, 0"),
    "unshare user": (272, 97, "0x10000000"),
    "unshare net": (272, 97, "0x40000000"),
    "setns": (308, 268, "0, 0"),
    "mount": (165, 40, "b'x', b'/tmp', b'tmpfs', 0, 0"),
    "umount2": (166, 39, "b'/tmp', 2"),
    "pivot_root": (155, 41, "b'/tmp', b'/tmp'"),
    "chroot": (161, 51, "b'/tmp'"),
    "open_tree": (428, 428, "-100, b'/', 1"),
    "move_mount": (429, 429, "-100, b'/', -100, b'/tmp', 0"),
    "fsopen": (430, 430, "b'tmpfs', 0"),
    "mount_setattr": (442, 442, "-100, b'/', 0, 0, 0"),
    "bpf": (321, 280, "0, 0, 0"),
    "perf_event_open": (298, 241, "0, 0, -1, -1, 0"),
    "io_uring_setup": (425, 425, "8, 0"),
    "io_uring_enter": (426, 426, "0, 0, 0, 0, 0"),
    "io_uring_register": (427, 427, "0, 0, 0, 0"),
    "userfaultfd": (323, 282, "0"),
    "init_module": (175, 105, "0, 0, b''"),
    "finit_module": (313, 273, "0, b'', 0"),
    "delete_module": (176, 106, "b'x', 0"),
    "kexec_load": (246, 104, "0, 0, 0, 0"),
    "reboot": (169, 142, "0, 0, 0, 0"),
    "swapon": (167, 224, "b'/tmp/x', 0"),
    "sethostname": (170, 161, "b'x', 1"),
    "settimeofday": (164, 170, "0, 0"),
    "clock_settime": (227, 112, "0, 0"),
    "acct": (163, 89, "0"),
    "quotactl": (179, 60, "0, 0, 0, 0"),
    "syslog": (103, 116, "3, 0, 0"),
    "open_by_handle_at": (304, 265, "-100, 0, 0"),
    "name_to_handle_at": (303, 264, "-100, b'/', 0, 0, 0"),
    "fanotify_init": (300, 262, "0, 0"),
    "mbind": (237, 235, "0, 0, 0, 0, 0, 0"),
    "move_pages": (279, 239, "0, 0, 0, 0, 0, 0"),
    "personality READ_IMPLIES_EXEC": (135, 92, "0x0400000"),
    "personality ADDR_NO_RANDOMIZE": (135, 92, "0x0040000"),
    "memfd_secret": (447, 447, "0"),
    "clone new user": (56, 220, "0x10000011, 0, 0, 0, 0"),
    "clone new net, high bits set": (56, 220, "0x40000011 | 1 << 40, 0, 0, 0, 0"),
}
ABSENT = {
    "clone3": (435, 435, "0, 0"),
    "a call of a later kernel": (2000, 2000, "0"),
}
CALL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(*words):
    ctypes.set_errno(0)
    words = [ctypes.c_char_p(word) if isinstance(word, bytes) else ctypes.c_long(word) for word in words]
    result = libc.syscall(*words)
    return errno.errorcode[ctypes.get_errno()] if result < 0 else "ANSWERED"
"""
SOCKETS = {
    "AF_VSOCK": (40, 1, 0),
    "AF_PACKET": (17, 3, 0),
    "AF_NETLINK audit": (16, 3, 9),
    "AF_NETLINK netfilter": (16, 3, 12),
    "AF_NETLINK generic": (16, 3, 16),
    "AF_NETLINK uevent": (16, 3, 15),
    "AF_ALG": (38, 5, 0),
    "AF_BLUETOOTH": (31, 3, 0),
    "AF_XDP": (44, 3, 0),
    "AF_RDS": (21, 5, 0),
    "AF_CAN": (29, 3, 1),
    "AF_TIPC": (30, 5, 0),
}
# A 32-bit getpid: mov eax, 20; int 0x80; ret
INT80 = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000" "cd80" "c3"))
run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print("pid", run(), flush=True)
"""


def number(entry: tuple[int, int, str]) -> int:
    return entry[1] if platform.machine() == "aarch64" else entry[0]


def test_dangerous_system_calls_are_refused(hutch: Hutch) -> None:
    lines = [f"print({name!r}, '=', call({number(entry)}, {entry[2]}))" for name, entry in REFUSED.items()]
    answers = dict(line.split(" = ") for line in hutch.run(CALL + "\n".join(lines)).out.splitlines())
    assert answers == dict.fromkeys(REFUSED, "EPERM")


def test_the_same_calls_are_known_to_this_kernel(hutch: Hutch) -> None:
    """Outside, most of them answer something else than EPERM: what refuses inside is the filter."""
    names = ["ptrace", "keyctl", "open_tree", "kcmp", "unshare user", "personality ADDR_NO_RANDOMIZE"]
    lines = [f"print(call({number(REFUSED[name])}, {REFUSED[name][2]}))" for name in names]
    with hutch.popen([PYTHON, "-c", CALL + "\n".join(lines)]) as child:
        out = child.communicate(timeout=30)[0]
    assert len(out.split()) == len(names)
    assert out.split().count("EPERM") <= 2


def test_unknown_system_calls_look_like_an_older_kernel(hutch: Hutch) -> None:
    lines = [f"print({name!r}, '=', call({number(entry)}, {entry[2]}))" for name, entry in ABSENT.items()]
    answers = dict(line.split(" = ") for line in hutch.run(CALL + "\n".join(lines)).out.splitlines())
    assert answers == dict.fromkeys(ABSENT, "ENOSYS")


def test_x32_calls_do_not_exist(hutch: Hutch) -> None:
    need("x86_64")
    assert hutch.run(CALL + "print(call(0x40000000 | 39), call(0x40000000 | 520))").out == "ENOSYS ENOSYS\n"


def test_int_0x80_is_killed(hutch: Hutch) -> None:
    need("x86_64")
    ran = hutch.run(INT80)
    assert (ran.outcome, ran.json["signal"], ran.out) == ("failed", "SIGSYS", "")
    assert ran.exit_code == 128 + 31


def test_int_0x80_would_work_outside() -> None:
    need("x86_64")
    outside = subprocess.run([PYTHON, "-c", INT80], capture_output=True, text=True)
    if outside.returncode == -11:
        pytest.skip("this kernel was built without 32-bit calls")
    assert outside.stdout.startswith("pid ")


@pytest.mark.parametrize("maker", ["socket", "socketpair"])
def test_unusual_socket_families_are_refused(hutch: Hutch, maker: str) -> None:
    call = {"socket": (41, 198, ""), "socketpair": (53, 199, ", ctypes.addressof(room)")}[maker]
    lines = ["room = (ctypes.c_int * 2)()"]
    for name, words in SOCKETS.items():
        arguments = ", ".join(map(str, words)) + call[2]
        lines.append(f"print({name!r}, '=', call({number((call[0], call[1], ''))}, {arguments}))")
    answers = dict(line.split(" = ") for line in hutch.run(CALL + "\n".join(lines)).out.splitlines())
    assert answers == dict.fromkeys(SOCKETS, "EAFNOSUPPORT")


def test_usual_socket_families_work(hutch: Hutch) -> None:
    code = "import socket\nfor family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):\n"
    ran = hutch.run(code + "    socket.socket(family, socket.SOCK_DGRAM).close(); print(1)")
    assert ran.out.split() == ["1"] * 4


def test_user_namespaces_cannot_be_nested(hutch: Hutch) -> None:
    ran = hutch.shell("unshare -U true || unshare -r id; echo $?; cat /proc/sys/user/max_user_namespaces")
    assert ran.out.split()[0] == "1"
    assert "not permitted" in ran.err


def test_a_sandbox_inside_can_still_take_away(hutch: Hutch) -> None:
    """Landlock and a stricter filter of one's own are no danger, and browsers and agents use them."""
    code = CALL + f"print(call({number((444, 444, ''))}, 0, 0, 1), call({number((317, 277, ''))}, 2, 0, 0))"
    first, second = hutch.run(code).out.split()
    assert first in ("ANSWERED", "ENOSYS", "EOPNOTSUPP")
    assert second in ("ANSWERED", "EFAULT", "EINVAL")


LAYERS = """
import struct
rules = ctypes.create_string_buffer(struct.pack("Q", 2))
layers = 0
while libc.syscall(446, libc.syscall(444, rules, 8, 0), 0) == 0:
    layers += 1
print(layers)
"""


def test_a_second_layer_bounds_what_can_be_written(hutch: Hutch) -> None:
    """The kernel takes 16 rule sets on top of each other: one fewer is left inside than outside."""
    script = "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.prctl(38, 1, 0, 0, 0)\n" + LAYERS
    outside = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, check=True).stdout
    inside = hutch.run("import ctypes\nlibc = ctypes.CDLL(None)\n" + LAYERS).out
    assert int(inside) == max(0, int(outside) - 1)


def test_abstract_sockets_of_the_host_stay_out_of_reach_with_its_network(hutch: Hutch) -> None:
    if ctypes.CDLL(None).syscall(444, 0, 0, 1) < 6:
        pytest.skip("this kernel's Landlock knows nothing of sockets; with --network host they are in reach")
    name = f"hutch-contract-host-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        code = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')"
        ran = hutch.run(code, "--network", "host")
    assert "PermissionError" in ran.err


def test_the_filter_stays_with_children(hutch: Hutch) -> None:
    code = f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {INT80!r}]).returncode)"
    need("x86_64")
    assert hutch.run(code).out == "-31\n"

"""The system-call filter, judged by its bytes: an interpreter of classic BPF answers as the kernel would."""

from __future__ import annotations

import ast
import errno
import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from hutch.errors import HostError
from hutch.isolation import seccomp

ALLOW, KILL, EPERM, ENOSYS, EAFNOSUPPORT = "allow", "kill", "EPERM", "ENOSYS", "EAFNOSUPPORT"

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
MACHINES = {"x86_64": X86_64, "aarch64": AARCH64}
X32_BIT = 0x40000000
HIGH = 1 << 32
ALL_ONES = 2**64 - 1


# ---- the interpreter ---------------------------------------------------------------------------------------


class Instruction(NamedTuple):
    code: int
    if_true: int
    if_false: int
    constant: int


class Answer(NamedTuple):
    verdict: str
    loaded: frozenset[int]  # offsets into struct seccomp_data


LOAD, JUMP, IF_EQUAL, IF_GREATER, IF_AT_LEAST, IF_ANY_BIT, RETURN = 0x20, 0x05, 0x15, 0x25, 0x35, 0x45, 0x06
CONDITIONS = (IF_EQUAL, IF_GREATER, IF_AT_LEAST, IF_ANY_BIT)
SECCOMP_DATA_BYTES = 64
MOST_INSTRUCTIONS = 4096


def decode(content: bytes) -> list[Instruction]:
    return [
        Instruction(
            int.from_bytes(content[i : i + 2], "little"),
            content[i + 2],
            content[i + 3],
            int.from_bytes(content[i + 4 : i + 8], "little"),
        )
        for i in range(0, len(content), 8)
    ]


def name_of(action: int) -> str:
    if action == 0x7FFF0000:
        return ALLOW
    if action == 0x80000000:
        return KILL
    assert action & 0xFFFF0000 == 0x00050000, hex(action)
    return errno.errorcode[action & 0xFFFF]


def run(code: list[Instruction], audit: int, number: int, args: tuple[int, ...] = ()) -> Answer:
    words = [number & 0xFFFFFFFF, audit, 0x1234, 0x5678]
    for value in (*args, *(0,) * (6 - len(args))):
        words += [value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF]
    at, accumulator, loaded = 0, 0, set()
    while True:
        op = code[at]
        at += 1
        if op.code == LOAD:
            accumulator = words[op.constant // 4]
            loaded.add(op.constant)
        elif op.code == JUMP:
            at += op.constant
        elif op.code == RETURN:
            return Answer(name_of(op.constant), frozenset(loaded))
        else:
            holds = {
                IF_EQUAL: accumulator == op.constant,
                IF_GREATER: accumulator > op.constant,
                IF_AT_LEAST: accumulator >= op.constant,
                IF_ANY_BIT: accumulator & op.constant != 0,
            }[op.code]
            at += op.if_true if holds else op.if_false


class Filter:
    def __init__(self, machine: str, *, host_writable: bool = False, counted: bool = True) -> None:
        self.machine = machine
        self.host_writable = host_writable
        self.audit = MACHINES[machine]
        self.numbers = next(a for a in seccomp.ARCHITECTURES if a.machine == machine).numbers()
        self.code = decode(seccomp.program(machine, host_writable=host_writable, counted=counted))

    def __call__(self, call: str | int, *args: int) -> str:
        return self.answer(call, *args).verdict

    def answer(self, call: str | int, *args: int) -> Answer:
        number = self.numbers[call] if isinstance(call, str) else call
        return run(self.code, self.audit, number, args)


FILTERS = {machine: Filter(machine) for machine in MACHINES}


WRITABLE = {machine: Filter(machine, host_writable=True) for machine in MACHINES}


@pytest.fixture(params=[*MACHINES, *(f"{machine}-host-writable" for machine in MACHINES)])
def on(request: pytest.FixtureRequest) -> Filter:
    machine = request.param.removesuffix("-host-writable")
    return (FILTERS if machine == request.param else WRITABLE)[machine]


# ---- the shipped bytes -------------------------------------------------------------------------------------


def test_the_data_file_is_what_the_program_gives(on: Filter) -> None:
    shipped = Path(seccomp.path(on.machine, host_writable=on.host_writable))
    assert shipped.read_bytes() == seccomp.program(on.machine, host_writable=on.host_writable)


def test_the_generator_writes_the_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "path", lambda machine, **kind: str(tmp_path / f"{machine}-{kind}"))
    seccomp.main()
    kinds = [{"host_writable": writable, "counted": counted} for writable in (False, True) for counted in (False, True)]
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        f"{machine}-{kind}": seccomp.program(machine, **kind) for machine in MACHINES for kind in kinds
    }


def test_what_nobody_counts_cannot_be_taken() -> None:
    for machine in MACHINES:
        for writable in (False, True):
            uncounted = Filter(machine, host_writable=writable, counted=False)
            shipped = Path(seccomp.path(machine, host_writable=writable, counted=False))
            assert shipped.read_bytes() == seccomp.program(machine, host_writable=writable, counted=False)
            for name in ("shmget", "sched_setaffinity"):
                assert (FILTERS[machine](name), uncounted(name)) == (ALLOW, EPERM)


def test_no_setuid_file_can_be_made_where_it_would_reach_the_host() -> None:
    for machine in MACHINES:
        assert FILTERS[machine]("openat2") == ALLOW
        assert WRITABLE[machine]("openat2") == ENOSYS


def test_an_architecture_is_as_good_as_its_name() -> None:
    for architecture in seccomp.ARCHITECTURES:
        assert MACHINES[architecture.machine] == architecture.audit
        assert seccomp.program(architecture) == seccomp.program(architecture.machine)


def test_the_kernel_would_accept_it(on: Filter) -> None:
    content = seccomp.program(on.machine, host_writable=on.host_writable)
    assert len(content) % 8 == 0
    assert 0 < len(on.code) < MOST_INSTRUCTIONS
    assert on.code[-1].code == RETURN
    for at, op in enumerate(on.code):
        rest = len(on.code) - at - 1
        assert op.code in (LOAD, JUMP, RETURN, *CONDITIONS)
        if op.code == LOAD:
            assert op.constant % 4 == 0
            assert op.constant < SECCOMP_DATA_BYTES
        if op.code == JUMP:
            assert op.constant < rest
        if op.code in CONDITIONS:
            assert max(op.if_true, op.if_false) < rest


@pytest.mark.parametrize("machine", ["i686", "armv7l", "riscv64", "amd64", "", "../x86_64"])
def test_a_machine_without_a_filter_is_an_error_of_the_host(machine: str) -> None:
    for function in (seccomp.path, seccomp.program):
        with pytest.raises(HostError) as caught:
            function(machine)
        assert caught.value.code == "host.architecture"
        assert repr(machine) in caught.value.message
        assert "x86_64 and aarch64" in caught.value.hint


def test_importing_it_imports_next_to_nothing() -> None:
    tree = ast.parse(Path(seccomp.__file__).read_text())
    imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"__future__", "os"}


# ---- the tables --------------------------------------------------------------------------------------------


def test_every_allowed_name_exists_and_is_listed_once() -> None:
    words = [name for group in seccomp.ALLOWED.values() for name in group.split()]
    known = {name for on in FILTERS.values() for name in on.numbers}
    assert sorted(words) == sorted(set(words))
    assert set(words) <= known
    assert {call for call, *_ in CASES} <= known - set(words)


def test_no_two_calls_share_a_number(on: Filter) -> None:
    assert len(set(on.numbers.values())) == len(on.numbers)


# A few by heart, so that the tables are held by something even where there are no headers.
@pytest.mark.parametrize(
    ("call", "x86_64", "aarch64"),
    [
        ("read", 0, 63),
        ("openat", 257, 56),
        ("ioctl", 16, 29),
        ("clone", 56, 220),
        ("execve", 59, 221),
        ("socket", 41, 198),
        ("ptrace", 101, 117),
        ("mount", 165, 40),
        ("unshare", 272, 97),
        ("keyctl", 250, 219),
        ("bpf", 321, 280),
        ("personality", 135, 92),
        ("io_uring_setup", 425, 425),
        ("clone3", 435, 435),
        ("fchmodat2", 452, 452),
        ("file_setattr", 469, 469),
    ],
)
def test_numbers_that_never_change(call: str, x86_64: int, aarch64: int) -> None:
    assert (FILTERS["x86_64"].numbers[call], FILTERS["aarch64"].numbers[call]) == (x86_64, aarch64)


HEADERS = {
    "x86_64": (
        "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
        "/usr/include/asm/unistd_64.h",
        "/usr/x86_64-linux-gnu/include/asm/unistd_64.h",
    ),
    "aarch64": (
        "/usr/include/asm-generic/unistd.h",
        "/usr/aarch64-linux-gnu/include/asm-generic/unistd.h",
    ),
}
# What the generic header has for others: the calls of 32-bit machines, and where private numbers begin.
NOT_FOR_AARCH64 = {244, *range(403, 424)}


def missing(component: str, reason: str) -> None:
    if component in os.environ.get("HUTCH_MUST", "").replace(",", " ").split():
        pytest.fail(f"HUTCH_MUST names {component}: {reason}")
    pytest.skip(reason)


def header_numbers(text: str) -> dict[str, int]:
    raw: dict[str, str] = dict(re.findall(r"^#define\s+(__NR\w*)\s+(\w+)", text, re.MULTILINE))
    found = {}
    for name, value in raw.items():
        last = raw.get(value, value)
        if name.startswith("__NR_") and name != "__NR_syscalls" and last.isdigit():
            found[name.removeprefix("__NR_")] = int(last)
    return found


def test_the_numbers_are_those_of_the_kernel_headers(on: Filter) -> None:
    present = [Path(name) for name in HEADERS[on.machine] if Path(name).is_file()]
    # On an arm machine /usr/include/asm is arm's own.
    present = [file for file in present if on.machine != "x86_64" or "__NR_arch_prctl" in file.read_text()]
    if not present:
        missing("headers", f"no kernel headers for {on.machine}; install linux-libc-dev or its cross package")
    for file in present:
        header = header_numbers(file.read_text())
        newest = max(header.values())
        assert len(header) > 300, file
        assert {name: header[name] for name in on.numbers if name in header} == {
            name: number for name, number in on.numbers.items() if name in header
        }
        unknown_to_the_header = {n for n in on.numbers if n not in header and on.numbers[n] <= newest}
        assert unknown_to_the_header <= {"uretprobe"}, file
        unknown_to_us = {n for n in header.values() if n <= max(on.numbers.values())} - {*on.numbers.values()}
        assert unknown_to_us <= (NOT_FOR_AARCH64 if on.machine == "aarch64" else {336}), file


# ---- the verdicts ------------------------------------------------------------------------------------------


def test_every_allowed_call_runs_whatever_its_arguments(on: Filter) -> None:
    for name in seccomp.allowed_names() & on.numbers.keys():
        assert on(name) == ALLOW, name
        assert on(name, *(ALL_ONES,) * 6) == ALLOW, name


def test_always_allowed_calls_are_decided_without_arguments(on: Filter) -> None:
    """Else the kernel could not cache the verdict, and every read() would pay for the filter."""
    for name in seccomp.allowed_names() & on.numbers.keys():
        assert on.answer(name).loaded == {0, 4}, name


# Written out on purpose: the allow-list is an opinion, this is what it must never become.
DANGEROUS = {
    "other processes": "ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp process_madvise",
    "namespaces": "setns unshare",
    "mounts": "mount umount2 pivot_root chroot mount_setattr open_tree open_tree_attr move_mount",
    "filesystems": "fsopen fsconfig fsmount fspick quotactl quotactl_fd nfsservctl sysfs ustat",
    "keys": "keyctl add_key request_key",
    "code in the kernel": "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register",
    "modules": "init_module finit_module delete_module create_module query_module get_kernel_syms",
    "the machine": "kexec_load kexec_file_load reboot swapon swapoff acct iopl ioperm syslog _sysctl vhangup",
    "files past the mounts": "name_to_handle_at open_by_handle_at fanotify_init fanotify_mark lookup_dcookie",
    "clock and names": "settimeofday clock_settime sethostname setdomainname",
    "memory placement": "mbind set_mempolicy get_mempolicy set_mempolicy_home_node migrate_pages move_pages",
    "rarely needed, often broken": "memfd_secret modify_ldt uselib file_setattr",
    "security modules": "lsm_get_self_attr lsm_set_self_attr lsm_list_modules",
}


@pytest.mark.parametrize("call", [call for calls in DANGEROUS.values() for call in calls.split()])
def test_a_dangerous_call_is_refused(call: str) -> None:
    having = [on for on in FILTERS.values() if call in on.numbers]
    assert having
    for on in having:
        assert on(call) == EPERM
        assert on(call, *(ALL_ONES,) * 6) == EPERM


def test_whatever_is_known_and_not_listed_is_refused(on: Filter) -> None:
    judged = (
        seccomp.allowed_names() | {call for call, *_ in CASES} | {"openat2", "shmget", "sched_setaffinity", "prlimit64"}
    )
    for name in on.numbers.keys() - judged:
        assert on(name) == EPERM, name
        assert on(name, *(ALL_ONES,) * 6) == EPERM, name


def test_the_limits_of_pid_1_cannot_be_changed(on: Filter) -> None:
    assert on("prlimit64", 1, 7, 4096, 0) == EPERM
    assert on("prlimit64", 1 | 1 << 32, 7, 4096, 0) == EPERM, "the kernel looks at the lower half"
    for pid in (0, 2, 1000):
        assert on("prlimit64", pid, 7, 4096, 0) == on("getpid")


def test_a_number_without_a_name_is_not_implemented(on: Filter) -> None:
    named = set(on.numbers.values())
    for number in (*range(600), 0x3FFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF):
        if number not in named:
            assert on(number) == ENOSYS, number


def test_x32_calls_are_not_implemented() -> None:
    on = FILTERS["x86_64"]
    for number in range(600):
        assert on(X32_BIT | number) == ENOSYS, number


@pytest.mark.parametrize(
    ("machine", "foreign"),
    [
        ("x86_64", 0x40000003),  # int 0x80: i386 from a 64-bit process
        ("x86_64", AARCH64),
        ("aarch64", 0x40000028),  # 32-bit arm
        ("aarch64", 0x800000B7),  # big-endian
        ("aarch64", X86_64),
        ("x86_64", 0),
        ("aarch64", 0xFFFFFFFF),
    ],
)
def test_the_calls_of_another_architecture_kill(machine: str, foreign: int) -> None:
    for number in (*range(500), X32_BIT, 0xFFFFFFFF):
        assert run(FILTERS[machine].code, foreign, number).verdict == KILL


# ---- the verdicts that depend on arguments -----------------------------------------------------------------

FD, PATH = 3, 0x7FFF12345678  # stand for any descriptor and any pointer
O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE, O_CLOEXEC = 0o2, 0o100, 0o1000, 0o20200000, 0o2000000
REGULAR, PIPE, SOCKET, CHARACTER, BLOCK = 0o100000, 0o010000, 0o140000, 0o020000, 0o060000
THREAD = 0x003D0F00  # what pthread_create asks of clone
SIGCHLD = 17
UNIX, INET, INET6, NETLINK, PACKET, ALG, VSOCK, XDP, TIPC = 1, 2, 10, 16, 17, 38, 40, 44, 30
STREAM, DATAGRAM, RAW = 1, 2, 3
ROUTE, NETFILTER, KOBJECT_UEVENT = 0, 12, 15
TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423
TCGETS, TIOCGWINSZ, TIOCSCTTY, TIOCSPGRP = 0x5401, 0x5413, 0x540E, 0x5410
FIONREAD, TIOCGPTPEER = 0x541B, 0x5441

CASES: list[tuple[str, tuple[int, ...], str]] = [
    # Processes and threads, but no namespaces.
    ("clone", (SIGCHLD,), ALLOW),
    ("clone", (THREAD,), ALLOW),
    ("clone", (0x4111,), ALLOW),  # vfork
    ("clone", (0x01200011,), ALLOW),  # fork with a child tid
    ("clone", (0x00020000 | SIGCHLD,), EPERM),  # CLONE_NEWNS
    ("clone", (0x02000000,), EPERM),  # CLONE_NEWCGROUP
    ("clone", (0x04000000,), EPERM),  # CLONE_NEWUTS
    ("clone", (0x08000000,), EPERM),  # CLONE_NEWIPC
    ("clone", (0x10000000 | SIGCHLD,), EPERM),  # CLONE_NEWUSER
    ("clone", (0x20000000,), EPERM),  # CLONE_NEWPID
    ("clone", (0x40000000,), EPERM),  # CLONE_NEWNET
    ("clone", (THREAD | 0x10000000,), EPERM),
    ("clone3", (PATH, 88), ENOSYS),
    # A terminal may be used, not typed into.
    ("ioctl", (0, TCGETS, PATH), ALLOW),
    ("ioctl", (0, TIOCGWINSZ, PATH), ALLOW),
    ("ioctl", (0, TIOCSCTTY, 0), ALLOW),
    ("ioctl", (0, TIOCSPGRP, PATH), ALLOW),
    ("ioctl", (0, FIONREAD, PATH), ALLOW),
    ("ioctl", (0, TIOCGPTPEER, 0), ALLOW),
    ("ioctl", (TIOCSTI, 0, TIOCSTI), ALLOW),  # only the request counts
    ("ioctl", (0, TIOCSTI, PATH), EPERM),
    ("ioctl", (0, TIOCSTI | HIGH, PATH), EPERM),
    ("ioctl", (0, TIOCSTI | 0xDEAD << 40, PATH), EPERM),
    ("ioctl", (0, TIOCLINUX, PATH), EPERM),
    ("ioctl", (0, TIOCLINUX | HIGH, PATH), EPERM),
    ("ioctl", (0, TIOCSETD, PATH), EPERM),
    ("ioctl", (0, TIOCSETD | HIGH, PATH), EPERM),
    # The families that programs need.
    ("socket", (UNIX, STREAM, 0), ALLOW),
    ("socket", (INET, STREAM, 6), ALLOW),
    ("socket", (INET6, DATAGRAM | O_CLOEXEC, 17), ALLOW),
    ("socket", (NETLINK, RAW, ROUTE), ALLOW),
    ("socket", (NETLINK, RAW, NETFILTER), EAFNOSUPPORT),
    ("socket", (NETLINK, RAW, KOBJECT_UEVENT), EAFNOSUPPORT),
    ("socket", (0, STREAM, 0), EAFNOSUPPORT),
    ("socket", (PACKET, RAW, 3), EAFNOSUPPORT),
    ("socket", (TIPC, STREAM, 0), EAFNOSUPPORT),
    ("socket", (ALG, 5, 0), EAFNOSUPPORT),
    ("socket", (VSOCK, STREAM, 0), EAFNOSUPPORT),
    ("socket", (VSOCK | HIGH, STREAM, 0), EAFNOSUPPORT),
    ("socket", (XDP, RAW, 0), EAFNOSUPPORT),
    ("socket", (UNIX | HIGH, STREAM, 0), ALLOW),
    ("socket", (0xFFFFFFFF, STREAM, 0), EAFNOSUPPORT),
    ("socketpair", (UNIX, STREAM, 0, PATH), ALLOW),
    ("socketpair", (UNIX, DATAGRAM, 0, PATH), ALLOW),
    ("socketpair", (TIPC, STREAM, 0, PATH), EAFNOSUPPORT),
    ("socketpair", (VSOCK, STREAM, 0, PATH), EAFNOSUPPORT),
    ("socketpair", (NETLINK, RAW, NETFILTER, PATH), EAFNOSUPPORT),
    # Modes: everything but setuid and setgid.
    ("chmod", (PATH, 0o755), ALLOW),
    ("chmod", (PATH, 0o1777), ALLOW),
    ("chmod", (PATH, 0o4755), EPERM),
    ("chmod", (PATH, 0o2755), EPERM),
    ("chmod", (PATH, 0o6755 | HIGH), EPERM),
    ("fchmod", (FD, 0o1777), ALLOW),
    ("fchmod", (FD, 0o4000), EPERM),
    ("fchmod", (FD, 0o2000), EPERM),
    ("fchmodat", (FD, PATH, 0o700), ALLOW),
    ("fchmodat", (FD, PATH, 0o4700), EPERM),
    ("fchmodat", (FD, PATH, 0o2700), EPERM),
    ("fchmodat2", (FD, PATH, 0o700, 0x100), ALLOW),
    ("fchmodat2", (FD, PATH, 0o4700, 0x100), EPERM),
    ("fchmodat2", (FD, PATH, 0o2700 | HIGH, 0), EPERM),
    ("creat", (PATH, 0o644), ALLOW),
    ("creat", (PATH, 0o4755), EPERM),
    ("open", (PATH, O_RDWR, 0o6777), ALLOW),  # it creates nothing; the mode is noise
    ("open", (PATH, O_RDWR | O_CREAT | O_TRUNC, 0o644), ALLOW),
    ("open", (PATH, O_RDWR | O_CREAT, 0o4755), EPERM),
    ("open", (PATH, O_RDWR | O_CREAT, 0o2755), EPERM),
    ("open", (PATH, O_RDWR | O_TMPFILE, 0o600), ALLOW),
    ("open", (PATH, O_RDWR | O_TMPFILE, 0o4600), EPERM),
    ("openat", (FD, PATH, O_RDWR | O_CLOEXEC, PATH), ALLOW),
    ("openat", (FD, PATH, O_RDWR | O_CREAT, 0o1666), ALLOW),
    ("openat", (FD, PATH, O_RDWR | O_CREAT, 0o4755), EPERM),
    ("openat", (FD, PATH, O_RDWR | O_CREAT | HIGH, 0o2755 | HIGH), EPERM),
    ("openat", (FD, PATH, O_RDWR | O_TMPFILE, 0o2600), EPERM),
    ("mknod", (PATH, REGULAR | 0o644, 0), ALLOW),
    ("mknod", (PATH, PIPE | 0o600, 0), ALLOW),
    ("mknod", (PATH, SOCKET | 0o777, 0), ALLOW),
    ("mknod", (PATH, REGULAR | 0o4755, 0), EPERM),
    ("mknod", (PATH, 0o2755, 0), EPERM),
    ("mknod", (PATH, CHARACTER | 0o666, 0x103), EPERM),
    ("mknod", (PATH, BLOCK | 0o660, 0x800), EPERM),
    ("mknodat", (FD, PATH, PIPE | 0o666, 0), ALLOW),
    ("mknodat", (FD, PATH, REGULAR | 0o4755, 0), EPERM),
    ("mknodat", (FD, PATH, CHARACTER | 0o666, 0), EPERM),
    ("mknodat", (FD, PATH, BLOCK | 0o666 | HIGH, 0), EPERM),
    # Linux, 32-bit Linux, UNAME26, and the question.
    ("personality", (0,), ALLOW),
    ("personality", (0x8,), ALLOW),
    ("personality", (0x20000,), ALLOW),
    ("personality", (0x20008,), ALLOW),
    ("personality", (0xFFFFFFFF,), ALLOW),
    ("personality", (ALL_ONES,), ALLOW),
    ("personality", (0x0040000,), EPERM),  # ADDR_NO_RANDOMIZE
    ("personality", (0x0400000,), EPERM),  # READ_IMPLIES_EXEC
    ("personality", (0x0400000 | HIGH,), EPERM),
    ("personality", (0x1,), EPERM),
]


@pytest.mark.parametrize(("call", "args", "expected"), CASES)
def test_arguments_decide(call: str, args: tuple[int, ...], expected: str) -> None:
    having = [on for on in FILTERS.values() if call in on.numbers]
    assert having
    for on in having:
        assert on(call, *args) == expected, on.machine


def test_the_upper_half_of_an_argument_changes_nothing() -> None:
    for call, args, expected in CASES:
        for on in FILTERS.values():
            if call in on.numbers:
                for upper in (HIGH, 0x8000000000000000, 0xFFFFFFFF00000000):
                    assert on(call, *(arg & 0xFFFFFFFF | upper for arg in args)) == expected, (call, args)


def test_every_bit_of_the_setuid_mask_counts_and_no_other(on: Filter) -> None:
    for call, index in {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1}.items():
        if call in on.numbers:
            refused = {1 << bit for bit in range(16) if on(call, *(0,) * index, 1 << bit) == EPERM}
            assert refused == {0o4000, 0o2000}, call


def test_no_other_family_makes_a_socket(on: Filter) -> None:
    for call in ("socket", "socketpair"):
        made = {family for family in range(256) if on(call, family, STREAM, 0) == ALLOW}
        assert made == {UNIX, INET, INET6, NETLINK}
        assert {n for n in range(256) if on(call, NETLINK, RAW, n) == ALLOW} == {ROUTE}


def test_of_all_terminal_requests_only_three_are_refused(on: Filter) -> None:
    refused = {request for request in range(0x5400, 0x5500) if on("ioctl", 0, request, PATH) != ALLOW}
    assert refused == {TIOCSTI, TIOCLINUX, TIOCSETD}

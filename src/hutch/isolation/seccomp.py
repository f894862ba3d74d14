"""The system-call filter of the jail: which calls a sandboxed program may make, and what the others answer.

Owns the allow-list, the call numbers of the two architectures, and the assembler that turns both into the
classic BPF program that `bwrap --seccomp` installs. `program` is pure: the same architecture always gives the
same bytes. They are shipped in `data/`, so that a run only opens a file; `python -m hutch.isolation.seccomp`
writes them anew.

Knows nothing of descriptors, of bubblewrap's arguments or of the policy of one sandbox, but for two things: whether it
can write to a directory of the host, in which case no way to make a setuid file is left, and whether a cgroup counts
what it uses.

What a call answers:

    allowed                                 it runs
    allowed for some arguments only         it runs, or fails as the block of that call says
    known, not allowed                      EPERM
    a number without a name here            ENOSYS, as from an older kernel, so that libraries fall back
    another architecture (int 0x80, arm)    the process is killed; its numbers mean other calls

The kernel takes an `int`, an `unsigned int` or a mode from the low half of a 64-bit register and ignores the
rest. So does every comparison here: one of all 64 bits could be passed by setting a bit that nobody reads.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant: struct sock_filter
    Block = tuple[Instruction, ...]  # always ends in a verdict on every way through it


# ---- policy ------------------------------------------------------------------------------------------------

# Calls that run whatever their arguments are. A name that one architecture lacks is simply absent there.
ALLOWED = {
    "data through descriptors": """
        read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range
        dup dup2 dup3 fcntl flock pipe pipe2 sendfile splice tee vmsplice copy_file_range readahead fadvise64
        fallocate truncate ftruncate fsync fdatasync sync syncfs sync_file_range cachestat""",
    "files and directories": """
        access faccessat faccessat2 stat fstat lstat newfstatat statx statfs fstatfs getdents
        getdents64 getcwd chdir fchdir mkdir mkdirat rmdir link linkat unlink unlinkat rename renameat
        renameat2 symlink symlinkat readlink readlinkat chown fchown lchown fchownat umask utime utimes
        futimesat utimensat inotify_init inotify_init1 inotify_add_watch inotify_rm_watch""",
    "extended attributes": """
        setxattr lsetxattr fsetxattr setxattrat getxattr lgetxattr fgetxattr getxattrat
        listxattr llistxattr flistxattr listxattrat removexattr lremovexattr fremovexattr removexattrat""",
    # They tell no more than /proc/self/mountinfo does.
    "own mounts, read only": "statmount listmount",
    "waiting for events": """
        poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
        eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime""",
    # Databases use this older interface. Its successor io_uring is refused, as no filter sees its requests.
    "asynchronous files": "io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents",
    "memory": """
        brk mmap munmap mremap mprotect msync madvise mincore mlock mlock2 mlockall munlock munlockall mseal
        remap_file_pages memfd_create membarrier map_shadow_stack pkey_alloc pkey_free pkey_mprotect""",
    "processes and threads": """
        fork vfork execve execveat exit exit_group wait4 waitid getpid getppid gettid getpgid getpgrp setpgid
        getsid setsid pidfd_open pidfd_send_signal process_mrelease prctl arch_prctl set_tid_address rseq
        futex futex_waitv futex_wake futex_wait futex_requeue set_robust_list get_robust_list""",
    # Put into a program by a host that traces it. Some kernels filter it too, and EPERM ends the program.
    "tracing by the host": "uretprobe",
    "signals": """
        kill tkill tgkill pause restart_syscall sigaltstack rt_sigaction rt_sigprocmask rt_sigpending
        rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo""",
    # Harmless in a user namespace that maps one id; programs set it to give up what they never had.
    "identity": """
        getuid geteuid getgid getegid getresuid getresgid getgroups capget capset
        setuid setgid setreuid setregid setresuid setresgid setfsuid setfsgid setgroups""",
    "limits and scheduling": """
        getrlimit setrlimit getrusage getpriority setpriority ioprio_get ioprio_set getcpu
        sched_yield sched_getaffinity sched_getattr sched_setattr sched_getparam
        sched_setparam sched_getscheduler sched_setscheduler sched_get_priority_max sched_get_priority_min
        sched_rr_get_interval""",
    # adjtimex and clock_adjtime also read the state of the clock; changing it needs a capability of the host.
    "time": """
        time gettimeofday times nanosleep alarm getitimer setitimer adjtimex clock_adjtime clock_gettime
        clock_getres clock_nanosleep timer_create timer_delete timer_settime timer_gettime
        timer_getoverrun""",
    "sockets, once made": """
        bind listen accept accept4 connect shutdown getsockname getpeername getsockopt setsockopt
        sendto sendmsg sendmmsg recvfrom recvmsg recvmmsg""",
    "IPC, in a namespace of its own": """
        shmat shmdt shmctl semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
        mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr""",
    "the system": "uname sysinfo getrandom",
    # They can only take away.
    "sandboxes inside": "seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self",
}

_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

# CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}. All lie in the low half of an unsigned long; clone ignores the
# other. Where CLONE_NEWTIME (0x80) would be, clone has the exit signal: only clone3 and unshare know it.
_CLONE_NAMESPACES = 0x7E020000

# O_CREAT and the own bit of O_TMPFILE: without one of them the mode of an open is whatever the register held.
_OPEN_CREATES = 0o20000100
_SETUID_SETGID = 0o6000
# The bit that block and character devices share, and that regular files, pipes and sockets lack.
_DEVICE = 0o020000

_TERMINAL_REFUSED = (
    0x5412,  # TIOCSTI types into the terminal as if the user had
    0x541C,  # TIOCLINUX pastes the selection of a virtual console into it
    0x5423,  # TIOCSETD loads line disciplines: drivers for modems with a history of holes, of no use on a pty
)

_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_NETLINK_ROUTE = 0

# Linux and 32-bit Linux, both also with UNAME26, and the question which of them it is. Other flags make
# memory executable or its layout predictable.
_PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)


def _conditional(*, host_writable: bool, counted: bool) -> dict[str, Block]:
    """The calls whose verdict depends on their arguments, or that answer something of their own."""
    refuse = _verdict(_errno(_EPERM))
    wrong_family = _verdict(_errno(_EAFNOSUPPORT))

    def without(mask: int, index: int) -> Block:
        return _any_bit(index, mask, refuse, _ALLOW)

    # AF_VSOCK knows no network namespace. The others are attack surface: to ask for a family loads its
    # module, and socketpair makes its sockets before it finds that a family has no pairs.
    netlink = _one_of(2, (_NETLINK_ROUTE,), _ALLOW, wrong_family)
    families = _one_of(0, (_AF_UNIX, _AF_INET, _AF_INET6), _ALLOW, _one_of(0, (_AF_NETLINK,), netlink, wrong_family))
    return {
        "clone": without(_CLONE_NAMESPACES, 0),
        # Its flags are in memory too. Every C library falls back to clone, which can be judged.
        "clone3": _verdict(_errno(_ENOSYS)),
        # So is the mode of openat2, through which a file can be created setuid. Where no such file reaches the host it
        # may run: GNU tar has no fallback on a C library that offers it.
        # Shared memory of this kind belongs to no process, so that nobody but a cgroup sees who fills it; and where no
        # cgroup bounds the CPU, being kept to some of them does.
        "shmget": _ALLOW if counted else refuse,
        "sched_setaffinity": _ALLOW if counted else refuse,
        "openat2": _verdict(_errno(_ENOSYS)) if host_writable else _ALLOW,
        # The limits of pid 1 are open to whoever has its uid: without descriptors or processes it could start nothing.
        "prlimit64": _one_of(0, (1,), refuse, _ALLOW),
        "ioctl": _one_of(1, _TERMINAL_REFUSED, refuse, _ALLOW),
        "socket": families,
        "socketpair": families,
        "personality": _one_of(0, _PERSONALITIES, _ALLOW, refuse),
        # A file in a writable mount outlives the sandbox and belongs to a user of the host. Were it setuid,
        # any other user there could run it as that one, whatever the mounts in here honour. mkdir and mkdirat
        # need no rule: the kernel drops both bits from their mode.
        "chmod": without(_SETUID_SETGID, 1),
        "fchmod": without(_SETUID_SETGID, 1),
        "fchmodat": without(_SETUID_SETGID, 2),
        "fchmodat2": without(_SETUID_SETGID, 2),
        "creat": without(_SETUID_SETGID, 1),
        "open": _any_bit(1, _OPEN_CREATES, without(_SETUID_SETGID, 2), _ALLOW),
        "openat": _any_bit(2, _OPEN_CREATES, without(_SETUID_SETGID, 3), _ALLOW),
        "mknod": without(_SETUID_SETGID | _DEVICE, 1),
        "mknodat": without(_SETUID_SETGID | _DEVICE, 2),
    }


# ---- numbers -----------------------------------------------------------------------------------------------

# Names in the order of their numbers. A number says where the next name stands; each line begins with one, so
# that a word lost or doubled moves no more than its line.
_X86_64 = """
      0 read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction
     14 rt_sigprocmask rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield
     25 mremap msync mincore madvise shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer
     39 getpid sendfile socket connect accept sendto recvfrom sendmsg recvmsg shutdown bind listen
     51 getsockname getpeername socketpair setsockopt getsockopt clone fork vfork execve exit wait4 kill
     63 uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl flock fsync fdatasync truncate
     77 ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink readlink chmod
     91 fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times ptrace getuid syslog
    104 getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid setregid getgroups
    116 setgroups setresuid getresuid setresgid getresgid getpgid setfsuid setfsgid getsid capget capset
    127 rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod uselib
    135 personality ustat statfs fstatfs sysfs getpriority setpriority sched_setparam sched_getparam
    144 sched_setscheduler sched_getscheduler sched_get_priority_max sched_get_priority_min
    148 sched_rr_get_interval mlock munlock mlockall munlockall vhangup modify_ldt pivot_root _sysctl prctl
    158 arch_prctl adjtimex setrlimit chroot sync acct settimeofday mount umount2 swapon swapoff reboot
    170 sethostname setdomainname iopl ioperm create_module init_module delete_module get_kernel_syms
    178 query_module quotactl nfsservctl getpmsg putpmsg afs_syscall tuxcall security gettid readahead
    188 setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
    197 removexattr lremovexattr fremovexattr tkill time futex sched_setaffinity sched_getaffinity
    205 set_thread_area io_setup io_destroy io_getevents io_submit io_cancel get_thread_area lookup_dcookie
    213 epoll_create epoll_ctl_old epoll_wait_old remap_file_pages getdents64 set_tid_address
    219 restart_syscall semtimedop fadvise64 timer_create timer_settime timer_gettime timer_getoverrun
    226 timer_delete clock_settime clock_gettime clock_getres clock_nanosleep exit_group epoll_wait
    233 epoll_ctl tgkill utimes vserver mbind set_mempolicy get_mempolicy mq_open mq_unlink mq_timedsend
    243 mq_timedreceive mq_notify mq_getsetattr kexec_load waitid add_key request_key keyctl ioprio_set
    252 ioprio_get inotify_init inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat
    260 fchownat futimesat newfstatat unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat
    270 pselect6 ppoll unshare set_robust_list get_robust_list splice tee sync_file_range vmsplice
    279 move_pages utimensat epoll_pwait signalfd timerfd_create eventfd fallocate timerfd_settime
    287 timerfd_gettime accept4 signalfd4 eventfd2 epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev
    297 rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init fanotify_mark prlimit64 name_to_handle_at
    304 open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu process_vm_readv process_vm_writev kcmp
    313 finit_module sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create kexec_file_load
    321 bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc
    331 pkey_free statx io_pgetevents rseq uretprobe
"""

_AARCH64 = """
      0 io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr
     10 fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd
     18 lookup_dcookie eventfd2 epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1
     27 inotify_add_watch inotify_rm_watch ioctl ioprio_set ioprio_get flock mknodat mkdirat unlinkat
     36 symlinkat linkat renameat umount2 mount pivot_root nfsservctl statfs fstatfs truncate ftruncate
     47 fallocate faccessat chdir fchdir chroot fchmod fchmodat fchownat fchown openat close vhangup pipe2
     60 quotactl getdents64 lseek read write readv writev pread64 pwrite64 preadv pwritev sendfile pselect6
     73 ppoll signalfd4 vmsplice splice tee readlinkat newfstatat fstat sync fsync fdatasync sync_file_range
     85 timerfd_create timerfd_settime timerfd_gettime utimensat acct capget capset personality exit
     94 exit_group waitid set_tid_address unshare futex set_robust_list get_robust_list nanosleep getitimer
    103 setitimer kexec_load init_module delete_module timer_create timer_gettime timer_getoverrun
    110 timer_settime timer_delete clock_settime clock_gettime clock_getres clock_nanosleep syslog ptrace
    118 sched_setparam sched_setscheduler sched_getscheduler sched_getparam sched_setaffinity
    123 sched_getaffinity sched_yield sched_get_priority_max sched_get_priority_min sched_rr_get_interval
    128 restart_syscall kill tkill tgkill sigaltstack rt_sigsuspend rt_sigaction rt_sigprocmask
    136 rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn setpriority getpriority reboot setregid
    144 setgid setreuid setuid setresuid getresuid setresgid getresgid setfsuid setfsgid times setpgid
    155 getpgid getsid setsid getgroups setgroups uname sethostname setdomainname getrlimit setrlimit
    165 getrusage umask prctl getcpu gettimeofday settimeofday adjtimex getpid getppid getuid geteuid getgid
    177 getegid gettid sysinfo mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget
    187 msgctl msgrcv msgsnd semget semctl semtimedop semop shmget shmctl shmat shmdt socket socketpair bind
    201 listen accept connect getsockname getpeername sendto recvfrom setsockopt getsockopt shutdown sendmsg
    212 recvmsg readahead brk munmap mremap add_key request_key keyctl clone execve mmap fadvise64 swapon
    225 swapoff mprotect msync mlock munlock mlockall munlockall mincore madvise remap_file_pages mbind
    236 get_mempolicy set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo perf_event_open accept4
    243 recvmmsg
    260 wait4 prlimit64 fanotify_init fanotify_mark name_to_handle_at open_by_handle_at clock_adjtime syncfs
    268 setns sendmmsg process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr
    276 renameat2 seccomp getrandom memfd_create bpf execveat userfaultfd membarrier mlock2 copy_file_range
    286 preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq kexec_file_load
"""

# Since 5.1 a new call gets the same number everywhere. The list ends with Linux 6.17.
_EVERYWHERE = """
    424 pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen
    431 fsconfig fsmount fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise
    441 epoll_pwait2 mount_setattr quotactl_fd landlock_create_ruleset landlock_add_rule
    446 landlock_restrict_self memfd_secret process_mrelease futex_waitv set_mempolicy_home_node cachestat
    452 fchmodat2 map_shadow_stack futex_wake futex_wait futex_requeue statmount listmount lsm_get_self_attr
    460 lsm_set_self_attr lsm_list_modules mseal setxattrat getxattrat listxattrat removexattrat
    467 open_tree_attr file_getattr file_setattr
"""


class Architecture:
    """A processor family, as the kernel tells it to a filter.

    Attributes:
        machine: its name in `os.uname().machine`.
        audit: the AUDIT_ARCH_* value of its 64-bit calls.
    """

    __slots__ = ("_table", "audit", "machine")

    def __init__(self, machine: str, audit: int, table: str) -> None:
        self.machine = machine
        self.audit = audit
        self._table = table

    def numbers(self) -> dict[str, int]:
        """The number of every call that this module knows by name."""
        found: dict[str, int] = {}
        number = 0
        for word in (self._table + _EVERYWHERE).split():
            if word.isdigit():
                number = int(word)
            else:
                found[word] = number
                number += 1
        return found


ARCHITECTURES = (Architecture("x86_64", 0xC000003E, _X86_64), Architecture("aarch64", 0xC00000B7, _AARCH64))


# ---- assembler ---------------------------------------------------------------------------------------------

_LOAD, _JUMP, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_FARTHEST = 255  # a conditional jump has eight bits

# struct seccomp_data: the number, the architecture, the instruction pointer, six arguments of eight bytes
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16

_KILL_PROCESS = 0x80000000


def _errno(number: int) -> int:
    return 0x00050000 | number


def _verdict(action: int) -> Block:
    return ((_RETURN, 0, 0, action),)


_ALLOW = _verdict(0x7FFF0000)


def _when(test: int, constant: int, yes: Block, no: Block) -> Block:
    """Branches on the loaded word. As both ways end in a verdict, blocks nest without labels."""
    if len(yes) <= _FARTHEST:
        return ((test, 0, len(yes), constant), *yes, *no)
    return ((test, 1, 0, constant), (_JUMP, 0, 0, len(yes)), *yes, *no)


def _argument(index: int) -> Instruction:
    # Both architectures are little-endian: the low half comes first.
    return (_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * index)


def _any_bit(index: int, mask: int, yes: Block, no: Block) -> Block:
    return (_argument(index), *_when(_IF_ANY_BIT, mask, yes, no))


def _one_of(index: int, values: Iterable[int], yes: Block, no: Block) -> Block:
    block = no
    for value in reversed(tuple(values)):
        block = _when(_IF_EQUAL, value, yes, block)
    return (_argument(index), *block)


def _search(ranges: list[tuple[int, Block]]) -> Block:
    """A binary tree over ranges, each given by its first number and reaching to the next one's.

    A few comparisons instead of hundreds. It looks at nothing but the number, so that the kernel (5.11 and
    later) sees beforehand which calls are always allowed, and skips the filter for them.
    """
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    return _when(_IF_AT_LEAST, ranges[middle][0], _search(ranges[middle:]), _search(ranges[:middle]))


def _ranges(blocks: dict[int, Block], default: Block) -> list[tuple[int, Block]]:
    # The range that begins behind the highest known number also takes x32 calls, which carry bit 30.
    found: list[tuple[int, Block]] = []
    for number in range(max(blocks) + 2):
        block = blocks.get(number, default)
        if not found or found[-1][1] != block:
            found.append((number, block))
    return found


# ---- what others call --------------------------------------------------------------------------------------


def allowed_names() -> frozenset[str]:
    """Every call that runs whatever its arguments are, on whichever architecture has it."""
    return frozenset(name for group in ALLOWED.values() for name in group.split())


def program(arch: Architecture | str, *, host_writable: bool = False, counted: bool = True) -> bytes:
    """The filter for one architecture, as an array of `struct sock_filter`.

    Args:
        arch: the architecture, or its name.
        host_writable: whether the sandbox can write to a directory of the host.
        counted: whether a cgroup counts what the sandbox uses.

    Raises:
        HostError: there is no filter for a machine of that name.
    """
    target = arch if isinstance(arch, Architecture) else _require_architecture(arch)
    numbers = target.numbers()
    verdicts = dict.fromkeys(numbers, _verdict(_errno(_EPERM)))
    verdicts.update(dict.fromkeys(allowed_names(), _ALLOW))
    verdicts.update(_conditional(host_writable=host_writable, counted=counted))
    blocks = {numbers[name]: block for name, block in verdicts.items() if name in numbers}
    tree = _search(_ranges(blocks, _verdict(_errno(_ENOSYS))))
    native = ((_LOAD, 0, 0, _NUMBER_OFFSET), *tree)
    whole = (
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        *_when(_IF_EQUAL, target.audit, native, _verdict(_KILL_PROCESS)),
    )
    return b"".join(
        code.to_bytes(2, "little") + bytes((if_true, if_false)) + constant.to_bytes(4, "little")
        for code, if_true, if_false, constant in whole
    )


def path(machine: str, *, host_writable: bool = False, counted: bool = True) -> str:
    """Where the shipped filter for a machine is, given its `os.uname().machine`.

    Raises:
        HostError: there is none.
    """
    kind = ("-host-writable" if host_writable else "") + ("" if counted else "-uncounted")
    name = f"seccomp-{_require_architecture(machine).machine}{kind}.bpf"
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", name)


def _require_architecture(machine: str) -> Architecture:
    for architecture in ARCHITECTURES:
        if architecture.machine == machine:
            return architecture
    from ..errors import HostError

    known = " and ".join(architecture.machine for architecture in ARCHITECTURES)
    raise HostError(
        f"there is no system-call filter for {machine!r} machines",
        code="host.architecture",
        hint=f"run hutch on a 64-bit kernel and userland of {known}",
    )


def main() -> None:
    """Writes the data files."""
    for architecture in ARCHITECTURES:
        for host_writable, counted in ((False, True), (True, True), (False, False), (True, False)):
            content = program(architecture, host_writable=host_writable, counted=counted)
            target = path(architecture.machine, host_writable=host_writable, counted=counted)
            with open(target, "wb") as file:
                file.write(content)
            print(f"{target}: {len(content) // 8} instructions")


if __name__ == "__main__":
    main()

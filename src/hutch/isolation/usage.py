"""What a sandbox uses, looked at from outside, where no cgroup counts it.

Everything here looks at /proc and at directories that hostile programs change meanwhile: bounded, by descriptor, and
wrong by no more than what happens between two looks.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

from ..errors import HostError
from ..model import MIB, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_INODE_BYTES = 1024
"""About what a file costs the kernel, also an empty one in memory."""
_FILE_BYTES = 8192
"""What a file on disk counts for at least, so that many small ones are bounded, too."""
_DISK_ENTRIES = 200_000
_SLACK_BYTES = 512 * MIB
_SOCKET_BYTES = 208 * 1024
"""What the kernel lets one socket hold by default."""
_SOCKETS_FREE = 256
_CLOSED_BYTES = 256 * MIB
"""What a process is taken to hide that lets nobody look into it."""
_DISK_DEPTH = 128
_START_SECONDS = 1.0


def tree_pids(pid: int) -> list[int]:
    """A process and all below it, the farthest last."""
    found: list[int] = []
    pending = [pid]
    while pending:
        current = pending.pop()
        found.append(current)
        for task in _tasks(current):
            pending += [int(child) for child in read_text(f"/proc/{current}/task/{task}/children").split()]
    return found


def life_signs(pids: Sequence[int]) -> dict[int, str]:
    """What tells whether processes did something: their times, page faults, threads and sizes, of all threads."""
    return {pid: read_text(f"/proc/{pid}/stat") for pid in pids}


def tree_memory(pids: Sequence[int]) -> int:
    """Bytes of memory that processes use."""
    return sum(_private_memory(pid) for pid in pids)


def temporary_bytes(pids: Sequence[int], temporary: Sequence[str]) -> int:
    """What a sandbox keeps in files that live in memory: its temporary filesystems, and files without a name."""
    held = look_at_descriptors(pids)
    used = sum(size for name, size in held.unnamed if name.startswith("/memfd:"))
    used += _shared_bytes(pids) + max(0, held.sockets - _SOCKETS_FREE) * _SOCKET_BYTES
    used += held.closed * _CLOSED_BYTES
    outside = os.stat("/").st_dev
    for pid in reversed(pids):  # the program's own; pid 1 lets nobody look
        try:
            if os.stat(f"/proc/{pid}/root/").st_dev == outside:
                continue
            files = [os.statvfs(f"/proc/{pid}/root{path}") for path in temporary]
        except OSError:
            continue
        used += sum((info.f_blocks - info.f_bfree) * info.f_frsize for info in files)
        used += sum((info.f_files - info.f_ffree) * _INODE_BYTES for info in files)
        break
    return used


def _shared_bytes(pids: Sequence[int]) -> int:
    """Shared memory without a name; its pages may be filled and yet mapped by nobody, so the whole of it counts."""
    found: dict[str, int] = {}
    for pid in pids:
        for line in read_text(f"/proc/{pid}/maps").splitlines():
            if line.endswith("/dev/zero (deleted)"):
                words = line.split()
                start, _, end = words[0].partition("-")
                size = int(end, 16) - int(start, 16)
                found[words[4]] = max(size, found.get(words[4], 0))
    return sum(found.values())


class OpenFiles(Value):
    """What processes hold by descriptor, each once."""

    unnamed: tuple[tuple[str, int], ...]
    """(last name, bytes) of files that no directory names any more."""
    sockets: int
    closed: int
    """How many programs let nobody look; pid 1, before which none stands, is such by design and does not count."""


def look_at_descriptors(pids: Sequence[int]) -> OpenFiles:
    """Look at what processes have open, as far as they let us."""
    names = [read_text(f"/proc/{pid}/comm").strip() for pid in pids]
    programs = set(pids[names.index("init") + 1 :]) if "init" in names else set()
    unnamed: dict[tuple[int, int], tuple[str, int]] = {}
    sockets: set[int] = set()
    closed = 0
    for pid in pids:
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except PermissionError:
            # Who is dying lets nobody look, either, and has no memory left to hide anything in; nor does a child of
            # pid 1 that is about to execute a program, and still is what pid 1 is.
            is_dying = "VmSize:" not in read_text(f"/proc/{pid}/status")
            is_starting = read_text(f"/proc/{pid}/comm").strip() == "init" and age_seconds(pid) < _START_SECONDS
            closed += pid in programs and not is_dying and not is_starting
            continue
        except OSError:
            continue
        for descriptor in descriptors[:4096]:
            path = f"/proc/{pid}/fd/{descriptor}"
            try:
                info = os.stat(path)
                if stat.S_ISSOCK(info.st_mode):
                    sockets.add(info.st_ino)
                elif stat.S_ISREG(info.st_mode) and info.st_nlink == 0:
                    unnamed[info.st_dev, info.st_ino] = (os.readlink(path), info.st_blocks * 512)
            except OSError:
                continue
    return OpenFiles(unnamed=tuple(unnamed.values()), sockets=len(sockets), closed=closed)


def age_seconds(pid: int) -> float:
    """For how long a process has lived; 0 if there is none."""
    try:
        started = int(read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[19])
        return float(read_text("/proc/uptime").split()[0]) - started / os.sysconf("SC_CLK_TCK")
    except (IndexError, ValueError):
        return 0.0


class Disk:
    """How much a directory of the host grows while a sandbox can write to it."""

    def __init__(self, path: str, guest_path: str) -> None:
        self._path = path
        self._guest_path = guest_path
        self._start = tree_disk(path)
        self._free = self._available()

    def growth(self, unnamed: Sequence[tuple[str, int]]) -> int:
        """Bytes that it grew by, with files that have no name any more."""
        hidden = sum(size for name, size in unnamed if name.startswith(f"{self._guest_path}/"))
        if self._start is None:
            # Too large to be walked again and again. What the filesystem lost is all that can be told.
            return self._free - self._available()
        used = tree_disk(self._path)
        if used is None:
            return sys.maxsize  # it was walkable before
        # Files without a name that are held by a mapping, or in a message, and not by a descriptor, show here alone.
        # Others write to the filesystem, too, so that only much counts.
        unseen = (self._free - self._available() - _SLACK_BYTES) // 2
        return max(used - self._start + hidden, unseen)

    def _available(self) -> int:
        info = os.statvfs(self._path)
        return info.f_bavail * info.f_frsize


def tree_disk(path: str) -> int | None:
    """Bytes that the files below a directory occupy, or None if it is too large, too deep or not open to be walked.

    By descriptor: a directory that is swapped for a link meanwhile leads nowhere else, and no path is too long.
    """
    total = 0
    left = _DISK_ENTRIES
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        open_directories = [os.open(path, flags)]
    except PermissionError:
        return None
    except OSError:
        return 0
    entries = [_list_directory(open_directories[0])]
    try:
        while open_directories:
            if not entries[-1]:
                entries.pop()
                os.close(open_directories.pop())
                continue
            name, size = entries[-1].pop()
            total += max(size, _FILE_BYTES)
            left -= 1
            if left < 0 or len(open_directories) > _DISK_DEPTH:
                return None
            if name is not None:
                try:
                    open_directories.append(os.open(name, flags, dir_fd=open_directories[-1]))
                except PermissionError:
                    return None  # closed to us, and so to our look; who closed it may write in it
                except OSError:
                    continue
                entries.append(_list_directory(open_directories[-1]))
    finally:
        for fd in open_directories:
            os.close(fd)
    return total


def _list_directory(fd: int) -> list[tuple[str | None, int]]:
    """(name if it is a directory, bytes) of each entry; what vanishes meanwhile is left out."""
    found: list[tuple[str | None, int]] = []
    try:
        with os.scandir(fd) as listing:
            for entry in listing:
                try:
                    info = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                found.append((entry.name if stat.S_ISDIR(info.st_mode) else None, info.st_blocks * 512))
                if len(found) > _DISK_ENTRIES:
                    break
    except OSError:
        return found
    return found


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _private_memory(pid: int) -> int:
    own = 0
    for line in read_text(f"/proc/{pid}/status").splitlines():
        if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")):
            own += int(line.split()[1]) * 1024
    if own > 32 * MIB:  # forked workers share most of their pages; ask for the exact share where it matters
        share = sum(
            int(line.split()[1]) * 1024
            for line in read_text(f"/proc/{pid}/smaps_rollup").splitlines()
            if line.startswith(("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))
        )
        return share or own
    return own


def read_text(path: str) -> str:
    """A small file of the kernel's, or "" where there is none.

    Raises:
        HostError: this process has no descriptor left to look with. That there is none must not be concluded from it.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise HostError(
                f"{path} cannot be looked at ({error.strerror})",
                code="host.descriptors",
                hint="raise the limit of open files: ulimit -n 65536",
            ) from error
        return ""

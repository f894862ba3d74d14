"""What sandboxes leave on the host while they live, and what dead ones left behind."""

from __future__ import annotations

import os
import signal

from ..config import cache_directory, data_directory
from ..process import is_alive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..model import Plan


def work_places() -> list[str]:
    """Directories in which work directories are made, in the order in which they are tried."""
    shared = ["/var/tmp", "/tmp"]
    private = [data_directory(), cache_directory()]
    # Root's own directories cannot be entered through a mount on which only the project's owner exists.
    return [*shared, *private] if os.geteuid() == 0 else [*private, *shared]


def _other_places() -> list[str]:
    """Directories beside projects in which there was no other way than to make one."""
    try:
        with open(_journal(), encoding="utf-8", errors="surrogateescape") as file:
            return file.read().split("\0")[:-1]
    except OSError:
        return []


def _journal() -> str:
    return f"{data_directory()}/work-places"


def _note_place(place: str) -> None:
    """Remember an unusual place, so that a later clean-up looks there, too."""
    if place in work_places() or place in _other_places():
        return
    os.makedirs(data_directory(), 0o700, exist_ok=True)
    with open(_journal(), "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{place}\0")


def find_stale() -> Iterator[tuple[str, str]]:
    """Everything that dead processes left: ("cgroup" | "work", path)."""
    from ..isolation import limits

    for directory in limits.cgroup_roots():
        for name in _names(directory):
            if name.startswith("hutch-") and not is_alive(name.removeprefix("hutch-")):
                yield "cgroup", f"{directory}/{name}"
    for place in [*work_places(), *_other_places()]:
        for name in _names(place):
            if name.startswith(".hutch-work-") and not is_alive(name.removeprefix(".hutch-work-")):
                path = f"{place}/{name}"
                if os.geteuid() == _owner(path):
                    yield "work", path


def _owner(path: str) -> int | None:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None  # another hutch was faster


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def clear_stale() -> list[str]:
    """Remove what dead processes left, and say what that was."""
    cleared = []
    for kind, path in find_stale():
        try:
            if kind == "cgroup":
                os.rmdir(path)
            else:
                remove_work_directory(path)
            cleared.append(path)
        except (OSError, RecursionError):
            continue  # still in use, another hutch was faster, or it is not what it seems
    return cleared


def kill_orphans(plan: Plan, child_pid: int) -> None:
    """Somebody killed a warden alone. Its child dies with it; what that had already started may not have."""
    from ..isolation import limits

    for pid in [-child_pid, *limits.members([directory for directory, _ in plan.cgroups])]:
        if pid:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def clean_up(plan: Plan) -> None:
    """Do what a warden did not come to do."""
    from ..isolation import limits

    for path, _, _ in plan.work_directories:
        if os.path.lexists(path):
            try:
                remove_work_directory(path)
            except OSError:
                continue  # gone meanwhile
    limits.remove_cgroups([directory for directory, _ in plan.cgroups])


def make_work_directory(path: str, name: str, uid: int, gid: int) -> None:
    """Make a directory that stays ours and, in it, one for overlayfs that belongs to a project's owner."""
    _note_place(os.path.dirname(path))
    os.mkdir(path, 0o711)
    inner = f"{path}/{name}"
    os.mkdir(inner, 0o700)
    if uid != os.geteuid():
        fd = os.open(inner, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchown(fd, uid, gid)
        finally:
            os.close(fd)


def remove_work_directory(path: str) -> None:
    """Remove a work directory of overlayfs, which leaves its own part unreadable."""
    import shutil

    if os.geteuid() != 0:  # root needs no permission, and must not be led to another file by a swapped name
        for inner in [f"{path}/{name}" for name in _names(path)]:
            for directory in (inner, f"{inner}/work"):
                if os.path.isdir(directory) and not os.path.islink(directory):
                    os.chmod(directory, 0o700)
    shutil.rmtree(path)

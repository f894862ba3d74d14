"""Directories by descriptor: made, checked and removed without following a link.

What lies in a session was made by guests. Its names, links, modes and depth are whatever suits an attacker, and may
change while we look.
"""

from __future__ import annotations

import errno
import os

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Directory:
    """A descriptor that is closed in the end; -1 is a directory that does not exist."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Give the descriptor back."""
        if self.fd >= 0:
            os.close(self.fd)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_exception: object) -> None:
        self.close()


def list_names(directory: int) -> list[str]:
    """What lies in a directory."""
    return os.listdir(directory) if directory >= 0 else []


def is_same(fd: int, path: str) -> bool:
    """Whether a path still leads to what is open here."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def make_directory(parent: int, name: str, mode: int = 0o700, owner: tuple[int, int] | None = None) -> None:
    """Make a directory with exactly this mode; one that is there already is left as it is."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        return
    if mode == 0o700 and owner is None:
        return
    with Directory(os.open(name, OPEN_DIRECTORY, dir_fd=parent)) as directory:
        if owner is not None and owner != (os.geteuid(), os.getegid()):
            os.fchown(directory, *owner)
        os.fchmod(directory, mode)


def unlink(directory: int, name: str) -> bool:
    """Remove a file; False if it is a directory. Gone already is as good."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        return False
    return True


def remove_tree(parent: int, name: str) -> None:
    """Remove a directory of ours and all that guests put into it.

    Guests nest directories deeper than any path or stack is long: each is first moved up into the one at the top.

    Raises:
        OSError: something could not be removed.
    """
    for attempt in range(10):  # whoever still has it open may put something in
        try:
            with Directory(_open_to_empty(parent, name)) as top:
                while names := os.listdir(top):
                    for inner in names:
                        if not unlink(top, inner):
                            _remove_directory(top, inner)
        except FileNotFoundError:
            if attempt == 0:
                raise
            return  # another process was faster
        if _remove_empty(parent, name):
            return
    os.rmdir(name, dir_fd=parent)


def _remove_directory(top: int, name: str) -> None:
    for _ in range(10):  # a guest that still runs could go on for ever
        if _remove_empty(top, name):
            return
        try:
            with Directory(_open_to_empty(top, name)) as directory:
                for inner in os.listdir(directory):
                    if not unlink(directory, inner) and not _remove_empty(directory, inner):
                        _move_up(directory, inner, top)
        except FileNotFoundError:
            continue  # another process removes it, too
    os.rmdir(name, dir_fd=top)


def _remove_empty(parent: int, name: str) -> bool:
    """Remove an empty directory; False if it is not empty."""
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _move_up(directory: int, name: str, top: int) -> None:
    # Where it lies is written in the directory itself, so that one which cannot be written cannot be moved.
    os.close(_open_to_empty(directory, name))
    os.rename(name, os.urandom(8).hex(), src_dir_fd=directory, dst_dir_fd=top)


def _open_to_empty(parent: int, name: str) -> int:
    """Open a directory and make it one that we can empty, whatever its mode was."""
    try:
        directory = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
    except PermissionError:
        with Directory(os.open(name, os.O_PATH | OPEN_DIRECTORY, dir_fd=parent)) as pinned:
            os.chmod(f"/proc/self/fd/{pinned}", 0o700)
        directory = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
    found = os.fstat(directory)
    if found.st_mode & 0o700 != 0o700 and found.st_uid == os.geteuid():
        os.fchmod(directory, 0o700)
    return directory

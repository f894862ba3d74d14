"""Where the daemon of one user and one data directory lives on disk, and which code it is made of.

<data>/run/daemon.lock    held while somebody starts a daemon
<data>/run/daemon.pid     held by the daemon for as long as it lives
<data>/run/address        a link to the directory of the socket, where that is another one
<data>/daemon.log         what went wrong
DIRECTORY/daemon.sock     $XDG_RUNTIME_DIR/hutch-*, else <data>/run, else, where that is too long, /tmp/hutch-*
"""

from __future__ import annotations

import binascii
import os
import stat

from ..config import data_directory
from ..errors import HostError
from ..model import HostPath
from ..process import quote

SOCKET = "daemon.sock"
LOG_BYTES = 1024 * 1024
_PATH_BYTES = 107
"""What a socket's path may have, without the NUL at its end: unix(7)."""


def home_directory() -> HostPath:
    """Where locks lie, whatever a caller's variables say about sockets."""
    return HostPath(f"{os.path.realpath(data_directory())}/run")


def socket_directory() -> HostPath:
    """Where a daemon that is started now has its socket."""
    home = home_directory()
    name = f"{binascii.crc32(os.fsencode(home)):08x}"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    chosen = f"{runtime}/hutch-{name}" if os.path.isabs(runtime) and is_private(runtime) else home
    if len(os.fsencode(f"{chosen}/{SOCKET}")) > _PATH_BYTES:
        chosen = f"/tmp/hutch-{os.geteuid()}-{name}"
    return HostPath(chosen)


def log_path() -> HostPath:
    """What the daemon writes when something goes wrong."""
    return HostPath(f"{os.path.realpath(data_directory())}/daemon.log")


def is_private(path: str) -> bool:
    """Whether this is a directory that only we can enter."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def require_private(path: str) -> None:
    """Make a directory that is ours alone, or see that it is.

    Raises:
        HostError: it is somebody else's, others can enter it, or it cannot be made.
    """
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        if not os.path.lexists(path):
            os.mkdir(path, 0o700)
    except OSError as error:
        if isinstance(error, FileExistsError) and is_private(path):
            return  # somebody was faster
        raise HostError(
            f"{path} cannot be made ({error.strerror})",
            code="host.runtime",
            hint="set HUTCH_DATA_DIR to a directory of your own",
        ) from error
    if not is_private(path):
        raise HostError(
            f"{path} is not a directory that only you can enter",
            code="host.runtime",
            hint=f"look at it with ls -ld, then: rm -r {quote(path)}",
        )


def open_own(path: str, *, flags: int = os.O_RDWR) -> int:
    """Open a file of our own, made if there is none.

    Raises:
        HostError: it cannot be.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HostError(
            f"{path} cannot be opened ({error.strerror})",
            code="host.runtime",
            hint="make room, or set HUTCH_DATA_DIR to a directory of your own",
        ) from error


def code_identity() -> str:
    """What changes when the code does: where it lies, and the times and sizes of its files."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    count = times = sizes = 0
    pending = [package]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "__pycache__":
                        pending.append(entry.path)
                    continue
                found = entry.stat()
                count += 1
                times += found.st_mtime_ns
                sizes += found.st_size
    return f"{package}:{count}:{times:x}:{sizes:x}"


def open_log() -> int:
    """The log, to be written to; what is in it is put aside when it is long."""
    path = log_path()
    try:
        if os.lstat(path).st_size > LOG_BYTES:
            os.rename(path, f"{path}.1")
    except OSError:
        pass
    return open_own(path, flags=os.O_WRONLY | os.O_APPEND)

"""Files of a sandbox's workspace, for whoever stands outside.

Every path is resolved inside, by the agent, beneath the workspace and without following a link (isolation/init.c); what
comes out is a descriptor. So nothing that the guest plants or swaps can lead to a file that it could not reach itself,
and a file that we make belongs to the guest. Sizes are capped, and only regular files are read.
"""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import stat

from ..errors import HutchError, SpecError
from ..isolation import jail
from ..model import MIB, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any, TypeVar

    from .agent import Agent

    T = TypeVar("T")

MAX_FILE_BYTES = 64 * MIB
"""What `read` and `write` take at once."""
MAX_TREE_BYTES = 4096 * MIB
MAX_TREE_FILES = 100_000
MAX_TREE_DEPTH = 100
_CHUNK = MIB
_QUICK_BYTES = 256 * 1024
"""What is copied without leaving the event loop."""
_AT_REMOVEDIR = 0x200
_BATCH = 500
"""Entries of a directory that are looked at before others have their turn."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Entry(Value):
    """What is known of one file, without following a link."""

    path: str
    """Relative to the workspace."""
    kind: str
    """file, directory, link or other."""
    size: int
    mode: int
    modified: float

    @property
    def name(self) -> str:
        """The last part of the path."""
        return posixpath.basename(self.path)


class Transfer(Value):
    """What an upload or a download came to."""

    files: int
    bytes: int
    skipped: tuple[str, ...] = ()
    """Links and special files, which are not copied."""


class Files:
    """The workspace of one sandbox."""

    def __init__(
        self,
        agent: Callable[[], Awaitable[Agent]],
        note: Callable[[str, str, int], None] = lambda action, path, size: None,
    ) -> None:
        self._agent = agent
        self._note = note
        """Told of every change: action, path, bytes."""

    # ---- one file ----

    async def read(self, path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """The content of a regular file.

        Raises:
            SpecError: there is none, it is larger than max_bytes, not a file, or not below the workspace.
        """
        inner = require_inside(path)
        fd = await self._open(inner, os.O_RDONLY)
        try:
            size = _require_regular(fd, path).st_size
            if size > max_bytes:
                raise _too_large(path, size, max_bytes)
            data = await _in_thread(size, _read_all, fd, max_bytes)
        finally:
            os.close(fd)
        if len(data) > max_bytes:
            raise _too_large(path, len(data), max_bytes)
        return data

    async def write(self, path: str, data: bytes | str) -> None:
        """Put a file in place in one step, with the directories above it.

        Raises:
            SpecError: it is too large, a directory is in the way, or the path is not below the workspace.
        """
        inner = _require_name(path)
        content = _encode(path, data) if isinstance(data, str) else bytes(data)
        if len(content) > MAX_FILE_BYTES:
            raise _too_large(path, len(content), MAX_FILE_BYTES)

        async def fill(fd: int) -> None:
            await _in_thread(len(content), _write_all, fd, content)

        await self._put(inner, await self._mode(inner, 0o644), fill)
        self._note("write", inner, len(content))

    async def stat(self, path: str) -> Entry:
        """What a path is. A link is described, not followed.

        Raises:
            SpecError: there is nothing, or the path is not below the workspace.
        """
        inner = require_inside(path)
        fd = await self._open(inner, os.O_PATH)
        try:
            return _entry(inner, os.fstat(fd))
        finally:
            os.close(fd)

    async def exists(self, path: str) -> bool:
        """Whether there is something at a path, even a link that leads nowhere."""
        try:
            await self.stat(path)
        except SpecError as error:
            if error.code in ("files.missing", "files.link") or isinstance(error.__cause__, NotADirectoryError):
                return False
            raise
        return True

    async def list(self, path: str = ".") -> list[Entry]:
        """What is in a directory, by name.

        Raises:
            SpecError: it is no directory, holds too much, or is not below the workspace.
        """
        inner = require_inside(path)
        prefix = "" if inner == "." else f"{inner}/"
        fd = await self._open(inner, os.O_RDONLY | os.O_DIRECTORY)
        found: list[Entry] = []
        try:
            with os.scandir(fd) as listing:
                for number, entry in enumerate(listing, 1):
                    try:
                        found.append(_entry(prefix + entry.name, entry.stat(follow_symlinks=False)))
                    except OSError:
                        continue  # gone meanwhile
                    if number > MAX_TREE_FILES:
                        raise SpecError(
                            f"{path} holds more than {MAX_TREE_FILES} files",
                            code="files.size",
                            hint='look at it from inside: box.exec(["ls", "-f"])',
                        )
                    if not number % _BATCH:
                        await asyncio.sleep(0)
        finally:
            os.close(fd)
        return sorted(found, key=lambda entry: entry.path)

    async def mkdir(self, path: str) -> None:
        """Make a directory, and those above it. One that exists is left as it is.

        Raises:
            SpecError: a file is in the way, or the path is not below the workspace.
        """
        inner = require_inside(path)
        parts = [] if inner == "." else inner.split("/")
        for depth in range(1, len(parts) + 1):
            step = "/".join(parts[:depth])
            try:
                await (await self._agent()).request("mkdir", "0755", step)
                self._note("mkdir", step, 0)
            except FileExistsError:
                fd = await self._open(step, os.O_PATH | os.O_DIRECTORY)
                os.close(fd)
            except OSError as error:
                raise _explain(path, error) from error

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link, an empty directory, or with recursive a directory and all below it.

        Raises:
            SpecError: there is nothing, the directory is not empty, or the path is not below the workspace.
        """
        inner = _require_name(path)
        agent = await self._agent()
        try:
            try:
                await agent.request("remove", 0, inner)
            except IsADirectoryError:
                if recursive:
                    await self._empty(inner)
                await agent.request("remove", _AT_REMOVEDIR, inner)
        except OSError as error:
            raise _explain(path, error) from error
        self._note("remove", inner, 0)

    async def _empty(self, inner: str) -> None:
        """Remove all that is in a directory. Not by recursion: it may be as deep as paths are long."""
        agent = await self._agent()
        pending = [(entry, False) for entry in await self.list(inner)]
        while pending:
            entry, is_emptied = pending.pop()
            try:
                await agent.request("remove", _AT_REMOVEDIR if is_emptied else 0, entry.path)
            except FileNotFoundError:
                continue  # somebody inside was faster
            except IsADirectoryError:
                pending.append((entry, True))
                pending += [(below, False) for below in await self.list(entry.path)]

    async def move(self, path: str, to: str) -> None:
        """Give a file or directory another place in the workspace; a file there is replaced.

        Raises:
            SpecError: there is nothing, something is in the way, or a path is not below the workspace.
        """
        source, target = _require_name(path), _require_name(to)
        await self._make_parent(target)
        try:
            await (await self._agent()).request("rename", source, target)
        except OSError as error:
            raise _explain(f"{path} -> {to}", error) from error
        self._note("move", f"{source} -> {target}", 0)

    # ---- trees ----

    async def upload(self, host_path: str, path: str = ".") -> Transfer:
        """Copy a file or a directory of the host into the workspace.

        Args:
            host_path: what to copy. Links and special files in it are skipped, and named in what is returned.
            path: the name that it gets; for a directory, where its content goes.

        Raises:
            SpecError: it does not exist, is too large, or the path is not below the workspace.
        """
        inner = require_inside(path)
        transfer = _Count()
        try:
            if os.path.isdir(host_path):
                directory = os.open(host_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                await self._upload_tree(directory, inner, transfer, host_path, MAX_TREE_DEPTH)
            else:
                source = os.open(host_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                await self._upload_file(source, inner, transfer, host_path)
        except OSError as error:
            raise SpecError(
                f"{error.filename or host_path} cannot be read ({error.strerror})",
                code="files.host",
                hint="name a file or directory that exists and that you may read",
            ) from error
        self._note("upload", inner, transfer.bytes)
        return transfer.value()

    async def download(self, path: str, host_path: str) -> Transfer:
        """Copy a file or a directory of the workspace to the host.

        Args:
            path: what to copy. Links and special files in it are skipped, and named in what is returned.
            host_path: the name that it gets; for a directory, where its content goes. Files there are replaced, but
                nothing is written through a link.

        Raises:
            SpecError: it does not exist, is too large, or cannot be written.
        """
        inner = require_inside(path)
        transfer = _Count()
        kind = (await self.stat(inner)).kind
        try:
            if kind == "directory":
                os.makedirs(host_path, exist_ok=True)
                directory = os.open(host_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                await self._download_tree(inner, directory, transfer, MAX_TREE_DEPTH)
            else:
                parent = os.open(os.path.dirname(os.path.abspath(host_path)), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    await self._download_file(inner, parent, os.path.basename(host_path), transfer)
                finally:
                    os.close(parent)
        except OSError as error:
            raise SpecError(
                f"{error.filename or host_path} cannot be written ({error.strerror})",
                code="files.host",
                hint="name a directory that you may write to, and remove links that are in the way",
            ) from error
        return transfer.value()

    # Both ways by descriptor: whoever can write to the directory on the host, perhaps a guest, could swap a part of it
    # for a link.

    async def _upload_tree(self, directory: int, inner: str, transfer: _Count, shown: str, depth: int) -> None:
        """Takes the descriptor over."""
        try:
            _require_depth(depth, shown)
            await self.mkdir(inner)
            for name in sorted(os.listdir(directory)):
                target = posixpath.normpath(posixpath.join(inner, name))
                where = f"{shown}/{name}"
                mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    below = os.open(name, _OPEN_DIRECTORY, dir_fd=directory)
                    await self._upload_tree(below, target, transfer, where, depth - 1)
                elif stat.S_ISREG(mode):
                    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
                    await self._upload_file(os.open(name, flags, dir_fd=directory), target, transfer, where)
                else:
                    transfer.skipped.append(where)
        finally:
            os.close(directory)

    async def _upload_file(self, source: int, inner: str, transfer: _Count, shown: str) -> None:
        """Takes the descriptor over."""
        try:
            info = _require_regular(source, shown)
            transfer.add(info.st_size)

            async def fill(fd: int) -> None:
                await _in_thread(info.st_size, _copy, source, fd, info.st_size)

            await self._put(_require_name(inner), 0o755 if info.st_mode & 0o100 else 0o644, fill)
        finally:
            os.close(source)

    async def _download_tree(self, inner: str, directory: int, transfer: _Count, depth: int) -> None:
        """Takes the descriptor over."""
        try:
            _require_depth(depth, inner)
            for entry in await self.list(inner):
                if entry.kind == "directory":
                    try:
                        os.mkdir(entry.name, 0o755, dir_fd=directory)
                    except FileExistsError:
                        pass
                    below = os.open(entry.name, _OPEN_DIRECTORY, dir_fd=directory)
                    await self._download_tree(entry.path, below, transfer, depth - 1)
                elif entry.kind == "file":
                    await self._download_file(entry.path, directory, entry.name, transfer)
                else:
                    transfer.skipped.append(entry.path)
        finally:
            os.close(directory)

    async def _download_file(self, inner: str, directory: int, name: str, transfer: _Count) -> None:
        source = await self._open(inner, os.O_RDONLY)
        try:
            info = _require_regular(source, inner)
            transfer.add(info.st_size)
            temporary = _temporary_name()
            mode = 0o755 if info.st_mode & 0o100 else 0o644
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            target = os.open(temporary, flags, mode, dir_fd=directory)
            try:
                await _in_thread(info.st_size, _copy, source, target, info.st_size)
                os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                os.unlink(temporary, dir_fd=directory)
                raise
            finally:
                os.close(target)
        finally:
            os.close(source)

    # ---- the agent ----

    async def _open(self, inner: str, flags: int, mode: int = 0) -> int:
        try:
            return (await (await self._agent()).request("open", flags, f"{mode:o}", inner)).fd
        except OSError as error:
            raise _explain(inner, error) from error

    async def _mode(self, inner: str, default: int) -> int:
        try:
            entry = await self.stat(inner)
        except SpecError:
            return default
        return entry.mode & 0o777 if entry.kind == "file" else default

    async def _make_parent(self, inner: str) -> None:
        parent = posixpath.dirname(inner)
        if parent:
            await self.mkdir(parent)

    async def _put(self, inner: str, mode: int, fill: Callable[[int], Awaitable[None]]) -> None:
        """Fill a file that has no name, and give it its own when it is whole.

        So nobody sees half of it, and who is killed meanwhile leaves nothing.
        """
        await self._make_parent(inner)
        agent = await self._agent()
        directory = posixpath.dirname(inner) or "."
        try:
            answer = await agent.request("open", os.O_TMPFILE | os.O_WRONLY, f"{mode:o}", directory)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise _explain(inner, error) from error
            await self._put_by_name(inner, mode, fill)  # a filesystem without such files
            return
        try:
            await fill(answer.fd)
            await agent.request("place", inner, fds=(answer.fd,))
        except OSError as error:
            raise _explain(inner, error) from error
        finally:
            os.close(answer.fd)

    async def _put_by_name(self, inner: str, mode: int, fill: Callable[[int], Awaitable[None]]) -> None:
        agent = await self._agent()
        temporary = posixpath.join(posixpath.dirname(inner), _temporary_name())
        try:
            fd = await self._open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            try:
                await fill(fd)
            finally:
                os.close(fd)
            await agent.request("rename", temporary, inner)
        except BaseException as error:
            try:
                await asyncio.shield(agent.request("remove", 0, temporary))
            except (OSError, HutchError):
                pass
            if isinstance(error, OSError):
                raise _explain(inner, error) from error
            raise


class _Count:
    def __init__(self) -> None:
        self.files = 0
        self.bytes = 0
        self.skipped: list[str] = []

    def add(self, size: int) -> None:
        self.files += 1
        self.bytes += size
        if self.files > MAX_TREE_FILES or self.bytes > MAX_TREE_BYTES:
            raise _too_much()

    def value(self) -> Transfer:
        return Transfer(files=self.files, bytes=self.bytes, skipped=tuple(self.skipped))


# ---- paths and errors -----------------------------------------------------------------------------------------------


def require_inside(path: str) -> str:
    """A path relative to the workspace, normal and below it.

    Raises:
        SpecError: it is not below it.
    """
    inner = posixpath.normpath(posixpath.join(jail.WORKSPACE, path)) if "\0" not in path else ""
    name = _encode(path, inner)
    if inner != jail.WORKSPACE and not inner.startswith(f"{jail.WORKSPACE}/"):
        raise SpecError(
            f"{path!r} is not below {jail.WORKSPACE}",
            code="files.path",
            hint=f"use a path relative to {jail.WORKSPACE}, such as results/a.csv",
        )
    if any(len(part) > 255 for part in name.split(b"/")) or len(name) > 4000:
        raise SpecError(f"{path[:100]!r}... is too long a name", code="files.path", hint="use a shorter one")
    return inner.removeprefix(jail.WORKSPACE).lstrip("/") or "."


def _encode(path: str, text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise SpecError(
            f"{path!r} holds half a letter, which no file can ({error.reason})",
            code="files.text",
            hint="use text that can be encoded, or bytes",
        ) from error


def _temporary_name() -> str:
    # Not from the name of the file: that may be as long as names can be.
    return f".hutch-{os.urandom(8).hex()}"


def _require_depth(left: int, path: str) -> None:
    if left <= 0:
        raise SpecError(
            f"{path} lies more than {MAX_TREE_DEPTH} directories deep",
            code="files.size",
            hint="pack it into one file first, for example with tar",
        )


def _require_name(path: str) -> str:
    inner = require_inside(path)
    if inner == "." or path.endswith("/"):
        raise SpecError(
            f"{path!r} names a directory", code="files.path", hint="name a file in the workspace, such as results/a.csv"
        )
    return inner


def _entry(inner: str, info: os.stat_result) -> Entry:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
    return Entry(
        path=inner,
        kind=kinds.get(stat.S_IFMT(info.st_mode), "other"),
        size=info.st_size,
        mode=stat.S_IMODE(info.st_mode),
        modified=info.st_mtime,
    )


def _require_regular(fd: int, path: str) -> os.stat_result:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise SpecError(f"{path} is not a regular file", code="files.kind", hint="only regular files can be copied")
    return info


def _too_much() -> SpecError:
    return SpecError(
        f"more than {MAX_TREE_FILES} files or {MAX_TREE_BYTES // MIB} MiB",
        code="files.size",
        hint="mount the directory instead",
    )


def _too_large(path: str, size: int, allowed: int) -> SpecError:
    return SpecError(
        f"{path} has {size} bytes, and {allowed} are allowed at once",
        code="files.size",
        hint="upload and download copy larger files",
    )


def _explain(path: str, error: OSError) -> SpecError:
    if isinstance(error, FileNotFoundError):
        return SpecError(
            f"{path} does not exist in the workspace", code="files.missing", hint="files.list() shows what does"
        )
    if error.errno == errno.ELOOP:
        return SpecError(
            f"{path} goes through a link, which is not followed", code="files.link", hint="use the path it leads to"
        )
    return SpecError(
        f"{path}: {error.strerror}",
        code="files.refused",
        hint="files.stat() tells what is there; a protected path of a project cannot be changed",
    )


# ---- copying --------------------------------------------------------------------------------------------------------


async def _in_thread(size: int, work: Callable[..., T], *arguments: Any) -> T:
    if size <= _QUICK_BYTES:
        return work(*arguments)
    working = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        # Whoever is cancelled closes the descriptors that the thread still uses, and their numbers become others'.
        while not working.done():
            try:
                await asyncio.wait([working])
            except asyncio.CancelledError:
                continue
        raise


def _read_all(fd: int, max_bytes: int) -> bytes:
    chunks = []
    left = max_bytes + 1
    while left > 0:
        chunk = os.read(fd, min(left, _CHUNK))
        if not chunk:
            break
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest[:_CHUNK]) :]


def _copy(source: int, target: int, size: int) -> None:
    """As much as there was when it was counted: somebody may add to it for ever."""
    while size > 0 and (chunk := os.read(source, min(size, _CHUNK))):
        _write_all(target, chunk)
        size -= len(chunk)

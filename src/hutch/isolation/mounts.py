"""Which parts of the host become visible inside, and what in them stays out of reach.

`check_mounts` looks at the host and refuses what must not be shown; what it returns names every file by device and
inode, so that the warden, which opens it again without following links, can tell whether it is still the same one.
"""

from __future__ import annotations

import os
import stat

from ..errors import HostError, SpecError
from ..model import GuestPath, HostPath, Mount, Unsafe, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PROTECTED = (
    ".git",
    ".gitmodules",
    ".gitattributes",
    ".gitconfig",
    ".mcp.json",
    ".claude",
    ".codex",
    ".agents",
    ".cursor",
    ".gemini",
    ".vscode",
    ".idea",
    ".zed",
    ".devcontainer",
    ".github/workflows",
    ".husky",
    ".pre-commit-config.yaml",
    ".envrc",
    ".npmrc",
    ".yarnrc",
    ".yarnrc.yml",
    ".pnpmfile.cjs",
    ".bashrc",
    ".bash_profile",
    ".profile",
    ".zshrc",
    ".zprofile",
    ".ripgreprc",
)
"""Paths in a project that tools on the host read and obey: code that can write them runs outside later."""

REPORTED = ("AGENTS.md", "CLAUDE.md", "flake.nix")
"""Paths that tools obey as well, and that people ask programs to change: not protected, but told of."""

_NESTED_DEPTH = 4
_NESTED_DIRECTORIES = 20_000
_VIRTUAL = ("/proc", "/sys", "/dev")
_SOCKETS = ("/run", "/var/run")


class CheckedMount(Value):
    """A mount that may be made, pinned to what was looked at."""

    host_path: HostPath
    guest_path: GuestPath
    writable: bool
    directory: bool
    device: str
    """major:minor, as the warden compares it."""
    inode: int
    uid: int
    gid: int
    guarded: bool = False
    present: tuple[str, ...] = ()
    """Protected paths that exist, nested repositories among them."""
    absent: tuple[str, ...] = ()
    work_directory: HostPath | None = None


def check_mounts(
    mounts: tuple[Mount, ...], unsafe: tuple[Unsafe, ...], private: tuple[str, ...]
) -> tuple[CheckedMount, ...]:
    """Look at every mount on the host.

    Args:
        mounts: what was asked for.
        unsafe: switches that lift a refusal.
        private: directories of hutch itself, never to be shown writable.

    Raises:
        SpecError: a source is missing, of the wrong kind, reached through a link, or must not be shown.
        HostError: protected paths in it cannot be guarded.
    """
    return tuple(_check(mount, unsafe, private) for mount in mounts)


def _refuse(mount: Mount, problem: str, hint: str, code: str) -> SpecError:
    return SpecError(f"mount {mount.host_path}:{mount.guest_path}: {problem}", code=code, hint=hint)


def _check(mount: Mount, unsafe: tuple[Unsafe, ...], private: tuple[str, ...]) -> CheckedMount:
    try:
        path = os.path.abspath(os.path.expanduser(mount.host_path))
    except FileNotFoundError as error:
        raise _refuse(
            mount,
            "the current directory no longer exists",
            "cd to an existing directory, or give an absolute path",
            "mount.missing",
        ) from error
    try:
        real = os.path.realpath(path)
        info = os.lstat(path)
    except OSError as error:
        raise _refuse(
            mount,
            f"{path} cannot be reached ({error.strerror})",
            "name a file or directory that exists",
            "mount.missing",
        ) from error
    if real != path or stat.S_ISLNK(info.st_mode):
        raise _refuse(
            mount,
            "the path goes through a symbolic link",
            f"if {real} is what you mean, mount that",
            "mount.symlink",
        )
    if not (stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode)):
        raise _refuse(mount, "neither a directory nor a regular file", "mount the directory around it", "mount.kind")
    if mount.guest_path in ("/workspace", "/project") and not stat.S_ISDIR(info.st_mode):
        raise _refuse(mount, f"{path} is a file", f"for one file: --mount {path}:/data/NAME", "mount.kind")
    _refuse_sensitive(mount, path, unsafe, private)
    checked = pin(HostPath(path), info, mount.guest_path, writable=mount.writable)
    if checked.writable and checked.directory and Unsafe.UNPROTECTED_MOUNTS not in unsafe:
        return _guard(checked)
    return checked


def pin(path: HostPath, info: os.stat_result, guest_path: GuestPath, *, writable: bool) -> CheckedMount:
    """A mount of what was looked at, and of nothing else that may come to be there."""
    return CheckedMount(
        host_path=path,
        guest_path=guest_path,
        writable=writable,
        directory=stat.S_ISDIR(info.st_mode),
        device=f"{os.major(info.st_dev)}:{os.minor(info.st_dev)}",
        inode=info.st_ino,
        uid=info.st_uid,
        gid=info.st_gid,
    )


def _refuse_sensitive(mount: Mount, path: str, unsafe: tuple[Unsafe, ...], private: tuple[str, ...]) -> None:
    def covers(outer: str, inner: str) -> bool:
        return outer == inner or inner.startswith(outer.rstrip("/") + "/")

    if any(covers(virtual, path) for virtual in _VIRTUAL):
        raise _refuse(
            mount, f"{path} shows the host's kernel and devices", "mount a directory of ordinary files", "mount.system"
        )
    if path in _SOCKETS or path in map(os.path.realpath, _SOCKETS):
        raise _refuse(
            mount, f"{path} holds sockets of the host's services", "mount the one directory you need", "mount.system"
        )
    if Unsafe.WRITABLE_HOME not in unsafe:
        home = os.path.realpath(os.path.expanduser("~"))
        if path == "/":
            raise _refuse(
                mount, "this would show the whole machine", "mount the one directory you need", "mount.whole-machine"
            )
        if mount.writable and home != "/" and covers(path, home):
            raise _refuse(
                mount,
                f"{path} holds the settings and keys of your account, and would be writable",
                "mount a project directory, or add --unsafe-writable-home",
                "mount.home",
            )
    for directory in map(os.path.realpath, private if mount.writable else ()):
        if covers(directory, path) or covers(path, directory):
            raise _refuse(
                mount,
                f"hutch's own files must stay out of reach, and {directory} is one of their places",
                "mount a project directory, or set HUTCH_DATA_DIR, HUTCH_CACHE_DIR and XDG_CONFIG_HOME to other places",
                "mount.private",
            )


# ---- protected paths ------------------------------------------------------------------------------------------------


def _guard(mount: CheckedMount) -> CheckedMount:
    present: list[str] = []
    absent: list[str] = []
    for name in PROTECTED:
        (present if _exists(mount, name) else absent).append(name)
    present += [name for name in _nested_repositories(mount.host_path) if _exists(mount, name)]
    _guard_bare_repository(mount, present, absent)
    present += _inner_git_directories(mount, present)
    if ".github/workflows" in absent and os.path.isfile(f"{mount.host_path}/.github"):
        absent.remove(".github/workflows")
        present.append(".github")
    return mount.replace(guarded=True, present=tuple(present), absent=tuple(absent))


_BARE = ("HEAD", "config", "config.worktree", "hooks", "info", "commondir")


def _guard_bare_repository(mount: CheckedMount, present: list[str], absent: list[str]) -> None:
    """A directory with HEAD, objects and refs is a repository by itself, whose config git obeys."""
    if all(os.path.lexists(f"{mount.host_path}/{name}") for name in ("HEAD", "objects", "refs")):
        for name in _BARE:
            (present if _exists(mount, name) else absent).append(name)
    elif ".git" in absent and not os.path.lexists(f"{mount.host_path}/HEAD"):
        absent.append("HEAD")  # without it git takes nothing for a repository


def _inner_git_directories(mount: CheckedMount, present: list[str]) -> list[str]:
    """Where a .git file points to another place in the same project, that place is what git obeys."""
    found: list[str] = []
    for name in present:
        path = f"{mount.host_path}/{name}"
        if name.rpartition("/")[2] != ".git" or not os.path.isfile(path):
            continue
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                target = file.read(4096).partition("gitdir:")[2].strip()
        except OSError:
            continue
        real = os.path.realpath(os.path.join(os.path.dirname(path), target))
        inside = os.path.relpath(real, mount.host_path)
        known = any(f"{inside}/".startswith(f"{other}/") for other in present + found)
        if real.startswith(f"{mount.host_path}/") and not known and _exists(mount, inside):
            found.append(inside)
    return found


def _exists(mount: CheckedMount, name: str) -> bool:
    """Whether a protected path is there; a link or a second name for it would lead around the guard."""
    path = mount.host_path
    info = None
    for part in name.split("/"):
        path = HostPath(f"{path}/{part}")
        try:
            info = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise HostError(
                f"{path} cannot be looked at ({error.strerror}), so it cannot be protected in a writable mount",
                code="host.protect",
                hint=f"make {os.path.dirname(path)} accessible, or mount the directory read-only",
            ) from error
        if stat.S_ISLNK(info.st_mode):
            raise SpecError(
                f"{path} is a symbolic link, so it cannot be protected in a writable mount",
                code="mount.protected-symlink",
                hint="replace the link by what it points to, or mount the directory read-only",
            )
    assert info is not None
    if stat.S_ISREG(info.st_mode) and info.st_nlink > 1:
        raise SpecError(
            f"{path} has {info.st_nlink} names (hard links), so it cannot be protected in a writable mount",
            code="mount.protected-hardlink",
            hint=f"give it one name: cp {path} {path}.new && mv {path}.new {path}",
        )
    return True


def _nested_repositories(root: str) -> Iterator[str]:
    """Every .git below the top, as far down as people keep them, in a bounded look.

    Raises:
        HostError: there are more directories than the look is bounded to, so that one could be missed.
    """
    directories = 0
    level = [""]
    for _ in range(_NESTED_DEPTH):
        below: list[str] = []
        for directory in level:
            directories += 1
            if directories > _NESTED_DIRECTORIES:
                raise HostError(
                    f"{root} has more than {_NESTED_DIRECTORIES} directories, too many to look for repositories in",
                    code="host.protect",
                    hint="mount a smaller directory, mount it read-only, or add --unsafe-unprotected-mounts",
                )
            try:
                with os.scandir(f"{root}/{directory}") as listing:
                    for entry in listing:
                        name = f"{directory}/{entry.name}" if directory else entry.name
                        if entry.name == ".git":
                            if directory:
                                yield name
                        elif entry.is_dir(follow_symlinks=False) and entry.name != "node_modules":
                            below.append(name)
            except OSError as error:
                if _is_ours(f"{root}/{directory}"):
                    raise HostError(
                        f"{root}/{directory} cannot be looked through for repositories ({error.strerror})",
                        code="host.protect",
                        hint=f"chmod u+rwx {root}/{directory}",
                    ) from error
                continue  # the program cannot open it, either
        level = below


def _is_ours(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def look_for_obeyed(root: str) -> dict[str, tuple[int, ...]]:
    """Everything in a project that tools obey and that is not protected, or was not there to be: name and identity."""
    names = list(REPORTED)
    try:
        names += _nested_repositories(root)
    except HostError:
        pass  # it grew too large to be looked through, which the limits are for
    found = {}
    for name in names:
        try:
            info = os.lstat(f"{root}/{name}")
        except OSError:
            continue
        changes = stat.S_ISREG(info.st_mode)  # a directory changes with every use
        found[name] = (info.st_ino, *((info.st_size, info.st_mtime_ns) if changes else ()))
    return found


def require_work_directory(mount: CheckedMount, candidates: list[str], token: str) -> HostPath:
    """The name of a directory yet to be made for overlayfs, on the very mount that holds the project.

    Raises:
        HostError: there is no writable place for one.
    """
    wanted = _mount_id(mount.host_path)
    parent = os.path.dirname(mount.host_path)
    tried = [*candidates, parent]
    while tried[-1] != "/":
        tried.append(os.path.dirname(tried[-1]))
    for place in tried:
        try:
            if _mount_id(place) != wanted or not os.access(place, os.W_OK) or not _is_trusted(place):
                continue
            return HostPath(f"{os.path.realpath(place)}/.hutch-work-{token}")
        except OSError:
            continue
    raise HostError(
        f"hooks and settings in {mount.host_path} cannot be protected: no place for a work directory on its filesystem",
        code="host.protect",
        details=f"tried {', '.join(tried)}",
        hint=f"make {parent} writable, copy the project to your home, or add --unsafe-unprotected-mounts",
    )


def _is_trusted(directory: str) -> bool:
    """Whether nobody else can put another file in the place of one that we make there."""
    info = os.stat(directory)
    if info.st_uid not in (0, os.geteuid()):
        return False
    return not info.st_mode & 0o022 or bool(info.st_mode & stat.S_ISVTX)


def _mount_id(path: str) -> str:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
            return next(line for line in info if line.startswith("mnt_id"))
    finally:
        os.close(fd)

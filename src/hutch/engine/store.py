"""What sessions keep on disk, and how it stays whole when a process is killed at any line.

    sessions/<id>/metadata.json              what the session is: record.py
                  lock                       held by whoever works in it
                  logs/                      what was done: audit.py
                  workspace/ home/ cache/    what sandboxes see and write, and nothing else of this

A session appears and vanishes by one rename: it is built as `.creating-<token>-<id>`, and taken apart as
`.removing-<id>-<token>`. What the dead left under such names is cleared when a store is opened next.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time

from ..errors import HostError, SessionError, SpecError
from ..model import HostPath
from ..process import is_alive, make_token, quote
from ..spec import find_nearest
from .audit import timestamp
from .record import METADATA, METADATA_BYTES, Record, corrupt, encode_record, is_id, is_label, parse_record
from .tree import OPEN_DIRECTORY, OPEN_FILE, Directory, is_same, list_names, make_directory, remove_tree, unlink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any, Self

SHARED = ("workspace", "home", "cache")
"""The directories of a session that sandboxes write to."""

_ABANDONED_SECONDS = 24 * 3600
"""Nothing takes a day to make or remove. What another container left, whose pids mean nothing here, has only this."""


class Store:
    """The sessions of a data directory, which need not exist yet. Any number of processes may use it at once.

    Every method raises HostError, host.data, where the directory is not ours alone or cannot be used.
    """

    def __init__(self, directory: str) -> None:
        # Without links, because nothing is mounted through one.
        self.directory = HostPath(f"{os.path.realpath(directory)}/sessions")
        self.repaired = self.repair()
        """What the dead had left unfinished."""

    def path(self, session_id: str, *parts: str) -> HostPath:
        """Where a session, or something of it, lies."""
        if not is_id(session_id):
            raise self._unknown(session_id)
        return HostPath("/".join((self.directory, session_id, *parts)))

    def create(
        self,
        name: str | None,
        environment: str,
        request: Mapping[str, Any],
        *,
        owner: tuple[int, int] | None = None,
        workspace: str | None = None,
        profile: str | None = None,
        rootfs_path: str | None = None,
        agent: str | None = None,
        description: str | None = None,
    ) -> Record:
        """Make a session. When this returns, it is on disk.

        Args:
            name: a label, which need not be unique.
            owner: uid and gid that sandboxes write as, where these are not our own.
            workspace: a directory of the user, in place of the session's own.

        Raises:
            SpecError: the name is no label, or the request cannot be kept.
        """
        if name is not None and not is_label(name):
            raise SpecError(
                f"{_show(name)} cannot be the name of a session",
                code="spec.session-name",
                hint="use 1 to 64 letters, digits, _ or -",
            )
        with self._open(make=True) as sessions:
            session_id = _new_id(sessions)
            record = Record(
                id=session_id,
                name=name,
                environment=environment,
                request=dict(request),
                created_at=timestamp(),
                workspace=HostPath(workspace or self.path(session_id, "workspace")),
                profile=profile,
                rootfs_path=None if rootfs_path is None else HostPath(rootfs_path),
                agent=agent,
                description=description,
            )
            text = encode_record(record)
            unfinished = f".creating-{make_token()}-{session_id}"
            try:
                _build(sessions, unfinished, text, owner)
                os.rename(unfinished, session_id, src_dir_fd=sessions, dst_dir_fd=sessions)
                os.fsync(sessions)
            except BaseException as error:
                _try_to_remove(sessions, unfinished)
                if isinstance(error, OSError):
                    raise _cannot_use(self.directory, error) from error
                raise
        return parse_record(text, self.path(session_id))

    def find(self, word: str, *, prefix: bool = True) -> Record:
        """The session with this id, else with this name, else, with prefix, whose id begins so.

        Raises:
            SessionError: session.unknown, session.ambiguous or session.corrupt.
        """
        ids = self.ids()
        if word in ids:
            return self._load(word)
        found = [record.id for record in self.all() if record.name == word]
        found = found or [session_id for session_id in ids if prefix and word and session_id.startswith(word)]
        if not found:
            raise self._unknown(word)
        if len(found) > 1:
            raise SessionError(
                f"{_show(word)} means {len(found)} sessions",
                code="session.ambiguous",
                hint=f"use one of the ids {', '.join(found)}",
            )
        return self._load(found[0])

    def ids(self) -> list[str]:
        """The ids of all sessions, also of those that cannot be read."""
        with self._open() as sessions:
            return sorted(name for name in list_names(sessions) if is_id(name))

    def all(self) -> list[Record]:
        """Every session, oldest first. Those that cannot be read are left out."""
        return sorted(self._load_all()[0], key=lambda record: (record.created_at, record.id))

    def broken(self) -> dict[str, SessionError]:
        """The sessions that `all` leaves out, by id, and why."""
        return self._load_all()[1]

    def update(self, record: Record) -> None:
        """Write a record in place of the one that is stored. When this returns, it is on disk.

        Raises:
            SessionError: session.unknown, the session was removed.
            SpecError: something of the record cannot be kept.
        """
        text = encode_record(record)
        with self._enter(record.id) as session:
            try:
                _write(session, text)
            except FileNotFoundError:
                raise self._unknown(record.id) from None
            except OSError as error:
                raise _cannot_use(self.path(record.id), error) from error

    def lock(self, session_id: str) -> Lock:
        """Take a session for this process, until `release` or until the process dies. Does not wait.

        Raises:
            SessionError: session.busy, or session.unknown.
        """
        with self._enter(session_id) as session:
            try:
                fd = os.open("lock", os.O_RDWR | os.O_CREAT | OPEN_FILE, 0o600, dir_fd=session)
            except FileNotFoundError:
                raise self._unknown(session_id) from None
            except OSError as error:
                raise _cannot_use(self.path(session_id, "lock"), error) from error
        lock = Lock(session_id, fd)
        try:
            holder = lock.take()
            if holder is not None:
                raise SessionError(
                    f"session {session_id} is in use by {holder}",
                    code="session.busy",
                    hint="wait until that is done, or use another session",
                )
            # Since it was opened the session may have been removed, and this be the lock of nothing.
            if not is_same(fd, self.path(session_id, "lock")):
                raise self._unknown(session_id)
        except BaseException:
            lock.release()
            raise
        return lock

    def holder(self, session_id: str) -> int | None:
        """The process that works in a session, if one does."""
        try:
            fd = os.open(self.path(session_id, "lock"), os.O_RDONLY | OPEN_FILE)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            pid = os.pread(fd, 100, 0).partition(b"-")[0]
            return int(pid) if pid.isdigit() else None
        finally:
            os.close(fd)

    def remove(self, session_id: str, *, lock: Lock | None = None) -> None:
        """Remove a session and all its files, also one that is corrupt.

        Args:
            lock: the lock of the session, if the caller holds it.

        Raises:
            SessionError: session.unknown, or session.busy.
        """
        held = lock or self.lock(session_id)
        doomed = f".removing-{session_id}-{make_token()}"
        try:
            with self._open() as sessions:
                try:
                    os.rename(session_id, doomed, src_dir_fd=sessions, dst_dir_fd=sessions)
                except FileNotFoundError:
                    raise self._unknown(session_id) from None
                os.fsync(sessions)  # or a power cut could bring back a session that is half empty
                remove_tree(sessions, doomed)
        except OSError as error:
            raise HostError(
                f"the files of session {session_id} cannot all be removed ({error.strerror})",
                code="host.data",
                hint=f"rm -r {quote(f'{self.directory}/{doomed}')}",
            ) from error
        finally:
            if lock is None:
                held.release()

    def repair(self) -> list[str]:
        """Remove what processes that were killed left unfinished, and say what that was."""
        cleared: list[str] = []
        with self._open() as sessions:
            for name in list_names(sessions):
                token = _token_of(name)
                if token is not None and _is_abandoned(sessions, name, token):
                    cleared += _try_to_remove(sessions, name)
                elif is_id(name):
                    cleared += _clear_unwritten(sessions, name)
        return [f"{self.directory}/{name}" for name in cleared]

    # ---- directories

    def _open(self, *, make: bool = False) -> Directory:
        """The directory of all sessions, checked. One that does not exist is like an empty one."""
        data = os.path.dirname(self.directory)
        place = data
        try:
            if make:
                os.makedirs(data, 0o700, exist_ok=True)
            with Directory(os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as parent:
                _require_ours(parent, data, is_parent=True)
                place = self.directory
                if make:
                    make_directory(parent, "sessions")
                sessions = Directory(os.open("sessions", OPEN_DIRECTORY, dir_fd=parent))
        except FileNotFoundError:
            return Directory(-1)
        except OSError as error:
            raise _cannot_use(place, error) from error
        try:
            _require_ours(sessions.fd, self.directory, is_parent=False)
        except HostError:
            sessions.close()
            raise
        return sessions

    def _enter(self, session_id: str) -> Directory:
        with self._open() as sessions:
            session = self._find_directory(sessions, session_id)
        if session is None:
            raise self._unknown(session_id)
        return session

    def _find_directory(self, sessions: int, session_id: str) -> Directory | None:
        if sessions < 0 or not is_id(session_id):
            return None
        try:
            return Directory(os.open(session_id, OPEN_DIRECTORY, dir_fd=sessions))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise corrupt(self.path(session_id), error.strerror or "") from error

    # ---- records

    def _load(self, session_id: str) -> Record:
        with self._open() as sessions:
            record = self._find_record(sessions, session_id)
        if record is None:
            raise self._unknown(session_id)
        return record

    def _find_record(self, sessions: int, session_id: str) -> Record | None:
        opened = self._find_directory(sessions, session_id)
        if opened is None:
            return None
        with opened as session:
            try:
                text = _read(session)
            except OSError as error:
                if not is_same(session, self.path(session_id)):
                    return None  # removed under our eyes
                raise corrupt(self.path(session_id), error.strerror or "") from error
        record = parse_record(text, self.path(session_id))
        if record.id != session_id:
            raise corrupt(self.path(session_id), f"it is that of session {record.id}")
        return record

    def _load_all(self) -> tuple[list[Record], dict[str, SessionError]]:
        records, broken = [], {}
        with self._open() as sessions:
            for session_id in list_names(sessions):
                try:
                    record = self._find_record(sessions, session_id)
                except SessionError as error:
                    broken[session_id] = error
                    continue
                if record is not None:
                    records.append(record)
        return records, broken

    def _unknown(self, word: str) -> SessionError:
        known = [name for record in self.all() for name in (record.name, record.id) if name]
        nearest = find_nearest(word, known)
        listed = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
        return SessionError(
            f"there is no session {_show(word)}" + (f'; did you mean "{nearest}"?' if nearest else ""),
            code="session.unknown",
            hint=f"use one of: {listed}" if known else "there is none yet: create one first",
        )


class Lock:
    """A session that belongs to this process: until `release`, the end of a `with`, or death."""

    def __init__(self, session_id: str, fd: int) -> None:
        self.session_id = session_id
        self._fd = fd
        self._is_held = False

    def take(self) -> str | None:
        """Take it; if that cannot be, say who has it."""
        for _ in range(50):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                token = os.pread(self._fd, 100, 0).decode("ascii", "replace")
                if token and is_alive(token):
                    return f"process {token.partition('-')[0]}"
                time.sleep(0.001)  # whoever has it is about to write his name, to let go, or only looks
            else:
                self._is_held = True
                self._sign(make_token())
                return None
        return "another process"

    def release(self) -> None:
        """Let go of it. Once is enough."""
        if self._fd >= 0:
            if self._is_held:
                self._sign("")
            fd, self._fd = self._fd, -1
            os.close(fd)

    def forget(self) -> None:
        """In a forked process: close our copy, so that it is free when the holder lets go of its own."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _sign(self, token: str) -> None:
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, token.encode("ascii"), 0)
        except OSError:
            pass  # a full disk hides who holds it, not that it is held

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.release()


# ---- parts of a session ---------------------------------------------------------------------------------------------


def _new_id(sessions: int) -> str:
    taken = list_names(sessions)
    while True:
        session_id = os.urandom(4).hex()
        if session_id not in taken:
            return session_id


def _build(sessions: int, name: str, text: bytes, owner: tuple[int, int] | None) -> None:
    """Make a whole session under a name that nobody takes for one."""
    os.mkdir(name, 0o700, dir_fd=sessions)
    with Directory(os.open(name, OPEN_DIRECTORY, dir_fd=sessions)) as session:
        make_directory(session, "logs")
        for shared in SHARED:
            make_directory(session, shared, 0o755, owner)
        os.close(os.open("lock", os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FILE, 0o600, dir_fd=session))
        _write(session, text)


def _read(session: int) -> bytes:
    fd = os.open(METADATA, os.O_RDONLY | OPEN_FILE, dir_fd=session)
    try:
        return os.read(fd, min(os.fstat(fd).st_size, METADATA_BYTES) + 2)
    finally:
        os.close(fd)


def _write(session: int, text: bytes) -> None:
    """Put a metadata.json in the place of an old one, whole."""
    name = f".{METADATA}-{make_token()}"
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FILE, 0o600, dir_fd=session)
        with open(fd, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.rename(name, METADATA, src_dir_fd=session, dst_dir_fd=session)
    except BaseException:
        unlink(session, name)
        raise
    os.fsync(session)


# ---- leftovers ------------------------------------------------------------------------------------------------------


def _token_of(name: str) -> str | None:
    """Who makes or removes the session that bears this name for a moment."""
    if name.startswith(".creating-"):
        return name.removeprefix(".creating-")
    return name[len(".removing-01234567-") :] if name.startswith(".removing-") else None


def _is_abandoned(directory: int, name: str, token: str) -> bool:
    try:
        age = time.time() - os.stat(name, dir_fd=directory, follow_symlinks=False).st_ctime
    except OSError:
        return False
    return not is_alive(token) or age > _ABANDONED_SECONDS


def _clear_unwritten(sessions: int, session_id: str) -> Iterator[str]:
    """Remove what an update that was killed left beside the metadata."""
    try:
        with Directory(os.open(session_id, OPEN_DIRECTORY, dir_fd=sessions)) as session:
            for name in os.listdir(session):
                token = name.removeprefix(f".{METADATA}-")
                if token != name and _is_abandoned(session, name, token) and unlink(session, name):
                    yield f"{session_id}/{name}"
    except OSError:
        return


def _try_to_remove(sessions: int, name: str) -> list[str]:
    try:
        remove_tree(sessions, name)
    except OSError:
        return []  # another process was faster, or the next one has more luck
    return [name]


# ---- refusals -------------------------------------------------------------------------------------------------------


def _require_ours(directory: int, path: str, *, is_parent: bool) -> None:
    """Whoever can rename what lies here decides what sandboxes see."""
    found = os.fstat(directory)
    if found.st_uid != os.geteuid() and not (is_parent and found.st_uid == 0):
        raise HostError(
            f"{path} belongs to user {found.st_uid}, not to you ({os.geteuid()})",
            code="host.data",
            hint="set HUTCH_DATA_DIR to a directory of your own",
        )
    # Around it, a group may be trusted, and the sticky bit of a directory like /tmp is enough.
    others = 0o022 if not is_parent else 0 if found.st_mode & 0o1000 else 0o002
    if found.st_mode & others:
        raise HostError(
            f"{path} can be written by others (mode {found.st_mode & 0o7777:04o})",
            code="host.data",
            hint=f"chmod go-w {quote(path)}",
        )


def _cannot_use(path: str, error: OSError) -> HostError:
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
        return HostError(
            f"{path} is not a directory",
            code="host.data",
            hint=f"move it away: mv {quote(path)} {quote(f'{path}.old')}",
        )
    return HostError(
        f"{path} cannot be used ({error.strerror})",
        code="host.data",
        hint="make room, or set HUTCH_DATA_DIR to a directory of your own",
    )


def _show(word: str) -> str:
    import json

    return json.dumps(word[:80])

"""Sessions: sandboxes with a name, whose files stay when they end and whose interpreters live while they are used.

A session belongs to one process at a time, by a lock on its directory, and is bound to what it was created with. Its
sandbox is started when it is first needed, ended when nobody used it for a while or when it is old, and started again.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time

from ..errors import HutchError, SessionError
from ..isolation import jail, mounts
from ..model import GuestPath, Result
from ..spec import PER_RUN, parse
from . import audit
from .box import Box
from .interpreter import Run
from .program import Command
from .store import SHARED, Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .engine import Engine
    from .record import Record
    from .store import Lock

IDLE_SECONDS = 300.0
LIFETIME_SECONDS = 3600.0
_REAP_SECONDS = 1.0
_GUEST_PATHS = {
    "workspace": GuestPath("/workspace"),
    "home": GuestPath("/home/sandbox"),
    "cache": GuestPath("/cache"),
}


class Session(Box):
    """A Box that is kept: its files on disk, and a log of what was done in it."""

    def __init__(self, engine: Engine, store: Store, record: Record, lock: Lock) -> None:
        super().__init__(engine, parse(record.request))
        self.record = record
        self._store = store
        self._lock = lock
        self._log = audit.Log(store.path(record.id, "logs", "audit.jsonl"))
        if record.last_run_at is not None:
            self._had_state.add(self.spec.environment.interpreter)  # of a sandbox that is no more

    @property
    def id(self) -> str:
        """Its id."""
        return self.record.id

    @property
    def name(self) -> str:
        """What its user calls it."""
        return self.record.name or self.record.id

    def note(self, event: str, **what: object) -> None:
        """Write something down in its log."""
        self._log.append(event, **what)

    async def rest(self, reason: str) -> None:
        """End its sandbox; the files stay, and the next use starts another one."""
        if self.live is not None:
            self._log.append("closed", reason=reason)
        await super().rest(reason)
        self.keep_record()

    def forget(self) -> None:
        """In a forked process: it is the parent's, and ends with it."""
        self._lock.forget()

    async def close(self) -> None:
        """Let it go: another process may have it."""
        try:
            await super().close()
        finally:
            self._log.close()
            self._lock.release()

    async def destroy(self) -> None:
        """Remove it with all its files."""
        self._is_open = False
        try:
            async with self._starting:
                await super().rest("destroyed")
            self._store.remove(self.record.id, lock=self._lock)
        finally:
            self._log.close()
            self._lock.release()

    def keep_record(self) -> None:
        """Write down when it was used last."""
        stored = self._store.find(self.record.id)
        if stored.last_run_at != self.record.last_run_at:
            self._store.update(stored.replace(last_run_at=self.record.last_run_at))

    # ---- what a Box does otherwise ----

    _keeps_files = True

    def _closed(self) -> HutchError:
        return SessionError(
            f"session {self.name} was closed", code="session.closed", hint=f"open it again: {self.record.id}"
        )

    def _label(self) -> str:
        return f"{self.record.id}/{self.record.name or ''}"

    def _own_mounts(self) -> tuple[mounts.CheckedMount, ...]:
        return tuple(self._own_mount(name) for name in SHARED)

    def _own_mount(self, name: str) -> mounts.CheckedMount:
        path = self._store.path(self.record.id, name)
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode):
            raise SessionError(
                f"{path} is not a directory", code="session.corrupt", hint=f"move it away, and mkdir {path}"
            )
        return mounts.pin(path, info, _GUEST_PATHS[name], writable=True)

    def _written(self, what: Run | Command, interpreter: str, result: Result) -> Result:
        self.record = self.record.replace(last_run_at=audit.timestamp())
        event, details = _describe(what, interpreter)
        self._log.append(
            event,
            **details,
            outcome=result.outcome.value,
            exit_code=result.exit_code,
            signal=result.signal,
            duration_ms=result.duration_ms,
            stdout_bytes=len(result.stdout.encode("utf-8", "replace")),
            stderr_bytes=len(result.stderr.encode("utf-8", "replace")),
            dropped_bytes=result.dropped_bytes,
            state_lost=result.state_lost,
        )
        for limit in result.limits_hit:
            self._log.append("limit", limit=limit)
        return result.replace(session=self.record.id)

    def _note_run(self, what: Run | Command, interpreter: str, how: str) -> None:
        event, details = _describe(what, interpreter)
        self._log.append(event, **details, outcome=how)

    def _note_file(self, action: str, path: str, size: int) -> None:
        self._log.append("file", action=action, path=path, bytes=size)


def _describe(what: Run | Command, interpreter: str) -> tuple[str, dict[str, Any]]:
    if isinstance(what, Run):
        return "run", {"interpreter": interpreter, **audit.describe_code(what.code)}
    return "exec", audit.describe_argv(what.argv)


class Sessions:
    """The sessions that this process holds."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        *,
        idle_seconds: float = IDLE_SECONDS,
        lifetime_seconds: float = LIFETIME_SECONDS,
    ) -> None:
        self._engine = engine
        self._store = store
        self._idle_seconds = idle_seconds
        self._lifetime_seconds = lifetime_seconds
        self._held: dict[str, Session] = {}
        self._users: dict[str, int] = {}
        """How often each was opened, and not closed yet."""
        self._opening = asyncio.Lock()
        self._reaper: asyncio.Task[None] | None = None

    @property
    def held(self) -> tuple[Session, ...]:
        """Those that are open here."""
        return tuple(self._held.values())

    async def open(self, word: str | None, request: Mapping[str, Any] | None = None, *, create: bool = True) -> Session:
        """A session by name or id, made if there is none.

        Args:
            word: its name or id; None makes one without a name.
            request: what it is created with. Of one that exists, what is said here must be what it has.
            create: whether to make one.

        Raises:
            SessionError: there is none, or it is ambiguous, held by another process, or of another kind.
            SpecError: the request or the name is wrong.
        """
        async with self._opening:
            # A name that is new must not be taken for the beginning of somebody's id.
            record = self._find(word, prefix=not create)
            is_new = False
            if record is None and not create:
                assert word is not None
                self._store.find(word)  # says that there is none
            if record is None:
                wanted = dict(request or {})
                spec = parse(wanted)  # before anything is made
                owner = (jail.DROP_ID, jail.DROP_ID) if os.geteuid() == 0 else None
                record = self._store.create(word, spec.environment.name, wanted, owner=owner)
                is_new = True
            elif request is not None:
                _require_same(record, request)
            if record.id not in self._held:
                lock = self._store.lock(record.id)
                try:
                    session = self._held[record.id] = Session(self._engine, self._store, record, lock)
                except BaseException:
                    lock.release()
                    raise
                if is_new:
                    session.note("created", environment=record.environment)
            if self._reaper is None:
                self._reaper = asyncio.get_running_loop().create_task(self._reap())
            self._users[record.id] = self._users.get(record.id, 0) + 1
            return self._held[record.id]

    def _find(self, word: str | None, *, prefix: bool) -> Record | None:
        if word is None:
            return None
        try:
            return self._store.find(word, prefix=prefix)
        except SessionError as error:
            if error.code == "session.unknown":
                return None
            raise

    async def close(self, session: Session) -> None:
        """Let a session go, unless others here opened it as well; its files stay."""
        self._users[session.id] = self._users.get(session.id, 1) - 1
        if self._users[session.id] <= 0 and self._forget(session):
            await session.close()

    async def destroy(self, session: Session) -> None:
        """Remove a session and its files, whoever else opened it."""
        if self._forget(session):
            await session.destroy()

    def _forget(self, session: Session) -> bool:
        self._users.pop(session.id, None)
        return self._held.pop(session.id, None) is not None

    async def close_all(self) -> None:
        """Let all go."""
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        held = self.held
        self._held.clear()
        self._users.clear()
        await asyncio.gather(*(session.close() for session in held))

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(_REAP_SECONDS, self._idle_seconds, self._lifetime_seconds))
            for session in self.held:
                live = session.live
                if live is None or session.is_busy:
                    continue
                try:
                    if time.monotonic() - session.used_at >= self._idle_seconds:
                        await session.rest("idle")
                    elif time.time() - live.started_at >= self._lifetime_seconds:
                        await session.rest("lifetime")
                except HutchError:
                    continue  # it ended; that its record cannot be kept is told to whoever uses it next


def _require_same(record: Record, request: Mapping[str, Any]) -> None:
    """A session is what it was created with."""
    name = record.name or record.id
    wanted = request.get("environment")
    if wanted is not None and wanted != record.environment:
        raise SessionError(
            f"session {name} has environment {record.environment}, not {wanted}",
            code="session.environment",
            hint=f"use -e {record.environment}, or another session",
        )
    for key, value in request.items():
        if key not in PER_RUN and key != "environment" and record.request.get(key) != value:
            has = f"{key} = {record.request[key]!r}" if key in record.request else f"the usual {key}"
            raise SessionError(
                f"session {name} was created with {has}, not {value!r}",
                code="session.request",
                hint=f"leave {key} out, or use another session",
            )

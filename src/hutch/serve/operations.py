"""What the daemon does when it is asked: runs in sessions and in pools, and what there is to know of sessions.

A session is opened when it is first needed and kept, so that its interpreters live from one request to the next. What
comes in a message is checked here, and then by whoever it is meant for.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import time
import weakref

from ..config import data_directory
from ..engine.engine import Engine
from ..engine.session import Session, Sessions
from ..engine.store import Store
from ..errors import GoneError, HutchError, SessionError, SpecError
from ..model import Limits, Result, Spec
from ..sandbox import make_command, make_run
from ..spec import PER_RUN, parse, unknown_word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from typing import Any

    from ..engine.record import Record

_POOL_SECONDS = 300.0


class Job:
    """One request while it is carried out."""

    def __init__(self, listen: Callable[[int, bytes], object]) -> None:
        self._listen = listen
        self.interrupt: Callable[[], Awaitable[bool]] | None = None
        """Ends what runs for it as Ctrl-C would; there once something does."""

    def listen(self, index: int, chunk: bytes) -> None:
        """Pass output on."""
        self._listen(index, chunk)


class Operations:
    """All sandboxes of the daemon, by what can be asked about them."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.store = Store(data_directory())
        self._sessions = Sessions(self.engine, self.store)
        self._opening = asyncio.Lock()
        self._kept: weakref.WeakSet[Session] = weakref.WeakSet()
        """Sessions that stay open when nobody uses them."""
        self._users: weakref.WeakKeyDictionary[Session, int] = weakref.WeakKeyDictionary()
        self._turns: weakref.WeakKeyDictionary[Session, dict[str, asyncio.Lock]] = weakref.WeakKeyDictionary()
        self._all: dict[str, Callable[[Mapping[str, Any], Job], Awaitable[Any]]] = {
            "run": self._run,
            "exec": self._execute,
            "pool": self._run_in_pool,
            "open": self._start,
            "sessions": self._list,
            "close": self._close,
            "destroy": self._destroy,
            "interrupt": self._interrupt,
        }

    async def do(self, message: Mapping[str, Any], job: Job) -> Any:
        """Carry out a request.

        Raises:
            HutchError: it is wrong, or cannot be done.
        """
        operation = message.get("op")
        if not isinstance(operation, str) or operation not in self._all:
            raise unknown_word("op", "operation", operation, self._all)
        return await self._all[operation](message, job)

    async def close(self) -> None:
        """End everything; the files of sessions stay."""
        with contextlib.suppress(HutchError):  # of a session whose files somebody removed
            await self._sessions.close_all()
        await self.engine.close()

    @property
    def held(self) -> int:
        """How many sessions are open."""
        return len(self._sessions.held)

    async def release(self, idle_seconds: float) -> None:
        """Let go of sessions that have no sandbox and that nobody used for a while: another process may want them."""
        for session in self._sessions.held:
            is_idle = session.live is None and time.monotonic() - session.used_at >= idle_seconds
            if is_idle and not self._users.get(session):
                await self._let_go(session)

    # ---- runs ----

    async def _run(self, message: Mapping[str, Any], job: Job) -> Any:
        code, stdin, echo = _code(message), _stdin(message), _flag(message, "echo")
        async with self._opened(message) as session:
            name = _text(message, "interpreter") or session.spec.environment.interpreter
            limits = _limits(session.record.request, message)
            run = make_run(limits, code, stdin, message.get("timeout_seconds", limits.timeout_seconds), echo=echo)
            turns = self._turns.setdefault(session, {})
            async with turns.setdefault(name, asyncio.Lock()):
                is_first = session.record.last_run_at is None
                job.interrupt = lambda: session.interrupt(name)
                try:
                    result = await session.run(run, name, job.listen)
                finally:
                    job.interrupt = None
            if is_first:
                # Before anybody hears of it: after a crash whoever opens it must be told that its state is gone.
                self._remember(session)
            return {**_about(session, limits), "result": result.to_json()}

    def _remember(self, session: Session) -> None:
        with contextlib.suppress(SessionError):
            if session in self._kept:
                session.keep_record()

    async def _execute(self, message: Mapping[str, Any], job: Job) -> Any:
        argv, env = message.get("argv"), message.get("env")
        if not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
            raise _wrong("argv", "a list of texts")
        cwd, stdin, quiet = _text(message, "cwd") or ".", _stdin(message), _flag(message, "quiet")
        async with self._opened(message) as session:
            limits = _limits(session.record.request, message)
            command = make_command(limits, argv, env, cwd, stdin, message.get("timeout_seconds"), None)
            if quiet:  # nothing that its user did, and nothing for its log
                result = await (await session.start_program(command, job.listen)).wait()
            else:
                result = await session.execute(command, job.listen)
            return {**_about(session, limits), "result": result.to_json()}

    async def _run_in_pool(self, message: Mapping[str, Any], job: Job) -> Any:
        spec = parse(_table(message, "request"))
        limits = spec.policy.limits
        timeout = message.get("timeout_seconds", limits.timeout_seconds)
        run = make_run(limits, _code(message), _stdin(message), timeout, echo=False).replace(once=True)
        # What differs from run to run is no reason for another pool.
        alike = spec.replace(policy=spec.policy.replace(limits=_without_per_run(limits)))
        result: Result = await self.engine.pool(alike, keep_seconds=_POOL_SECONDS).run(run, job.listen)
        return {"limits": dict(limits.__dict__), "result": result.to_json()}

    # ---- sessions ----

    @contextlib.asynccontextmanager
    async def _opened(self, message: Mapping[str, Any]) -> AsyncIterator[Session]:
        """A session, made if there is none and the message says with what."""
        word = _text(message, "session")
        if not word:
            raise _wrong("session", "the name or id of a session")
        async with self._opening:
            record = self._find(word)
            is_new = record is None and message.get("create") is not None
            if is_new:
                session = await self._sessions.open(word, _table(message, "create"))
            else:
                news = {} if record is None else _news(record, _table(message, "given"))
                session = await self._sessions.open(word, news, create=False)
            is_kept = session in self._kept
            self._kept.add(session)
        self._users[session] = self._users.get(session, 0) + 1
        try:
            yield session
        except HutchError:
            if is_new and session.live is None and session.record.last_run_at is None:
                # It never began: a mistake in the request is not to be kept under the name.
                self._kept.discard(session)
                await self._sessions.destroy(session)
            raise
        finally:
            self._users[session] -= 1
            if is_kept and session in self._sessions.held:
                await self._sessions.close(session)  # once less; it stays open

    def _find(self, word: str) -> Record | None:
        try:
            return self.store.find(word, prefix=False)
        except SessionError as error:
            if error.code == "session.unknown":
                return None
            raise

    async def _start(self, message: Mapping[str, Any], _job: Job) -> Any:
        async with self._opened(message) as session:
            await session.start()
            return _about(session, _limits(session.record.request, message))

    async def _list(self, _message: Mapping[str, Any], _job: Job) -> Any:
        held = {session.id: session for session in self._sessions.held}
        return [
            {
                **record.to_json(),
                "pid": self.store.holder(record.id),
                "live": _describe(held[record.id]) if record.id in held else None,
            }
            for record in self.store.all()
        ]

    async def _close(self, message: Mapping[str, Any], _job: Job) -> Any:
        session = self._held(message)
        if session is not None:
            await self._let_go(session)
        return {"closed": session is not None}

    async def _destroy(self, message: Mapping[str, Any], _job: Job) -> Any:
        word = _text(message, "session") or ""
        session = await self._sessions.open(word, None, create=False)
        self._kept.discard(session)
        await self._sessions.destroy(session)
        return {"destroyed": session.id}

    async def _interrupt(self, message: Mapping[str, Any], _job: Job) -> Any:
        session = self._held(message)
        return {"interrupted": session is not None and await session.interrupt(_text(message, "interpreter") or None)}

    def _held(self, message: Mapping[str, Any]) -> Session | None:
        """The session, if it is open here.

        Raises:
            SessionError: there is none.
        """
        record = self.store.find(_text(message, "session") or "")
        return next((session for session in self._sessions.held if session.id == record.id), None)

    async def _let_go(self, session: Session) -> None:
        self._kept.discard(session)
        while session in self._sessions.held:
            await self._sessions.close(session)


def interrupted() -> GoneError:
    """The error for whoever gave up a run before it began, or one that did not listen."""
    return GoneError("the run was interrupted", code="sandbox.interrupted", hint="run it again")


def _about(session: Session, limits: Limits) -> dict[str, Any]:
    return {
        "id": session.id,
        "name": session.record.name,
        "environment": session.record.environment,
        "interpreter": session.spec.environment.interpreter,
        "limits": dict(limits.__dict__),
    }


def _describe(session: Session) -> dict[str, Any] | None:
    live = session.live
    if live is None:
        return None
    return {
        "id": live.token.rpartition("-")[2],
        "busy": session.is_busy,
        "ageSeconds": round(time.time() - live.started_at, 2),
        "idleSeconds": 0 if session.is_busy else round(time.monotonic() - session.used_at, 2),
    }


# ---- what a session is made with, and what is asked of it ------------------------------------------------------------


def _news(record: Record, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked of a session that it does not have anyway.

    Mounts and variables are asked for one by one: those of its settings file need not be named again.
    """
    has = parse(record.request)
    news = {}
    for key, value in given.items():
        if key in PER_RUN:
            continue
        if key == "environment" or not _holds(has, parse({**record.request, key: value}), parse({key: value}), key):
            news[key] = value
    return news


def _holds(has: Spec, would_have: Spec, asked: Spec, key: str) -> bool:
    if key == "mounts":
        return set(asked.policy.mounts) <= set(has.policy.mounts)
    if key == "env":
        return set(asked.policy.variables) <= set(has.policy.variables)
    return would_have == has


def _limits(request: Mapping[str, Any], message: Mapping[str, Any]) -> Limits:
    """The limits of one run: the session's, and what the run chose for itself."""
    given = _table(message, "given")
    chosen = {key: given[key] for key in PER_RUN if key in given}
    return parse({**request, **chosen}).policy.limits


def _without_per_run(limits: Limits) -> Limits:
    usual = Limits()
    return limits.replace(
        timeout_seconds=usual.timeout_seconds, output_bytes=usual.output_bytes, keep_bytes=usual.keep_bytes
    )


# ---- what is in a message -------------------------------------------------------------------------------------------


def _wrong(key: str, what: str) -> SpecError:
    return SpecError(f"{key} is not {what}", code="spec.message", hint="correct the request")


def _text(message: Mapping[str, Any], key: str) -> str | None:
    value = message.get(key)
    if value is not None and (not isinstance(value, str) or len(value) > 4096):
        raise _wrong(key, "a text")
    return value


def _flag(message: Mapping[str, Any], key: str) -> bool:
    value = message.get(key, False)
    if not isinstance(value, bool):
        raise _wrong(key, "true or false")
    return value


def _table(message: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = message.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(key, "a table")
    return value


def _code(message: Mapping[str, Any]) -> str:
    code = message.get("code")
    if not isinstance(code, str):
        raise _wrong("code", "a text")
    try:
        code.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise _wrong("code", "valid Unicode") from error
    return code


def _stdin(message: Mapping[str, Any]) -> bytes:
    text = message.get("stdin", "")
    if not isinstance(text, str):
        raise _wrong("stdin", "Base64")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise _wrong("stdin", "Base64") from error

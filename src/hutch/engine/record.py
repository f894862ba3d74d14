"""A session as it is written down: its metadata.json, and one entry of what `list` prints."""

from __future__ import annotations

import os

from ..errors import SessionError, SpecError
from ..model import MIB, HostPath, Value
from ..process import quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

METADATA = "metadata.json"
METADATA_BYTES = MIB

_HEX = frozenset("0123456789abcdef")
_LABEL = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def is_id(word: object) -> bool:
    """Whether this is what we call a session ourselves: 8 hex digits."""
    return isinstance(word, str) and len(word) == 8 and set(word) <= _HEX


def is_label(word: object) -> bool:
    """Whether a session may be called so by a user."""
    return isinstance(word, str) and 1 <= len(word) <= 64 and set(word) <= _LABEL


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.startswith("/") and "\0" not in value


def _is_pid(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_time(value: object) -> bool:
    if not (isinstance(value, str) and value.isascii() and value[-1:] == "Z"):
        return False
    whole, dot, fraction = value[:-1].partition(".")
    shape = "".join("0" if char.isdigit() else char for char in whole)
    return shape == "0000-00-00T00:00:00" and (fraction.isdigit() if dot else True)


def _or_null(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_right(value)


# key: (field, whether a value is right, what it should be)
_KEYS: dict[str, tuple[str, Callable[[object], bool], str]] = {
    "sessionId": ("id", is_id, "8 hex digits"),
    "name": ("name", _or_null(is_label), "1 to 64 letters, digits, _ or -"),
    "profile": ("profile", _or_null(_is_text), "a text"),
    "rootfsPath": ("rootfs_path", _or_null(_is_path), "an absolute path"),
    "workspace": ("workspace", _is_path, "an absolute path"),
    "createdAt": ("created_at", _is_time, "a time such as 2026-01-02T10:11:12Z"),
    "lastExecAt": ("last_run_at", _or_null(_is_time), "a time such as 2026-01-02T10:11:12Z"),
    "pid": ("pid", _or_null(_is_pid), "a number of a process"),
    "agent": ("agent", _or_null(_is_text), "a text"),
    "description": ("description", _or_null(_is_text), "a text"),
    "environment": ("environment", _is_text, "a text"),
    "request": ("request", lambda value: isinstance(value, dict), "a table"),
}


class Record(Value):
    """What is known of a session between runs."""

    id: str
    environment: str
    request: dict[str, Any]
    """What `spec.parse` takes."""
    created_at: str
    workspace: HostPath
    name: str | None = None
    profile: str | None = None
    rootfs_path: HostPath | None = None
    last_run_at: str | None = None
    pid: int | None = None
    agent: str | None = None
    description: str | None = None
    unknown: dict[str, Any] = {}
    """Keys of another version, which are written back as they were."""

    def to_json(self) -> dict[str, Any]:
        """The session as it is stored and listed: every key, null where nothing is known."""
        known = {key: getattr(self, field) for key, (field, _, _) in _KEYS.items()}
        return {**self.unknown, **known} if self.unknown else known


def parse_record(text: bytes, directory: str) -> Record:
    """Read a metadata.json.

    Raises:
        SessionError: session.corrupt.
    """
    import json

    try:
        value = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise corrupt(directory, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise corrupt(directory, "not a table")
    problem = _find_problem(value)
    if problem:
        raise corrupt(directory, problem)
    known = {field: value[key] for key, (field, _, _) in _KEYS.items() if key in value}
    return Record(**known, unknown={key: value[key] for key in value.keys() - _KEYS.keys()})


def _find_problem(value: Mapping[str, Any]) -> str | None:
    for key, (_, is_right, what) in _KEYS.items():
        if not is_right(value.get(key)):
            return f"{key} is not {what}"
    return None


def _refuse_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _finite(word: str) -> float:
    number = float(word)
    return number if number - number == 0 else _refuse_number(word)


def encode_record(record: Record) -> bytes:
    """The text of a metadata.json.

    Raises:
        SpecError: spec.value, something of it cannot be kept.
    """
    import json

    value = record.to_json()
    problem = _find_problem(value)
    try:
        text = json.dumps(value, allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"it cannot be kept as JSON ({error})"
    else:
        if len(text) > METADATA_BYTES:
            problem = f"it has {len(text)} bytes"
    if problem:
        raise SpecError(
            f"session {record.id}: {problem}",
            code="spec.value",
            hint="give texts, numbers, lists and tables, all together less than 1 MiB",
        )
    return text + b"\n"


def corrupt(directory: str, reason: str) -> SessionError:
    """The error for a session whose metadata is of no use."""
    return SessionError(
        f"session {os.path.basename(directory)}: its {METADATA} cannot be read",
        code="session.corrupt",
        details=reason,
        hint=f"copy what you need from {directory}/workspace, then: rm -r {quote(directory)}",
    )

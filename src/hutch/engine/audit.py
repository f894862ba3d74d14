"""What was done in a session, one JSON line an event, in files that are bounded and rotated.

Written by us alone and never visible inside. Several processes may append at once: a record is one write to a file
opened for appending. A write that was cut short, by a full disk or a kill, costs the record it belongs to and no other.
What a user or a guest chose the length of is cut before it is written.
"""

from __future__ import annotations

import _thread
import fcntl
import os
import time

from ..model import MIB

TYPE_CHECKING = False
if TYPE_CHECKING:
    import json
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

POLL_SECONDS = 0.2
CODE_HEAD = 200
_TEXT = 1024
_ITEMS = 64
_DEPTH = 4
_LINE_BYTES = 32 * 1024
_WORD = 200
_WORDS = 32


def timestamp(nanoseconds: int | None = None) -> str:
    """A moment, by default this one, as ISO 8601 in UTC with milliseconds."""
    milliseconds = (time.time_ns() if nanoseconds is None else nanoseconds) // 1_000_000
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(milliseconds // 1000))}.{milliseconds % 1000:03d}Z"


# ---- what is written ------------------------------------------------------------------------------------------------


def describe_code(code: str) -> dict[str, str]:
    """Fields for a program: enough to recognise it, and to prove that it was this one."""
    import hashlib

    digest = hashlib.sha256(code.encode("utf-8", "surrogatepass")).hexdigest()
    return {"code_sha256": digest, "code_head": code[:CODE_HEAD]}


def describe_argv(argv: Sequence[str]) -> dict[str, Any]:
    """Fields for a command line."""
    fields: dict[str, Any] = {"argv": [_cut(word, _WORD) for word in argv[:_WORDS]]}
    if len(argv) > _WORDS:
        fields["argv_words"] = len(argv)
    return fields


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _bound(value: object, depth: int = 0) -> object:
    """A value that is JSON and not long. Nothing is refused: a record matters more than its look."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return _cut(value, _TEXT)
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 63 else "a very large number"
    if isinstance(value, float):
        return float(value) if value - value == 0 else str(float(value))
    if depth < _DEPTH and isinstance(value, dict):
        return {_cut(str(key), _WORD): _bound(value[key], depth + 1) for key in list(value)[:_ITEMS]}
    if depth < _DEPTH and isinstance(value, (list, tuple)):
        return [_bound(item, depth + 1) for item in value[:_ITEMS]]
    return type(value).__name__


class Log:
    """Appends records to one file; safe to share between threads.

    A file that would grow past `max_bytes` is renamed to `.1`, the one before it to `.2`, and so on; `keep` old ones
    stay.
    """

    def __init__(self, path: str, max_bytes: int = 10 * MIB, keep: int = 3) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.keep = max(1, keep)
        self._fd = -1
        self._inode = (0, 0)
        self._end = -1  # where our own last record ended
        self._lost = 0
        self._guard = _thread.allocate_lock()
        self._encoder: json.JSONEncoder | None = None

    def append(self, event: str, /, **fields: object) -> bool:
        """Write one record.

        Returns:
            Whether it was written. Nothing is raised: a full disk must not end a run. The next record that can be
            written says how many were lost.
        """
        record: dict[str, object] = {"ts": timestamp(), "event": _cut(event, _WORD)}
        for name, value in fields.items():
            if name not in record:
                record[name] = _bound(value)
        with self._guard:
            if self._lost:
                record["lost"] = self._lost
            line = self._encode(record)
            try:
                written = self._write(line)
            except OSError:
                written = False
            self._lost = 0 if written else self._lost + 1
            return written

    def close(self) -> None:
        """Give the descriptor back. A later `append` opens the file again."""
        with self._guard:
            self._close()

    def _encode(self, record: dict[str, object]) -> bytes:
        if self._encoder is None:
            import json

            self._encoder = json.JSONEncoder(separators=(",", ":"))
        line = self._encoder.encode(record)
        if len(line) > _LINE_BYTES:
            short = {name: record[name] for name in ("ts", "event", "lost") if name in record}
            line = self._encoder.encode({**short, "oversized": len(line)})
        return f"{line}\n".encode("ascii")

    def _write(self, line: bytes) -> bool:
        size = self._current_size()
        if size and size + len(line) > self.max_bytes and self._rotate():
            size = self._current_size()
        # Whatever stands before us and was written by someone else may be half a record.
        if size and size != self._end and not self._is_line_end(size):
            line = b"\n" + line
        if not self._write_at_once(line):
            return False
        start = self._end - len(line)
        if start == size or line[0] == 10 or self._is_line_end(start):
            return True
        return self._write_at_once(b"\n" + line)  # half a record came between our look and our write

    def _write_at_once(self, line: bytes) -> bool:
        written = os.write(self._fd, line)
        self._end = os.lseek(self._fd, 0, os.SEEK_CUR) if written == len(line) else -1
        return written == len(line)

    def _is_line_end(self, offset: int) -> bool:
        return offset == 0 or os.pread(self._fd, 1, offset - 1) in (b"\n", b"")

    def _current_size(self) -> int:
        """How long the file is; it is opened again when another process has rotated or removed it."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
            if self._fd >= 0 and self._inode == (found.st_dev, found.st_ino):
                return found.st_size
        except FileNotFoundError:
            pass
        self._close()
        self._fd = os.open(
            self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
        )
        found = os.fstat(self._fd)
        self._inode = (found.st_dev, found.st_ino)
        return found.st_size

    def _rotate(self) -> bool:
        """Move the files on, unless another process is at it; then the file grows a little longer."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            found = os.stat(self.path, follow_symlinks=False)
            if self._inode == (found.st_dev, found.st_ino):
                # A kill between two renames leaves a gap; only what stands before it has to move.
                free = next((n for n in range(1, self.keep) if not os.path.lexists(f"{self.path}.{n}")), self.keep)
                for number in range(free, 1, -1):
                    os.rename(f"{self.path}.{number - 1}", f"{self.path}.{number}")
                os.rename(self.path, f"{self.path}.1")
        finally:
            self._close()  # and with it the lock
        return True

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = self._end = -1


# ---- what is read ---------------------------------------------------------------------------------------------------


def read(path: str) -> Iterator[dict[str, Any]]:
    """Every whole record, oldest first, from the rotated files and the current one."""
    return Tail(path).poll()


def follow(path: str, *, from_start: bool = False) -> Iterator[dict[str, Any]]:
    """Records as they are written, for as long as anyone asks for the next."""
    tail = Tail(path, from_start=from_start)
    while True:
        yield from tail.poll()
        time.sleep(POLL_SECONDS)


class Tail:
    """Knows how far a log was read. Between two polls it holds no descriptor, so that many logs can be followed."""

    def __init__(self, path: str, *, from_start: bool = True) -> None:
        self.path = path
        self._read: dict[tuple[int, int], int] = {}
        if not from_start:
            for part in _open_parts(path, {}):
                with part.file:
                    self._read[part.inode] = part.find_last_end()

    def poll(self) -> Iterator[dict[str, Any]]:
        """What is new since the last poll, oldest first."""
        parts = _open_parts(self.path, self._read)
        try:
            for part in parts:
                start = self._read.get(part.inode, 0)
                if start > part.size:
                    start = 0  # another file, with the inode of one that was rotated away
                part.file.seek(start)
                for line in part.file:
                    start += len(line)
                    if start > part.size or not line.endswith(b"\n"):
                        break  # still being written
                    self._read[part.inode] = start
                    record = _parse_line(line)
                    if record is not None:
                        yield record
        finally:
            for part in parts:
                part.file.close()


class _Part:
    """One file of a log, and how long it was when it was opened."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(fd)
        self.file = open(fd, "rb")  # noqa: SIM115
        self.inode = (found.st_dev, found.st_ino)
        self.size = found.st_size

    def find_last_end(self) -> int:
        """Where the last whole line ends."""
        start = max(0, self.size - 2 * _LINE_BYTES)
        self.file.seek(start)
        return start + self.file.read(self.size - start).rfind(b"\n") + 1


def _open_parts(path: str, already_read: Mapping[tuple[int, int], int]) -> list[_Part]:
    """The files of a log, oldest first, without those of which nothing is new.

    They are opened newest first. Files only ever move to higher numbers, so that rotations meanwhile can show one of
    them twice, and hide none. And a writer may be slow to notice a rotation: what it wrote to an old file before
    something in a newer one is within the length of the old file, which was looked at later.
    """
    parts: dict[tuple[int, int], _Part] = {}
    highest = _highest_number(path)
    number = missing = 0
    while number <= highest or missing < 2:  # a rotation leaves a gap for a moment, a killed one for longer
        file_path = f"{path}.{number}" if number else path
        number += 1
        try:
            found = os.stat(file_path, follow_symlinks=False)
            missing = 0
            if already_read.get((found.st_dev, found.st_ino)) == found.st_size:
                continue
            part = _Part(file_path)
        except OSError:
            missing += 1
            continue
        if part.inode in parts:
            part.file.close()
            while next(reversed(parts)) != part.inode:
                parts.popitem()[1].file.close()  # newer than this one, and met too early
        else:
            parts[part.inode] = part
    return list(reversed(parts.values()))


def _highest_number(path: str) -> int:
    """The number of the oldest file of a log."""
    directory, name = os.path.split(path)
    try:
        ends = [other[len(name) + 1 :] for other in os.listdir(directory or ".") if other.startswith(f"{name}.")]
    except OSError:
        return 0
    return max((int(end) for end in ends if end.isascii() and end.isdigit() and len(end) < 5), default=0)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    import json

    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict) and isinstance(record.get("ts"), str) and isinstance(record.get("event"), str):
        return record
    return None

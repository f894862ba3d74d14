"""`hutch logs`: what was done in sessions, for people and for programs."""

from __future__ import annotations

import select
import sys
from collections import deque

from ..config import data_directory
from ..engine.audit import POLL_SECONDS, Tail
from ..engine.store import Store
from ..errors import SpecError
from ..process import join
from . import print_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator
    from typing import Any

_SHOWN = ("ts", "session", "event", "outcome", "duration_ms", "lost")
_DETAIL_CHARACTERS = 100


def add_arguments(parser: argparse.ArgumentParser, _verb: str) -> None:
    """Declare the options."""
    parser.description = "Show what was done in a session, or in all of them, oldest first. Times are UTC."
    parser.epilog = "examples:\n  hutch logs\n  hutch logs mywork --last 20 --follow\n  hutch logs --json | jq .event\n"
    parser.add_argument("session", nargs="?", metavar="SESSION", help="id, beginning of an id, or name (default: all)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what is done from now on")
    parser.add_argument("--last", metavar="N", type=int, help="only the last N events")
    parser.add_argument("--json", action="store_true", help="print one JSON record a line")


def main(options: argparse.Namespace) -> int:
    """Carry out the verb."""
    if options.last is not None and options.last < 0:
        raise SpecError(f"hutch logs: --last {options.last} is no number of events", code="cli.usage", hint="--last 20")
    store = Store(data_directory())
    only = store.find(options.session).id if options.session is not None else None
    logs = _Logs(store, only)
    past = deque(sorted(logs.poll(options.last), key=_time), maxlen=options.last)
    _print(past, logs, as_json=options.json)
    if not past and not options.follow:
        print("hutch: nothing was done yet", file=sys.stderr)
    while options.follow and logs.refresh():
        _wait()
        _print(sorted(logs.poll(), key=_time), logs, as_json=options.json)
    return 0


class _Logs:
    """The logs of one session or of all; sessions that appear while it is used are taken up."""

    def __init__(self, store: Store, only: str | None) -> None:
        self._store = store
        self._only = only
        self._tails: dict[str, Tail] = {}
        self.names: dict[str, str | None] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Look which sessions there are; False if there can be nothing more to read."""
        ids = [session for session in self._store.ids() if self._only in (None, session)]
        if set(ids) != self._tails.keys():
            self.names = {record.id: record.name for record in self._store.all()}
            known = self._tails
            self._tails = {
                session: known.get(session) or Tail(self._store.path(session, "logs", "audit.jsonl")) for session in ids
            }
        return self._only is None or bool(ids)

    def poll(self, last: int | None = None) -> Iterator[dict[str, Any]]:
        """What is new, session by session, and of each no more than the last records."""
        for session, tail in self._tails.items():
            for record in deque(tail.poll(), maxlen=last):
                yield {**record, "session": session}


def _time(record: dict[str, Any]) -> str:
    return str(record["ts"])


def _wait() -> None:
    """A moment, or less when the reader of our output leaves."""
    reader = select.poll()
    reader.register(1, 0)
    if reader.poll(POLL_SECONDS * 1000):
        raise BrokenPipeError


# ---- lines ----------------------------------------------------------------------------------------------------------


def _print(records: Iterable[dict[str, Any]], logs: _Logs, *, as_json: bool) -> None:
    for record in records:
        if as_json:
            print_json(record)
        else:
            print(to_line(record, logs.names.get(record["session"])))
    sys.stdout.flush()


def to_line(record: dict[str, Any], name: str | None) -> str:
    """One event as people read it. What a guest could choose reaches no terminal raw."""
    moment = str(record["ts"])[:19].replace("T", " ")
    took = record.get("duration_ms")
    columns = [
        f"{moment}  {record['session']} {name or '-':<12}",
        f"{record['event']:<7}",
        f"{str(record.get('outcome') or ''):<8}",
        f"{f'{took:.0f} ms' if isinstance(took, (int, float)) else '':>9}",
        _detail(record),
    ]
    return escape("  ".join(columns)).rstrip()


def _detail(record: dict[str, Any]) -> str:
    """What the event was about, in one piece of text."""
    if isinstance(record.get("code_head"), str):
        text = record["code_head"].strip()
    elif isinstance(record.get("argv"), list):
        text = join(str(word) for word in record["argv"])
    else:
        rest = {key: value for key, value in record.items() if key not in _SHOWN and value is not None}
        text = " ".join(f"{key}={value}" for key, value in rest.items())
    if len(text) > _DETAIL_CHARACTERS:
        text = f"{text[: _DETAIL_CHARACTERS - 3]}..."
    return f"{text} (events lost before this: {record['lost']})" if record.get("lost") else text


def escape(text: str) -> str:
    """The text with everything escaped that moves a cursor, hides, reorders, or cannot be shown here."""
    visible = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    encoding = sys.stdout.encoding or "utf-8"
    return visible.encode(encoding, "backslashreplace").decode(encoding)

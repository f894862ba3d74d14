"""`hutch ps` and `hutch kill`: the sandboxes that run, whoever started them."""

from __future__ import annotations

import os
import select
import signal
import sys

from ..engine import census
from ..errors import HostError, SessionError, SpecError
from ..model import MIB
from ..spec import unknown_word
from . import print_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

_PATIENCE_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    """Declare the options of either verb."""
    if verb == "ps":
        parser.description = "List the sandboxes that run: yours, or everybody's for root."
        parser.epilog = "examples:\n  hutch ps\n  hutch ps --json | jq '.[].id'\n"
    else:
        parser.description = "End sandboxes that run. The files of a session stay."
        parser.epilog = "examples:\n  hutch kill 3f2a91c0\n  hutch kill mysession\n  hutch kill --all\n"
        parser.add_argument("ids", metavar="ID", nargs="*", help="an id of hutch ps, or the name or id of a session")
        parser.add_argument("--all", action="store_true", help="end all sandboxes of yours")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(verb=verb)


def main(options: argparse.Namespace) -> int:
    """Carry out either verb."""
    return _list(as_json=options.json) if options.verb == "ps" else _kill(options)


# ---- ps -------------------------------------------------------------------------------------------------------------


def _list(*, as_json: bool) -> int:
    found = census.find_sandboxes()
    if as_json:
        print_json([living.to_json() for living in found])
        return 0
    with_user = os.geteuid() == 0
    rows = [_row(living, with_user=with_user) for living in found]
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return 0
    if not rows:
        print("no sandbox runs", file=sys.stderr)
        return 0
    titles = ["ID", "SESSION", "ENVIRONMENT", "PROCESSES", "MEMORY", "CPU", "AGE", "PID"]
    rows.insert(0, [*titles, "USER"] if with_user else titles)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(living: census.Living, *, with_user: bool) -> list[str]:
    row = [
        living.id,
        living.name or living.session or "-",
        living.environment,
        str(living.processes),
        f"{living.memory_bytes / MIB:.1f}M",
        f"{living.cpu_seconds:.2f}s",
        _duration(living.age_seconds),
        str(living.pid),
    ]
    return [*row, _user(living.uid)] if with_user else row


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# ---- kill -----------------------------------------------------------------------------------------------------------


def _kill(options: argparse.Namespace) -> int:
    if bool(options.ids) is options.all:
        raise SpecError("hutch kill: name sandboxes, or --all", code="cli.usage", hint="hutch ps shows which there are")
    own = [living for living in census.find_sandboxes() if living.uid == os.geteuid()]
    doomed = own if options.all else list({living.id: living for living in _chosen(options.ids, own)}.values())
    for living in doomed:
        end(living)
        if not options.json:
            print(f"ended {living.id}")
    if options.json:
        print_json({"ended": [living.id for living in doomed]})
    return 0


def _chosen(words: Iterable[str], own: list[census.Living]) -> Iterable[census.Living]:
    for word in words:
        found = [living for living in own if word == living.id]
        found = found or [living for living in own if word in (living.session, living.name)]
        if not found:
            known = sorted({name for living in own for name in (living.id, living.name) if name})
            if not known:
                raise SpecError(
                    f'there is no sandbox "{word[:80]}"', code="spec.unknown", hint="none of yours runs: hutch ps"
                )
            raise unknown_word("hutch kill", "sandbox", word, known)
        if len({living.session for living in found}) > 1:
            raise SessionError(
                f'"{word[:80]}" means {len(found)} sandboxes',
                code="session.ambiguous",
                hint=f"use one of the ids {', '.join(living.id for living in found)}",
            )
        yield from found


def end(living: census.Living) -> None:
    """End one sandbox, and wait until it is gone.

    Raises:
        HostError: it does not go.
    """
    try:
        process = os.pidfd_open(living.pid)
    except ProcessLookupError:
        return
    try:
        # What we hold is the one that was listed only if that is still there now.
        if not any((one.pid, one.id) == (living.pid, living.id) for one in census.find_sandboxes()):
            return
        try:
            signal.pidfd_send_signal(process, signal.SIGTERM)
        except ProcessLookupError:
            return
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        if not waiting.poll(_PATIENCE_SECONDS * 1000):
            raise HostError(
                f"sandbox {living.id} did not end in {_PATIENCE_SECONDS:g} s",
                code="host.kill",
                hint=f"kill -9 {living.pid}",
            )
    finally:
        os.close(process)

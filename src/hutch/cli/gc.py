"""`hutch gc`."""

from __future__ import annotations

from ..config import data_directory
from ..engine import state
from ..engine.store import Store
from . import print_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser, _verb: str) -> None:
    """Declare the options."""
    parser.description = (
        "Remove cgroups, work directories and half-made sessions that killed processes left behind. What lives is kept."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace) -> int:
    """Carry out the verb."""
    cleared = [*state.clear_stale(), *Store(data_directory()).repaired]
    if options.json:
        print_json({"removed": cleared})
    else:
        print("\n".join(f"removed {path}" for path in cleared) or "nothing to remove")
    return 0

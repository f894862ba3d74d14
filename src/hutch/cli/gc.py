"""`hutch gc`."""

from __future__ import annotations

from ..engine import state
from . import print_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser, _verb: str) -> None:
    """Declare the options."""
    parser.description = "Remove cgroups and work directories that killed runs left behind. Running sandboxes are kept."
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace) -> int:
    """Carry out the verb."""
    cleared = state.clear_stale()
    if options.json:
        print_json({"removed": cleared})
    else:
        print("\n".join(f"removed {path}" for path in cleared) or "nothing to remove")
    return 0

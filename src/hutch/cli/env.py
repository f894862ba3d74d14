"""`hutch env list` and `hutch env show`."""

from __future__ import annotations

from ..config import find_settings
from ..errors import HostError
from ..sources import host
from ..spec import PRESETS, parse, unknown_word
from . import print_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any


def add_arguments(parser: argparse.ArgumentParser, _verb: str) -> None:
    """Declare the options."""
    parser.description = "List environments, or show one."
    parser.epilog = "examples:\n  hutch env list\n  hutch env show python --json\n"
    parser.add_argument("action", choices=("list", "show"))
    parser.add_argument("name", nargs="?", help="the environment to show")
    parser.add_argument("--config", metavar="FILE", help="configuration (default ~/.config/hutch/hutch.toml)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace) -> int:
    """Carry out the verb."""
    settings = find_settings(options.config)
    names = sorted({*PRESETS, *settings.environments})
    if options.action == "list":
        described = [_describe(name, settings.request(name)) for name in names]
        if options.json:
            print_json(described)
        else:
            for entry in described:
                print(f"{entry['name']:<16} {entry['source']:<6} {entry['program'] or entry['missing']}")
        return 0
    if options.name not in names:
        raise unknown_word("hutch env show", "environment", options.name or "", names)
    entry = _describe(options.name, settings.request(options.name))
    if options.json:
        print_json(entry)
    else:
        for key, value in entry.items():
            print(f"{key:<12} {value}")
    return 0


def _describe(name: str, request: dict[str, Any]) -> dict[str, Any]:
    spec = parse(request)
    limits = spec.policy.limits
    entry: dict[str, Any] = {
        "name": name,
        "preset": spec.environment.preset,
        "interpreter": spec.environment.interpreter,
        "source": "host",
        "program": None,
        "id": None,
        "missing": None,
        "network": spec.policy.network.value,
        "timeout": limits.timeout_seconds,
        "memoryMb": limits.memory_bytes // (1024 * 1024),
    }
    try:
        rootfs = host.realise(spec.environment)
    except HostError as error:
        entry["missing"] = f"{error.message}; {error.hint}"
    else:
        entry["program"] = rootfs.interpreter[0]
        entry["id"] = rootfs.id
    return entry

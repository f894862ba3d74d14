"""The command line. One module per group of verbs, imported when its verb is used.

Exit codes: the program's own; 124 timeout; 137 killed by a limit; 2 bad request; 125 hutch itself failed.
"""

from __future__ import annotations

import os
import sys

from ..errors import HutchError, SpecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

VERBS = {
    # verb: (module, one line)
    "run": ("run", "run code in a fresh sandbox"),
    "plan": ("run", "show exactly what a run would execute"),
    "doctor": ("doctor", "what this machine can do, and the fix for what it cannot"),
    "env": ("env", "list and show environments"),
    "gc": ("gc", "remove what killed runs left behind"),
    "completion": ("completion", "print the completion script for a shell"),
}

EXIT_BAD_REQUEST = 2
EXIT_FAILED = 125

_HELP = """\
hutch - a safe home for AI agents and the code that language models write

usage: hutch VERB [options]

{verbs}

  hutch run 'print(6 * 7)'                     Python, in a sandbox that is gone afterwards
  hutch run -e shell 'uname -a; id'            a shell
  hutch run -f job.py --mount ./data:/data     a file, with a directory it may read
  hutch doctor                                 is this machine ready?

hutch VERB --help tells the rest of each.
"""


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    _require_standard_streams()
    as_json = "--json" in words[: words.index("--") if "--" in words else None]
    try:
        return _dispatch(words)
    except HutchError as error:
        return print_error(error, as_json=as_json)
    except BrokenPipeError:
        # The reader of our output left, as head(1) does: end as a program in a pipeline would.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except KeyboardInterrupt:
        return 130


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        verbs = "\n".join(f"  {verb:<12} {line}" for verb, (_, line) in VERBS.items())
        print(_HELP.format(verbs=verbs), end="")
        return 0 if words else EXIT_BAD_REQUEST
    if words[0] in ("--version", "-V", "version"):
        from .. import __version__

        print(f"hutch {__version__}")
        return 0
    verb = words[0]
    if verb not in VERBS:
        from ..spec import unknown_word

        raise unknown_word("hutch", "verb", verb, VERBS)
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever ignores it hands that on
    options = build_parser(verb).parse_args(words[1:])
    code: int = _module(verb).main(options)
    return code


def _module(verb: str) -> Any:
    return __import__(f"{__name__}.{VERBS[verb][0]}", fromlist=["main"])


def build_parser(verb: str) -> argparse.ArgumentParser:
    """The parser of one verb."""
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> None:  # type: ignore[override]
            raise SpecError(f"{self.prog}: {message}", code="cli.usage", hint=f"{self.prog} --help")

    class Formatter(argparse.RawDescriptionHelpFormatter):
        def __init__(self, prog: str) -> None:
            # Asked for the terminal's width, argparse imports shutil and all its archive formats.
            super().__init__(prog, max_help_position=28, width=100)

    parser = Parser(
        prog=f"hutch {verb}",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    _module(verb).add_arguments(parser, verb)
    return parser


def print_error(error: HutchError, *, as_json: bool) -> int:
    """Show an error and return its exit code."""
    if as_json:
        print_json({"error": error.to_json()})
    lines = [f"error: {error.message}"]
    if error.details:
        lines += [f"       {line}" for line in error.details.splitlines()[-12:]]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    print("\n".join(lines), file=sys.stderr)
    return EXIT_BAD_REQUEST if isinstance(error, SpecError) else EXIT_FAILED


def print_json(value: object) -> None:
    """One JSON value on one line."""
    import json

    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _require_standard_streams() -> None:
    """A pipe made while 0, 1 or 2 is closed would take its number, and be mistaken for a standard stream."""
    while True:
        fd = os.open(os.devnull, os.O_RDWR)
        if fd > 2:
            os.close(fd)
            return

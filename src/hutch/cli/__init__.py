"""The command line. One module per group of verbs, imported when its verb is used.

Exit codes: the program's own; 124 timeout; 137 killed by a limit; 2 bad request; 125 hutch itself failed.
"""

from __future__ import annotations

import errno
import os
import sys

from ..errors import HutchError, SandboxError, SpecError

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
    "ps": ("live", "list the sandboxes that run"),
    "kill": ("live", "end sandboxes that run"),
    "logs": ("logs", "show what was done in sessions"),
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
  hutch run -s work 'x = 1'                    in a session, whose state and files stay
  hutch run -i                                 line by line
  hutch doctor                                 is this machine ready?

hutch VERB --help tells the rest of each.
"""


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    _require_standard_streams()
    as_json = "--json" in words[: words.index("--") if "--" in words else None]
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except HutchError as error:
        return print_error(error, as_json=as_json)
    except BrokenPipeError:
        # The reader of our output left, as head(1) does: end as a program in a pipeline would.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the last door: whatever comes here is a fault of ours
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is buffered cannot be written at exit, either
        return print_error(_own_fault(error), as_json=False)


def _own_fault(error: Exception) -> HutchError:
    import traceback

    return SandboxError(
        f"hutch itself failed ({type(error).__name__}: {error})",
        code="hutch.fault",
        details="".join(traceback.format_exception(error)).strip(),
        hint="please report this, with the output of hutch doctor --json",
    )


def _dispatch(words: list[str]) -> int:
    if len(words) == 2 and words[0] == "help" and words[1] in VERBS:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        verbs = "\n".join(f"  {verb:<12} {line}" for verb, (_, line) in VERBS.items())
        print(_HELP.format(verbs=verbs), end="")
        return 0 if words else EXIT_BAD_REQUEST
    if words[0] in ("--version", "-V", "version"):
        from .. import __version__

        print(f"hutch {__version__}")
        return 0
    verb = words[0]
    if verb.startswith("-"):
        raise SpecError(f"hutch: {verb} stands before the verb", code="cli.usage", hint=f"hutch run {verb} ...")
    if verb not in VERBS:
        from ..spec import unknown_word

        raise unknown_word("hutch", "verb", verb, VERBS)
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever ignores it hands that on
    parser = build_parser(verb)
    options, more = parser.parse_known_args(words[1:])
    if more:
        raise _too_much(parser, verb, more)
    code: int = _module(verb).main(options)
    return code


def _too_much(parser: argparse.ArgumentParser, verb: str, more: list[str]) -> SpecError:
    """The error for words that the verb does not know: a misspelt flag, or a program without quotes."""
    from ..spec import find_nearest

    known = [option for action in parser._actions for option in action.option_strings]
    flag = more[0].partition("=")[0]
    nearest = find_nearest(flag, known) if flag.startswith("--") else None
    if nearest:
        return SpecError(
            f'hutch {verb}: unknown flag {flag}; did you mean "{nearest}"?',
            code="cli.usage",
            hint=f"hutch {verb} --help",
        )
    return SpecError(
        f"hutch {verb}: too many words: {' '.join(more)[:200]}",
        code="cli.usage",
        hint="a program is one argument: hutch run -e shell 'ls -la'; a file is run with: hutch run -f job.py"
        if verb in ("run", "plan")
        else f"hutch {verb} --help",
    )


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
            break
    # For a stream that was closed Python has None, and prints what was meant for one to the other.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

"""`hutch run --interactive`: statements from a terminal or a pipe, each run when it is complete.

Whether a statement is complete is for its own language to say. Python is asked here; bash and node are asked inside,
because this machine need not have them, and because nothing of what is typed is to be parsed by a program outside.
"""

from __future__ import annotations

import os
import sys

from ..config import data_directory
from ..engine.planning import CODE_BYTES
from ..errors import HutchError, SpecError
from ..model import Value
from . import lasting, print_error, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from typing import Any

_HISTORY_LINES = 1000
_TOP_LEVEL_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

# Both read a text and print the numbers of the lines at which a statement ends. A statement that is wrong ends where
# that shows: what is wrong with it, its interpreter shall say.
_BASH_ENDS = r"""
text= number=0
while IFS= read -r line || [ -n "$line" ]; do
  number=$((number + 1))
  text+="$line"$'\n'
  said=$(LC_ALL=C "$BASH" --norc -n <<<"$text" 2>&1)
  case $said in
    *"unexpected end of file"*|*"unexpected EOF while looking"*|*"delimited by end-of-file"*) continue ;;
  esac
  [[ $line =~ (^|[^\\])(\\\\)*\\$ ]] && continue
  text=
  echo $number
done
"""
_NODE_ENDS = r"""
const vm = require("vm");
const lines = require("fs").readFileSync(0, "utf8").split("\n");
if (lines[lines.length - 1] === "") lines.pop();
const fault = (text) => { try { new vm.Script(text); return ""; } catch (error) { return String(error.message); } };
let text = "";
lines.forEach((line, index) => {
  text += line + "\n";
  const inside = "async function _() {" + text;
  const wants = /Unexpected end of input|Unterminated template/;
  const open = fault(text) && fault(inside + "}") && (wants.test(fault(inside)) || wants.test(fault(inside + "*/")));
  if (!open) { console.log(index + 1); text = ""; }
});
"""


class Language(Value):
    """How one interpreter is talked to."""

    prompt: str
    more: str
    farewells: tuple[str, ...]
    with_code: tuple[tuple[str, str], ...] = ()
    """What stands around the exit code in a farewell that has one."""
    ends: tuple[str, ...] = ()
    """The program that finds where statements end."""


LANGUAGES = {
    "python": Language(
        prompt=">>> ",
        more="... ",
        farewells=("exit", "quit", "exit()", "quit()"),
        with_code=(("exit(", ")"), ("quit(", ")")),
    ),
    "bash": Language(
        prompt="$ ",
        more="> ",
        farewells=("exit", "logout"),
        with_code=(("exit ", ""),),
        ends=("bash", "-c", _BASH_ENDS),
    ),
    "node": Language(prompt="> ", more="... ", farewells=(".exit",), ends=("node", "-e", _NODE_ENDS)),
}


def main(options: argparse.Namespace) -> int:
    """Carry out `hutch run --interactive`."""
    for flag, given in (("CODE", options.code), ("--file", options.file)):
        if given is not None:
            raise SpecError(f"--interactive reads statements, and {flag} was given", code="cli.usage", hint="give one")
    for flag, given in (("--json", options.json), ("--stdin", options.stdin)):
        if given:
            raise SpecError(f"--interactive and {flag} do not go together", code="cli.usage", hint=f"leave out {flag}")
    place = lasting.open_place(options)
    try:
        about = place.start()
        repl = Repl(place, about["interpreter"], told_of_loss=options.session is None or not options.no_daemon)
        if os.isatty(0):
            return repl.serve_terminal(str(about["environment"]))
        return repl.serve_pipe()
    finally:
        place.close()


class Repl:
    """Reads, runs, and shows."""

    def __init__(self, place: lasting.Place, interpreter: str, *, told_of_loss: bool) -> None:
        self._place = place
        self._language = LANGUAGES[interpreter]
        self._told_of_loss = told_of_loss
        self._code = 0
        """How the last statement ended."""

    def serve_terminal(self, environment: str) -> int:
        """Talk to a person."""
        print(f"hutch: {environment}, in a sandbox; Ctrl-D ends it", file=sys.stderr)
        with _History(environment):
            pending: list[str] = []
            while True:
                try:
                    sys.stdout.flush()
                    pending.append(input(self._language.more if pending else self._language.prompt))
                    text = "\n".join(pending)
                    if not text.strip():
                        pending.clear()
                        continue
                    if self._is_farewell(text):
                        return self._code
                    if not self._is_complete(text):
                        continue
                    pending.clear()
                    self._run(text)
                except EOFError:
                    print()
                    return self._code
                except HutchError as error:
                    pending.clear()
                    self._code = print_error(error, as_json=False)
                except KeyboardInterrupt:
                    pending.clear()
                    print()

    def serve_pipe(self) -> int:
        """Run what comes through a pipe, to its end."""
        with open(0, "rb", closefd=False) as stream:
            text = run._decode(stream.read(CODE_BYTES + 1), "standard input")
        for statement in self._statements(text):
            if self._is_farewell(statement):
                break
            try:
                self._run(statement)
            except KeyboardInterrupt:
                return 130
        return self._code

    def _run(self, code: str) -> None:
        with lasting.Interrupts() as interrupts:
            ran = self._place.evaluate(code, interrupts, lasting.pass_on)
        lasting.say_how_it_went(ran, told_of_loss=self._told_of_loss)
        self._told_of_loss = True
        self._code = run.exit_code(ran.result)

    # ---- where a statement ends ----

    def _is_farewell(self, text: str) -> bool:
        """Whether this ends the conversation; a number in it is then our exit code."""
        words = text.strip()
        if words in self._language.farewells:
            self._code = 0
            return True
        for before, after in self._language.with_code:
            number = words.removeprefix(before).removesuffix(after).strip()
            if words == f"{before}{number}{after}" and number.isascii() and number.isdigit() and len(number) < 9:
                self._code = int(number) & 0xFF
                return True
        return False

    def _is_complete(self, text: str) -> bool:
        if not self._language.ends:
            return _is_complete_python(text)
        return text.count("\n") + 1 in self._find_ends(text)

    def _statements(self, text: str) -> Iterator[str]:
        """A text, cut where statements end."""
        lines = text.splitlines(keepends=True)
        start = 0
        for end in [*(self._find_ends(text) if self._language.ends else _python_ends(text)), len(lines)]:
            statement = "".join(lines[start:end])
            start = max(start, end)
            if statement.strip():
                yield statement

    def _find_ends(self, text: str) -> list[int]:
        with lasting.Interrupts() as interrupts:
            found = self._place.execute(list(self._language.ends), text.encode("utf-8", "surrogateescape"), interrupts)
        return [int(word) for word in found.stdout.split() if word.isascii() and word.isdigit()]


def _is_complete_python(text: str) -> bool:
    import codeop
    import warnings

    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= _TOP_LEVEL_AWAIT
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the interpreter inside says it
            return compiler(text) is not None
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return True


def _python_ends(text: str) -> list[int]:
    import ast
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flags = ast.PyCF_ONLY_AST | _TOP_LEVEL_AWAIT
            tree: Any = compile(text, "<stdin>", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return []  # as a whole, for the interpreter inside to complain of, or to know better
    return [
        one.end_lineno
        for one, other in zip(tree.body, [*tree.body[1:], None], strict=False)
        if other is None or other.lineno > one.end_lineno
    ]


class _History:
    """What was typed before, where this Python can edit lines."""

    def __init__(self, environment: str) -> None:
        self._path = f"{data_directory()}/history/{environment}"
        self._readline: Any = None

    def __enter__(self) -> None:
        try:
            import readline
        except ImportError:
            return
        self._readline = readline
        readline.parse_and_bind("tab: tab-insert")  # and not the names of files outside
        try:
            with open(self._path, encoding="utf-8", errors="surrogateescape") as file:
                for line in file.read().splitlines()[-_HISTORY_LINES:]:
                    readline.add_history(line)
        except OSError:
            return

    def __exit__(self, *_exception: object) -> None:
        if self._readline is None:
            return
        size = self._readline.get_current_history_length()
        lines = [self._readline.get_history_item(at + 1) for at in range(max(0, size - _HISTORY_LINES), size)]
        new = f"{self._path}.{os.getpid()}"
        try:
            os.makedirs(os.path.dirname(self._path), 0o700, exist_ok=True)
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.writelines(f"{line}\n" for line in lines if line)
            os.rename(new, self._path)
        except OSError:
            return  # a full disk, or a home that is not there

"""Stand-ins for programs that use hutch, so that their own tests need no sandbox.

Nothing here isolates anything, and nothing runs: a fake answers what it was told to. No request, flag or setting leads
to one; only a test that makes one has one.
"""

from __future__ import annotations

import posixpath

from .engine.files import Entry, require_inside
from .errors import SpecError
from .model import Outcome, Result

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, Self

    Answer = Callable[[str], Result | str]


def make_result(stdout: str = "", stderr: str = "", exit_code: int = 0, outcome: Outcome | None = None) -> Result:
    """A Result as a sandbox would give it."""
    return Result(
        outcome=outcome or (Outcome.OK if exit_code == 0 else Outcome.FAILED),
        exit_code=exit_code,
        stdout=stdout,
        stderr=stderr,
        env="fake",
    )


class FakeFiles:
    """A workspace in memory, with the paths and errors of the real one."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    def read(self, path: str) -> bytes:
        """The content of a file."""
        inner = require_inside(path)
        if inner not in self.content:
            raise SpecError(
                f"{path} does not exist in the workspace", code="files.missing", hint="files.list() shows what does"
            )
        return self.content[inner]

    def read_text(self, path: str) -> str:
        """The content of a file as text."""
        return self.read(path).decode("utf-8", "replace")

    def write(self, path: str, data: bytes | str) -> None:
        """Put a file in place."""
        self.content[require_inside(path)] = data.encode() if isinstance(data, str) else data

    def list(self, path: str = ".") -> list[Entry]:
        """What is in a directory, by name."""
        inner = require_inside(path)
        prefix = "" if inner == "." else f"{inner}/"
        found = {}
        for name, data in self.content.items():
            if name.startswith(prefix):
                first, slash, _ = name.removeprefix(prefix).partition("/")
                kind, size = ("directory", 0) if slash else ("file", len(data))
                found[first] = Entry(path=posixpath.join(prefix, first), kind=kind, size=size, mode=0o644, modified=0.0)
        return [found[name] for name in sorted(found)]

    def exists(self, path: str) -> bool:
        """Whether there is something at a path."""
        inner = require_inside(path)
        return inner in self.content or any(name.startswith(f"{inner}/") for name in self.content)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, or with recursive a directory and all below it."""
        inner = require_inside(path)
        below = [name for name in self.content if name.startswith(f"{inner}/")] if recursive else []
        if not below:
            self.read(path)
        for name in [*below, inner]:
            self.content.pop(name, None)


class FakeSandbox:
    """Answers like a `Sandbox`, and remembers what it was asked.

    ``box = FakeSandbox({"print(1)": "1\\n"})``, or with a function of the code.
    """

    def __init__(self, answers: dict[str, Result | str] | Answer | None = None) -> None:
        """Say what it answers.

        Args:
            answers: a Result, or just the standard output, for each code or command (its words joined by blanks); or
                a function that is given the code. What is not known is answered with an empty output and code 0.
        """
        self._answers = answers or {}
        self.runs: list[str] = []
        """Every code that it was given."""
        self.commands: list[tuple[str, ...]] = []
        """Every command."""
        self.files = FakeFiles()
        self.id = "fake0000"
        self.is_open = False

    def _answer(self, words: str, options: dict[str, Any]) -> Result:
        said = self._answers.get(words, "") if isinstance(self._answers, dict) else self._answers(words)
        result = said if isinstance(said, Result) else make_result(said)
        for name, text in (("on_stdout", result.stdout), ("on_stderr", result.stderr)):
            if options.get(name) is not None and text:
                options[name](text)
        return result.check() if options.get("check") else result

    def run(self, code: str, **options: Any) -> Result:
        """Remember the code, and answer."""
        self.runs.append(code)
        return self._answer(code, options)

    def exec(self, argv: Sequence[str], **options: Any) -> Result:
        """Remember the command, and answer."""
        self.commands.append(tuple(argv))
        return self._answer(" ".join(argv), options)

    def map(self, codes: Iterable[str], **options: Any) -> list[Result]:
        """As of a `Pool`."""
        return [self.run(code, **options) for code in codes]

    def interrupt(self) -> bool:
        """Nothing runs."""
        return False

    def start(self) -> Self:
        """Begin."""
        self.is_open = True
        return self

    def close(self) -> None:
        """End."""
        self.is_open = False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exception: object) -> None:
        self.close()


class AsyncFakeSandbox:
    """The same, awaited."""

    def __init__(self, answers: dict[str, Result | str] | Answer | None = None) -> None:
        self.fake = FakeSandbox(answers)
        self.files = _AsyncFakeFiles(self.fake.files)
        self.id = self.fake.id

    async def run(self, code: str, **options: Any) -> Result:
        """Remember the code, and answer."""
        return self.fake.run(code, **options)

    async def exec(self, argv: Sequence[str], **options: Any) -> Result:
        """Remember the command, and answer."""
        return self.fake.exec(argv, **options)

    async def map(self, codes: Iterable[str], **options: Any) -> list[Result]:
        """As of an `AsyncPool`."""
        return self.fake.map(codes, **options)

    async def __aenter__(self) -> Self:
        self.fake.start()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self.fake.close()


class _AsyncFakeFiles:
    def __init__(self, files: FakeFiles) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._files, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            return method(*arguments, **options)

        return call

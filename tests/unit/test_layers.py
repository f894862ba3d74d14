"""The shape of the package, read from its source: imports point down, and one module starts processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hutch

ROOT = Path(hutch.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Lowest first. Families on one line stand side by side and do not know each other.
LAYERS = (
    ("guest",),
    ("errors",),
    ("model",),
    ("spec",),
    ("config",),
    ("process",),
    ("isolation", "sources"),
    ("engine",),
    ("sandbox",),
    ("blocking",),
    ("testing",),
    ("serve",),
    ("cli",),
    ("__main__",),
)
RANK = {family: rank for rank, families in enumerate(LAYERS) for family in families}


def family(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, family) of everything of hutch that a file imports, inside functions too."""
    package = ["hutch", *file.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *filter(None, [node.module])])
            names = [f"{whole}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            # A name of the package itself, such as its version, lies below everything.
            if parts[0] == "hutch" and len(parts) > 1:
                module = ROOT / parts[1]
                if module.is_dir() or module.with_suffix(".py").exists():
                    yield node.lineno, parts[1]


@pytest.mark.parametrize("file", [file for file in FILES if file != ROOT / "__init__.py"], ids=lambda file: file.name)
def test_imports_point_down_only(file: Path) -> None:
    own = family(file)
    upward = [
        f"{file.relative_to(ROOT)}:{line} imports {other}"
        for line, other in imports(file)
        if other != own and RANK[other] >= RANK[own]
    ]
    assert upward == []


def test_the_guest_imports_nothing_of_hutch() -> None:
    assert [(file, found) for file in FILES if family(file) == "guest" for found in imports(file)] == []


def test_the_import_reader_sees_every_way_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "engine").mkdir()
    for name in ("errors", "process", "cli"):
        (tmp_path / f"{name}.py").touch()
    file = tmp_path / "engine" / "x.py"
    file.write_text(
        "from .. import process\nfrom ..errors import A\nimport hutch.cli\ndef f():\n    from hutch.cli import b\n"
        "from .. import __version__\nimport os\nfrom . import output\n"
    )
    assert sorted(imports(file)) == [(1, "process"), (2, "errors"), (3, "cli"), (5, "cli"), (8, "engine")]


def test_no_module_has_a_name_that_says_nothing() -> None:
    names = {part.removesuffix(".py") for file in FILES for part in file.relative_to(ROOT).parts}
    assert names & {"utils", "util", "helpers", "common", "manager", "base", "misc"} == set()


def starts_processes(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in ("subprocess", "multiprocessing", "pty") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module in ("subprocess", "multiprocessing", "pty") or (
            node.module == "os" and any(is_spawner(alias.name) for alias in node.names)
        )
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("os", "posix")
        and is_spawner(node.attr)
    )


def is_spawner(name: str) -> bool:
    return name in ("system", "popen", "fork", "forkpty") or name.startswith(("exec", "spawn", "posix_spawn"))


def test_only_the_process_module_starts_processes() -> None:
    found = {
        str(file.relative_to(ROOT))
        for file in FILES
        if family(file) != "guest"
        for node in ast.walk(ast.parse(file.read_text()))
        if starts_processes(node)
    }
    assert found == {"process.py"}

"""The names that hutch promises, and what it costs to load them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hutch

SOURCE = Path(hutch.__file__).parent.parent

# Each of these costs more than a hutch module, and some cost more than starting a sandbox.
HEAVY = {
    "asyncio",
    "concurrent",
    "configparser",
    "contextlib",
    "ctypes",
    "dataclasses",
    "difflib",
    "email",
    "importlib.metadata",
    "importlib.resources",
    "inspect",
    "json",
    "logging",
    "multiprocessing",
    "pathlib",
    "pickle",
    "platform",
    "shlex",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "tomllib",
    "typing",
    "urllib",
    "uuid",
}

VERSION_MODULES = {"hutch", "hutch.cli", "hutch.errors"}
RUN_MODULES = VERSION_MODULES | {
    "hutch.cli.run",
    "hutch.config",
    "hutch.engine",
    "hutch.engine.output",
    "hutch.engine.planning",
    "hutch.engine.state",
    "hutch.engine.supervisor",
    "hutch.engine.verdict",
    "hutch.isolation",
    "hutch.isolation.bwrap",
    "hutch.isolation.jail",
    "hutch.isolation.limits",
    "hutch.isolation.mounts",
    "hutch.isolation.network",
    "hutch.isolation.seccomp",
    "hutch.isolation.usage",
    "hutch.model",
    "hutch.process",
    "hutch.sources",
    "hutch.sources.host",
    "hutch.spec",
}

START_UP = """
from hutch.cli import build_parser, run
options = build_parser("run").parse_args(["--memory", "1G", "--network", "off", "print(6 * 7)"])
run._code(options)
spec = run._spec(options)
try:
    run.planning.host.realise(spec.environment)
except run.planning.host.HostError:
    pass
"""


def modules_after(code: str) -> set[str]:
    """What a bare interpreter has loaded after some code; without site, which loads whatever is installed."""
    script = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); before = set(sys.modules)\n{code}\n"
    script += "print(); print(' '.join(sorted(set(sys.modules) - before)))"
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],
        check=True,
        capture_output=True,
        text=True,
        env={"HOME": "/nonexistent", "PATH": os.defpath},
    )
    assert said.stderr == ""
    return set(said.stdout.splitlines()[-1].split())


def hutch_modules(loaded: set[str]) -> set[str]:
    return {name for name in loaded if name.split(".")[0] == "hutch"}


def test_the_public_names_are_listed_in_order() -> None:
    assert hutch.__all__ == sorted(hutch.__all__)
    assert len(set(hutch.__all__)) == len(hutch.__all__)
    assert dir(hutch) == hutch.__all__


@pytest.mark.parametrize("name", hutch.__all__)
def test_every_public_name_is_there(name: str) -> None:
    thing = getattr(hutch, name)
    assert name == "__version__" or thing.__name__ == name


def test_a_star_import_gives_exactly_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from hutch import *", names)
    assert set(names) - {"__builtins__"} == set(hutch.__all__)


def test_what_type_checkers_see_is_what_is_there() -> None:
    homes = {name: module for module, names in hutch._HOMES.items() for name in names}
    assert {*homes, "__version__"} == set(hutch.__all__)
    for name, module in homes.items():
        assert getattr(hutch, name).__module__ == f"hutch.{module}"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        hutch.runn  # noqa: B018


def test_importing_hutch_loads_nothing_else() -> None:
    assert modules_after("import hutch") - {"__future__"} == {"hutch"}


STATE = """
import os, signal
def state():
    signals = [signal.getsignal(number) for number in signal.valid_signals()]
    return os.listdir("/proc/self/fd"), dict(os.environ), os.getcwd(), sys.path[:], sys.excepthook, signals
before_import = state()
import hutch, hutch.cli.run, hutch.sandbox
print("unchanged" if state() == before_import else "changed")
"""


def test_importing_hutch_changes_nothing_in_the_process() -> None:
    script = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{STATE}"
    said = subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True, capture_output=True, text=True)
    assert said.stdout == "unchanged\n"


def test_the_modules_that_version_loads() -> None:
    loaded = modules_after("from hutch.cli import main; main(['--version'])")
    assert hutch_modules(loaded) == VERSION_MODULES
    assert loaded & (HEAVY | {"argparse", "re", "hashlib"}) == set()


def test_the_modules_that_run_loads() -> None:
    loaded = modules_after(START_UP)
    assert hutch_modules(loaded) == RUN_MODULES
    assert loaded & HEAVY == set()


def test_only_the_parser_of_flags_needs_regular_expressions() -> None:
    loaded = modules_after("import hutch.cli.run")
    assert loaded & (HEAVY | {"argparse", "re", "hashlib", "shutil"}) == set()


def test_the_version_is_that_of_the_installed_package() -> None:
    from importlib.metadata import version

    assert version("hutch") == hutch.__version__

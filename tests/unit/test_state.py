"""What dead runs left behind, and nothing else, is cleared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hutch.engine import state
from hutch.isolation import limits
from hutch.process import make_token

DEAD = f"1073741823-5-{os.stat('/proc/self/ns/pid').st_ino}-0badcafe"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(state, "work_places", lambda: [str(tmp_path / "work"), "/nonexistent"])
    monkeypatch.setattr(limits, "cgroup_roots", lambda: [str(tmp_path / "groups")])
    (tmp_path / "work").mkdir()
    (tmp_path / "groups").mkdir()
    return tmp_path


def test_what_the_dead_left_is_removed(place: Path) -> None:
    (place / "groups" / f"hutch-{DEAD}").mkdir()
    work = place / "work" / f".hutch-work-{DEAD}"
    state.make_work_directory(str(work), "layer", os.geteuid(), os.getegid())
    (work / "layer" / "work").mkdir()
    (work / "layer" / "work").chmod(0)  # overlayfs leaves it so
    assert sorted(state.clear_stale()) == sorted([str(place / "groups" / f"hutch-{DEAD}"), str(work)])
    assert state.clear_stale() == []


def test_what_the_living_use_stays(place: Path) -> None:
    token = make_token()
    for path in (f"groups/hutch-{token}", f"work/.hutch-work-{token}", f"work/.hutch-work-{token}-0"):
        (place / path).mkdir()
    assert state.clear_stale() == []


@pytest.mark.parametrize("path", ["groups/hutch-supervisors", "groups/other", "work/.hutch-work-mine", "work/code"])
def test_what_is_not_ours_stays(path: str, place: Path) -> None:
    (place / path).mkdir()
    assert list(state.find_stale()) == []


def test_the_work_directory_of_a_dead_run_is_found(place: Path) -> None:
    work = place / "work" / f".hutch-work-{DEAD}-0"
    work.mkdir()
    assert list(state.find_stale()) == [("work", str(work))]


def test_what_belongs_to_someone_else_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "work" / f".hutch-work-{DEAD}").mkdir()
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert list(state.find_stale()) == []


def test_a_group_that_is_in_use_is_left(place: Path) -> None:
    (place / "groups" / f"hutch-{DEAD}" / "child").mkdir(parents=True)
    assert state.clear_stale() == []


def test_a_link_among_the_leftovers_does_not_lead_outside(place: Path) -> None:
    (place / "precious").mkdir()
    (place / "precious" / "file").touch()
    work = place / "work" / f".hutch-work-{DEAD}"
    work.mkdir()
    (work / "work").symlink_to(place / "precious")
    state.clear_stale()
    assert (place / "precious" / "file").exists()
    assert not work.exists()


def test_another_hutch_may_be_faster(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_names", lambda _directory: [f".hutch-work-{DEAD}"])
    assert state.clear_stale() == []


def test_what_could_not_be_removed_is_not_told_as_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    work = place / "work" / f".hutch-work-{DEAD}"
    work.mkdir()
    monkeypatch.setattr(os, "rmdir", refuse)
    assert state.clear_stale() == []
    assert work.exists()

"""Fixtures that tests of several kinds share: an identity that runs hutch, and a directory of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.harness import IS_ROOT, Arena, Hutch, need

IDENTITIES = ("root", "user") if IS_ROOT else ("user",)


@pytest.fixture(scope="session")
def identities() -> Iterator[dict[str, Hutch]]:
    """Everyone who can run hutch here, by name."""
    need("python3", "bwrap", "userns")
    arena = Arena.build()
    try:
        yield {name: Hutch(name, arena) for name in IDENTITIES}
    finally:
        arena.remove()


@pytest.fixture(params=IDENTITIES)
def hutch(request: pytest.FixtureRequest, identities: dict[str, Hutch]) -> Hutch:
    """Each identity in turn."""
    return identities[request.param]


@pytest.fixture
def root(identities: dict[str, Hutch]) -> Hutch:
    """Root, for claims about being started by root."""
    need("root")
    return identities["root"]


@pytest.fixture
def user(identities: dict[str, Hutch]) -> Hutch:
    """The ordinary user, for claims about not being root."""
    return identities["user"]


@pytest.fixture
def project(hutch: Hutch) -> Iterator[Path]:
    """An empty directory of the identity's own."""
    need("overlay")
    if hutch.is_root:
        need("idmap")
    path = hutch.home / "projects" / "demo"
    path.mkdir(parents=True)
    for directory in (path, path.parent):
        hutch.give(directory)
    yield path
    shutil.rmtree(path.parent)

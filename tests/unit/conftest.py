"""What every unit test shares: nobody's settings, and property tests that give the same answer each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "hutch",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],  # a loaded machine is no fault of the code
)
settings.load_profile("hutch")


@pytest.fixture(scope="session", autouse=True)
def no_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home without settings, so that those of whoever runs the tests change nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(("HUTCH_", "NIXOSANDBOX_", "XDG_")) and name != "HUTCH_MUST":
                patch.delenv(name)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def nobodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, to put settings into."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home

"""What every unit test shares: nobody's settings, and property tests that give the same answer each time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The fixture below is the same for every example, so one setting of it for all of them is what is wanted.
settings.register_profile(
    "hutch",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("hutch")


@pytest.fixture(scope="session")
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def no_settings(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without settings, so that those of whoever runs the tests change nothing."""
    for name in ("CONFIG", "DATA_DIR", "CACHE_DIR", "BWRAP"):
        monkeypatch.delenv(f"HUTCH_{name}", raising=False)
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NIXOSANDBOX_DATA_DIR", "NIXOSANDBOX_BWRAP_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(empty_home))


@pytest.fixture
def nobodys_home(no_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, to put settings into."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home

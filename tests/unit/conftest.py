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


@pytest.fixture(autouse=True)
def nobodys_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without settings, so that those of whoever runs the tests change nothing."""
    home = tmp_path_factory.mktemp("home")
    for name in ("HUTCH_CONFIG", "HUTCH_DATA_DIR", "HUTCH_CACHE_DIR", "HUTCH_BWRAP"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NIXOSANDBOX_DATA_DIR", "NIXOSANDBOX_BWRAP_PATH", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    return home

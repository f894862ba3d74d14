"""Every contract test is followed by the same question: what did it leave?"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .harness import GRACE_SECONDS, Hutch, Snapshot, become_subreaper, end_newcomers, find_leftovers, reap_orphans


@pytest.fixture(scope="session", autouse=True)
def _subreaper() -> None:
    become_subreaper()


@pytest.fixture(autouse=True)
def leaves_nothing(identities: dict[str, Hutch], _subreaper: None) -> Iterator[None]:
    """No process, mount, cgroup or file of a test outlives it; what is dying gets a moment to do so."""
    everyone = list(identities.values())
    for hutch in everyone:
        hutch.pids.clear()
    before = Snapshot.take(identities["user"].uid)
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        reap_orphans(before)
        left = find_leftovers(before, everyone)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    if left:
        end_newcomers(before)
        pytest.fail("left behind:\n" + "\n".join(sorted(left)[:20]))

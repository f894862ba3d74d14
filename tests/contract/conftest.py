"""Every contract test is followed by the same question: what did it leave?"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .harness import GRACE_SECONDS, Hutch, Snapshot, become_subreaper, end_newcomers, find_leftovers, reap_orphans
from .live_harness import Caller


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


@pytest.fixture(scope="session")
def callers(identities: dict[str, Hutch], _subreaper: None) -> Iterator[dict[str, Caller]]:
    """For each identity a process that uses hutch as a library."""
    found = {name: Caller(hutch) for name, hutch in identities.items()}
    for caller in found.values():
        caller.start()
    yield found
    for caller in found.values():
        caller.close()


@pytest.fixture
def caller(hutch: Hutch, callers: dict[str, Caller], leaves_nothing: None) -> Iterator[Caller]:
    """The process of each identity in turn. What its sandboxes leave carries its pid in the name."""
    found = callers[hutch.name]
    was_there = found.is_running
    if not was_there:  # an earlier test was its end
        found.start()
    hutch.pids.append(found.pid)
    yield found
    if not was_there and found.is_running:
        found.end()

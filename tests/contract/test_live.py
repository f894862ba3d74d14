from __future__ import annotations
from hutch import Sandbox
from .live_harness import Caller

def test_a(caller: Caller) -> None:
    def claim():
        with Sandbox() as box:
            return box.run("print(1)")
    assert caller(claim).stdout == "1\n"

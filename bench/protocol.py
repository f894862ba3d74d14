"""A worker's side of the pipe. Standard library only: workers of other projects run in interpreters of their own."""

from __future__ import annotations

import json
import os
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def serve(answer: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """Answer until nobody asks any more."""
    # Out of the way of what is measured, and of whatever it starts.
    asked = os.fdopen(os.dup(0), "rb", buffering=0)
    told = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    while line := asked.readline():
        request = json.loads(line)
        try:
            said = answer(request.pop("do"), request)
        except Exception:  # noqa: BLE001  # whoever asked is told
            said = {"error": traceback.format_exc(limit=-4).strip()}
        os.write(told, json.dumps(said).encode() + b"\n")

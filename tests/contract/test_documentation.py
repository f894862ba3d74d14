"""The examples of the Python page do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .harness import DEADLINE_SECONDS, PYTHON, Hutch

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_page_has_examples() -> None:
    assert len(EXAMPLES) >= 10


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.strip().splitlines()[0][:40])
def test_an_example_does_what_the_page_says(hutch: Hutch, example: str) -> None:
    with hutch.popen([PYTHON, "-c", f"import hutch\n{example}"]) as script:
        _, complaints = script.communicate(timeout=DEADLINE_SECONDS)
    assert (script.returncode, complaints) == (0, "")

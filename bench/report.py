"""Numbers into tables: medians, ratios, budgets held or broken, as text and as JSON."""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

NOISY = 4.0
"""Above this, raw's own 95th percentile is so far from its median that the machine was doing something else."""


def percentile(values: Iterable[float], share: float) -> float:
    """The value that a share of all is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


class Times:
    """What one row took, in seconds."""

    def __init__(self, values: list[float]) -> None:
        self.count = len(values)
        self.median = statistics.median(values)
        self.p95 = percentile(values, 0.95)
        self.least = min(values)

    @property
    def spread(self) -> float:
        """How far the slowest are from the middle."""
        return self.p95 / self.median


class Finding:
    """One line of a table."""

    def __init__(
        self, name: str, group: str, title: str, value: float, unit: str, budget: float | None, **details: Any
    ) -> None:
        self.name = name
        self.group = group
        self.title = title
        self.value = value
        self.unit = unit
        """"" for a ratio to raw."""
        self.budget = budget
        self.details = details

    @property
    def verdict(self) -> str:
        """held, broken, or nothing where there is no budget."""
        if self.budget is None:
            return ""
        return "held" if self.value <= self.budget else "broken"

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "row": self.name,
            "group": self.group,
            "title": self.title,
            "value": round(self.value, 4),
            "unit": self.unit or "raw",
            "budget": self.budget,
            "held": None if self.budget is None else self.verdict == "held",
            **{name: round(value, 4) if isinstance(value, float) else value for name, value in self.details.items()},
        }


def compare(name: str, group: str, title: str, times: Times, raw: Times, budget: float | None) -> Finding:
    """A row as a ratio to raw."""
    return Finding(
        name,
        group,
        title,
        times.median / raw.median,
        "",
        budget,
        p95=times.p95 / raw.median,
        least=times.least / raw.least,
        median_ms=times.median * 1000,
        samples=times.count,
    )


def show_times(findings: list[Finding]) -> None:
    """The table of ratios."""
    print(f"  {'':<46}{'median':>9}{'p95':>9}{'best':>9}{'ms':>9}{'n':>5}{'budget':>8}")
    group = ""
    for finding in findings:
        if finding.group != group:
            group = finding.group
            print(f"  {_bold(group)}")
        details = finding.details
        cells = "".join(_ratio(value) for value in (finding.value, details["p95"], details["least"]))
        cells += f"{details['median_ms']:>9.2f}{details['samples']:>5}"
        print(f"    {finding.title:<44}{cells}{_budget(finding)}")


def show_measures(findings: list[Finding]) -> None:
    """The table of everything that is no ratio to raw."""
    for finding in findings:
        amount = f"{finding.value:.2f}" if finding.value < 10 else f"{finding.value:.0f}"
        unit = f" {finding.unit}" if finding.unit else ""
        note = finding.details.get("note", "")
        print(f"    {finding.title:<44}{amount:>9}{unit:<5}{_budget(finding)}  {_dim(note)}".rstrip())


def heading(text: str) -> None:
    """A line above a table."""
    print(f"\n{_bold(text)}")


def say(text: str) -> None:
    """A line below one."""
    print(f"    {text}", flush=True)


def _ratio(value: float) -> str:
    return f"{value:>9.3f}" if value < 1 else f"{value:>9.2f}"


def _budget(finding: Finding) -> str:
    if finding.budget is None:
        return ""
    text = f"{finding.budget:>8g}  {finding.verdict}"
    return text if finding.verdict == "held" else _red(text)


def _bold(text: str) -> str:
    return _style("1", text)


def _dim(text: str) -> str:
    return _style("2", text) if text else ""


def _red(text: str) -> str:
    return _style("31", text)


def _style(code: str, text: str) -> str:
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() else text


def progress(text: str) -> None:
    """What is being done, for whoever watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

"""make bench: what hutch costs, as ratios to plain bubblewrap that are measured in the same loop.

Absolute times say more about the machine than about hutch. So every round measures every row once, in an order that
changes, in one process for each identity; medians are compared to the median of `bwrap /bin/true` among them.

    HUTCH_BENCH_ROUNDS=N   how often (100)
    HUTCH_BENCH_ONLY=a,b   only rows, groups or titles that contain one of these words; raw is always measured
    HUTCH_BENCH_JSON=FILE  also write everything as JSON
    HUTCH_BENCH_STRICT=1   exit with 1 if a budget is broken, and not only if something does not work
    HUTCH_BENCH_PEERS=DIR  where `make bench-peers` put others (build/peers)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
from typing import Any

import footprint
import peers
import report
import rows
from arena import Arena, Identity, Worker, WorkerError
from report import Finding, Times, progress

WARM_UP = 3
"""The first rounds fill caches."""
PATIENCE = 15
"""A row that takes more than so many times raw is measured in fewer rounds."""
IDLE = 40
CROWD = 100
OUTPUT_MB = 100
MEASURES = {
    # name: (title, budget)
    "sandboxed": ("python in hutch's jail / python without", 1.5),
    "output-cpu": (f"{OUTPUT_MB} MB of output: CPU of the host process", 40.0),
    "output-memory": (f"{OUTPUT_MB} MB of output: growth of its memory", 4.0),
    "gap": (f"longest gap of the loop while {CROWD} start", 50.0),
    "idle": ("idle python session, all processes and kernel", 8.0),
}
BUDGETED = {row.name for row in rows.ROWS if row.budget(slow_cgroups=False)}


class Options:
    """What was asked for."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--quick", action="store_true", help="few rounds, without the others: to see that it works")
        arguments = parser.parse_args()
        self.quick: bool = arguments.quick
        self.rounds = int(os.environ.get("HUTCH_BENCH_ROUNDS") or (12 if self.quick else 100))
        self.samples = 1 if self.quick else 5
        self.only = [word for word in os.environ.get("HUTCH_BENCH_ONLY", "").split(",") if word]
        self.json = os.environ.get("HUTCH_BENCH_JSON")
        self.strict = os.environ.get("HUTCH_BENCH_STRICT") == "1"

    def wants(self, *texts: str) -> bool:
        """Whether a row that is called so is to be measured."""
        return not self.only or any(word in text for word in self.only for text in texts)


class Bench:
    """All that is measured of one identity."""

    def __init__(self, arena: Arena, who: Identity, options: Options) -> None:
        self._arena = arena
        self._who = who
        self._options = options
        self._missing: dict[str, str] = {}
        self._attempts = 0

    def run(self) -> dict[str, Any]:
        """Measure and show."""
        with Worker(self._arena, self._who, "worker.py") as worker:
            facts = worker.ask("hello")
            times = self._measure_rows(worker)
            if times[rows.RAW].spread > report.NOISY:
                progress("")
                report.heading(f"{self._who.title}: the machine was busy, measuring again")
                times = self._measure_rows(worker)
        raw = times[rows.RAW]
        slow = facts["cgroups"] == 1
        ratios = [
            report.compare(row.name, row.group, row.title, times[row.name], raw, row.budget(slow_cgroups=slow))
            for row in (*rows.ROWS, *peers.ROWS)
            if row.name in times
        ]
        measures = self._measure_once(times)
        progress("")
        self._show(ratios, measures, raw, facts)
        return {
            "identity": self._who.name,
            "uid": self._who.uid,
            "rounds": self._options.rounds,
            "attempts": self._attempts,
            "raw_ms": round(raw.median * 1000, 3),
            "raw_spread": round(raw.spread, 2),
            "noisy": raw.spread > report.NOISY,
            **facts,
            "rows": [finding.to_json() for finding in (*ratios, *measures)],
            "missing": self._missing,
        }

    # ---- in rounds ----

    def _measure_rows(self, worker: Worker) -> dict[str, Times]:
        self._attempts += 1
        self._missing = {}
        table = rows.commands(self._arena, self._who)
        served = dict.fromkeys(table, worker)
        served |= {row.name: worker for row in rows.ROWS if row.group in (rows.COLD_STARTS, rows.WARM_STARTS)}
        wanted = {row.name: row for row in rows.ROWS if row.name in served}
        other: Worker | None = None
        if not self._options.quick:
            theirs, missing = peers.commands(self._who)
            self._missing |= missing
            table |= theirs
            served |= dict.fromkeys(theirs, worker)
            python = peers.interpreter()
            libraries = [row.name for row in peers.ROWS if row.name.startswith(("jupyter", "llm-sandbox"))]
            if python is None:
                self._missing |= {name: peers.how(name) for name in ("jupyter", "llm-sandbox")}
            elif any(self._options.wants(name, rows.PEERS) for name in libraries):
                other = Worker(self._arena, self._who, "peer_worker.py", python=python)
                served |= dict.fromkeys(libraries, other)
            wanted |= {row.name: row for row in peers.ROWS if row.name in served}
        worker.ask("commands", table=table)
        names = [name for name, row in wanted.items() if self._options.wants(name, row.group, row.title)]
        try:
            return self._loop({name: served[name] for name in dict.fromkeys([rows.RAW, *names])})
        finally:
            if other is not None:
                other.__exit__()

    def _loop(self, served: dict[str, Worker]) -> dict[str, Times]:
        raw = statistics.median(self._once(served, rows.RAW) for _ in range(5))
        strides = {}
        for name in tuple(served):
            progress(f"{self._who.title}: {name}")
            try:
                self._once(served, name)
                strides[name] = max(1, math.ceil(self._once(served, name) / raw / PATIENCE))
            except WorkerError as error:
                said = str(error).splitlines()[-1].partition(": ")[2]
                self._missing[name] = f"does not run here: {said[:140]}"
                del served[name]
        chance = random.Random(1)
        times: dict[str, list[float]] = {name: [] for name in served}
        for turn in range(self._options.rounds + WARM_UP):
            progress(f"{self._who.title}: round {turn + 1} of {self._options.rounds + WARM_UP}")
            order = [name for name in served if turn % strides[name] == 0]
            chance.shuffle(order)
            for name in order:
                spent = self._once(served, name)
                if turn >= WARM_UP or strides[name] > 1:
                    times[name].append(spent)
        return {name: Times(values) for name, values in times.items()}

    def _once(self, served: dict[str, Worker], name: str) -> float:
        seconds: float = served[name].ask("time", row=name)["seconds"]
        return seconds

    # ---- once ----

    def _measure_once(self, times: dict[str, Times]) -> list[Finding]:
        found = []
        if "jail-python" in times and "python" in times:
            ratio = times["jail-python"].median / times["python"].median
            found.append(self._finding("sandboxed", ratio, ""))
        if self._options.wants("output-cpu", "output-memory"):
            found += self._measure_output()
        if self._options.wants("gap"):
            found.append(self._measure_gap())
        if self._options.wants("idle"):
            found.append(self._measure_idle())
        return found

    def _finding(self, name: str, value: float, unit: str, note: str = "", **details: float) -> Finding:
        title, budget = MEASURES[name]
        return Finding(name, "measures", title, value, unit, budget, note=note, **details)

    def _each(self, do: str, samples: int, **arguments: int) -> dict[str, float]:
        """Medians of what fresh processes found."""
        found = []
        for turn in range(samples):
            progress(f"{self._who.title}: {do} {turn + 1} of {samples}")
            with Worker(self._arena, self._who, "worker.py") as worker:
                worker.ask("hello")
                found.append(worker.ask(do, **arguments))
        return {name: statistics.median(one[name] for one in found) for name in found[0]}

    def _measure_output(self) -> list[Finding]:
        seen = self._each("output", self._options.samples, megabytes=OUTPUT_MB)
        note = f"in {seen['wall_ms']:.0f} ms, beside {seen['idle_cpu_ms']:.1f} ms for waiting as long"
        return [
            self._finding("output-cpu", seen["cpu_ms"], "ms", note, wall_ms=seen["wall_ms"]),
            self._finding("output-memory", seen["growth_mb"], "MB"),
        ]

    def _measure_gap(self) -> Finding:
        seen = self._each("gap", min(3, self._options.samples), count=CROWD)
        note = (
            f"all answered after {seen['wall_ms']:.0f} ms; p95 {seen['p95_ms']:.1f} ms, idle {seen['idle_max_ms']:.1f}"
        )
        return self._finding("gap", seen["max_ms"], "ms", note, wall_ms=seen["wall_ms"], p95_ms=seen["p95_ms"])

    def _measure_idle(self) -> Finding:
        kernel, processes, hidden = [], 0, 0
        with Worker(self._arena, self._who, "worker.py") as worker:
            worker.ask("hello")
            worker.ask("grow", count=2)
            for turn in range(3):
                progress(f"{self._who.title}: memory of idle sandboxes {turn + 1} of 3")
                worker.ask("leave")
                before = footprint.kernel_bytes()
                wardens = worker.ask("grow", count=IDLE)["wardens"]
                kernel.append((footprint.kernel_bytes() - before) / IDLE)
                pids = [pid for warden in wardens for pid in footprint.tree(warden)]
                total, hidden = footprint.own_bytes(pids)
                processes = total // IDLE
        megabytes = (processes / 1e6, max(0.0, statistics.median(kernel)) / 1e6)
        note = f"{megabytes[0]:.2f} in {len(pids) / IDLE:g} processes, {megabytes[1]:.2f} in the kernel; mean of {IDLE}"
        if hidden:
            note += f"; {hidden / IDLE:g} processes do not tell what they share and count whole"
        return self._finding("idle", sum(megabytes), "MB", note, processes_mb=megabytes[0], kernel_mb=megabytes[1])

    # ---- the text ----

    def _show(self, ratios: list[Finding], measures: list[Finding], raw: Times, facts: dict[str, Any]) -> None:
        cgroups = f"cgroup v{facts['cgroups']}" if facts["cgroups"] else "no cgroup"
        report.heading(
            f"{self._who.title}, {cgroups}: ratios to raw ({raw.median * 1000:.2f} ms), {self._options.rounds} rounds"
        )
        report.show_times(ratios)
        titles = {row.name: row.title for row in rows.ROWS}
        for name, why in self._missing.items():
            report.say(f"{titles.get(name, name)}: {why}")
        if measures:
            print("  and apart from these")
            report.show_measures(measures)
        if raw.spread > report.NOISY:
            report.say(
                f"The machine is busy: p95 of raw is {raw.spread:.1f} times its median. Budgets mean little now."
            )


def main() -> int:
    """Both identities, where there are two."""
    options = Options()
    found = []
    with Arena() as arena:
        for who in arena.identities:
            found.append(Bench(arena, who, options).run())
    broken = [row for one in found for row in one["rows"] if row["held"] is False]
    absent = [name for one in found for name in one["missing"] if name in BUDGETED]
    budgets = [row for one in found for row in one["rows"] if row["held"] is not None]
    print(f"\n{len(budgets) - len(broken)} of {len(budgets)} budgets held", flush=True)
    if absent:
        print(f"not measured, though it has a budget: {', '.join(absent)}")
    if options.json:
        machine = {
            "kernel": platform.release(),
            "machine": platform.machine(),
            "cpus": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "identities": found}, file, indent=1)
            file.write("\n")
    return 1 if absent or (broken and options.strict) else 0


if __name__ == "__main__":
    sys.exit(main())

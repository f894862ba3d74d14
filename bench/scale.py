"""make bench-scale: many sandboxes at once, many one after the other, and what of them is still there afterwards.

    HUTCH_BENCH_SESSIONS=10,100,500   how many live at once
    HUTCH_BENCH_RUNS=1000             how many follow each other, each in a sandbox of its own
    HUTCH_BENCH_JSON=FILE             also write everything as JSON

Exits with 1 if anything grows.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import footprint
import report
import rows
from arena import Arena, Identity, Worker
from report import Times, progress

SIZES = [int(word) for word in os.environ.get("HUTCH_BENCH_SESSIONS", "10,100,500").split(",")]
RUNS = int(os.environ.get("HUTCH_BENCH_RUNS", "1000"))
VISITS, BATCH = 200, 10
REST_SECONDS = 3.0
SLACK_KB = 1024
"""What Python's own memory may grow by, which it never gives back exactly."""


def main() -> int:
    """Both identities, where there are two."""
    found, grew = [], []
    with Arena() as arena:
        for who in arena.identities:
            with Worker(arena, who, "worker.py") as worker:
                facts = worker.ask("hello")
                worker.ask("commands", table=rows.commands(arena, who))
                report.heading(
                    f"{who.title}: live at once (of {facts['descriptors'][1]} descriptors a process may have)"
                )
                before, live, after = live_at_once(worker, who)
                grew += show_growth(who, f"{max(SIZES)} sandboxes that lived", before, after)
            with Worker(arena, who, "worker.py") as worker:
                worker.ask("hello")
                progress(f"{who.title}: {RUNS} runs")
                many = worker.ask("many", count=RUNS)
                progress("")
                rate, each = RUNS / many["seconds"], many["median_ms"]
                report.heading(f"{who.title}: {RUNS} runs, each in a fresh sandbox: {rate:.0f}/s, median {each:.2f} ms")
                grew += show_growth(who, f"{RUNS} runs", many["before"], many["after"])
            with Worker(arena, who, "worker.py") as worker:
                worker.ask("hello")
                gap = worker.ask("gap", count=100)
                flood = worker.ask("output", megabytes=100)
            report.heading(f"{who.title}: at once")
            report.say(
                f"100 sandboxes answered after {gap['wall_ms']:.0f} ms; longest gap of the loop {gap['max_ms']:.0f} ms"
            )
            report.say(
                f"100 MB of output in {flood['wall_ms']:.0f} ms, {flood['cpu_ms']:.0f} ms of CPU, "
                f"memory grew by {flood['growth_mb']:.2f} MB"
            )
            if flood["growth_mb"] > SLACK_KB / 1024:
                grew.append(f"{who.title}: memory, by output")
            found.append({"identity": who.name, "live": live, "many": many, "gap": gap, "output": flood})
    print("\n" + ("\n".join(f"grows: {line}" for line in grew) or "nothing grows"))
    if path := os.environ.get("HUTCH_BENCH_JSON"):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"identities": found, "grows": grew}, file, indent=1)
            file.write("\n")
    return 1 if grew else 0


def live_at_once(worker: Worker, who: Identity) -> tuple[dict[str, int], list[dict[str, Any]], dict[str, int]]:
    """More and more, and a look at each stage; what the process had before and after."""
    worker.ask("grow", count=2)
    before = worker.ask("leave")
    host = worker.ask("grow", count=0)["memory_kb"]
    kernel = footprint.kernel_bytes()
    print(f"    {'':<12}{'memory of each, MB':^36}{'run in any of them':^28}")
    print(
        f"    {'sandboxes':>10}{'processes':>12}{'kernel':>9}{'our own':>9}{'descriptors':>13}"
        f"{'ms':>8}{'p95':>8}{'of raw':>9}{'CPU, idle':>12}{'started':>10}"
    )
    chance = random.Random(1)
    stages = []
    for size in SIZES:
        progress(f"{who.title}: {size} live sandboxes")
        grown = worker.ask("grow", count=size)
        used = footprint.kernel_bytes() - kernel
        own, _ = footprint.own_bytes([pid for warden in grown["wardens"] for pid in footprint.tree(warden)])
        times: list[float] = []
        raw: list[float] = []
        for _ in range(VISITS // BATCH):
            times += worker.ask("visit", numbers=[chance.randrange(size) for _ in range(BATCH)])["times"]
            raw.append(worker.ask("time", row=rows.RAW)["seconds"])
        run = Times(times)
        idle = worker.ask("rest", seconds=REST_SECONDS)
        stage = {
            "sandboxes": size,
            "processes_mb": own / size / 1e6,
            "kernel_mb": used / size / 1e6,
            "host_mb": (grown["memory_kb"] - host) / size / 1e3,
            "descriptors": grown["descriptors"],
            "run_ms": run.median * 1000,
            "run_p95_ms": run.p95 * 1000,
            "ratio": run.median / Times(raw).median,
            "idle_cpu_percent": idle["cpu_percent"],
            "idle_gap_ms": idle["max_ms"],
            "started_seconds": grown["seconds"],
        }
        stages.append(stage)
        progress("")
        print(
            f"    {size:>10}{stage['processes_mb']:>12.2f}{stage['kernel_mb']:>9.2f}{stage['host_mb']:>9.3f}"
            f"{stage['descriptors']:>13}{stage['run_ms']:>8.2f}{stage['run_p95_ms']:>8.2f}{stage['ratio']:>9.3f}"
            f"{stage['idle_cpu_percent']:>10.1f} %"
            f"{stage['started_seconds']:>8.1f} s",
            flush=True,
        )
    after = worker.ask("leave")
    report.say(f"all gone after {after.pop('seconds'):.1f} s")
    before.pop("seconds")
    return before, stages, after


def show_growth(who: Identity, what: str, before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Say what the process had before and after; return what grew."""
    grew = []
    words = []
    for name, now in after.items():
        slack = SLACK_KB if name == "memory_kb" else 0
        # Many at once leave their memory to Python, for the next ones; many in turn must not.
        checked = name != "memory_kb" or "runs" in what
        words.append(f"{name.replace('_kb', ' kB')} {before[name]} -> {now}")
        if checked and now > before[name] + slack:
            grew.append(f"{who.title}: {name}, by {what}: {before[name]} -> {now}")
    report.say(", ".join(words))
    return grew


if __name__ == "__main__":
    sys.exit(main())

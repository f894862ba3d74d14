"""`hutch doctor`: each layer tried for real, and the exact fix where it does not hold."""

from __future__ import annotations

import os
import sys

from ..config import data_directory, find_settings
from ..engine import planning, state, supervisor
from ..errors import HutchError
from ..isolation import bwrap, jail, limits, network
from ..model import Network, Result, Value
from ..sources import host
from ..spec import PRESETS, parse
from . import EXIT_FAILED, print_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

OK, WARNING, FAILED = "ok", "warning", "failed"


class Finding(Value):
    """What was found of one layer."""

    layer: str
    status: str
    found: str
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser, _verb: str) -> None:
    """Declare the options."""
    parser.description = (
        "Try each layer of the isolation on this machine. Exits with 0 when isolation holds; limits that do not hold\n"
        "for a whole sandbox are warnings."
    )
    parser.add_argument("--strict", action="store_true", help="treat weaker limits as failures")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace) -> int:
    """Carry out the verb."""
    findings = []
    for finding in examine(strict=options.strict):
        findings.append(finding)
        if not options.json:
            _print(finding)
    holds = not any(finding.status == FAILED for finding in findings)
    if options.json:
        print_json({"holds": holds, "layers": [dict(finding.__dict__) for finding in findings]})
    else:
        print(f"\n{_verdict(findings)}")
    return 0 if holds else EXIT_FAILED


def _verdict(findings: list[Finding]) -> str:
    failed = [finding.layer for finding in findings if finding.status == FAILED]
    if not failed:
        return "isolation holds on this machine"
    if all(layer.startswith("limit: ") for layer in failed):
        return "isolation holds; these limits are weaker than --strict asks for: " + ", ".join(failed)
    return "isolation does NOT hold; see the fixes above"


def _print(finding: Finding) -> None:
    mark = {OK: "ok  ", WARNING: "warn", FAILED: "FAIL"}[finding.status]
    print(f"{mark}  {finding.layer:<18} {finding.found}")
    if finding.fix:
        print(f"      {'':<18} fix: {finding.fix}")
    sys.stdout.flush()


def examine(*, strict: bool) -> Iterator[Finding]:
    """Look at every layer, from the ground up."""
    yield from _bubblewrap()
    yield from _jail()
    yield from _limits(weak=FAILED if strict else WARNING)
    yield from _network()
    yield from _protected_paths()
    yield from _environments()
    yield from _settings()
    yield from _leftovers()


def _failure(layer: str, error: HutchError, status: str = FAILED) -> Finding:
    return Finding(layer=layer, status=status, found=error.message, fix=error.hint)


def _bubblewrap() -> Iterator[Finding]:
    try:
        found = bwrap.require_bwrap()
    except HutchError as error:
        yield _failure("bubblewrap", error)
        return
    note = ""
    if found.version < bwrap.SYMLINK_SAFE:
        note = "; older than 0.12.0, so hutch itself refuses planted links (CVE-2026-87766)"
    yield Finding(layer="bubblewrap", status=OK, found=f"{found.release} at {found.path}{note}")


_PROBE = """
grep -E '^(NoNewPrivs|Seccomp|CapEff|CapBnd):' /proc/self/status
[ -w / ] || [ -w /usr ] || [ -w /etc ] || echo read-only
grep -vq '^ *lo:' <(tail -n +3 /proc/net/dev) || echo no-network
[ -r /proc/1/environ ] && cat /proc/1/environ >/dev/null 2>&1 || echo init-closed
unshare -U true 2>/dev/null || echo no-nesting
"""


def _jail() -> Iterator[Finding]:
    try:
        result = _run(_PROBE)
    except HutchError as error:
        yield _failure("user namespaces", error)
        return
    lines = result.stdout.split("\n")
    fields = {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines if ":" in line}
    yield Finding(layer="user namespaces", status=OK, found="a sandbox starts, with every namespace of its own")
    uid = os.geteuid()
    identity = f"started by root, the sandbox runs as uid {jail.DROP_ID}" if uid == 0 else f"runs as uid {uid}"
    yield Finding(layer="identity", status=OK, found=f"{identity} on the host and {jail.SANDBOX_ID} inside")
    for layer, holds, found in (
        ("system calls", fields.get("Seccomp") == "2", "an allow-list filter is installed"),
        ("privileges", fields.get("NoNewPrivs") == "1", "none can be gained"),
        ("capabilities", set(fields.get("CapEff", "1") + fields.get("CapBnd", "1")) == {"0"}, "none are left"),
        ("root filesystem", "read-only" in lines, "read-only"),
        ("network off", "no-network" in lines, "only a loopback of its own"),
        ("pid 1", "init-closed" in lines, "its memory and environment cannot be read"),
        ("nesting", "no-nesting" in lines, "no further user namespaces can be made inside"),
    ):
        if holds:
            yield Finding(layer=layer, status=OK, found=found)
        else:
            fix = "report this: hutch plan and the output of hutch doctor --json"
            yield Finding(layer=layer, status=FAILED, found=f"NOT so: {found}", fix=fix)


def _limits(*, weak: str) -> Iterator[Finding]:
    base = limits.find_cgroup_base()
    spec = parse({})
    plan = limits.plan_limits(spec.policy.limits, base, "doctor", (), strict=False)
    enforced = dict(plan.enforced)
    where = f"cgroup v{base.version}" if base else "no cgroup that this user may write"
    for name, weaker in (
        ("memory", "hutch samples the whole tree and kills it"),
        ("pids", "a limit per user namespace, without a count of what was refused"),
        ("cpus", "kept to as many CPUs, and to no less than one"),
    ):
        if enforced[name] == "tree":
            yield Finding(layer=f"limit: {name}", status=OK, found=f"holds for the whole sandbox ({where})")
        else:
            yield Finding(
                layer=f"limit: {name}",
                status=weak,
                found=f"{enforced[name]}: {weaker} ({where})",
                fix="systemd-run --user --scope -p Delegate=yes hutch ... (or start hutch as root)",
            )


def _network() -> Iterator[Finding]:
    try:
        slirp = network.require_slirp()
        result = _run("getent hosts localhost >/dev/null && cat /etc/resolv.conf", network=Network.FULL.value)
    except HutchError as error:
        yield _failure("network full", error, WARNING)
        return
    works = network.NAMESERVER in result.stdout
    yield Finding(
        layer="network full",
        status=OK if works else WARNING,
        found=f"through {slirp}" if works else f"the sandbox did not come up: {result.stderr[:200]}",
        fix="" if works else "run slirp4netns by hand to see what it lacks",
    )


def _protected_paths() -> Iterator[Finding]:
    import shutil
    import tempfile

    project = None
    for place in (os.path.dirname(os.path.realpath(data_directory())), "/var/tmp", "/tmp"):
        try:
            project = tempfile.mkdtemp(prefix=".hutch-doctor-", dir=place)
            break
        except OSError:
            continue
    if project is None:
        yield Finding(layer="protected paths", status=WARNING, found="not tried", fix="make /var/tmp writable")
        return
    try:
        result = _run("touch ok; echo x > .git/hooks; mkdir -p .claude/a; true", workspace=project)
        held = sorted(os.listdir(project)) == ["ok"]
        yield Finding(
            layer="protected paths",
            status=OK if held else FAILED,
            found="hooks and settings in writable mounts cannot be written"
            if held
            else f"left in a writable mount: {os.listdir(project)} {result.stderr[:200]}",
            fix="" if held else "report this: hutch plan and the output of hutch doctor --json",
        )
    except HutchError as error:
        yield _failure("protected paths", error, WARNING)
    finally:
        shutil.rmtree(project, ignore_errors=True)


def _environments() -> Iterator[Finding]:
    for name in PRESETS:
        try:
            rootfs = host.realise(parse({"environment": name}).environment)
        except HutchError as error:
            yield _failure(f"env: {name}", error, WARNING)
        else:
            yield Finding(layer=f"env: {name}", status=OK, found=f"{rootfs.interpreter[0]} of this machine")


def _settings() -> Iterator[Finding]:
    try:
        settings = find_settings(None)
        for name in {*PRESETS, *settings.environments}:
            parse(settings.request(name), settings.path or "")
    except HutchError as error:
        yield _failure("settings", error, WARNING)
    else:
        yield Finding(layer="settings", status=OK, found=settings.path or "none, defaults are used")


def _leftovers() -> Iterator[Finding]:
    stale = [path for _, path in state.find_stale()]
    yield Finding(
        layer="leftovers",
        status=WARNING if stale else OK,
        found=f"{len(stale)} from killed runs" if stale else "none",
        fix="hutch gc" if stale else "",
    )


def _run(code: str, **request: object) -> Result:
    spec = parse({"environment": "shell", "timeout_seconds": 20, **request})
    prepared = planning.prepare(spec, code)
    return supervisor.run(prepared.plan, prepared.warden)

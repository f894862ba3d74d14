"""From a Spec to a Plan: looking at the machine, and nothing more."""

from __future__ import annotations

import os
import time

from .. import process
from ..config import cache_directory, can_keep, private_directories
from ..errors import HostError, SpecError
from ..isolation import jail, limits, mounts
from ..model import File, GuestPath, HostPath, Network, Plan, Rootfs, Source, Spec, Value
from ..sources import host
from . import state

CODE_BYTES = 16 * 1024 * 1024
STDIN_BYTES = 64 * 1024 * 1024
"""What a program may be given to read in one piece."""


class Prepared(Value):
    """A plan, and the program that carries it out."""

    plan: Plan
    warden: HostPath
    token: str


def prepare(spec: Spec, code: str | None, own: tuple[mounts.CheckedMount, ...] = ()) -> Prepared:
    """Look at the host, and plan.

    Args:
        spec: what was asked for.
        code: the program; None for a sandbox that stays.
        own: directories of hutch's own that the sandbox gets beside what was asked for.

    Raises:
        SpecError: the request asks for what must not be.
        HostError: this machine cannot do it.
    """
    limits.start_priming()
    if code is not None:
        check_code(code)
    if spec.environment.source not in (None, Source.HOST):
        raise SpecError(
            f"source {spec.environment.source.value if spec.environment.source else ''} is not supported yet",
            code="spec.source",
            hint='use source = "host"',
        )
    token = process.make_token()
    rootfs = host.realise(spec.environment)
    if code is None:
        rootfs = rootfs.replace(files=(*rootfs.files, *_compiled_driver(dict(rootfs.interpreters).get("python"))))
    checked = mounts.check_mounts(spec.policy.mounts, spec.policy.unsafe, private_directories())
    checked = tuple(
        mount.replace(work_directory=mounts.require_work_directory(mount, state.work_places(), f"{token}-{index}"))
        if mount.guarded
        else mount
        for index, mount in enumerate(checked)
    )
    taken = {mount.guest_path for mount in checked}
    checked += tuple(mount for mount in own if mount.guest_path not in taken)
    paths = [path for mount in checked for path in (mount.host_path, mount.work_directory) if path]
    machine = _look_at_host(token, spec.policy.network, rootfs, paths)
    return Prepared(plan=jail.plan(spec, rootfs, checked, machine, code), warden=machine.warden, token=token)


_MACHINE_SECONDS = 1.0
_machines: dict[tuple[object, ...], tuple[float, jail.Host]] = {}


def _look_at_host(token: str, wanted: Network, rootfs: Rootfs, paths: list[HostPath]) -> jail.Host:
    """This machine, as it is or was a moment ago: who fills a pool need not look again for each sandbox."""
    key = (wanted, rootfs.binds, *paths)
    now = time.monotonic()
    seen = _machines.get(key)
    if seen is None or now - seen[0] > _MACHINE_SECONDS:
        _machines.clear()
        seen = _machines[key] = (now, jail.inspect_host(token, wanted, rootfs, paths))
    return seen[1].replace(token=token)


_compiled: dict[tuple[object, ...], File] = {}


def _compiled_driver(program: str | None) -> tuple[File, ...]:
    """The Python driver as the sandbox's Python compiles it, which would otherwise happen at every start.

    Made once by that Python, and kept in the cache directory for as long as neither changes.
    """
    if program is None:
        return ()
    source = jail.DRIVERS["python"][0]
    try:
        key = tuple((info.st_ino, info.st_size, info.st_mtime_ns) for info in (os.stat(source), os.stat(program)))
    except OSError:
        return ()
    kept = _compiled.get(key)
    if kept is None or not os.path.exists(kept.host_path or ""):  # whoever clears a cache need not ask us
        path = _find_compiled(source, program, "-".join(f"{part:x}" for info in key for part in info))
        if path is None:
            return ()
        guest = os.path.dirname(jail.DRIVERS["python"][1])
        name = GuestPath(f"{guest}/__pycache__/{os.path.basename(path)}")
        kept = _compiled[key] = File(guest_path=name, host_path=path)
    return (kept,)


_COMPILE = """
import py_compile, sys
source, target = sys.argv[1:]
name = "python." + sys.implementation.cache_tag + ".pyc"
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
py_compile.compile(source, target + "/" + name, "python.py", True, invalidation_mode=mode)
"""


def _find_compiled(source: str, program: str, name: str) -> HostPath | None:
    if not can_keep():
        return None
    place = f"{cache_directory()}/guest/{name}"
    try:
        os.makedirs(place, 0o700, exist_ok=True)
        found = [file for file in os.listdir(place) if file.endswith(".pyc")]
        if not found:
            process.run([program, "-I", "-S", "-c", _COMPILE, source, place])  # in place in one step, whoever else does
            found = [file for file in os.listdir(place) if file.endswith(".pyc")]
    except (OSError, HostError):
        return None  # it starts without, only later
    return HostPath(f"{place}/{found[0]}") if found else None


def check_code(code: str) -> None:
    """Refuse code that cannot be handed to an interpreter.

    Raises:
        SpecError: it is too large, holds a NUL byte, or cannot be encoded.
    """
    if len(code) > CODE_BYTES:
        raise SpecError(
            f"the code is {len(code)} characters long",
            code="spec.code-size",
            hint="mount large inputs as files: --mount DIR:/data",
        )
    if "\0" in code:
        raise SpecError("the code holds a NUL byte", code="spec.code-nul", hint="no interpreter reads that; remove it")
    try:
        code.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise SpecError(
            f"the code holds half a letter ({error.reason})", code="spec.text", hint="use text that can be encoded"
        ) from error

"""From a Spec to a Plan: looking at the machine, and nothing more."""

from __future__ import annotations

from .. import process
from ..config import private_directories
from ..errors import SpecError
from ..isolation import jail, limits, mounts
from ..model import HostPath, Plan, Source, Spec, Value
from ..sources import host
from . import state

CODE_BYTES = 16 * 1024 * 1024


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
    machine = jail.inspect_host(token, spec.policy.network, rootfs, paths)
    return Prepared(plan=jail.plan(spec, rootfs, checked, machine, code), warden=machine.warden, token=token)


def check_code(code: str) -> None:
    """Refuse code that cannot be handed to an interpreter.

    Raises:
        SpecError: it is too large, or holds a NUL byte.
    """
    if len(code) > CODE_BYTES:
        raise SpecError(
            f"the code is {len(code)} characters long",
            code="spec.code-size",
            hint="mount large inputs as files: --mount DIR:/data",
        )
    if "\0" in code:
        raise SpecError("the code holds a NUL byte", code="spec.code-nul", hint="no interpreter reads that; remove it")

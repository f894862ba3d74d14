"""The Python API."""

from __future__ import annotations

from . import process
from .config import private_directories
from .engine import state, supervisor
from .errors import SpecError
from .isolation import jail, limits, mounts
from .model import HostPath, Plan, Result, Source, Spec, Value
from .sources import host
from .spec import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CODE_BYTES = 16 * 1024 * 1024


class Prepared(Value):
    """A plan, and the program that carries it out."""

    plan: Plan
    warden: HostPath


def prepare(spec: Spec, code: str) -> Prepared:
    """Look at the host, and plan.

    Raises:
        SpecError: the request asks for what must not be.
        HostError: this machine cannot do it.
    """
    limits.start_priming()
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
    paths = [path for mount in checked for path in (mount.host_path, mount.work_directory) if path]
    machine = jail.inspect_host(token, spec.policy.network, rootfs, paths)
    return Prepared(plan=jail.plan(spec, rootfs, checked, machine, code), warden=machine.warden)


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


def run(code: str, environment: str = "python", *, stdin: bytes | str = b"", **request: Any) -> Result:
    """Run code in a fresh sandbox that is gone afterwards.

    Args:
        code: the program.
        environment: python, shell or node.
        stdin: what the program reads.
        **request: any key of the schema (docs/spec.md), for example ``memory_mb=256`` or ``network="full"``.

    Raises:
        SpecError: the request is wrong.
        HostError: this machine cannot isolate it as asked.
        StartError: the sandbox did not start.
    """
    spec = parse({"environment": environment, **request})
    prepared = prepare(spec, code)
    data = stdin.encode() if isinstance(stdin, str) else stdin
    return supervisor.run(prepared.plan, prepared.warden, supervisor.Streams(stdin=data))

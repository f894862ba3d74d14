"""What a failed start means, and what to do about it."""

from __future__ import annotations

import os

from .. import process
from ..errors import HostError, HutchError, SpecError, StartError
from ..model import Plan


def explain_exec(plan: Plan, number: int) -> HutchError:
    """The error for a program that is there and cannot be executed inside."""
    program = plan.command[5]
    return HostError(
        f"{program} could not be executed in the sandbox ({os.strerror(number)})",
        code="host.program",
        details=process.join(plan.command),
        hint=f"check that {program} runs on the host, and that all its libraries lie in /usr",
    )


_CHANGED = ("bind mount", "source path", "type of source")
"""What bubblewrap says of a source that was there a moment ago."""


def explain_failure(operation: str, number: int, text: str) -> HutchError:
    """Turn a report of the warden, or what bubblewrap printed, into an error with a remedy."""
    why = os.strerror(number) if number else ""
    if operation == "unshare" or (operation == "bwrap" and _is_namespace_refusal(text)):
        return HostError(
            f"the kernel refused a user namespace ({why or 'see details'})",
            code="host.userns",
            details=text,
            hint=namespace_hint(),
        )
    if operation == "pin" or (operation == "bwrap" and any(phrase in text for phrase in _CHANGED)):
        return SpecError(
            f"{text} changed while the sandbox was starting ({why})",
            code="mount.changed",
            hint="run it again; if another sandbox writes there, do not mount what it can rename",
        )
    if operation == "mask":
        return SpecError(
            f"{text} in a writable mount cannot be protected ({why})",
            code="mount.protect",
            hint="replace links and special files among protected paths, or mount the directory read-only",
        )
    if operation == "idmap-mount":
        return HostError(
            f"this filesystem cannot show a mount under another owner ({why})",
            code="host.idmap",
            details=text,
            hint="start hutch as the owner of the directory, move it to ext4, xfs or btrfs, or mount it read-only",
        )
    if operation == "overlay":
        return HostError(
            f"overlayfs refused the directory of a writable mount ({why})",
            code="host.overlay",
            details=text,
            hint="move the project to ext4, xfs or btrfs, or add --unsafe-unprotected-mounts",
        )
    if operation == "drop":
        return HostError(
            f"this root cannot become an unprivileged user, as which the sandbox must run ({why})",
            code="host.drop",
            details=f"{text}: a user namespace that maps uid 0 alone looks like this",
            hint="start hutch as an ordinary user, or map uid 65534 into the user namespace",
        )
    if operation == "cgroup":
        return HostError(
            f"the sandbox could not join its cgroup ({why})",
            code="host.cgroup",
            details=text,
            hint="hutch doctor shows which limits this machine can hold",
        )
    return StartError(
        f"the sandbox did not start: {text.splitlines()[-1] if text else why or 'no reason was given'}",
        code="start.failed",
        details=f"{operation} {why}\n{text}".strip(),
        hint="hutch doctor shows which layer is missing; hutch plan shows what was executed",
    )


def _is_namespace_refusal(text: str) -> bool:
    return any(
        phrase in text
        for phrase in (
            "new namespace",
            "uid map",
            "setgroups",
            "Creating new namespace",
            "user namespace",
            "max_user_namespaces",
        )
    )


def namespace_hint() -> str:
    """The one command that makes user namespaces work on this machine, as far as can be told."""
    for path, off, command in (
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sudo sysctl kernel.unprivileged_userns_clone=1"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("/proc/sys/user/max_user_namespaces", "0", "sudo sysctl user.max_user_namespaces=15000"),
    ):
        try:
            with open(path, encoding="ascii") as file:
                if file.read().strip() == off:
                    return command
        except OSError:
            continue
    return "in a container, start it with --security-opt seccomp=unconfined --security-opt systempaths=unconfined"

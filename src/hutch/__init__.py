"""hutch: a safe home for AI agents and for the code that language models write.

The way of a request, each step a module, each value frozen (`model`):

    doors (cli, this package) -> spec.parse -> Spec -> sources -> Rootfs -> isolation.jail.plan -> Plan
    -> engine.supervisor (one run) or engine.live (a sandbox that stays) -> warden -> bubblewrap -> Result

Below the doors lie `blocking` and `sandbox`, below them `engine`, then `isolation` and `sources` side by side, then
`process`, then `spec` and `config`, then `model`, then `errors`. Imports point down only. `guest` runs inside.

Importing this package does nothing; a name is loaded when it is first used.
"""

from __future__ import annotations

__version__ = "0.1.0"

_HOMES = {
    "blocking": ("Pool", "Sandbox", "run"),
    "sandbox": ("AsyncPool", "AsyncSandbox", "Output"),
    "model": ("Limits", "Mount", "Network", "Outcome", "Policy", "Result", "Spec"),
    "errors": (
        "BuildError",
        "CommandError",
        "GoneError",
        "HostError",
        "HutchError",
        "ProtocolError",
        "SandboxError",
        "SessionError",
        "SpecError",
        "StartError",
    ),
}

__all__ = [
    "AsyncPool",
    "AsyncSandbox",
    "BuildError",
    "CommandError",
    "GoneError",
    "HostError",
    "HutchError",
    "Limits",
    "Mount",
    "Network",
    "Outcome",
    "Output",
    "Policy",
    "Pool",
    "ProtocolError",
    "Result",
    "Sandbox",
    "SandboxError",
    "SessionError",
    "Spec",
    "SpecError",
    "StartError",
    "__version__",
    "run",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .blocking import Pool, Sandbox, run
    from .errors import (
        BuildError,
        CommandError,
        GoneError,
        HostError,
        HutchError,
        ProtocolError,
        SandboxError,
        SessionError,
        SpecError,
        StartError,
    )
    from .model import Limits, Mount, Network, Outcome, Policy, Result, Spec
    from .sandbox import AsyncPool, AsyncSandbox, Output


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""Every failure that hutch reports, split by who must act.

    HutchError
    ├── SpecError        the request is wrong, nothing started          -> edit the request
    ├── HostError        this machine cannot do that                    -> run the hint
    ├── BuildError       the environment could not be built             -> read the details
    ├── SandboxError     the sandbox failed, not the program in it
    │   ├── StartError       it never became ready
    │   ├── GoneError        it died or was closed under us
    │   └── ProtocolError    the guest sent something illegal; it was killed
    ├── SessionError     no such session, busy, or it exists already
    └── CommandError     raised by Result.check() alone

A program that fails, is killed or runs into a limit is a field of `Result`, never an exception. A new sentence is a new
`code`, not a new class.
"""

from __future__ import annotations


class HutchError(Exception):
    """Something hutch could not do.

    Attributes:
        code: a stable slug such as ``host.userns``, for programs.
        message: what happened, with the value.
        details: the evidence, possibly several lines.
        hint: one command to run or one edit to make.
    """

    def __init__(self, message: str, *, code: str, details: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details
        self.hint = hint

    def __str__(self) -> str:
        return self.message

    def to_json(self) -> dict[str, str]:
        """The error as the doors print it."""
        return {"code": self.code, "message": self.message, "details": self.details, "hint": self.hint}


class SpecError(HutchError):
    """The request is wrong; nothing was started."""


class HostError(HutchError):
    """This machine cannot do what was asked; the hint says what would change that."""


class BuildError(HutchError):
    """The environment could not be built."""


class SandboxError(HutchError):
    """The sandbox failed, not the program in it."""


class StartError(SandboxError):
    """The sandbox never became ready."""


class GoneError(SandboxError):
    """The sandbox died, or was closed, while it was needed."""


class ProtocolError(SandboxError):
    """The guest sent something illegal and was killed."""


class SessionError(HutchError):
    """There is no such session, it is busy, or it exists already."""


class CommandError(HutchError):
    """A program did not succeed, and the caller asked for that to raise."""

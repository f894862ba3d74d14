"""Requests become a Spec here, whichever door they came through.

Flags, TOML tables, JSON objects and keyword arguments are all reduced to one mapping with the keys of `FIELDS`; there
is one schema, and it is strict. This module is pure: it looks at nothing but its arguments. Whether a path exists or a
program is installed is for others to find out.
"""

from __future__ import annotations

import enum

from .errors import SpecError
from .model import (
    MIB,
    Environment,
    GuestPath,
    HostPath,
    Limits,
    Mount,
    Network,
    Policy,
    Source,
    Spec,
    Unsafe,
    Value,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

PRESETS: dict[str, str] = {"python": "python", "shell": "bash", "node": "node"}
"""The bundled environments and the interpreter of each."""

PER_RUN = ("timeout_seconds", "max_output_mb", "keep_kb")
"""What each run in a session may choose anew; all else belongs to the session."""

SYSTEM_DIRECTORIES = (
    *("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "nix"),
    *("proc", "root", "run", "sbin", "sys", "tmp", "usr", "var"),
)
"""Top-level guest directories that make up the sandbox itself; nothing may be mounted on or below them."""

SECRET_WORDS = ("TOKEN", "SECRET", "KEY", "PASSWORD", "PASSWD", "CREDENTIAL")
SECRET_NAMES = ("SSH_AUTH_SOCK", "DOCKER_HOST", "KUBECONFIG")
SECRET_PREFIXES = ("AWS_", "DBUS_", "LD_", "GIT_")
LOADER_NAMES = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "NODE_OPTIONS", "BASH_ENV", "ENV", "PERL5LIB", "PERL5OPT")


class Field(Value):
    """One key of the schema: how its value is read, and what it means."""

    read: Callable[[object, str], object]
    doc: str


# ---- errors ---------------------------------------------------------------------------------------------------------


def _refuse(where: str, problem: str, hint: str, code: str = "spec.value") -> SpecError:
    return SpecError(f"{where}: {problem}", code=code, hint=hint)


def find_nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a misspelt one most probably meant."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word[:64], list(known), n=1, cutoff=0.6)), None)


def unknown_word(where: str, what: str, word: object, known: Iterable[str]) -> SpecError:
    """The error for a word outside a closed list: names the nearest one and lists all."""
    words = sorted(known)
    nearest = find_nearest(word, words) if isinstance(word, str) else None
    meant = f'; did you mean "{nearest}"?' if nearest else ""
    return SpecError(
        f"{where}: unknown {what} {_show(word)}{meant}",
        code="spec.unknown",
        hint=f"use one of: {', '.join(words)}",
    )


def _show(value: object) -> str:
    try:
        text = f'"{value}"' if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nesting without end
        return f"this {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


# ---- readers: one value each ----------------------------------------------------------------------------------------


def _number(low: float, high: float, unit: str, *, whole: bool = True) -> Callable[[object, str], float]:
    def read(value: object, where: str) -> float:
        allowed = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise _refuse(
                where, f"{_show(value)} is not a {'whole ' if whole else ''}number", f"give {unit} as a number"
            )
        assert isinstance(value, (int, float))
        if not low <= value <= high:  # also refuses nan
            raise _refuse(where, f"{_show(value)} is out of range", f"use {low} to {high} {unit}", code="spec.range")
        return value

    return read


def _timeout(value: object, where: str) -> float | None:
    if value is None or value == "none":
        return None
    return float(_number(0.01, 7 * 86400, "seconds", whole=False)(value, where))


def _boolean(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise _refuse(where, f"{_show(value)} is not true or false", "write true or false, without quotes")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _refuse(where, f"{_show(value)} is not a text", "give a text in quotes")
    if "\0" in value:
        raise _refuse(where, "contains a NUL byte", "remove the NUL byte")
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise _refuse(where, f"{_show(value)} is not valid Unicode", "give a text in UTF-8") from None
    return value


def _choice(kind: type[enum.Enum], what: str) -> Callable[[object, str], enum.Enum]:
    def read(value: object, where: str) -> enum.Enum:
        if isinstance(value, kind):
            return value
        for member in kind:
            if value == member.value:
                return member
        raise unknown_word(where, what, value, [member.value for member in kind])

    return read


def _network(value: object, where: str) -> Network:
    if isinstance(value, (list, tuple)):
        raise _refuse(
            where,
            "a list of domains is not supported yet",
            'use "off" or "full"; a list must not silently mean either',
            code="spec.network-list",
        )
    network = _choice(Network, "network")(value, where)
    assert isinstance(network, Network)
    return network


def guest_path(value: object, where: str) -> GuestPath:
    """A path inside the sandbox that may be mounted on.

    Raises:
        SpecError: it is not absolute and plain, or lies in the sandbox's own system directories.
    """
    path = _text(value, where)
    parts = path.split("/")[1:]
    if not path.startswith("/") or any(part in ("", ".", "..") for part in parts) or len(path) > 1024:
        raise _refuse(
            where,
            f"{_show(value)} is not a plain absolute path",
            'use a path such as /workspace or /data, without "..", "//" or a slash at the end',
            code="spec.guest-path",
        )
    if parts[0] in SYSTEM_DIRECTORIES or path == "/home":
        raise _refuse(
            where,
            f"{path} belongs to the sandbox itself and cannot be mounted over",
            "mount at /workspace, /project, /home/sandbox, /cache or a new directory such as /data",
            code="spec.guest-system",
        )
    if parts[0] == "home" and parts[1] != "sandbox":
        raise _refuse(
            where,
            f"{path}: the only home inside is /home/sandbox",
            "mount below /home/sandbox",
            code="spec.guest-system",
        )
    return GuestPath(path)


def _host_path(value: object, where: str) -> HostPath:
    path = _text(value, where)
    if ".." in path.split("/"):
        raise _refuse(where, f'{_show(value)} contains ".."', "write the path out", code="spec.host-path")
    return HostPath(path)


def parse_mount(value: object, where: str = "mount") -> Mount:
    """Read ``HOST:GUEST[:rw|:ro]``, or a table with host, guest and writable.

    Raises:
        SpecError: it is neither.
    """
    if isinstance(value, Mount):
        value = {"host": value.host_path, "guest": value.guest_path, "writable": value.writable}
    if isinstance(value, str):
        parts = value.split(":")
        mode = parts.pop() if len(parts) > 2 and parts[-1] in ("rw", "ro") else "ro"
        if len(parts) == 2 and parts[0]:
            return Mount(
                host_path=_host_path(parts[0], where),
                guest_path=guest_path(parts[1], where),
                writable=mode == "rw",
            )
    elif is_mapping(value):
        table = dict(value)  # type: ignore[call-overload]
        for key in table:
            if key not in ("host", "guest", "writable"):
                raise unknown_word(where, "key", key, ("host", "guest", "writable"))
        if "host" in table and "guest" in table:
            return Mount(
                host_path=_host_path(table["host"], f"{where}.host"),
                guest_path=guest_path(table["guest"], f"{where}.guest"),
                writable=_boolean(table.get("writable", False), f"{where}.writable"),
            )
    raise _refuse(
        where,
        f"{_show(value)} is not a mount",
        "write HOST:GUEST or HOST:GUEST:rw, for example ./data:/data",
        code="spec.mount",
    )


def is_mapping(value: object) -> bool:
    """Whether a value of unknown origin is a table."""
    if isinstance(value, type):
        return False
    return isinstance(value, dict) or (hasattr(value, "keys") and hasattr(value, "__getitem__"))


def _mounts(value: object, where: str) -> tuple[Mount, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise _refuse(where, f"{_show(value)} is not a list of mounts", 'write ["HOST:GUEST"]')
    return tuple(parse_mount(item, f"{where}[{index}]") for index, item in enumerate(value))


def is_secret_name(name: str) -> bool:
    """Whether a variable of the host is kept out unless its value is written down on purpose."""
    upper = name.upper()
    return (
        upper in SECRET_NAMES
        or upper in LOADER_NAMES
        or upper.startswith(SECRET_PREFIXES)
        or any(word in upper for word in SECRET_WORDS)
    )


def variable_name(name: object, where: str) -> str:
    """A usable name of an environment variable.

    Raises:
        SpecError: it is not one.
    """
    text = _text(name, where)
    if "=" in text or len(text) > 256 or any(ord(letter) <= 32 for letter in text):
        raise _refuse(where, f"{_show(name)} is not a variable name", "use letters, digits and _", code="spec.variable")
    return text


def _variables(value: object, where: str) -> tuple[tuple[str, str], ...]:
    if not is_mapping(value):
        raise _refuse(where, f"{_show(value)} is not a table of variables", 'write { NAME = "value" }')
    pairs = []
    for name, content in dict(value).items():  # type: ignore[call-overload]
        variable_name(name, where)
        if content != "" or not isinstance(content, str):
            _text(content, f"{where}.{name}")
        pairs.append((name, content))
    return tuple(sorted(pairs))


_PACKAGE_START = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
_PACKAGE = _PACKAGE_START | frozenset("._+-")


def _packages(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise _refuse(where, f"{_show(value)} is not a list", 'write ["git", "jq"]')
    names = tuple(_text(name, where) for name in value)
    for name in names:
        if not 1 <= len(name) <= 128 or name[0] not in _PACKAGE_START or not _PACKAGE.issuperset(name):
            raise _refuse(
                where,
                f"{_show(name)} is not a name of a package",
                "use letters, digits and . _ + -, such as git or python3",
                code="spec.package",
            )
    return names


def _environment(value: object, where: str) -> str:
    name = _text(value, where)
    if name not in PRESETS:
        raise unknown_word(where, "environment", name, PRESETS)
    return name


def _backend(value: object, where: str) -> str:
    if value == "jail":
        return "jail"
    if value == "microvm":
        from .errors import HostError

        raise HostError(
            f"{where}: the microvm backend does not exist yet",
            code="host.microvm",
            hint='use backend = "jail"',
        )
    raise unknown_word(where, "backend", value, ("jail", "microvm"))


_MIB = _number(1, 1024 * 1024, "MiB", whole=True)

FIELDS: dict[str, Field] = {
    "environment": Field(read=_environment, doc="which software exists: python, shell, node"),
    "packages": Field(read=_packages, doc="programs that must be there, a list"),
    "source": Field(read=_choice(Source, "source"), doc="where the software comes from: host"),
    "backend": Field(read=_backend, doc="how it is isolated: jail"),
    "network": Field(read=_network, doc="off, full, or host (weaker)"),
    "mounts": Field(read=_mounts, doc="HOST:GUEST[:rw], a list"),
    "project": Field(read=_host_path, doc="a directory, read-only at /project"),
    "workspace": Field(read=_host_path, doc="a directory, read-write at /workspace"),
    "env": Field(read=_variables, doc="variables of the program, a table"),
    "timeout_seconds": Field(read=_timeout, doc="wall time; none for no limit"),
    "memory_mb": Field(read=_number(16, 1024 * 1024, "MiB"), doc="memory of all processes and temporary files"),
    "pids": Field(read=_number(4, 1_000_000, "processes"), doc="processes and threads"),
    "cpus": Field(read=_number(0.01, 4096, "CPUs", whole=False), doc="CPU time per second of wall time"),
    "tmp_mb": Field(read=_MIB, doc="size of /tmp, of the home, and of a /workspace that is no mount"),
    "file_mb": Field(read=_MIB, doc="size of one file"),
    "disk_mb": Field(read=_MIB, doc="growth of all writable mounts"),
    "open_files": Field(read=_number(16, 1_000_000, "files"), doc="open files of one process"),
    "keep_kb": Field(read=_number(1, 1024 * 1024, "KiB"), doc="kept of each output stream"),
    "max_output_mb": Field(read=_MIB, doc="output at which the run is stopped"),
    "strict_limits": Field(read=_boolean, doc="refuse to run where a limit does not hold for the whole sandbox"),
    "unsafe_writable_home": Field(read=_boolean, doc="allow a home directory or / as a writable mount"),
    "unsafe_unprotected_mounts": Field(read=_boolean, doc="leave hooks and settings in writable mounts unprotected"),
}


# ---- the whole ------------------------------------------------------------------------------------------------------


def parse(request: Mapping[str, Any], where: str = "") -> Spec:
    """Turn a request into a Spec.

    Args:
        request: keys of `FIELDS`; an absent key means its default.
        where: what the request came from, put before the key in messages.

    Raises:
        SpecError: a key is unknown, a value is of the wrong type or out of range, or two contradict each other.
        HostError: the request is right, but asks for what does not exist yet.
    """
    if not is_mapping(request):
        raise _refuse(where or "request", f"{_show(request)} is not a table", "give keys and values", code="spec.type")
    prefix = f"{where}: " if where else ""
    values: dict[str, Any] = {}
    for key in request.keys():  # noqa: SIM118 - any mapping will do
        if not isinstance(key, str) or key not in FIELDS:
            raise unknown_word(f"{prefix}{key if isinstance(key, str) else _show(key)}", "key", key, FIELDS)
        values[key] = FIELDS[key].read(request[key], f"{prefix}{key}")
    name = values.get("environment", "python")
    return Spec(
        environment=Environment(
            name=name,
            preset=name,
            interpreter=PRESETS[name],
            packages=values.get("packages", ()),
            source=values.get("source"),
        ),
        policy=_policy(values, where),
        backend=values.get("backend", "jail"),
    )


def _policy(values: Mapping[str, Any], where: str) -> Policy:
    mounts: tuple[Mount, ...] = values.get("mounts", ())
    if "project" in values:
        mounts += (Mount(host_path=values["project"], guest_path=GuestPath("/project")),)
    if "workspace" in values:
        mounts += (Mount(host_path=values["workspace"], guest_path=GuestPath("/workspace"), writable=True),)
    _refuse_collisions(mounts, where or "mounts")
    return Policy(
        network=values.get("network", Network.OFF),
        mounts=mounts,
        variables=values.get("env", ()),
        limits=_limits(values, where),
        strict_limits=values.get("strict_limits", False),
        unsafe=tuple(switch for switch in Unsafe if values.get(switch.value)),
    )


def _refuse_collisions(mounts: tuple[Mount, ...], where: str) -> None:
    guests = sorted(f"{mount.guest_path}/" for mount in mounts)  # with the slash, what lies inside follows at once
    for one, other in zip(guests, guests[1:], strict=False):
        if other.startswith(one):
            raise _refuse(
                where,
                f"{other[:-1]} is mounted over {one[:-1]}",
                "give each mount a guest path of its own, none inside another",
                code="spec.collision",
            )


def _limits(values: Mapping[str, Any], where: str) -> Limits:
    given: dict[str, Any] = {}
    for key, field, scale in (
        ("timeout_seconds", "timeout_seconds", 0),
        ("memory_mb", "memory_bytes", MIB),
        ("pids", "pids", 0),
        ("cpus", "cpus", 0),
        ("tmp_mb", "tmp_bytes", MIB),
        ("file_mb", "file_bytes", MIB),
        ("disk_mb", "disk_bytes", MIB),
        ("open_files", "open_files", 0),
        ("keep_kb", "keep_bytes", 1024),
        ("max_output_mb", "output_bytes", MIB),
    ):
        if key in values:
            given[field] = values[key] * scale if scale else values[key]
    limits = Limits(**given)
    if limits.keep_bytes > limits.output_bytes:
        raise _refuse(
            f"{where}: keep_kb" if where else "keep_kb",
            f"{limits.keep_bytes // 1024} KiB are to be kept, but the run stops at {limits.output_bytes // 1024} KiB",
            "raise max_output_mb or lower keep_kb",
            code="spec.contradiction",
        )
    return limits


_UNITS = {"": 1, "m": 1, "mb": 1, "mib": 1, "g": 1024, "gb": 1024, "gib": 1024}


def parse_size_mb(text: str, where: str) -> int:
    """Read 512, 512M or 2G as MiB.

    Raises:
        SpecError: it is none of these.
    """
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text[len(digits) :].lower()
    if not (digits.isascii() and digits.isdigit()) or unit not in _UNITS or len(digits) > 12:
        raise _refuse(where, f"{_show(text)} is not a size", "write 512, 512M or 2G", code="spec.size")
    return int(digits) * _UNITS[unit]

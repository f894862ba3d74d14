"""Finding and reading what the user configured.

    data      $HUTCH_DATA_DIR, $NIXOSANDBOX_DATA_DIR, else ~/.local/share/hutch
    cache     $HUTCH_CACHE_DIR, else ~/.cache/hutch: answers that can be found again at any time
    settings  --config, $HUTCH_CONFIG, else ~/.config/hutch/hutch.toml

A hutch.toml in the current directory is never read on its own: a directory is what sandboxes are made against, and one
from elsewhere must not be able to say what may be mounted.
"""

from __future__ import annotations

import os

from .errors import SpecError
from .model import HostPath, Value
from .spec import is_mapping, unknown_word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TABLES = ("daemon", "defaults", "project", "session", "environments")
_PROJECT_KEYS = ("path", "mount_point")


def data_directory() -> HostPath:
    """Where sessions and work directories live. Not created here."""
    chosen = os.environ.get("HUTCH_DATA_DIR") or os.environ.get("NIXOSANDBOX_DATA_DIR")
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return HostPath(os.path.abspath(chosen or f"{base}/hutch"))


def cache_directory() -> HostPath:
    """Where answers are kept that can be found again. Not created here."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return HostPath(os.path.abspath(os.environ.get("HUTCH_CACHE_DIR") or f"{base}/hutch"))


def private_directories() -> tuple[str, ...]:
    """What a sandbox must never be able to write."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return (data_directory(), cache_directory(), f"{config}/hutch")


def can_keep() -> bool:
    """Whether there is a place for what is kept between runs. A home that does not exist is not made."""
    return "HUTCH_CACHE_DIR" in os.environ or os.path.isdir(os.path.expanduser("~"))


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


# ---- settings -------------------------------------------------------------------------------------------------------


class Settings(Value):
    """What a configuration file says, still as requests for `spec.parse`."""

    path: HostPath | None
    defaults: dict[str, Any]
    environments: dict[str, dict[str, Any]]

    def request(self, environment: str) -> dict[str, Any]:
        """The defaults, and over them what is said of one environment."""
        return {**self.defaults, "environment": environment, **self.environments.get(environment, {})}


def find_settings(chosen: str | None) -> Settings:
    """Read the configuration file, if there is one.

    Args:
        chosen: a path named by the user, which then must exist.

    Raises:
        SpecError: the file cannot be read, is no TOML, or holds an unknown table.
    """
    named = chosen or os.environ.get("HUTCH_CONFIG")
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = os.path.join(_here(), os.path.expanduser(named)) if named else f"{base}/hutch/hutch.toml"
    try:
        with open(path, "rb") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        if named:
            raise SpecError(
                f"{path}: no such configuration file", code="config.missing", hint="correct --config or HUTCH_CONFIG"
            ) from None
        return Settings(path=None, defaults={}, environments={})
    except OSError as error:
        raise SpecError(
            f"the settings {path} cannot be read ({error.strerror})",
            code="config.unreadable",
            hint=f"make {path} readable, or set HOME to your own home",
        ) from error
    return parse_settings(text, path)


def parse_settings(text: bytes, path: str) -> Settings:
    """Read the text of a configuration file.

    Tables of parts that hutch does not have yet, [daemon] and [session], are passed over.

    Raises:
        SpecError: it is no TOML, or holds an unknown table.
    """
    import tomllib

    try:
        tables = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # a number of many digits is a plain ValueError
        raise SpecError(
            f"{path}: {error or 'nested too deeply'}", code="config.syntax", hint="correct the TOML"
        ) from error
    for name, table in tables.items():
        if name not in _TABLES:
            raise unknown_word(f"{path}: {name}", "table", name, _TABLES)
        if not is_mapping(table):
            raise SpecError(f"{path}: {name} is not a table", code="config.type", hint=f"write [{name}]")
    defaults = dict(tables.get("defaults", {}))
    project = _find_project(tables.get("project", {}), path)
    if project is not None:
        mounts = defaults.get("mounts", [])
        if not isinstance(mounts, list):
            raise SpecError(f"{path}: defaults.mounts is not a list", code="config.type", hint='write ["HOST:GUEST"]')
        defaults["mounts"] = [*mounts, project]
    environments = {}
    for name, table in tables.get("environments", {}).items():
        if not is_mapping(table):
            raise SpecError(
                f"{path}: environments.{name} is not a table", code="config.type", hint=f"write [environments.{name}]"
            )
        request = dict(table)
        request["environment"] = request.pop("preset", request.get("environment", name))
        environments[name] = request
    return Settings(path=HostPath(path), defaults=defaults, environments=environments)


def _find_project(table: dict[str, Any], path: str) -> dict[str, Any] | None:
    for key in table:
        if key not in _PROJECT_KEYS:
            raise unknown_word(f"{path}: project.{key}", "key", key, _PROJECT_KEYS)
    if "path" not in table:
        return None
    if not isinstance(table["path"], str):
        raise SpecError(f"{path}: project.path is not a text", code="config.type", hint='write path = "."')
    host = os.path.abspath(os.path.expanduser(table["path"]))
    return {"host": host, "guest": table.get("mount_point", "/project")}

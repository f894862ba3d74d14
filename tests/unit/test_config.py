"""Which settings are found, and what is refused in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hutch import config
from hutch.errors import SpecError
from hutch.model import HostPath
from hutch.spec import parse

TEXT = "[defaults]\npids = 7\n"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(TEXT)
    return file


def refusal(text: str | bytes) -> SpecError:
    with pytest.raises(SpecError) as caught:
        config.parse_settings(text.encode() if isinstance(text, str) else text, "/x/hutch.toml")
    assert caught.value.hint
    assert caught.value.message.startswith("/x/hutch.toml: ")
    return caught.value


# ---- finding --------------------------------------------------------------------------------------------------------


def test_no_file_means_no_settings() -> None:
    assert config.find_settings(None) == config.Settings(path=None, defaults={}, environments={})


def test_the_named_file_is_read(written: Path) -> None:
    found = config.find_settings(str(written))
    assert (found.path, found.defaults) == (HostPath(str(written)), {"pids": 7})


def test_the_variable_names_a_file_too(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUTCH_CONFIG", str(written))
    assert config.find_settings(None).defaults == {"pids": 7}


def test_the_flag_wins_over_the_variable(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUTCH_CONFIG", "/nonexistent/hutch.toml")
    assert config.find_settings(str(written)).path == str(written)


def test_a_named_file_may_start_with_a_tilde(nobodys_home: Path) -> None:
    (nobodys_home / "a.toml").write_text(TEXT)
    assert config.find_settings("~/a.toml").defaults == {"pids": 7}


@pytest.mark.parametrize("variable", ["XDG_CONFIG_HOME", None])
def test_the_usual_place_is_read(variable: str | None, nobodys_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = nobodys_home / ("elsewhere" if variable else ".config")
    if variable:
        monkeypatch.setenv(variable, str(base))
    (base / "hutch").mkdir(parents=True)
    (base / "hutch" / "hutch.toml").write_text(TEXT)
    assert config.find_settings(None).defaults == {"pids": 7}


def test_a_file_in_the_current_directory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hutch.toml").write_text("this would be refused if it were read")
    monkeypatch.chdir(tmp_path)
    assert config.find_settings(None).path is None


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_named_file_must_exist(by_flag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUTCH_CONFIG", "/nonexistent/a.toml")
    with pytest.raises(SpecError, match="/nonexistent/a.toml: no such configuration file") as caught:
        config.find_settings("/nonexistent/a.toml" if by_flag else None)
    assert caught.value.code == "config.missing"
    assert "HUTCH_CONFIG" in caught.value.hint


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        config.find_settings(str(tmp_path))
    assert caught.value.code == "config.unreadable"
    assert caught.value.hint.startswith(f"make {tmp_path} readable")


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["defaults = ", "[defaults", "a = 1\na = 2", b"\xff\xfe", "x = " + "[" * 5000, "[defaults]\n[defaults]"],
    ids=["no value", "no bracket", "twice", "no UTF-8", "nested", "table twice"],
)
def test_what_is_no_toml_is_refused(text: str | bytes) -> None:
    assert refusal(text).code == "config.syntax"


def test_an_endless_number_is_refused() -> None:
    assert refusal("[defaults]\npids = " + "1" * 5000).code == "config.syntax"


def test_an_unknown_table_names_the_nearest() -> None:
    error = refusal("[enviroments.python]\npids = 7")
    assert error.code == "spec.unknown"
    assert 'did you mean "environments"?' in error.message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("defaults = 1", "write [defaults]"),
        ("[environments]\nmine = 3", "write [environments.mine]"),
        ("[project]\npath = 3", 'write path = "."'),
    ],
)
def test_what_is_not_a_table_is_refused(text: str, hint: str) -> None:
    error = refusal(text)
    assert (error.code, error.hint) == ("config.type", hint)


def test_the_tables_of_the_server_are_known() -> None:
    settings = config.parse_settings(b"[daemon]\n[session]\n[project]\n[defaults]\n[environments]\n", "f")
    assert (settings.defaults, settings.environments) == ({}, {})


def test_the_project_becomes_a_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = config.parse_settings(b'[project]\npath = "code"\nmount_point = "/data"\n', "f")
    mount = parse(settings.request("python")).policy.mounts[0]
    assert (mount.host_path, mount.guest_path, mount.writable) == (f"{tmp_path}/code", "/data", False)


def test_the_project_is_at_project_unless_told() -> None:
    settings = config.parse_settings(b'[project]\npath = "~"\n', "f")
    assert settings.defaults["mounts"] == [{"host": os.environ["HOME"], "guest": "/project"}]


def test_an_unknown_key_of_the_project_names_the_nearest() -> None:
    assert 'did you mean "mount_point"?' in refusal('[project]\nmountpoint = "/x"').message


def test_the_project_joins_the_mounts_of_the_defaults() -> None:
    settings = config.parse_settings(b'[defaults]\nmounts = ["/a:/a"]\n[project]\npath = "/p"\n', "f")
    assert {mount.guest_path for mount in parse(settings.request("python")).policy.mounts} == {"/a", "/project"}


def test_an_environment_stands_over_the_defaults() -> None:
    settings = config.parse_settings(
        b'[defaults]\npids = 7\nmemory_mb = 64\n[environments.mine]\npreset = "shell"\npids = 9\n', "f"
    )
    spec = parse(settings.request("mine"))
    assert (spec.environment.name, spec.policy.limits.pids) == ("shell", 9)
    assert spec.policy.limits.memory_bytes == 64 * 1024 * 1024
    assert settings.request("python") == {"environment": "python", "pids": 7, "memory_mb": 64}


def test_an_environment_named_like_a_preset_is_that_preset() -> None:
    settings = config.parse_settings(b"[environments.node]\npids = 9\n", "f")
    assert parse(settings.request("node")).environment.preset == "node"


# ---- directories ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "data"),
    [
        ({}, "~/.local/share/hutch"),
        ({"XDG_DATA_HOME": "/d"}, "/d/hutch"),
        ({"NIXOSANDBOX_DATA_DIR": "/n", "XDG_DATA_HOME": "/d"}, "/n"),
        ({"HUTCH_DATA_DIR": "/h/../i", "NIXOSANDBOX_DATA_DIR": "/n"}, "/i"),
    ],
)
def test_where_data_lives(variables: dict[str, str], data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert config.data_directory() == os.path.expanduser(data)
    assert config.data_directory() in config.private_directories()


@pytest.mark.parametrize(
    ("variables", "cache"),
    [({}, "~/.cache/hutch"), ({"XDG_CACHE_HOME": "/c"}, "/c/hutch"), ({"HUTCH_CACHE_DIR": "/h"}, "/h")],
)
def test_where_answers_are_kept(variables: dict[str, str], cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert config.cache_directory() == os.path.expanduser(cache)
    assert config.cache_directory() in config.private_directories()

"""Which variables the program sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .harness import Hutch, descendants

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"
EVERYONES = """
import os
for name in os.listdir("/proc"):
    if name.isdigit():
        try:
            print(name, open(f"/proc/{name}/environ", "rb").read())
        except OSError as error:
            print(name, error.strerror)
"""
SECRETS = {"AWS_SECRET_ACCESS_KEY": "hunter2-aws", "GITHUB_TOKEN": "hunter2-gh", "PLAIN": "hunter2-plain"}


def test_cannot_see_host_environment(hutch: Hutch) -> None:
    seen = json.loads(hutch.run(SHOW, variables=SECRETS).out)
    assert seen["HOME"] == "/home/sandbox"
    assert not set(seen) & set(SECRETS)
    assert str(hutch.arena.root) not in json.dumps(seen)


def test_cannot_see_host_environment_in_any_process_of_the_sandbox(hutch: Hutch) -> None:
    ran = hutch.run(EVERYONES, variables=SECRETS)
    assert "HOME=/home/sandbox" in ran.out, "one's own is readable"
    assert "1 Permission denied" in ran.out
    assert "hunter2" not in ran.out


def test_the_variables_are_a_short_list(hutch: Hutch) -> None:
    expected = {"HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "TERM", "SHELL", "PATH", "PYTHONUNBUFFERED", "PYTHONPATH"}
    assert set(json.loads(hutch.run(SHOW).out)) - {"PWD", "LC_CTYPE"} == expected


def test_a_named_variable_is_passed_on(hutch: Hutch) -> None:
    seen = json.loads(hutch.run(SHOW, "--env", "PLAIN", "--env", "COLOUR=red", variables=SECRETS).out)
    assert (seen["PLAIN"], seen["COLOUR"]) == ("hunter2-plain", "red")


@pytest.mark.parametrize("name", ["GITHUB_TOKEN", "AWS_PROFILE", "SSH_AUTH_SOCK", "LD_DEBUG", "db_password", "ENV"])
def test_a_secret_is_not_passed_on_by_name_alone(hutch: Hutch, name: str) -> None:
    ran = hutch.run(SHOW, "--env", name, variables={name: ""})
    assert (ran.exit_code, ran.outcome) == (2, "spec.secret")
    assert f"--env {name}=" in ran.json["error"]["hint"]


def test_a_secret_is_passed_on_when_its_value_is_written_down(hutch: Hutch) -> None:
    seen = json.loads(hutch.run(SHOW, "--env", "GITHUB_TOKEN=on-purpose").out)
    assert seen["GITHUB_TOKEN"] == "on-purpose"


def test_a_variable_does_not_show_on_any_command_line(hutch: Hutch) -> None:
    code = "print('ready', flush=True); import time; time.sleep(60)"
    with hutch.running(code, "--env", "PLAIN", variables=SECRETS) as live:
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(live.process.pid)]
    assert len(lines) >= 3
    assert not any(b"hunter2" in line for line in lines)

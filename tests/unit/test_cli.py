"""The command line: help, exit codes, errors for people and for programs, completion."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import hutch
from hutch.cli import VERBS, build_parser, doctor, lasting, main, repl, run
from hutch.engine import planning, state, supervisor
from hutch.errors import HostError
from hutch.isolation import limits
from hutch.model import HostPath, Limits, Outcome, Plan, Result
from hutch.sources import host

Captured = pytest.CaptureFixture[str]


def options_of(verb: str) -> list[str]:
    shown = [action for action in build_parser(verb)._actions if action.help != argparse.SUPPRESS]
    return [option for action in shown for option in action.option_strings]


# ---- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_help_names_every_verb(words: list[str], capsys: Captured) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for verb, (_, line) in VERBS.items():
        assert verb in out
        assert line in out


def test_no_verb_is_a_bad_request_with_help(capsys: Captured) -> None:
    assert main([]) == 2
    assert "usage: hutch VERB" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--version"], ["-V"], ["version"]])
def test_version(words: list[str], capsys: Captured) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out == f"hutch {hutch.__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_explains_itself(verb: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: hutch {verb}")
    assert all(option in out for option in options_of(verb))


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_has_a_line_of_help(verb: str) -> None:
    assert [action.dest for action in build_parser(verb)._actions if action.option_strings and not action.help] == []


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_an_unknown_verb_names_the_nearest(capsys: Captured) -> None:
    assert main(["rum"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith('error: hutch: unknown verb "rum"; did you mean "run"?\nhint: use one of: ')


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["run", "--memroy", "1G", "x"], "--memroy"),
        (["run", "--mem", "1G", "x"], "--mem"),  # no guessing at what was meant
        (["run", "--pids", "many", "x"], "invalid int value: 'many'"),
        (["env"], "action"),
        (["env", "remove"], "invalid choice"),
        (["completion", "tcsh"], "invalid choice"),
    ],
)
def test_a_wrong_flag_is_a_bad_request(words: list[str], problem: str, capsys: Captured) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert problem in err
    assert "hint: " in err


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        (["run", "a", "b"], "too many words: b", "a program is one argument"),
        (["run", "-e", "shell", "ls", "-la"], "too many words: -la", "'ls -la'"),
        (["run", "--memmory", "1G", "x"], 'unknown flag --memmory; did you mean "--memory"?', "hutch run --help"),
        (["gc", "--jsn"], 'did you mean "--json"?', "hutch gc --help"),
        (["--json", "run", "x"], "--json stands before the verb", "hutch run --json"),
        (["run", ""], "no code was given", "hutch run 'print(6 * 7)'"),
    ],
)
def test_a_mistake_in_the_words_is_understood(words: list[str], problem: str, hint: str, capsys: Captured) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert problem in err
    assert hint in err.partition("hint: ")[2]


def test_help_of_a_verb_may_be_asked_for_both_ways(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["help", "gc"])
    assert capsys.readouterr().out.startswith("usage: hutch gc")


def test_a_fault_of_our_own_is_told_as_such(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("hutch.cli.gc.main", lambda _options: 1 // 0)
    assert main(["gc"]) == 125
    assert "hutch itself failed (ZeroDivisionError" in capsys.readouterr().err


def test_an_error_for_programs_is_one_json_line(capsys: Captured) -> None:
    assert main(["run", "--json", "--network", "on", "x"]) == 2
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    error = json.loads(out)["error"]
    assert error["code"] == "spec.unknown"
    assert error["hint"] == "use one of: full, host, off"
    assert {"code", "message", "hint"} <= set(error)
    assert err == f"error: {error['message']}\nhint: {error['hint']}\n"


def test_a_machine_that_cannot_is_not_a_bad_request(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        details = "\n".join(f"line {number}" for number in range(100))
        raise HostError("it cannot", code="host.x", details=details, hint="mend it")

    monkeypatch.setattr(planning, "prepare", refuse)
    assert main(["run", "x"]) == 125
    lines = capsys.readouterr().err.splitlines()
    assert (lines[0], lines[-2], lines[-1]) == ("error: it cannot", "       line 99", "hint: mend it")
    assert len(lines) < 20


def test_ctrl_c_ends_as_a_shell_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "prepare", interrupt)
    assert main(["run", "x"]) == 130


# ---- run and plan ---------------------------------------------------------------------------------------------------

PLAN = Plan(operations=(), bwrap=("bwrap",), command=("init", "init", "200", "-", "-", "python3", "x"))


def pretend(monkeypatch: pytest.MonkeyPatch, result: Result, plan: Plan = PLAN) -> list[supervisor.Streams]:
    """Everything but the sandbox itself; returns the streams that it was given."""
    given: list[supervisor.Streams] = []

    def fake_run(_plan: Plan, _warden: str, streams: supervisor.Streams, _token: str) -> Result:
        given.append(streams)
        return result

    prepared = planning.Prepared(plan=plan, warden=HostPath("/warden"), token="")
    monkeypatch.setattr(planning, "prepare", lambda _spec, _code: prepared)
    monkeypatch.setattr(supervisor, "run", fake_run)
    monkeypatch.setattr(state, "clear_stale", list)
    monkeypatch.setattr(signal, "signal", lambda _number, _handler: None)
    return given


CODES = [
    (Outcome.OK, 0, None, 0, ""),
    (Outcome.FAILED, 3, None, 3, ""),
    (Outcome.FAILED, 125, None, 125, ""),
    (Outcome.FAILED, None, "SIGSEGV", 139, "SIGSEGV"),
    (Outcome.FAILED, None, "SIG64", 137, "SIG64"),
    (Outcome.TIMEOUT, None, None, 124, "--timeout"),
    (Outcome.MEMORY, None, "SIGKILL", 137, "--memory"),
    (Outcome.MEMORY, 1, None, 137, "--memory"),
    (Outcome.PIDS, 1, None, 1, "--pids"),
    (Outcome.DISK, None, "SIGXFSZ", 137, "disk"),
    (Outcome.OUTPUT, None, None, 137, "--max-output"),
    (Outcome.KILLED, None, None, 137, "killed from outside"),
]


@pytest.mark.parametrize(("outcome", "exit_code", "signal_name", "code", "reason"), CODES)
@pytest.mark.parametrize("as_json", [False, True])
def test_exit_codes_tell_how_it_ended(
    outcome: Outcome,
    exit_code: int | None,
    signal_name: str | None,
    code: int,
    reason: str,
    as_json: bool,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = Result(outcome=outcome, exit_code=exit_code, signal=signal_name)
    pretend(monkeypatch, result)
    assert main(["run", *(["--json"] if as_json else []), "x"]) == code
    out, err = capsys.readouterr()
    assert (json.loads(out) == result.to_json()) if as_json else out == ""
    assert reason in err
    assert bool(err) is bool(reason)


def test_the_program_writes_to_our_streams_and_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = pretend(monkeypatch, Result(outcome=Outcome.OK, exit_code=0))
    main(["run", "x"])
    main(["run", "--stdin", "x"])
    main(["run", "--json", "x"])
    assert [(streams.stdin_fd, streams.stdout_fd, streams.stderr_fd) for streams in given] == [
        (None, 1, 2),
        (0, 1, 2),
        (None, None, None),
    ]


def test_weaker_isolation_is_said_aloud(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Result(outcome=Outcome.OK, exit_code=0), PLAN.replace(unsafe=("network_host",)))
    assert main(["run", "x"]) == 0
    assert capsys.readouterr().err == "warning: weaker isolation: network host\n"


def test_plan_prints_a_script_and_runs_nothing(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    given = pretend(monkeypatch, Result(outcome=Outcome.OK, exit_code=0))
    assert main(["plan", "x"]) == 0
    assert capsys.readouterr().out.endswith("env -i /warden \\\n  bwrap 0 bwrap \\\n  init init - - - python3 x\n")
    assert main(["plan", "--json", "x"]) == 0
    assert json.loads(capsys.readouterr().out)["argv"][0] == "/warden"
    assert given == []


def test_code_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print('é')")
    assert run._code(build_parser("run").parse_args(["-f", str(tmp_path / "a.py")])) == "print('é')"
    assert run._code(build_parser("run").parse_args(["print(1)"])) == "print(1)"


# ---- sessions -------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands where a session would, and keeps what it was asked for."""

    asked: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    def __init__(self, word: str, given: dict[str, Any], create: dict[str, Any]) -> None:
        self.asked.append((word, given, create))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    monkeypatch.setattr(Recorder, "asked", [])
    monkeypatch.setattr(lasting, "Distant", Recorder)
    monkeypatch.setattr(lasting, "Near", Recorder)
    return Recorder.asked


def ask(*words: str) -> None:
    lasting.open_place(build_parser("run").parse_args(["-s", "a", *words]))


def test_a_session_is_asked_only_for_what_was_said(asked: list[Any], tmp_path: Path, nobodys_home: Path) -> None:
    settings = tmp_path / "a.toml"
    settings.write_text(
        '[defaults]\nmemory_mb = 64\ntimeout_seconds = 5\nmounts = ["/tmp:/data"]\nenv = {A = "1"}\n'
        '[environments.mine]\npreset = "shell"\npids = 9\n'
    )
    config = ("--config", str(settings))
    shown = {"host": "/tmp", "guest": "/data", "writable": False}
    ask(*config, "x")
    usual = {"environment": "python", "memory_mb": 64, "timeout_seconds": 5, "mounts": [shown], "env": {"A": "1"}}
    assert asked.pop() == ("a", {}, usual)
    ask(*config, "-e", "mine", "--timeout", "7", "--max-output", "2M", "--env", "B=2", "x")
    given = {"environment": "shell", "pids": 9, "timeout_seconds": 7.0, "max_output_mb": 2, "env": {"B": "2"}}
    assert asked.pop() == ("a", given, {**usual, "environment": "shell", "pids": 9, "env": {"A": "1", "B": "2"}})


def test_a_session_is_told_whole_paths(asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    ask("--workspace", ".", "--project", "p", "--mount", "~/d:/d:rw", "x")
    _, given, create = asked.pop()
    assert (given["workspace"], given["project"]) == (str(tmp_path), f"{tmp_path}/p")
    assert given["mounts"] == [{"host": "/home/me/d", "guest": "/d", "writable": True}]
    assert {key: create[key] for key in given} == given


def test_a_wrong_request_for_a_session_starts_no_daemon(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hutch.serve.client.connect", lambda: pytest.fail("it was connected to"))
    for words in (
        ["--memory", "much", "x"],
        ["-e", "pyton", "x"],
        [""],
        ["--mount", "a", "x"],
        ["--network", "on", "x"],
    ):
        assert main(["run", "-s", "a", *words]) == 2
    assert main(["run", "-s", "a", "--stdin", "-"]) == 2
    assert "error: " in capsys.readouterr().err


PROMPTS = [
    ("x", True),
    ("if x:", False),
    ("if x:\n    y", False),
    ("if x:\n    y\n", True),
    ("async with x:", False),
    ("await x", True),
    ("(1,", False),
    ("'''text", False),
    ("x = \\", False),
    ("@decorated", False),
    ("def f(:", True),
    ("\0", True),
]


@pytest.mark.parametrize(("text", "is_complete"), PROMPTS)
def test_python_says_when_a_statement_is_complete(text: str, is_complete: bool) -> None:
    assert repl._is_complete_python(text) is is_complete


def test_a_script_is_cut_where_statements_end() -> None:
    assert repl._python_ends("a\n\nif b:\n\n  c\nelse:\n  d\ne; f\n@g\ndef h():\n\n  i") == [1, 7, 8, 12]
    assert repl._python_ends("a\nif") == []
    assert repl._python_ends("# nothing\n") == []


@pytest.mark.parametrize("language", ["bash", "node"])
def test_other_languages_are_asked_themselves(language: str) -> None:
    program = shutil.which(language)
    if program is None:
        pytest.skip(f"{language} is not installed")
    cases = {
        "bash": [
            (
                "a=1\nif b; then\n  c\nfi\nd <<E\nx\n\nE\ne \\\n f\n'a\nb'\ng() {\nh; }\n)\ni",
                [1, 4, 8, 10, 12, 14, 15, 16],
            ),
            *((text, []) for text in ("a &&", "a |", "$(", "case a in", "for a", '"', "a <<E", "{", "((1 +")),
        ],
        "node": [
            ("let a = 1\nf({\n  b\n})\n`c\n`\n/* d\n*/ e\nawait g(\n1)\n}\nh", [1, 4, 6, 8, 10, 11, 12]),
            *(
                (text, [])
                for text in ("f(", "() => {", "class A {", "x = [", "`${", "if (x)", "for (const y of await z) {")
            ),
        ],
    }
    for text, ends in cases[language]:
        argv = [program, *repl.LANGUAGES[language].ends[1:]]
        said = subprocess.run(argv, input=text, capture_output=True, text=True, check=True)
        assert [int(word) for word in said.stdout.split()] == ends, text


FAREWELLS = [
    ("python", "exit()", 0),
    ("python", "exit", 0),
    ("python", " quit(3) ", 3),
    ("python", "exit(300)", 300 & 0xFF),
    ("python", "exit(x)", None),
    ("python", "exit 3", None),
    ("python", "exited", None),
    ("bash", "exit", 0),
    ("bash", "exit 3", 3),
    ("bash", "exit $x", None),
    ("bash", "exit()", None),
    ("node", ".exit", 0),
    ("node", "exit", None),
]


@pytest.mark.parametrize(("language", "text", "code"), FAREWELLS)
def test_a_farewell_may_carry_an_exit_code(language: str, text: str, code: int | None) -> None:
    conversation = repl.Repl(lasting.Place(), language, told_of_loss=True)
    assert conversation._is_farewell(text) is (code is not None)
    assert conversation._code == (code or 0)


def test_a_limit_is_named_in_the_units_of_its_flag(capsys: Captured) -> None:
    run._say_why(Result(outcome=Outcome.TIMEOUT, exit_code=None), Limits(timeout_seconds=2.5))
    assert capsys.readouterr().err == "hutch: stopped after 2.5 s; --timeout changes that\n"


# ---- env, gc, doctor ------------------------------------------------------------------------------------------------


def test_env_list_shows_presets_and_those_of_the_settings(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[environments.mine]\npreset = "shell"\nmemory_mb = 64\n')
    assert main(["env", "list", "--config", str(file), "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert set(listed) == {"python", "shell", "node", "mine"}
    assert (listed["mine"]["preset"], listed["mine"]["memoryMb"]) == ("shell", 64)
    assert main(["env", "list", "--config", str(file)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_env_show_tells_what_is_missing(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "find_program", lambda _names, _roots: None)
    monkeypatch.setattr(host, "_realised", {})
    assert main(["env", "show", "node", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert (entry["program"], entry["id"]) == (None, None)
    assert "apt install nodejs" in entry["missing"]
    assert main(["env", "show", "node"]) == 0
    assert "apt install nodejs" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["env", "show", "pyton"], ["env", "show"]])
def test_env_show_of_nothing_known_lists_what_there_is(words: list[str], capsys: Captured) -> None:
    assert main(words) == 2
    assert "hint: use one of: node, python, shell" in capsys.readouterr().err


def test_gc_tells_what_it_removed(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    monkeypatch.setattr(state, "clear_stale", lambda: removed)
    assert main(["gc"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
    removed += ["/a", "/b"]
    assert main(["gc"]) == 0
    assert capsys.readouterr().out == "removed /a\nremoved /b\n"
    assert main(["gc", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": ["/a", "/b"]}


def finding(status: str) -> doctor.Finding:
    return doctor.Finding(layer="layer", status=status, found="found this", fix="" if status == "ok" else "do that")


@pytest.mark.parametrize(("statuses", "code"), [(["ok"], 0), (["ok", "warning"], 0), (["ok", "failed", "ok"], 125)])
def test_doctor_exits_by_what_holds(
    statuses: list[str], code: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *, strict: iter(map(finding, statuses)))
    assert main(["doctor"]) == code
    out = capsys.readouterr().out
    assert out.count("found this") == len(statuses)
    assert ("fix: do that" in out) is (statuses != ["ok"])
    assert ("does NOT hold" in out) is (code != 0)
    assert main(["doctor", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["holds"] is (code == 0)
    assert [layer["status"] for layer in told["layers"]] == statuses


@pytest.mark.parametrize(("weak", "status"), [(doctor.WARNING, "warning"), (doctor.FAILED, "failed")])
def test_doctor_calls_limits_without_a_cgroup_weak(weak: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "find_cgroup_base", lambda: None)
    found = list(doctor._limits(weak=weak))
    assert {one.status for one in found} == {status}
    assert all(one.fix for one in found)


# ---- completion -----------------------------------------------------------------------------------------------------

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(params=SHELLS)
def script(request: pytest.FixtureRequest, capsys: Captured) -> tuple[str, str]:
    assert main(["completion", request.param]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return request.param, out


def test_completion_knows_every_verb_and_option(script: tuple[str, str]) -> None:
    shell, text = script
    for verb in VERBS:
        assert verb in text
        for option in options_of(verb):
            if shell == "fish":
                option = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
                assert any(option in line for line in text.splitlines() if f"_from {verb}'" in line)
            else:
                assert any(
                    f" {option} " in f" {line} ".replace("'", " ") for line in text.splitlines() if f"{verb})" in line
                )


def test_completion_is_a_script_that_its_shell_reads(script: tuple[str, str], tmp_path: Path) -> None:
    shell, text = script
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "completion"
    file.write_text(text)
    said = subprocess.run(
        [program, "-n", str(file)], capture_output=True, text=True, env={"HOME": str(tmp_path), "PATH": os.defpath}
    )
    assert (said.returncode, said.stderr) == (0, "")


def test_bash_completes_verbs_options_and_values(tmp_path: Path, capsys: Captured) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    main(["completion", "bash"])
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    asked = "source completion; for line in 'hutch ru' 'hutch run --mem' 'hutch run -e no' 'hutch run --network f'; do "
    asked += 'COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _hutch; echo "${COMPREPLY[@]}"; done'
    said = subprocess.run([bash, "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == ["run", "--memory", "node", "full"]

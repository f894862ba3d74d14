"""Sessions live in a daemon that comes when it is needed, serves its own user alone, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import (
    DEADLINE_SECONDS,
    PYTHON,
    Hutch,
    Ran,
    descendants,
    living,
    need,
    wait_until,
)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sessions.md").read_text()
FOREIGNER = 61999
LOST = "hutch: the state that earlier runs left"


class Keeper:
    """One identity with a data directory of its own, and with whatever daemon serves that."""

    def __init__(self, hutch: Hutch, data: Path) -> None:
        self.hutch = hutch
        self.data = data
        self.variables = {"HUTCH_DATA_DIR": str(data)}
        self.pids: set[int] = set()

    @property
    def pid(self) -> int:
        """Of the daemon."""
        pid = int((self.data / "run" / "daemon.pid").read_text())
        self.pids.add(pid)
        # What it leaves carries its pid in the name.
        self.hutch.pids.append(pid)
        return pid

    @property
    def socket(self) -> Path:
        return self.data / "run" / "daemon.sock"

    @property
    def log(self) -> str:
        return (self.data / "daemon.log").read_text()

    def is_there(self) -> bool:
        """Whether a daemon lives."""
        return bool(living({self.pid}))

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "variables": {**self.variables, **options.get("variables", {})}}

    def start(self, *words: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a `hutch` command."""
        return self.hutch.start(*words, **self.options(options))

    def command(self, *words: str | Path, **options: Any) -> Ran:
        """Run a `hutch` command to its end."""
        return self.hutch.command(*words, **self.options(options))

    def run(self, code: str, *flags: str | Path, session: str = "s", **options: Any) -> Ran:
        """Run code in a session, as a person would."""
        ran = self.command("run", "-s", session, *flags, "--", code, **options)
        if (self.data / "run" / "daemon.pid").exists():
            assert self.pid
        return ran

    def python(self, script: str, **options: Any) -> str:
        """Run a script that uses hutch's own client, and return what it printed."""
        options = self.options(options)
        with self.hutch.popen([PYTHON, "-c", f"from hutch.serve import client\n{script}"], **options) as child:
            out, err = child.communicate(timeout=DEADLINE_SECONDS)
        assert child.returncode == 0, err
        return out

    def ask(self, operation: str, **fields: Any) -> Any:
        """Ask the daemon."""
        return json.loads(
            self.python(f"import json; print(json.dumps(client.ask({operation!r}, start=True, **{fields!r})))")
        )

    def remove(self) -> None:
        """End the daemon, and all that is left of it."""
        self.python("client.retire()")
        assert wait_until(lambda: not living(self.pids)), "the daemon did not end when it was asked to"
        shutil.rmtree(self.data, ignore_errors=True)


@pytest.fixture
def keeper(hutch: Hutch) -> Iterator[Keeper]:
    """A new data directory for each test."""
    found = Keeper(hutch, hutch.home / "data")
    yield found
    found.remove()


@pytest.fixture
def own_keeper(user: Hutch) -> Iterator[Keeper]:
    """The same, of the ordinary user alone: for what does not depend on who one is, or would touch what others run."""
    found = Keeper(user, user.home / "data")
    yield found
    found.remove()


# ---- sessions -------------------------------------------------------------------------------------------------------


def test_state_and_files_stay_between_commands(keeper: Keeper) -> None:
    first = keeper.run("x = 6 * 7; open('kept', 'w').write('on disk')")
    assert (first.exit_code, first.stdout, first.stderr) == (0, "", "")
    before = keeper.pid
    second = keeper.run("print(x, open('kept').read())")
    assert (second.exit_code, second.stdout, second.stderr) == (0, "42 on disk\n", "")
    assert keeper.pid == before
    assert keeper.run("print(x)", session="t").exit_code == 1  # another session knows nothing of it


def test_a_session_remembers_its_environment(keeper: Keeper) -> None:
    assert keeper.run("a=1; cd /tmp", "-e", "shell").exit_code == 0
    assert keeper.run("echo $a $PWD").stdout == "1 /tmp\n"
    other = keeper.run("print(1)", "-e", "python")
    assert other.exit_code == 125
    assert "session s has environment shell, not python" in other.stderr


def test_what_is_asked_of_a_session_again_must_be_what_it_has(own_keeper: Keeper) -> None:
    (own_keeper.hutch.home / "shown").mkdir()
    try:
        flags = ("--memory", "400M", "--mount", "shown:/data", "--env", "A=1")
        assert own_keeper.run("x = 1", *flags).exit_code == 0
        assert own_keeper.run("import os; print(x, os.environ['A'], os.listdir('/data'))", *flags).stdout == "1 1 []\n"
        assert own_keeper.run("print(x)", "--memory", "400M", "--timeout", "20", "--pids", "128").stdout == "1\n"
        assert own_keeper.run("print(x)", "--mount", "shown:/data", cwd=own_keeper.hutch.home).stdout == "1\n"
        for flag, value, told in (("--memory", "512M", "memory_mb"), ("--env", "A=2", "env"), ("--pids", "9", "pids")):
            refused = own_keeper.run("print(x)", flag, value)
            assert refused.exit_code == 125
            assert told in refused.stderr
            assert "or use another session" in refused.stderr
        # The same words in another directory mean another directory.
        assert "mounts" in own_keeper.run("print(x)", "--mount", "shown:/data", cwd="/tmp").stderr
    finally:
        (own_keeper.hutch.home / "shown").rmdir()


def test_settings_make_a_session_and_do_not_contradict_it_later(own_keeper: Keeper) -> None:
    settings = own_keeper.data.parent / "settings.toml"
    look = "import os; print(x, os.environ.get('FROM'), os.sysconf('SC_PAGESIZE') > 0)"
    try:
        settings.write_text('[defaults]\nmemory_mb = 400\nenv = {FROM = "settings"}\n[environments.mine]\n')
        settings.write_text(settings.read_text() + 'preset = "python"\npids = 64\n')
        assert own_keeper.run("x = 1", "--config", settings, "--env", "B=2").exit_code == 0
        assert own_keeper.run(look).stdout == "1 settings True\n"
        settings.write_text('[defaults]\nmemory_mb = 512\n[environments.mine]\npreset = "python"\npids = 64\n')
        assert own_keeper.run(look, "--config", settings).stdout == "1 settings True\n"
        # An environment named on the command line stands for all that it says.
        assert "pids = 64" not in own_keeper.run("x", "--config", settings, "-e", "python").stderr
        refused = own_keeper.run("x", "--config", settings, "-e", "mine")
        assert refused.exit_code == 125
        assert "pids" in refused.stderr
    finally:
        settings.unlink()


def test_a_mistake_in_the_first_request_is_not_kept_under_the_name(own_keeper: Keeper) -> None:
    assert own_keeper.run("x = 1", "--mount", "/nonexistent:/data").exit_code == 2
    assert own_keeper.run("x = 1; print(x)").stdout == "1\n"
    assert own_keeper.ask("sessions")[0]["request"] == {"environment": "python"}


def test_a_new_name_is_not_taken_for_the_beginning_of_an_id(own_keeper: Keeper) -> None:
    own_keeper.run("x = 1", session="first")
    letter = own_keeper.ask("sessions")[0]["sessionId"][0]
    assert own_keeper.run("print('x' in globals())", session=letter).stdout == "False\n"
    assert {record["name"] for record in own_keeper.ask("sessions")} == {"first", letter}


def test_the_result_is_that_of_a_run(keeper: Keeper) -> None:
    done = keeper.run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)", "--json")
    assert done.exit_code == 7
    assert (done.out, done.err, done.outcome) == ("out\n", "err\n", "failed")
    assert done.json["session"] == keeper.ask("sessions")[0]["sessionId"]
    late = keeper.run("import time; time.sleep(60)", "--timeout", "0.5")
    assert late.exit_code == 124
    assert "stopped after 0.5 s; --timeout changes that" in late.stderr
    big = keeper.run("x = bytearray(900 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1", "--json")
    assert (big.exit_code, big.outcome) == (137, "memory")
    flood = keeper.run("while True: print('x' * 9999)", "--max-output", "1M")
    assert flood.exit_code == 137
    assert len(flood.stdout) == 1 << 20


def test_bytes_come_out_as_they_went_in(own_keeper: Keeper) -> None:
    data = bytes(range(256)) * 300 + "é√".encode() + b"\xff"
    with own_keeper.start(
        *("run", "-s", "s", "--stdin", "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"),
        stdin=subprocess.PIPE,
        text=False,
        errors=None,
    ) as child:
        out, err = child.communicate(data, timeout=DEADLINE_SECONDS)  # type: ignore[arg-type]
    assert (out, err, child.returncode) == (data, b"", 0)
    assert own_keeper.pid
    assert own_keeper.run("import sys; print(repr(sys.stdin.read()))", stdin="unasked").stdout == "''\n"


def test_output_comes_while_the_program_runs_and_ctrl_c_keeps_the_state(keeper: Keeper) -> None:
    code = "x = 'kept'\nimport time\nprint('first', flush=True)\ntime.sleep(60)\nx = 'not reached'"
    with keeper.start("run", "-s", "s", code) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "first\n"
        child.send_signal(signal.SIGINT)
        _, complaints = child.communicate(timeout=DEADLINE_SECONDS)
    assert child.returncode == 130
    assert complaints.rstrip().endswith("KeyboardInterrupt")
    after = keeper.run("print(x)")
    assert (after.stdout, after.stderr) == ("kept\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_client_that_is_killed_gives_up_its_run_and_not_the_state(own_keeper: Keeper, number: int) -> None:
    with own_keeper.start("run", "-s", "s", "x = 'kept'\nprint(1, flush=True)\nimport time; time.sleep(60)") as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        child.send_signal(number)
        child.communicate(timeout=DEADLINE_SECONDS)
    after = own_keeper.run("print(x)")
    assert (after.stdout, after.stderr) == ("kept\n", "")


def test_who_ignores_ctrl_c_is_ended_by_the_second(own_keeper: Keeper) -> None:
    code = "import signal, time\nsignal.signal(2, lambda *_: print('no', flush=True))\nprint('up', flush=True)\n"
    with own_keeper.start("run", "-s", "s", f"{code}while True: time.sleep(0.1)") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "no\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=DEADLINE_SECONDS) == 130
    after = own_keeper.run("print('x')")
    assert after.stdout == "x\n"
    assert LOST in after.stderr


def test_who_waits_for_his_turn_interrupts_nobody_else(own_keeper: Keeper) -> None:
    code = "print('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\nprint('whole', flush=True)"
    own_keeper.run("import os, time")
    with own_keeper.start("run", "-s", "s", code) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "up\n"
        with own_keeper.start("run", "-s", "s", "print('second')") as second:
            assert wait_until(lambda: own_keeper.ask("status")["runs"] == 2)
            second.send_signal(signal.SIGINT)
            assert second.communicate(timeout=DEADLINE_SECONDS)[0] == ""
        assert second.returncode == 130
        workspace = Path(own_keeper.ask("sessions")[0]["workspace"])
        (workspace / "go").touch()
        assert first.communicate(timeout=DEADLINE_SECONDS)[0] == "whole\n"
    assert first.returncode == 0


def test_a_lost_state_is_told_of(keeper: Keeper) -> None:
    keeper.run("x = 1")
    crashed = keeper.run("import os; os._exit(9)")
    assert crashed.exit_code == 9
    assert f"{LOST} in session s is lost; its files are there" in crashed.stderr
    assert LOST in keeper.run("y = 1").stderr
    assert LOST not in keeper.run("y").stderr


def test_without_the_daemon_files_stay_and_state_does_not(keeper: Keeper) -> None:
    with keeper.start("run", "--no-daemon", "-s", "s", "x = 1; open('f', 'w').write('file')") as child:
        assert child.communicate(timeout=DEADLINE_SECONDS) == ("", "")
    later = keeper.command("run", "--no-daemon", "-s", "s", "print(open('f').read(), 'x' in globals())")
    assert (later.exit_code, later.stdout, later.stderr) == (0, "file False\n", "")
    assert not (keeper.data / "run").exists()
    assert keeper.command("run", "--no-daemon", "print(6 * 7)").stdout == "42\n"
    with keeper.start("run", "--no-daemon", "-s", "s", "import time; print(1, flush=True); time.sleep(60)") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "1\n"
        child.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in child.communicate(timeout=DEADLINE_SECONDS)[1]
    assert child.returncode == 130


def test_a_plain_run_needs_no_daemon(own_keeper: Keeper) -> None:
    assert own_keeper.command("run", "print(6 * 7)").stdout == "42\n"
    assert not (own_keeper.data / "run").exists()


# ---- the daemon's life ----------------------------------------------------------------------------------------------


def test_many_who_come_at_once_find_one_daemon(keeper: Keeper) -> None:
    children = [keeper.start("run", "-s", f"s{number}", f"print({number})") for number in range(6)]
    said = [child.communicate(timeout=DEADLINE_SECONDS) for child in children]
    assert said == [(f"{number}\n", "") for number in range(6)]
    assert keeper.is_there()
    assert keeper.log.count("started") == 1


def test_it_is_a_process_of_its_own(own_keeper: Keeper) -> None:
    secret = {"MY_SECRET": "x", "PYTHONSTARTUP": "x", "HUTCH_DAEMON_IDLE": "77"}
    own_keeper.run("x = 1", variables=secret)
    pid = own_keeper.pid
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    names = {word.partition("=")[0] for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if word}
    assert names == {"PATH", "HOME", "LANG", "HUTCH_DATA_DIR", "HUTCH_DAEMON_IDLE"}
    soft, hard = re.findall(r"Max open files\s+(\d+)\s+(\d+)", Path(f"/proc/{pid}/limits").read_text())[0]
    assert soft == hard
    assert {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (1, 2)} == {str(own_keeper.data / "daemon.log")}
    for path, mode in ((own_keeper.data / "run", 0o700), (own_keeper.socket, 0o600), (own_keeper.data, 0o700)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE((own_keeper.data / "daemon.log").stat().st_mode) == 0o600
    assert own_keeper.run("import os; print('MY_SECRET' in os.environ)").stdout == "False\n"


def test_it_does_not_look_for_modules_in_a_directory_that_it_was_started_in(own_keeper: Keeper, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o111)
    (tmp_path / "asyncio.py").write_text("raise SystemExit('taken from the current directory')")
    assert own_keeper.run("print(1)", cwd=tmp_path).stdout == "1\n"


def test_it_ends_when_nothing_lives_in_it(keeper: Keeper) -> None:
    idle = {"HUTCH_DAEMON_IDLE": "1"}
    keeper.run("x = 1", variables=idle)
    pid = keeper.pid
    time.sleep(1.5)
    assert keeper.is_there()  # a session lives
    assert keeper.run("print(x)", variables=idle).stdout == "1\n"
    assert keeper.pid == pid
    assert keeper.ask("close", session="s") == {"closed": True}
    assert wait_until(lambda: not living({pid}))
    assert not keeper.socket.exists()
    assert "ends: idle" in keeper.log
    later = keeper.run("print('x' in globals())", variables=idle)
    assert later.stdout == "False\n"
    assert LOST in later.stderr


@pytest.mark.parametrize("moment", ["idle", "running"])
def test_kill_minus_nine_leaves_nothing_and_the_next_call_works(keeper: Keeper, moment: str) -> None:
    keeper.run("x = 1; open('kept', 'w').write('on disk')")
    if moment == "idle":
        _kill(keeper)
    else:
        with keeper.start("run", "-s", "s", "print('up', flush=True); import time; time.sleep(60)") as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            _kill(keeper)
            complaints = child.communicate(timeout=DEADLINE_SECONDS)[1]
        assert child.returncode == 125
        assert "ended meanwhile" in complaints
    assert keeper.socket.exists()  # nobody was there to remove it
    later = keeper.run("print(open('kept').read(), 'x' in globals())")
    assert (later.exit_code, later.stdout) == (0, "on disk False\n")
    assert LOST in later.stderr


def _kill(keeper: Keeper) -> None:
    pid = keeper.pid
    inside = descendants(pid)
    assert inside
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not living(inside | {pid}))
    assert wait_until(lambda: not _cgroups(pid))


def _cgroups(pid: int) -> list[str]:
    found = [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names]
    return [name for name in found if name.startswith(f"hutch-{pid}-")]


def test_sigterm_ends_it_and_all_that_it_keeps(keeper: Keeper) -> None:
    keeper.run("x = 1")
    keeper.run("x = 1", session="t")
    pid = keeper.pid
    below = descendants(pid)
    with keeper.start("run", "-s", "s", "print('up', flush=True); import time; time.sleep(60)") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        os.kill(pid, signal.SIGTERM)
        assert wait_until(lambda: not living({pid}), seconds=5)
        assert child.wait(timeout=DEADLINE_SECONDS) == 125
    assert not living(below)
    assert not keeper.socket.exists()
    assert _cgroups(pid) == []


def test_code_that_changed_gets_a_daemon_of_its_own(own_keeper: Keeper) -> None:
    own_keeper.run("x = 1")
    before = own_keeper.pid
    marker = own_keeper.hutch.arena.library / "hutch" / "py.typed"
    changed = marker.stat().st_mtime_ns
    with own_keeper.start("run", "-s", "s", "print('up', flush=True); import time; time.sleep(60)") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        os.utime(marker, ns=(changed, changed + 1))
        busy = own_keeper.run("print(1)", session="t")
        assert busy.exit_code == 125
        assert "is of other code and has 1 runs to finish" in busy.stderr
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=DEADLINE_SECONDS)
    after = own_keeper.run("print('x' in globals())")
    assert after.stdout == "False\n"
    assert LOST in after.stderr
    assert own_keeper.pid != before
    assert not living({before})


def test_a_session_without_a_sandbox_is_let_go_of(own_keeper: Keeper) -> None:
    idle = {"HUTCH_DAEMON_IDLE": "1"}
    own_keeper.run("x = 1", variables=idle)
    own_keeper.run("x = 1", session="other")
    busy = own_keeper.command("run", "--json", "--no-daemon", "-s", "s", "print(1)")
    assert busy.outcome == "session.busy"
    assert own_keeper.command("kill", "s").exit_code == 0
    assert wait_until(lambda: own_keeper.ask("status")["sessions"] == 1)
    assert own_keeper.command("run", "--no-daemon", "-s", "s", "print(1)").stdout == "1\n"
    assert own_keeper.run("print(x)", session="other").stdout == "1\n"


def test_a_daemon_whose_socket_vanished_makes_room(own_keeper: Keeper) -> None:
    own_keeper.run("x = 1")
    before = own_keeper.pid
    own_keeper.socket.unlink()
    assert own_keeper.run("print(2)").stdout == "2\n"
    assert own_keeper.pid != before
    assert "its socket was taken away" in own_keeper.log


def test_a_daemon_that_does_not_start_says_why(own_keeper: Keeper) -> None:
    wrong = own_keeper.run("print(1)", variables={"HUTCH_DAEMON_IDLE": "soon"})
    assert wrong.exit_code == 2
    assert "HUTCH_DAEMON_IDLE=soon" in wrong.stderr
    shutil.rmtree(own_keeper.data)
    own_keeper.hutch.write(own_keeper.data, "a file")
    wrong = own_keeper.run("print(1)")
    assert wrong.exit_code == 125
    assert "HUTCH_DATA_DIR" in wrong.stderr
    own_keeper.data.unlink()


def test_a_daemon_that_does_not_answer_is_named(own_keeper: Keeper) -> None:
    own_keeper.run("x = 1")
    pid = own_keeper.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        stuck = own_keeper.run("print(x)")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert stuck.exit_code == 125
    assert f"process {pid}, does not answer" in stuck.stderr
    assert own_keeper.run("print(x)").stdout == "1\n"


# ---- where it lives -------------------------------------------------------------------------------------------------


def test_the_runtime_directory_is_preferred_and_found_without_the_variable(own_keeper: Keeper) -> None:
    runtime = own_keeper.hutch.home / "runtime"
    runtime.mkdir(mode=0o700)
    own_keeper.hutch.give(runtime)
    try:
        own_keeper.run("x = 1", variables={"XDG_RUNTIME_DIR": str(runtime)})
        assert [path.name for path in runtime.glob("hutch-*/*")] == ["daemon.sock"]
        before = own_keeper.pid
        assert own_keeper.run("print(x)").stdout == "1\n"
        assert own_keeper.run("print(x)", variables={"XDG_RUNTIME_DIR": "/proc"}).stdout == "1\n"
        assert own_keeper.pid == before
        own_keeper.python("client.retire()")
        assert list(runtime.iterdir()) == []
    finally:
        shutil.rmtree(runtime)


def test_a_long_path_is_replaced_by_a_short_one(own_keeper: Keeper) -> None:
    own_keeper.data = own_keeper.data / ("long" * 25)
    own_keeper.variables["HUTCH_DATA_DIR"] = str(own_keeper.data)
    own_keeper.run("x = 1")
    place = Path(own_keeper.ask("status")["socket"]).parent
    assert place.parent == Path("/tmp")
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert own_keeper.run("print(x)").stdout == "1\n"
    own_keeper.python("client.retire()")
    assert not place.exists()
    shutil.rmtree(own_keeper.data.parent)


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
def test_a_place_that_is_not_ours_alone_is_refused(own_keeper: Keeper, kind: str) -> None:
    home = own_keeper.hutch.home
    for path in (own_keeper.data, home / "elsewhere"):
        path.mkdir(mode=0o700)
        own_keeper.hutch.give(path)
    run = own_keeper.data / "run"
    try:
        if kind == "open to others":
            run.mkdir(mode=0o755)
            own_keeper.hutch.give(run)
        elif kind == "a link":
            run.symlink_to(home / "elsewhere")
        else:
            own_keeper.hutch.write(run)
        refused = own_keeper.command("run", "--json", "-s", "s", "print(1)")
        assert refused.outcome == "host.runtime"
        assert str(run) in refused.stderr
        assert list((home / "elsewhere").iterdir()) == []
    finally:
        (home / "elsewhere").rmdir()


# ---- who may talk to it ---------------------------------------------------------------------------------------------

CONNECT = """
import socket, sys
line = socket.socket(socket.AF_UNIX); line.settimeout(20)
line.connect(sys.argv[1])
try:
    line.sendall(b'{"retire": true}\\n'); print(line.recv(100))
except (BrokenPipeError, ConnectionResetError):
    print(b'')
"""


def test_another_user_cannot_talk_to_it(own_keeper: Keeper) -> None:
    need("root")
    own_keeper.run("x = 1")

    def as_foreigner() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PYTHON, "-c", CONNECT, str(own_keeper.socket)],
            user=FOREIGNER,
            group=FOREIGNER,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )  # type: ignore[call-overload]

    assert "PermissionError" in as_foreigner().stderr
    for path in (own_keeper.data, own_keeper.data / "run"):
        path.chmod(0o755)
    own_keeper.socket.chmod(0o666)
    try:
        met = as_foreigner()
        assert (met.stdout, met.stderr) == ("b''\n", "")  # hung up on, without a word
    finally:
        for path in (own_keeper.data, own_keeper.data / "run"):
            path.chmod(0o700)
    assert own_keeper.run("print(x)").stdout == "1\n"


def test_somebody_else_s_daemon_is_not_talked_to(own_keeper: Keeper) -> None:
    need("root")
    own_keeper.run("x = 1")
    own_keeper.python("client.retire()")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(own_keeper.socket))
        own_keeper.socket.chmod(0o666)
        stranger.listen()
        refused = own_keeper.command("run", "--json", "-s", "s", "print(x)")
        assert refused.outcome == "host.runtime"
        assert "belongs to user 0" in refused.stderr
    own_keeper.socket.unlink()


# ---- what it is told ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def line_to(keeper: Keeper) -> Iterator[socket.socket]:
    """A connection by hand. Only the daemon's own user is let in, so a child of that user does the talking."""
    ours, theirs = socket.socketpair()
    relay = """
import os, select, socket, sys
line = socket.socket(socket.AF_UNIX); line.connect(sys.argv[1])
ends = {0: line.fileno(), line.fileno(): 1}
while ends:
    for fd in select.select(list(ends), [], [])[0]:
        data = os.read(fd, 1 << 20)
        if not data:
            if fd: sys.exit()
            line.shutdown(socket.SHUT_WR); del ends[fd]; continue
        try:
            while data: data = data[os.write(ends[fd], data):]
        except (BrokenPipeError, ConnectionResetError):
            sys.exit()
"""
    with keeper.hutch.popen([PYTHON, "-c", relay, str(keeper.socket)], stdin=theirs, stdout=theirs) as child:
        theirs.close()
        ours.settimeout(DEADLINE_SECONDS)
        try:
            yield ours
        finally:
            ours.close()
            child.wait(timeout=DEADLINE_SECONDS)


def hear(line: socket.socket) -> list[dict[str, Any]]:
    """All that is said until the other side hangs up."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := line.recv(65536):
            said += chunk
    return [json.loads(one) for one in said.splitlines()]


def hello(keeper: Keeper) -> bytes:
    script = "import json, os\nfrom hutch.serve import place\n"
    script += "print(json.dumps({'hello': {'version': client.__version__, 'code': place.code_identity(), "
    script += "'data': os.path.realpath(place.data_directory())}}))"
    return keeper.python(script).encode()


GARBAGE = {
    "nothing": b"",
    "an empty line": b"\n",
    "half a line": b'{"hello": {"version"',
    "no JSON": b"GET / HTTP/1.1\r\n\r\n",
    "no text": bytes(range(256)) + b"\n",
    "no table": b"[1, 2]\n",
    "deep": b"[" * 200_000 + b"\n",
    "a long number": b"9" * 100_000 + b"\n",
    "no hello": b'{"op": "run"}\n',
    "a hello of no kind": b'{"hello": 7}\n',
}


def test_garbage_is_answered_or_hung_up_on(own_keeper: Keeper) -> None:
    own_keeper.run("x = 1")
    before = own_keeper.pid
    for garbage in GARBAGE.values():
        with line_to(own_keeper) as line:
            line.sendall(garbage)
            line.shutdown(socket.SHUT_WR)
            assert {answer["event"] for answer in hear(line)} <= {"error"}
    assert own_keeper.run("print(x)").stdout == "1\n"
    assert own_keeper.pid == before
    assert "Traceback" not in own_keeper.log


REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"op": "explode"}, "spec.unknown"),
    ({"op": ["run"]}, "spec.unknown"),
    ({"op": "run"}, "spec.message"),
    ({"op": "run", "session": 7, "code": "1"}, "spec.message"),
    ({"op": "run", "session": "s", "code": 7}, "spec.message"),
    ({"op": "run", "session": "s", "code": "a\0b"}, "spec.code-nul"),
    ({"op": "run", "session": "s", "code": "\ud800"}, "spec.message"),
    ({"op": "run", "session": "s", "code": "1", "stdin": "%"}, "spec.message"),
    ({"op": "run", "session": "s", "code": "1", "given": [1]}, "spec.message"),
    ({"op": "run", "session": "s", "code": "1", "given": {"memroy_mb": 1}}, "spec.unknown"),
    ({"op": "run", "session": "s", "code": "1", "echo": "yes"}, "spec.message"),
    ({"op": "run", "session": "s", "code": "1", "timeout_seconds": "soon"}, "spec.value"),
    ({"op": "run", "session": "s", "code": "1", "interpreter": "perl"}, "host.interpreter"),
    ({"op": "run", "session": "a/b", "code": "1", "create": {}}, "spec.session-name"),
    ({"op": "run", "session": "unknown", "code": "1"}, "session.unknown"),
    ({"op": "run", "session": "t", "code": "1", "create": {"environment": "pyton"}}, "spec.unknown"),
    ({"op": "exec", "session": "s", "argv": "ls"}, "spec.message"),
    ({"op": "exec", "session": "s", "argv": []}, "spec.command"),
    ({"op": "pool", "request": {"memory_mb": "1"}, "code": "1"}, "spec.value"),
    ({"op": "close", "session": "unknown"}, "session.unknown"),
    ({"op": "destroy"}, "session.unknown"),
    ({"op": "interrupt", "session": {}}, "spec.message"),
]


def test_a_wrong_request_is_told_what_is_wrong(own_keeper: Keeper) -> None:
    own_keeper.run("x = 1")
    before = own_keeper.pid
    greeting = hello(own_keeper)
    met = []
    for request, _ in REQUESTS:
        with line_to(own_keeper) as line:
            line.sendall(greeting + json.dumps(request).encode() + b"\n")
            met.append(hear(line)[-1])
    assert [answer["error"]["code"] for answer in met] == [code for _, code in REQUESTS]
    assert all(answer["error"]["hint"] for answer in met)
    assert own_keeper.run("print(x)").stdout == "1\n"
    assert own_keeper.pid == before
    assert [record["name"] for record in own_keeper.ask("sessions")] == ["s"]


def test_a_flood_without_an_end_is_hung_up_on(own_keeper: Keeper) -> None:
    own_keeper.run("x = 1")
    with line_to(own_keeper) as line:
        block = b"x" * (1 << 20)
        with contextlib.suppress(OSError):
            for _ in range(300):
                line.sendall(block)
            pytest.fail("300 MiB without a line's end were taken")
    assert own_keeper.run("print(x)").stdout == "1\n"


def test_what_can_be_asked(keeper: Keeper) -> None:
    keeper.run("x = 1")
    status = keeper.ask("status")
    assert (status["pid"], status["sandboxes"], status["sessions"]) == (keeper.pid, 1, 1)
    record = keeper.ask("sessions")[0]
    assert (record["name"], record["environment"], record["pid"]) == ("s", "python", keeper.pid)
    assert record["live"]["busy"] is False
    assert keeper.ask("interrupt", session="s") == {"interrupted": False}
    told = keeper.ask("exec", session=record["sessionId"], argv=["cat"], stdin="aGk=")
    assert told["result"]["stdout"] == "hi"
    once = [keeper.ask("pool", request={"environment": "python"}, code="print(__name__, 'x' in globals())")]
    once += [keeper.ask("pool", request={"environment": "python"}, code="x = 1; exit(4)", timeout_seconds=9)]
    assert [one["result"]["stdout"] for one in once] == ["__main__ False\n", ""]
    assert once[1]["result"]["exit_code"] == 4
    assert keeper.ask("close", session="s") == {"closed": True}
    assert keeper.ask("sessions")[0]["live"] is None
    assert keeper.ask("destroy", session="s") == {"destroyed": record["sessionId"]}
    assert keeper.ask("sessions") == []
    assert not Path(record["workspace"]).exists()


# ---- the conversation -----------------------------------------------------------------------------------------------


class Terminal:
    """A person at a terminal, and hutch on it."""

    def __init__(self, keeper: Keeper, *words: str) -> None:
        self._screen, line = pty.openpty()
        os.fchmod(line, 0o666)
        take = "import fcntl, os, sys; os.setsid(); fcntl.ioctl(0, 0x540E, 0); os.execv(sys.argv[1], sys.argv[1:])"
        streams = {"stdin": line, "stdout": line, "stderr": line}
        argv = [PYTHON, "-c", take, PYTHON, "-m", "hutch", "run", "-i", *words]
        self.process = keeper.hutch.popen(argv, **keeper.options({**streams, "variables": {"TERM": "dumb"}}))
        os.close(line)
        self._shown = ""

    def see(self, expected: str) -> None:
        """Wait until something is shown; it is then not looked at again."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while expected not in self._shown and expected not in self.look(0.1):
            if time.monotonic() > deadline:
                pytest.fail(f"{expected!r} does not appear: {self._shown!r}")
        self._shown = self._shown.partition(expected)[2]

    def look(self, seconds: float) -> str:
        """What is on the screen, after a moment in which something may come."""
        if select.select([self._screen], [], [], seconds)[0]:
            try:
                self._shown += os.read(self._screen, 4096).decode(errors="replace")
            except OSError:
                pytest.fail(f"hutch is gone; it showed {self._shown!r}")
        return self._shown

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def close(self) -> None:
        os.close(self._screen)
        self.process.wait(timeout=DEADLINE_SECONDS)


@pytest.fixture
def terminal(keeper: Keeper) -> Iterator[Callable[..., Terminal]]:
    """Opens terminals, and closes them."""
    opened: list[Terminal] = []

    def open_terminal(*words: str) -> Terminal:
        opened.append(Terminal(keeper, *words))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def test_a_conversation_with_python(keeper: Keeper, terminal: Callable[..., Terminal]) -> None:
    screen = terminal()
    screen.see(">>> ")
    screen.type("x = 6 * 7\n")
    screen.see(">>> ")
    screen.type("x\n")
    screen.see("42\r\n>>> ")
    screen.type("def double(n):\n")
    screen.see("... ")
    screen.type("    return 2 * n\n")
    screen.see("... ")
    screen.type("\n")
    screen.see(">>> ")
    screen.type("double(x)\n")
    screen.see("84\r\n>>> ")
    screen.type("1 / 0\n")
    screen.see("ZeroDivisionError")
    screen.see(">>> ")
    screen.type("if x:\n")
    screen.see("... ")

    def is_clear() -> bool:
        # Python itself misses a Ctrl-C between the prompt and its first wait for a key.
        screen.type("\x03")
        wait_until(lambda: ">>> " in screen.look(0.1), seconds=1)
        screen.type("'ma' 'rk'\n")
        return wait_until(lambda: "'mark'\r\n" in screen.look(0.1), seconds=3)

    assert wait_until(is_clear, seconds=30), screen._shown
    screen.see("'mark'\r\n>>> ")
    screen.type("import time; print('asleep'); time.sleep(60)\n")
    screen.see("asleep\r\n")
    screen.type("\x03")
    screen.see("KeyboardInterrupt")
    screen.see(">>> ")
    screen.type("double(x)\n")
    screen.see("84\r\n>>> ")
    screen.type("\x04")
    assert screen.process.wait(timeout=DEADLINE_SECONDS) == 0
    history = keeper.data / "history" / "python"
    assert history.read_text().splitlines()[:3] == ["x = 6 * 7", "x", "def double(n):"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert not (keeper.data / "run").exists()


def test_a_conversation_in_a_session(keeper: Keeper, terminal: Callable[..., Terminal]) -> None:
    keeper.run("x = 'from a run'")
    screen = terminal("-s", "s")
    screen.see(">>> ")
    screen.type("x\n")
    screen.see("'from a run'\r\n")
    screen.see(">>> ")
    screen.type("x = 'typed'; import time; print('asleep'); time.sleep(60)\n")
    screen.see("asleep\r\n")
    screen.type("\x03")
    screen.see("KeyboardInterrupt")
    screen.see(">>> ")
    screen.type("exit(3)\n")
    assert screen.process.wait(timeout=DEADLINE_SECONDS) == 3
    assert keeper.run("print(x)").stdout == "typed\n"


def test_a_conversation_with_a_shell(terminal: Callable[..., Terminal]) -> None:
    screen = terminal("-e", "shell")
    screen.see("$ ")
    for line, shown in (
        ("name=wor\n", "$ "),
        ("for n in 1 2; do\n", "> "),
        ("  echo $name$n\n", "> "),
        ("done\n", "wor1\r\nwor2\r\n$ "),
        ("cat <<END\n", "> "),
        ("here $name\n", "> "),
        ("END\n", "here wor\r\n$ "),
        ("echo 'a\n", "> "),
        ("b'\n", "a\r\nb\r\n$ "),
    ):
        screen.type(line)
        screen.see(shown)
    screen.type("exit 5\n")
    assert screen.process.wait(timeout=DEADLINE_SECONDS) == 5


def test_a_conversation_with_node(terminal: Callable[..., Terminal]) -> None:
    need("node")
    screen = terminal("-e", "node")
    screen.see("> ")
    for line, shown in (
        ("const f = (n) => {\n", "... "),
        ("  return n * 2 }\n", "> "),
        ("f(21)\n", "42\r\n"),
        ("await Promise.resolve(\n", "... "),
        ("7)\n", "7\r\n"),
    ):
        screen.type(line)
        screen.see(shown)
    screen.type(".exit\n")
    assert screen.process.wait(timeout=DEADLINE_SECONDS) == 0


PIPED = """\
x = 6

def f(a):
    b = a

    return b * 7

f(x); 'same line'
1 / 0
for n in range(2):
    print(n)
else:
    print('end')
raise SystemExit(4)
"""


@pytest.mark.parametrize("session", [False, True])
def test_statements_may_come_through_a_pipe(keeper: Keeper, session: bool) -> None:
    flags = ["-s", "s"] if session else []
    done = keeper.command("run", "-i", *flags, stdin=PIPED)
    assert done.stdout == "'same line'\n0\n1\nend\n"
    assert "ZeroDivisionError" in done.stderr
    assert done.exit_code == 4
    left = keeper.command("run", "--interactive", *flags, stdin="print('before')\nexit()\nprint('after')\n")
    assert (left.exit_code, left.stdout, left.stderr) == (0, "before\n", "")
    wrong = keeper.command("run", "-i", *flags, stdin="print('one')\nif\n")
    assert wrong.exit_code == 1
    assert "SyntaxError" in wrong.stderr


def test_a_shell_through_a_pipe(own_keeper: Keeper) -> None:
    script = "a=1\nif [ $a = 1 ]; then\n  echo yes\nfi\ncat <<END\n$a\n\nEND\necho $a \\\n  b\nfalse\n"
    done = own_keeper.command("run", "-i", "-e", "shell", stdin=script)
    assert (done.exit_code, done.stdout, done.stderr) == (1, "yes\n1\n\n1 b\n", "")


def test_a_conversation_takes_no_code_and_makes_no_json(own_keeper: Keeper) -> None:
    for words in (("print(1)",), ("-f", "x.py"), ("--json",), ("--stdin",)):
        assert own_keeper.command("run", "-i", *words).exit_code == 2 if "--json" not in words else True
    assert own_keeper.command("run", "-i", "--json").outcome == "cli.usage"


# ---- ps and kill ----------------------------------------------------------------------------------------------------


def test_ps_shows_what_runs_and_kill_ends_it(keeper: Keeper) -> None:
    keeper.run("x = 1; import subprocess; subprocess.Popen(['sleep', '60'])", session="listed")
    record = keeper.ask("sessions")[0]
    shown = [one for one in _ps(keeper) if one["name"] == "listed" and one["session"] == record["sessionId"]]
    assert len(shown) == 1
    one = shown[0]
    assert (one["environment"], one["uid"], one["owner"]) == ("python", keeper.hutch.uid, keeper.pid)
    assert one["processes"] >= 2
    assert one["memory_bytes"] > 1 << 20
    line = next(line for line in keeper.command("ps").stdout.splitlines() if line.startswith(one["id"]))
    assert line.split("\t")[:3] == [one["id"], "listed", "python"]
    assert (len(line.split("\t")) == 9) is keeper.hutch.is_root
    unknown = keeper.command("kill", "listde")
    assert unknown.exit_code == 2
    assert 'did you mean "listed"?' in unknown.stderr
    assert one["id"] in unknown.stderr
    inside = descendants(one["pid"])
    ended = keeper.command("kill", "listed")
    assert (ended.exit_code, ended.stdout) == (0, f"ended {one['id']}\n")
    assert not living(inside | {one["pid"]})
    after = keeper.run("print('x' in globals())", session="listed")
    assert after.stdout == "False\n"
    assert LOST in after.stderr
    again = next(one for one in _ps(keeper) if one["session"] == record["sessionId"])
    assert keeper.command("kill", "--json", again["id"]).json == {"ended": [again["id"]]}


def test_a_run_whose_sandbox_is_killed_says_so(keeper: Keeper) -> None:
    with keeper.start("run", "-s", "s", "print('up', flush=True); import time; time.sleep(60)") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        assert keeper.pid
        assert keeper.command("kill", "s").exit_code == 0
        complaints = child.communicate(timeout=DEADLINE_SECONDS)[1]
    assert child.returncode == 137
    assert "killed from outside" in complaints
    assert keeper.run("print(1)").stdout == "1\n"


def _ps(keeper: Keeper) -> list[dict[str, Any]]:
    found = keeper.command("ps", "--json")
    assert found.exit_code == 0
    return list(found.json)  # type: ignore[arg-type]


def test_ps_on_a_terminal_is_a_table(own_keeper: Keeper) -> None:
    own_keeper.run("x = 1", session="shown")
    screen, line = pty.openpty()
    try:
        with own_keeper.start("ps", stdout=line) as child:
            assert child.wait(timeout=DEADLINE_SECONDS) == 0
        lines = os.read(screen, 65536).decode().splitlines()
    finally:
        os.close(screen)
        os.close(line)
    assert lines[0].split() == ["ID", "SESSION", "ENVIRONMENT", "PROCESSES", "MEMORY", "CPU", "AGE", "PID"]
    row = next(line for line in lines if "shown" in line)
    assert row.index("shown") == lines[0].index("SESSION")


def test_a_user_neither_sees_nor_ends_what_others_run(own_keeper: Keeper, identities: dict[str, Hutch]) -> None:
    need("root")
    root = Keeper(identities["root"], identities["root"].home / "data")
    try:
        root.run("x = 1", session="roots")
        sandbox = next(one["id"] for one in _ps(root) if one["name"] == "roots")
        assert sandbox not in {one["id"] for one in _ps(own_keeper)}
        assert own_keeper.command("kill", sandbox).exit_code == 2
        own_keeper.run("x = 1", session="users")
        mine = next(one["id"] for one in _ps(root) if one["name"] == "users")
        assert root.command("kill", mine).exit_code == 2
        assert own_keeper.run("print(x)", session="users").stdout == "1\n"
    finally:
        root.remove()


def test_kill_all_ends_everything_of_ours(identities: dict[str, Hutch]) -> None:
    """By a user whom nobody else uses, since it is all of his."""
    need("root")
    lonely = Hutch("lonely", identities["user"].arena)
    lonely.uid = lonely.gid = FOREIGNER
    lonely.give(lonely.home)
    keeper = Keeper(lonely, lonely.home / "data")
    try:
        for name in ("one", "two"):
            assert keeper.run("x = 1", session=name).exit_code == 0
        ids = {one["id"] for one in _ps(keeper)}
        assert len(ids) == 2
        assert keeper.command("kill").exit_code == 2
        assert set(keeper.command("kill", "--all", "--json").json["ended"]) == ids
        assert _ps(keeper) == []
        assert keeper.command("kill", "--all").stdout == ""
    finally:
        keeper.remove()
        shutil.rmtree(lonely.home)


# ---- the page -------------------------------------------------------------------------------------------------------


def _examples() -> list[tuple[str, str]]:
    """(command, what it prints) of the page, in its order."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], ""))
            else:
                found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
    return found


def test_the_examples_of_the_page_print_what_it_says(keeper: Keeper) -> None:
    assert len(_examples()) >= 8
    hutch = keeper.hutch.write(keeper.hutch.home / "bin" / "hutch", f'#!/bin/sh\nexec {PYTHON} -m hutch "$@"\n')
    hutch.chmod(0o755)
    variables = {**keeper.variables, "PATH": f"{hutch.parent}:/usr/bin:/bin"}
    try:
        for command, expected in _examples():
            with keeper.hutch.popen(
                ["/bin/bash", "-c", command], variables=variables, stderr=subprocess.STDOUT
            ) as child:
                out, _ = child.communicate(timeout=DEADLINE_SECONDS)
            pattern = re.escape(expected).replace(re.escape("..."), ".*")
            assert re.fullmatch(pattern, out, re.DOTALL), f"{command}: {out!r}, not {expected!r}"
        assert keeper.pid
    finally:
        shutil.rmtree(hutch.parent)

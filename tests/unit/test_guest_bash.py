"""The bash driver on the real shell, without a sandbox: what a session keeps, and what ends a run but not the session.

GUEST_BASHES, paths separated by colons, names other shells to try than the system's own.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest_harness import Driver, Run

import hutch

GUEST = str(Path(hutch.__file__).parent / "guest" / "bash.sh")
BASHES = os.environ.get("GUEST_BASHES", "/usr/bin/bash").split(":")


@pytest.fixture(params=BASHES)
def argv(request: pytest.FixtureRequest) -> list[str]:
    return [request.param, "--norc", "--noprofile", GUEST]


@pytest.fixture
def driver(argv: list[str], tmp_path: Path) -> Iterator[Driver]:
    with Driver(argv, tmp_path) as driver:
        yield driver


def good(run: Run) -> str:
    """What a run printed that went well."""
    assert (run.code, run.stderr, run.died) == (0, b"", None), run
    return run.stdout.decode()


def ended(run: Run) -> tuple[int | None, str, str]:
    return run.code, run.stdout.decode(), run.stderr.decode()


def interrupted(driver: Driver, code: str) -> Run:
    """A run that is interrupted once it has printed `going`."""
    driver.start(code)
    driver.wait_for(b"going\n")
    driver.interrupt()
    return driver.finish()


# ---- what a session keeps -------------------------------------------------------------------------------------------

STATE = r"""
    plain=5; export EXPORTED='a b'; readonly FIXED=7; declare -i number=4; declare -u upper=abc
    list=(1 "two words" $'new\nline'); declare -A map=([k 1]=v [x]=$'b\001\377'); declare -n ref=list; declare -A empty
    odd=$'a\n\'"\\$x\t'; IFS=,; unset PS4
    hello-world() { echo "hello $1"; cat <<END
  here $1
END
    }
    exported() { echo exported; }; export -f exported
    either() { [[ $1 == @(a|b) ]] && echo either; }
    shopt -s extglob nullglob; set -o pipefail
    alias greet='echo aliased'; umask 027; set -- one "two 2"
    mkdir real; ln -s real link; cd link; pushd / >/dev/null; pushd +1 >/dev/null
    exec 7>../seven {high}</etc/passwd; trap 'echo usr1' USR1; trap 'echo err' ERR
"""
ASK = r"""
    builtin declare -p plain EXPORTED FIXED number upper list map ref empty odd IFS
    echo "${PS4-unset} $# $1 $2 ${PWD##*/} $(umask) $(pwd -P | sed 's:.*/::')"
    hello-world you; bash -c 'exported; echo $EXPORTED'; either a; dirs -l -p | tail -n 1
    greet; shopt nullglob extglob; set -o | grep pipefail
    readlink /proc/$$/fd/7 /proc/$$/fd/$high; (number=2+3; echo $number; FIXED=8; echo never)
    kill -USR1 $$; false; trap -p
"""


def test_everything_of_the_shell_is_kept_between_runs_and_beyond_its_end(driver: Driver) -> None:
    good(driver.run(STATE))
    before = driver.run(ASK)
    assert before.stderr == b"bash: line 6: FIXED: readonly variable\n"
    assert b"hello you\n  here you\nexported\na b\neither\n" in before.stdout
    assert before.stdout.endswith(b"5\nerr\nusr1\nerr\ntrap -- 'echo usr1' SIGUSR1\ntrap -- 'echo err' ERR\n")
    assert driver.run("exit 3").code == 3
    assert driver.run(ASK) == before


def test_the_last_status_is_seen_by_the_next_run(driver: Driver) -> None:
    assert driver.run("(exit 41)").code == 41
    assert good(driver.run("echo $?")) == "41\n"
    assert driver.run("exit 42").code == 42
    assert good(driver.run("echo $?; set -e")) == "42\n"
    assert driver.run("[[ a == b ]] && echo never").code == 1
    assert good(driver.run("echo $? $-")).startswith("1 e")


def test_a_run_looks_like_a_script_called_bash(driver: Driver) -> None:
    code = 'echo "$0 $# ${BASH_SOURCE[0]} $BASH_SUBSHELL $(($$ == BASHPID)) $LINENO"\necho $LINENO'
    assert good(driver.run(code)) == "bash 0 bash 0 1 1\n2\n"
    assert driver.run("exit 1").code == 1
    assert good(driver.run(code)) == "bash 0 bash 0 1 1\n2\n"


def test_errors_name_the_line_of_the_code(driver: Driver) -> None:
    run = driver.run("f() {\n  nosuch1\n}\nf\ncd /nonexistent\n\nnosuch2")
    assert ended(run) == (
        127,
        "",
        "bash: line 2: nosuch1: command not found\n"
        "bash: line 5: cd: /nonexistent: No such file or directory\n"
        "bash: line 7: nosuch2: command not found\n",
    )


@pytest.mark.parametrize(
    ("code", "out", "message"),
    [
        ('echo "abc', "", "unexpected EOF"),
        ("echo a\nif true; then echo x", "a\n", "unexpected end of file"),
        ("echo a\ndone\necho b", "a\n", "line 2: syntax error near unexpected token `done'"),
        ("set -e\necho a\n}", "a\n", "line 3: syntax error near unexpected token `}'"),
        ("echo a && ", "", "unexpected end of file"),
        ("f( {", "", "line 1: syntax error"),
        ("case x in", "", "unexpected end of file"),
    ],
)
def test_a_syntax_error_is_an_error_of_the_run(driver: Driver, code: str, out: str, message: str) -> None:
    run = driver.run(f"{code}")
    assert run.code in (1, 2), run
    assert run.stdout.decode() == out
    assert message in run.stderr.decode()
    assert "__hutch" not in run.stderr.decode()
    assert driver.run("echo alive").stdout == b"alive\n"


def test_an_unfinished_here_document_ends_with_the_code(driver: Driver) -> None:
    run = driver.run("cat <<END\nhello")
    assert (run.code, run.stdout) in [(0, b"hello"), (0, b"hello\n")]
    assert b"delimited by end-of-file" in run.stderr


def test_words_that_belong_into_loops_do_not_end_the_session(driver: Driver) -> None:
    run = driver.run(
        "x=1; break; echo a; continue 3; echo b; return 4; echo c; for i in 1 2; do break 9; done; echo $i"
    )
    assert (run.code, run.stdout) == (0, b"a\nb\nc\n1\n")
    assert run.stderr.count(b"only meaningful in a") == 2
    driver.run("word=break")
    assert b"only meaningful in a" in driver.run("eval $word; eval $word").stderr
    assert good(driver.run("echo $x")) == "1\n"


# ---- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("exit 3", 3),
        ("exit 256", 0),
        ("false; exit", 1),
        ("f() { local x=2 y=3; exit 4; }; f", 4),
        ("g() { local x=3; f; }; f() { local x=2 y=3; builtin exit 5; }; g >/dev/null", 5),
        ("echo 'x=1; exit 6' >lib; source ./lib", 6),
        ("set -e; f() { local x=2 y=1; false; echo never; }; f >/dev/null", 1),
        ("set -u; f() { local x=2 y=1; echo $nope; }; f", 1),
        ("set -eu; f() { local x=2 y=1; echo $nope; }; f >/dev/null", 1),
        ("f() { local x=2 y=1; : ${nope:?message}; }; f", 1),
        ("while read line; do exit 7; done </etc/passwd", 7),
        ("eval 'eval \"exit 8\"'", 8),
        ("exec nosuchprogram", 127),
        ("set -o posix; exit 9", 9),
        ("kill -INT $$", 130),
    ],
)
def test_what_ends_a_shell_ends_the_run_only(driver: Driver, code: str, status: int) -> None:
    good(driver.run("x=1; keep() { echo kept; }; exec 9>nine"))
    run = driver.run(f"{code}\necho not reached")
    assert run.code == status, run
    assert b"not reached" not in run.stdout
    assert b"__hutch" not in run.stderr
    assert good(driver.run("set +eu +o posix; keep; echo $x ${y-none}; echo 9 >&9; cat nine")) == "kept\n1 none\n9\n"


def test_what_ends_a_subshell_ends_the_subshell_only(driver: Driver) -> None:
    good(driver.run("f() { exit 4; }"))
    run = driver.run(
        "(exit 3); echo $?; x=$(echo a; f); echo $? $x; f | cat; f & wait $!; echo $?; (trap 'echo t' EXIT; f)"
    )
    assert ended(run) == (4, "3\n4 a\n4\nt\n", "")


def test_complaints_about_exit_are_those_of_bash(driver: Driver) -> None:
    assert ended(driver.run("exit 1 2; echo on")) == (1, "", "bash: line 1: exit: too many arguments\n")
    assert ended(driver.run("exit abc")) == (2, "", "bash: line 1: exit: abc: numeric argument required\n")


def test_options_persist_and_stay_in_force(driver: Driver) -> None:
    assert driver.run("set -euo pipefail; false; echo never").code == 1
    assert driver.run("echo one; false | true; echo never").stdout == b"one\n"
    assert driver.run("echo $nope").code == 1
    assert good(driver.run("set +euo pipefail; false; echo $nope; echo on")) == "\non\n"
    assert good(driver.run("set -aC; v=1")) == ""
    assert good(driver.run("w=2; env | grep -E '^(v|w|__hutch)' | sort; exec 8>new")) == "v=1\nw=2\n"
    assert driver.run("exit 2").code == 2
    assert driver.run("env | grep -cE '^(v|w|__hutch)'; : >new").stdout == b"2\n"


def test_a_trace_shows_the_code_and_nothing_else(driver: Driver) -> None:
    assert ended(driver.run("set -x; : one")) == (0, "", "++ : one\n")
    assert ended(driver.run(": two\nexit 3")) == (3, "", "++ : two\n++ exit 3\n")
    assert ended(driver.run("set +x")) == (0, "", "++ set +x\n")


def test_output_that_was_redirected_comes_back_with_an_exit(driver: Driver) -> None:
    assert driver.run("exec >file 2>&1; echo hidden").stdout == b""
    assert driver.run("echo hidden; exit 1").stdout == b""
    assert good(driver.run("echo shown; cat file")) == "shown\nhidden\nhidden\n"


def test_names_of_user_code_are_in_nobodys_way(driver: Driver) -> None:
    names = "rest flags action name signal found text line status base i n token code phase"
    good(driver.run(f"readonly {names.replace(' ', '=1 ')}=1; readonly IFS; alias eval=false builtin=false"))
    good(driver.run('cd() { builtin cd "$@"; }; printf() { :; }; declare() { :; }; eval() { :; }; read() { :; }'))
    assert driver.run("trap 'echo bye' EXIT; exit 3").stdout == b"bye\n"
    assert good(driver.run("echo $rest; \\builtin printf ok")) == "1\nok"


def test_deep_and_odd_options_do_not_disturb_the_driver(driver: Driver) -> None:
    good(
        driver.run(
            "set -fhPTE +B; shopt -s failglob nocasematch extdebug localvar_inherit 2>/dev/null; TMOUT=1; CDPATH=/"
        )
    )
    assert good(driver.run("echo *[x]*")) == "*[x]*\n"
    assert driver.run("exit 3").code == 3
    assert good(driver.run("echo $- | grep -c 'f.*T'; cd; pwd")).startswith("1\n")


# ---- traps ----------------------------------------------------------------------------------------------------------


def test_the_trap_for_exit_runs_at_exit_and_not_at_the_end_of_a_run(driver: Driver) -> None:
    assert good(driver.run("trap 'echo bye $?' EXIT")) == ""
    assert good(driver.run("trap -p; trap -p EXIT")) == "trap -- 'echo bye $?' EXIT\n" * 2
    assert ended(driver.run("exit 5")) == (5, "bye 5\n", "")
    assert ended(driver.run("trap -p; exit 6")) == (6, "", "")
    good(driver.run("trap 'echo bye' 0; trap - exit"))
    assert ended(driver.run("exit 7")) == (7, "", "")


@pytest.mark.parametrize(
    ("code", "status", "out"),
    [
        ("trap 'echo c; exit 9; echo no' EXIT; exit 1", 9, "c\n"),
        ("c() { local rc=$?; echo $rc; exit $rc; }; trap c EXIT; set -e; f() { local x=2; false; }; f", 1, "1\n"),
        ("set -eu; trap 'false; echo $nope on' EXIT; exit 4", 4, "on\n"),
        ("trap 'jobs -p | wc -l; kill %1' EXIT; sleep 100 & exit 2", 2, "1\n"),
        ("trap 'echo in; read line; echo $line' EXIT; exec 0<<<text; exit 2", 2, "in\ntext\n"),
    ],
)
def test_a_trap_for_exit_may_do_anything(driver: Driver, code: str, status: int, out: str) -> None:
    good(driver.run("x=1"))
    run = driver.run(code)
    assert (run.code, run.stdout.decode()) == (status, out), run
    assert good(driver.run("set +eu; echo $x; trap -p")) == "1\n"


def test_traps_for_code_see_the_code_of_the_user_only(driver: Driver) -> None:
    assert good(driver.run("trap 'echo debug $BASH_COMMAND' DEBUG; echo one")) == "debug echo one\none\n"
    assert good(driver.run("echo two")) == "debug echo two\ntwo\n"
    assert driver.run("exit 3").stdout == b"debug exit 3\n"
    assert good(driver.run("trap - DEBUG")) == "debug trap - DEBUG\n"
    assert driver.run("trap 'echo err $LINENO' ERR\nfalse\nfalse").stdout == b"err 2\nerr 3\n"
    assert driver.run("trap -p ERR; false").stdout == b"trap -- 'echo err $LINENO' ERR\nerr 1\n"
    assert driver.run("trap - ERR; false").stdout == b""
    code = (
        "f() { local t=5; trap 'echo gone $t' RETURN; echo in; }; f; echo out; trap - RETURN; f; trap - RETURN; trap -p"
    )
    assert good(driver.run(code)) == "in\ngone 5\nout\nin\ngone 5\n"


def test_traps_for_signals_work_and_are_listed(driver: Driver) -> None:
    assert good(driver.run("trap 'echo got $x' TERM HUP; x=1; kill $$; kill -HUP $$; echo on")) == "got 1\ngot 1\non\n"
    assert driver.run("trap '' USR1; exit 1").code == 1
    listed = "trap -- 'echo got $x' SIGHUP\ntrap -- '' SIGUSR1\ntrap -- 'echo got $x' SIGTERM\n"
    assert good(driver.run('trap; kill -USR1 $$; echo "$(trap -p TERM)"')) == listed + listed.splitlines()[2] + "\n"
    assert good(driver.run("trap - USR1 TERM; trap 'echo usr1' USR1; kill -USR1 $$")) == "usr1\n"
    assert b"invalid signal" in driver.run("trap x NOSUCH").stderr


# ---- interrupts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "f() { local x=2; echo going; while true; do :; done; }; f",
        "sh -c 'echo going; exec sleep 100'; echo never",
        "mkfifo fifo; sh -c 'echo going; exec cat fifo'; echo never",
        "sh -c 'echo going; exec sleep 100' | cat | cat; echo never",
        "sleep 100 & echo going; wait; echo never",
        "y=$(sh -c 'echo going >/proc/$PPID/fd/2; exec sleep 100'); echo never",
        "sh -c 'trap \"exit 0\" INT; echo going; while :; do :; done'; echo never",
        "(echo going; while :; do :; done); echo never",
        "mkfifo fifo; exec 4<>fifo; echo going; read line <&4; echo never",
        "set -e; { sh -c 'echo going; exec sleep 100'; } 2>/dev/null || echo never",
    ],
)
def test_an_interrupt_ends_the_run_and_keeps_the_state(driver: Driver, code: str) -> None:
    good(driver.run("x=1; keep() { echo kept; }; trap 'echo exit' EXIT"))
    run = interrupted(driver, code)
    assert (run.code, run.stdout + run.stderr) == (130, b"going\n"), run
    assert good(driver.run("echo $? $x; keep; trap -p")) == "130 1\nkept\ntrap -- 'echo exit' EXIT\n"


def test_an_interrupt_of_an_idle_shell_changes_nothing(driver: Driver) -> None:
    good(driver.run("trap 'echo got' INT"))
    driver.interrupt()
    assert good(driver.run("trap -p")) == "trap -- 'echo got' SIGINT\n"
    good(driver.run("trap - INT"))
    driver.interrupt()
    driver.interrupt()
    assert good(driver.run("echo alive; trap -p")) == "alive\n"


def test_a_trap_of_the_user_takes_the_interrupt(driver: Driver) -> None:
    good(driver.run("trap 'echo got' INT"))
    run = interrupted(driver, "sh -c 'echo going; exec sleep 100'; echo on")
    assert (run.code, run.stdout) == (0, b"going\ngot\non\n")
    assert driver.run("exit 3").code == 3
    run = interrupted(driver, "trap 'echo last; exit 9' INT; sh -c 'echo going; exec sleep 100'; echo on")
    assert (run.code, run.stdout) == (9, b"going\nlast\n")
    run = interrupted(driver, "trap - INT; sh -c 'echo going; exec sleep 100'; echo on")
    assert (run.code, run.stdout) == (130, b"going\n")


def test_programs_get_signals_as_they_ought_to_be(driver: Driver) -> None:
    code = "grep -E 'Sig(Blk|Ign|Cgt)' /proc/self/status"
    first = good(driver.run(code))
    for line in first.splitlines():
        assert int(line.split()[1], 16) & 0x4002 == 0, line
    assert driver.run("exit 1").code == 1
    assert good(driver.run(code)) == first


# ---- descriptors and input ------------------------------------------------------------------------------------------


def open_descriptors(driver: Driver) -> list[str]:
    return re.findall(r" (\d+) -> (?!/proc)", good(driver.run("ls -l /proc/self/fd")))


def test_programs_inherit_nothing_of_the_driver(driver: Driver) -> None:
    assert open_descriptors(driver) == ["0", "1", "2"]
    assert driver.run("exit 1").code == 1
    assert driver.run("set -eu; f() { echo $nope; }; f").code == 1
    assert driver.run("set +eu; f() { builtin exit 2; }; f").code == 2
    assert open_descriptors(driver) == ["0", "1", "2"]
    assert interrupted(driver, "sh -c 'echo going; exec sleep 100'").code == 130
    assert open_descriptors(driver) == ["0", "1", "2"]


def test_user_code_may_use_every_small_descriptor(driver: Driver) -> None:
    every = " ".join(f"{fd}>&-" for fd in range(3, 64))
    good(driver.run(f"exec {every}; exec 3>three 4</dev/null 5>&3 10>ten 11>&10"))
    assert driver.run("echo 3 >&5; echo 10 >&11; exit 1").code == 1
    assert good(driver.run(f"echo 3 >&3; echo 10 >&10; cat three ten; exec {every}")) == "3\n3\n10\n10\n"
    assert good(driver.run("echo alive")) == "alive\n"


def test_with_few_descriptors_the_driver_takes_lower_ones(argv: list[str], tmp_path: Path) -> None:
    limited = ["/bin/sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *argv]
    with Driver(limited, tmp_path) as driver:
        assert good(driver.run("x=1; ulimit -n")) == "64\n"
        assert driver.run("exit 3").code == 3
        assert good(driver.run("echo $x")) == "1\n"


def test_each_run_has_its_own_input(driver: Driver) -> None:
    assert good(driver.run("read a; echo [$a]; cat", b"one\ntwo\nthree")) == "[one]\ntwo\nthree"
    assert good(driver.run("cat; read b || echo end")) == "end\n"
    assert good(driver.run("head -c 1; cat; exec 0</dev/zero", b"xyz")) == "xyz"
    assert driver.run("cat; exit 2", b"after").stdout == b"after"
    assert good(driver.run("wc -c", b"q" * 3_000_000)).strip() == "3000000"


def test_output_may_be_anything_and_much(driver: Driver) -> None:
    assert driver.run(r"printf '\000\001\377\n'").stdout == b"\0\1\xff\n"
    assert len(driver.run("head -c 10000000 /dev/zero; printf x").stdout) == 10_000_001


def test_much_code_is_read_in_blocks(driver: Driver) -> None:
    began = time.monotonic()
    assert good(driver.run("x='" + "é" * 2_500_000 + "'; echo ${#x}")) == "2500000\n"
    assert good(driver.run(":\n" * 300_000 + "echo $LINENO")) == "300001\n"
    assert time.monotonic() - began < 30
    assert good(driver.run("")) == ""


# ---- background -----------------------------------------------------------------------------------------------------


def test_what_runs_in_the_background_goes_on_between_runs(driver: Driver) -> None:
    good(driver.run("mkfifo fifo; sleep 100 & first=$!; { read line <fifo; echo late $line; } &"))
    assert "sleep 100" in good(driver.run("jobs; echo x >fifo; wait $!"))
    assert good(driver.run("kill %1; wait $first; echo $?")) == "143\n"


def test_what_runs_in_the_background_survives_an_exit(driver: Driver) -> None:
    assert driver.run("sleep 100 & job=$!; exit 3").code == 3
    assert good(driver.run("kill -0 $job && echo lives; kill $job")) == "lives\n"


def test_a_shell_that_is_replaced_is_gone(driver: Driver) -> None:
    run = driver.run("exec echo replaced")
    assert (run.code, run.stdout, run.died) == (None, b"replaced\n", 0)


@pytest.mark.parametrize(
    ("code", "died"), [("kill $$", 15), ("trap 'echo bye' EXIT; kill -HUP $$", 1), ("kill -9 $$", 9)]
)
def test_a_shell_that_is_killed_is_gone(driver: Driver, code: str, died: int) -> None:
    run = driver.run(f"{code}; echo never")
    assert (run.code, run.died) == (None, died)
    assert run.stdout == (b"bye\n" if "bye" in code else b"")


def test_an_idle_shell_that_is_killed_is_gone(driver: Driver) -> None:
    good(driver.run("x=1"))
    os.kill(driver.pid, signal.SIGTERM)
    driver.start("echo never")
    assert driver.finish() == Run(None, b"", b"", signal.SIGTERM)


def test_the_driver_ends_with_its_host(driver: Driver) -> None:
    good(driver.run("trap 'echo never' EXIT; echo x"))
    assert driver.hang_up() == 0
    assert driver.printed() == (b"", b"")


# ---- once -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status", "out", "err"),
    [
        ("echo $0 $# $(($$ == BASHPID)) $BASH_SUBSHELL; type -t exit trap; pwd -P | grep -c workspace", 0,
         "bash 0 1 0\nbuiltin\nbuiltin\n1\n", ""),
        ("trap 'echo bye; exit 4' EXIT; exit 3", 4, "bye\n", ""),
        ("set -e; trap 'echo err' ERR\nfalse", 1, "err\n", ""),
        ("trap 'echo got' TERM; kill $$; echo on", 0, "got\non\n", ""),
        ("echo a; kill -9 $$", 137, "a\n", ""),
        ("f() { nosuch; }\nf", 127, "", "bash: line 1: nosuch: command not found\n"),
        ("echo a\nfi", 2, "a\n", "bash: line 2: syntax error near unexpected token `fi'\nbash: line 2: `fi'\n"),
        ("cat; read x; (exit $?)", 1, "input", ""),
        ("sleep 100 & echo $((2 + 2))", 0, "4\n", ""),
        ("exec sh -c 'exit 12'", 12, "", ""),
    ],
)  # fmt: skip
def test_the_only_run_is_a_script(driver: Driver, code: str, status: int, out: str, err: str) -> None:
    assert ended(driver.run(code, b"input", "once")) == (status, out, err)


def test_the_only_run_can_be_interrupted(driver: Driver) -> None:
    driver.start("trap 'echo exit' EXIT; sh -c 'echo going; exec sleep 100'; echo never", flags="once")
    driver.wait_for(b"going\n")
    driver.interrupt()
    run = driver.finish()
    assert (run.code, run.stdout) == (130, b"going\nexit\n")

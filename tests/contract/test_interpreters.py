"""Interpreters that stay: what a run leaves to the next, and how each kind of end is told."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from hutch import AsyncSandbox, Sandbox

from .harness import need
from .live_harness import Caller, error_of, outcome

# One table a language: the name of a claim, the runs, and what the last of them must print or end with.
PYTHON: dict[str, tuple[list[str], object]] = {
    "names persist": (["x = 1", "def f(): return x + 1", "class C: y = f()", "print(x, f(), C.y)"], "1 2 2\n"),
    "functions see what is defined later": (["def f(): return g()", "def g(): return 3", "print(f())"], "3\n"),
    "globals that change are seen": (["n = 1\ndef f(): return n", "n = 2", "print(f())"], "2\n"),
    "imports persist": (["import json, os.path as p", "print(json.dumps([p.sep]))"], '["/"]\n'),
    "open files persist": (["f = open('log', 'w+')", "f.write('abc')", "f.seek(0); print(f.read())"], "abc\n"),
    "the directory persists": (["import os; os.mkdir('d'); os.chdir('d')", "print(os.getcwd())"], "/workspace/d\n"),
    "variables persist": (["import os; os.environ['A'] = '1'", "print(os.popen('echo $A').read())"], "1\n\n"),
    "threads persist": (
        [
            "import threading, time; e = threading.Event(); t = threading.Thread(target=e.wait); t.start()",
            "e.set(); t.join(); print(1)",
        ],
        "1\n",
    ),
    "modules of the workspace can be imported": (
        ["open('mod.py', 'w').write('v = 5')", "import mod; print(mod.v)"],
        "5\n",
    ),
    "await works at the top": (
        ["import asyncio", "await asyncio.sleep(0)\nprint(await asyncio.gather(asyncio.sleep(0, 4)))"],
        "[4]\n",
    ),
    "tasks persist": (
        [
            "import asyncio\nasync def f(): await asyncio.sleep(0); return 6\nt = asyncio.create_task(f()); await f()",
            "print(await t)",
        ],
        "6\n",
    ),
    "decorators, generators and comprehensions see globals": (
        ["k = 2", "print([k * i for i in range(3)], *(k for _ in 'a'))"],
        "[0, 2, 4] 2\n",
    ),
    "main is main": (
        ["class A: pass", "print(__name__, A.__module__, __import__('__main__').A is A)"],
        "__main__ __main__ True\n",
    ),
    "pickles of own classes work": (
        ["class A: pass", "import pickle; print(type(pickle.loads(pickle.dumps(A()))) is A)"],
        "True\n",
    ),
    "dataclasses and annotations work": (
        ["from dataclasses import dataclass", "@dataclass\nclass P:\n    x: int\nprint(P(1))"],
        "P(x=1)\n",
    ),
    "future imports persist": (
        ["from __future__ import annotations", "def f(x: nothing): pass\nprint(f.__annotations__)"],
        "{'x': 'nothing'}\n",
    ),
    "programs print on the same streams": (
        ["import subprocess, os", "os.write(1, b'a'); subprocess.run(['echo', 'b']); print('c')"],
        "ab\nc\n",
    ),
    "an error leaves the names": (["x = 1", "y = 2; 1 / 0", "print(x, y)"], "1 2\n"),
    "a syntax error runs nothing": (["x = 1", "x = 2\nthis is not", "print(x)"], "1\n"),
    "sys.exit leaves the names": (["x = 1", "import sys; sys.exit(3)", "print(x)"], "1\n"),
    "multiprocessing works": (
        [
            "import multiprocessing as m\ndef f(n): return n * n",
            "with m.get_context('fork').Pool(2) as p: print(p.map(f, [1, 2, 3]))",
        ],
        "[1, 4, 9]\n",
    ),
    "ten megabytes of code are code": ([f"s = '{'x' * 10_000_000}'", "print(len(s))"], "10000000\n"),
    "ten thousand lines are code": (["\n".join(f"a{n} = {n}" for n in range(10_000)), "print(a9999)"], "9999\n"),
    "no code is code": (["", "print(1)"], "1\n"),
    "letters of all kinds are code": (["ü = 'é😀'", "print(ü)"], "é😀\n"),
    "recursion is an error and no death": (["x = 1\ndef f(): f()", "f()", "print(x)"], "1\n"),
    "input() is the end of input": (["try: input()\nexcept EOFError: print('end')"], "end\n"),
}
BASH: dict[str, tuple[list[str], object]] = {
    "variables persist": (["a=1", "export b=2", "echo $a $b $(printenv b)"], "1 2 2\n"),
    "arrays persist": (["a=(1 2 3); declare -A m=([k]=v)", 'echo "${a[1]} ${m[k]}"'], "2 v\n"),
    "functions persist": (["f() { echo f$1; }", "f 1"], "f1\n"),
    "aliases persist": (["shopt -s expand_aliases; alias hi='echo hello'", "hi"], "hello\n"),
    "the directory persists": (["mkdir d; cd d", "pwd"], "/workspace/d\n"),
    "options persist": (["set -u; shopt -s nullglob", "shopt -q nullglob && [[ $- == *u* ]] && echo yes"], "yes\n"),
    "the last code is there": (["false", "echo $?"], "1\n"),
    "set -e ends the run and not the session": (["a=1", "set -e; false; echo never", "set +e; echo $a"], "1\n"),
    "exit ends the run and not the session": (["a=1", "exit 3; echo never", "echo $a"], "1\n"),
    "traps work": (["trap 'echo caught' USR1", "kill -USR1 $$; sleep 0.1"], "caught\n"),
    "here documents work": (["a=x", "cat <<E\n$a\n'q'\nE"], "x\n'q'\n"),
    "quotes that do not end are an error and no end": (["a=1", "echo 'x", "echo $a"], "1\n"),
    "jobs live on": (["sleep 100 & echo begun", "jobs -r | wc -l; kill %1"], "1\n"),
    "output that is no text is passed on": ([r"printf 'a\377b\n'"], "a\ufffdb\n"),
    "lines that continue are one": (["echo a \\\n b"], "a b\n"),
    "comments and empty code are nothing": (["", "# nothing", "echo 1"], "1\n"),
    "read meets the end of input": (["read x || echo end"], "end\n"),
    "substitutions work": (["echo $(echo a $(echo b)) <(true) | cut -d' ' -f1,2"], "a b\n"),
    "a syntax error names it and goes on": (["a=1", "if then", "echo $a"], "1\n"),
}
NODE: dict[str, tuple[list[str], object]] = {
    "names persist": (
        ["const x = 1; let y = 2; var z = 3; function f() { return x + y + z }", "console.log(f())"],
        "6\n",
    ),
    "let, const and class can be declared again": (
        [
            "let a = 1; const b = 1; class C {}",
            "let a = 2; const b = 2; class C { static v = 3 }",
            "console.log(a, b, C.v)",
        ],
        "2 2 3\n",
    ),
    "await works at the top": (
        ["const r = await Promise.resolve(4)", "console.log(r, await new Promise(d => setTimeout(() => d(5), 5)))"],
        "4 5\n",
    ),
    "require works": (
        ["const path = require('path')", "console.log(path.sep, require('fs').existsSync('/workspace'))"],
        "/ true\n",
    ),
    "import() works": (["const os = await import('os')", "console.log(typeof os.cpus)"], "function\n"),
    "modules of the workspace can be required": (
        [
            "require('fs').writeFileSync('/workspace/m.js', 'exports.v = 7')",
            "console.log(require('/workspace/m.js').v)",
        ],
        "7\n",
    ),
    "an error leaves the names": (["let x = 1", "throw new Error('oops')", "console.log(x)"], "1\n"),
    "a syntax error runs nothing": (["let x = 1", "x = 2; this is not", "console.log(x)"], "1\n"),
    "process.exit ends the run": (["let x = 1", "process.exit(3)", "console.log(typeof x)"], None),
    "timers do not hold the run": (["setTimeout(() => {}, 1e6); setInterval(() => {}, 1e6)", "console.log(1)"], "1\n"),
    "much output arrives whole": (
        ["console.log('x'.repeat(300000).length)", "process.stdout.write('y'.repeat(300000))"],
        "y" * 300_000,
    ),
    "letters of all kinds are code": (["const ü = 'é😀'", "console.log(ü)"], "é😀\n"),
}
CLAIMS = [
    (language, name, *claim)
    for language, table in (("python", PYTHON), ("bash", BASH), ("node", NODE))
    for name, claim in table.items()
]


@pytest.mark.parametrize(
    ("language", "runs", "expected"), [(c[0], *c[2:]) for c in CLAIMS], ids=[f"{c[0]}, {c[1]}" for c in CLAIMS]
)
def test_a_language_at_its_prompt(caller: Caller, language: str, runs: list[str], expected: str | None) -> None:
    if language == "node":
        need("node")

    def claim(language: str, runs: list[str]) -> object:
        with Sandbox() as box:
            results = [box.run(code, interpreter=language, timeout_seconds=20) for code in runs]
            return results[-1].stdout, results[-1].stderr, outcome(results[-1])

    said, complaint, word = caller(claim, language, runs)
    assert (said, word) == (expected if expected is not None else said, "ok"), complaint


# language, code: exit code, and a part of what it says on standard error
ENDINGS = [
    ("python", "exit(5)", 5, ""),
    ("python", "import sys; sys.exit()", 0, ""),
    ("python", "import sys; sys.exit('text')", 1, "text\n"),
    ("python", "raise SystemExit(300)", 44, ""),
    ("python", "1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ("python", "raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
    ("python", "def f(): f()\nf()", 1, "RecursionError"),
    ("python", "x = (", 1, "SyntaxError"),
    ("python", "await 1", 1, "TypeError"),
    ("python", "import nothing_of_that_name", 1, "ModuleNotFoundError"),
    ("bash", "exit 3", 3, ""),
    ("bash", "false", 1, ""),
    ("bash", "no-such-command", 127, "no-such-command"),
    ("bash", "echo 'x", 2, "unexpected EOF"),
    ("bash", "set -e; (exit 9); echo never", 9, ""),
    ("bash", "return 4", None, ""),
    ("node", "throw new Error('oops')", 1, "Error: oops"),
    ("node", "await Promise.reject(new Error('later'))", 1, "Error: later"),
    ("node", "Promise.reject(new Error('nobody waits')); await new Promise(d => setTimeout(d, 50))", 1, "nobody waits"),
    (
        "node",
        "setTimeout(() => { throw new Error('in a timer') }, 1); await new Promise(d => setTimeout(d, 200))",
        1,
        "in a timer",
    ),
    ("node", "process.exit(7)", 7, ""),
    ("node", "nothing()", 1, "ReferenceError"),
    ("node", "let x = (", 1, "SyntaxError"),
]


@pytest.mark.parametrize(
    ("language", "code", "exit_code", "said"), ENDINGS, ids=[f"{e[0]}, {e[1][:40]}" for e in ENDINGS]
)
def test_how_a_run_ended_is_told(caller: Caller, language: str, code: str, exit_code: int | None, said: str) -> None:
    if language == "node":
        need("node")

    def claim(language: str, code: str) -> object:
        with Sandbox() as box:
            result = box.run(code, interpreter=language, timeout_seconds=20)
            after = box.run(
                {"python": "print(1)", "bash": "echo 1", "node": "console.log(1)"}[language], interpreter=language
            )
            return result.exit_code, result.stderr, outcome(result), result.signal, after.stdout

    found, complaint, word, signal_name, after = caller(claim, language, code)
    if exit_code is not None:
        assert found == exit_code, complaint
        assert word == ("ok" if exit_code == 0 else "failed")
    assert signal_name is None
    assert said in complaint
    assert after == "1\n"


# language, code that ends the process itself: exit code or signal
DEATHS = [
    ("python", "import os; os._exit(9)", 9),
    ("python", "import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    ("python", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    ("python", "import os; os.abort()", "SIGABRT"),
    ("python", "import os; os.execvp('sh', ['sh', '-c', 'exit 6'])", 6),
    ("bash", "kill -9 $$", "SIGKILL"),
    ("bash", "exec sh -c 'exit 6'", 6),
    ("node", "process.abort()", "SIGABRT"),
    ("node", "process.kill(process.pid, 'SIGKILL'); await new Promise(() => {})", "SIGKILL"),
]


@pytest.mark.parametrize(("language", "code", "end"), DEATHS, ids=[f"{d[0]}, {d[1][:40]}" for d in DEATHS])
def test_an_interpreter_that_died_is_started_again_and_that_is_told(
    caller: Caller, language: str, code: str, end: object
) -> None:
    if language == "node":
        need("node")

    def claim(language: str, code: str) -> object:
        one = {"python": "print(1)", "bash": "echo 1", "node": "console.log(1)"}[language]
        with Sandbox() as box:
            before = box.run(one, interpreter=language)
            result = box.run(code, interpreter=language, timeout_seconds=20)
            after, later = box.run(one, interpreter=language), box.run(one, interpreter=language)
            ends = (result.exit_code, result.signal, outcome(result))
            return ends, before.state_lost, result.state_lost, after.state_lost, after.stdout, later.state_lost

    ends, *told = caller(claim, language, code)
    assert ends == ((end, None, "failed") if isinstance(end, int) else (None, end, "failed"))
    assert told == [False, True, True, "1\n", False]


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_a_traceback_shows_the_lines_of_the_user_and_no_others(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            box.run("def f(n):\n    return 1 / n\n")
            return box.run("x = 1\nf(\n    0)\n").stderr

    text = caller(claim)
    assert [line.strip() for line in text.splitlines()][0] == "Traceback (most recent call last):"
    assert "return 1 / n" in text
    assert "guest" not in text
    assert "exec(" not in text
    assert text.count("File ") == 2


@pytest.mark.parametrize("echo", [False, True])
def test_the_value_of_the_last_expression_is_shown_when_asked_for(caller: Caller, echo: bool) -> None:
    def claim(echo: bool) -> object:
        with Sandbox() as box:
            return box.run("x = 20\nx * 2 + 2", echo=echo).stdout, box.run("None", echo=echo).stdout

    assert caller(claim, echo) == ("42\n" if echo else "", "")


@pytest.mark.parametrize(("name", "code"), [("ruby", "host.interpreter"), ("", None)])
def test_an_interpreter_that_is_not_there_is_named(caller: Caller, name: str, code: str | None) -> None:
    def claim(name: str) -> object:
        with Sandbox() as box:
            if not name:
                return outcome(box.run("1", interpreter=name))
            return error_of(box.run, "1", interpreter=name), box.run("print(1)").stdout

    if code is None:
        assert caller(claim, name) == "ok"
        return
    (kind, found, message), after = caller(claim, name)
    assert (kind, found) == ("HostError", code)
    assert name in message
    assert after == "1\n"


@pytest.mark.parametrize("code", ["x\0y", "\ud800", "x" * (16 * 1024 * 1024 + 1)])
def test_what_cannot_be_code_is_refused_before_anything_runs(caller: Caller, code: str) -> None:
    def claim(code: str) -> object:
        with Sandbox() as box:
            return error_of(box.run, code)[0], box.run("print(1)").state_lost

    assert caller(claim, code) == ("SpecError", False)


# ---- input and output -----------------------------------------------------------------------------------------------

READERS = {
    "python": "import sys; print(len(sys.stdin.buffer.read()))",
    "bash": "wc -c",
    "node": "console.log(require('fs').readFileSync(0).length)",
}


@pytest.mark.parametrize("language", READERS)
def test_each_run_has_an_input_of_its_own(caller: Caller, language: str) -> None:
    if language == "node":
        need("node")

    def claim(language: str, code: str) -> object:
        with Sandbox() as box:
            inputs = (b"abc", b"", bytes(range(256)) * 4000, "ü")
            return [int(box.run(code, interpreter=language, stdin=data).stdout) for data in inputs]

    assert caller(claim, language, READERS[language]) == [3, 0, 1024000, 2]


def test_input_reads_lines_of_the_run(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            first = box.run("print(input() + input())", stdin="a\nb\n").stdout
            return first, box.run("print(input())", stdin="c").stdout, "EOFError" in box.run("input()").stderr

    assert caller(claim) == ("ab\n", "c\n", True)


def test_output_between_runs_belongs_to_the_next(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            code = "import threading, time\n"
            code += "def late(): time.sleep(0.2); print('late', flush=True); open('written', 'w')\n"
            code += "threading.Thread(target=late).start()"
            first = box.run(code)
            while not box.files.exists("written"):
                time.sleep(0.02)
            return first.stdout, box.run("print('own')").stdout, box.run("1").stdout

    assert caller(claim) == ("", "late\nown\n", "")


def test_a_flood_between_runs_neither_stops_its_writer_nor_fills_our_memory(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            box.run("import subprocess; subprocess.Popen('head -c 3000000 /dev/zero; touch written', shell=True)")
            while not box.files.exists("written"):
                time.sleep(0.02)
            result = box.run("print('own')")
            return len(result.stdout) < 300_000, result.stdout.endswith("own\n")

    assert caller(claim) == (True, True)


@pytest.mark.parametrize("language", ["python", "bash", "node"])
def test_a_flood_ends_the_run_and_the_next_one_is_told(caller: Caller, language: str) -> None:
    if language == "node":
        need("node")

    def claim(language: str) -> object:
        codes = {
            "python": "while True: print('x' * 9999)",
            "bash": "yes",
            "node": "while (true) console.log('x'.repeat(9999))",
        }
        one = {"python": "print(1)", "bash": "echo 1", "node": "console.log(1)"}
        with Sandbox(max_output_mb=1, keep_kb=16) as box:
            box.run(one[language], interpreter=language)
            result = box.run(codes[language], interpreter=language, timeout_seconds=30)
            after = box.run(one[language], interpreter=language)
            return outcome(result), result.truncated, len(result.stdout) < 20_000, result.state_lost, after.stdout

    assert caller(claim, language) == ("output", True, True, True, "1\n")


# ---- time -----------------------------------------------------------------------------------------------------------

ENDLESS = {"python": "while True: pass", "bash": "while :; do :; done", "node": "while (true);"}
ASLEEP = {
    "python": "import time; time.sleep(60)",
    "bash": "sleep 60",
    "node": "await new Promise(d => setTimeout(d, 60000))",
}
KEEP = {
    "python": ("kept = 7", "print(kept)"),
    "bash": ("kept=7", "echo $kept"),
    "node": ("let kept = 7", "console.log(kept)"),
}


@pytest.mark.parametrize("language", KEEP)
@pytest.mark.parametrize("codes", [ENDLESS, ASLEEP], ids=["endless", "asleep"])
def test_at_its_time_a_run_is_interrupted_and_the_state_is_kept(
    caller: Caller, language: str, codes: dict[str, str]
) -> None:
    if language == "node":
        need("node")

    def claim(language: str, keep: str, code: str, show: str) -> object:
        with Sandbox() as box:
            box.run(keep, interpreter=language)
            started = time.monotonic()
            result = box.run(code, interpreter=language, timeout_seconds=0.5)
            took = time.monotonic() - started
            after = box.run(show, interpreter=language)
            return outcome(result), result.state_lost, took < 20, after.stdout, after.state_lost

    keep, show = KEEP[language]
    assert caller(claim, language, keep, codes[language], show) == ("timeout", False, True, "7\n", False)


def test_whoever_ignores_the_interrupt_is_killed_and_that_is_told(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            box.run("kept = 7")
            code = "import time\nwhile True:\n    try: time.sleep(60)\n    except KeyboardInterrupt: pass"
            result = box.run(code, timeout_seconds=0.3)
            after = box.run("print('kept' in globals())")
            return outcome(result), result.state_lost, after.stdout, after.state_lost

    assert caller(claim) == ("timeout", True, "False\n", True)


def test_the_children_of_a_run_end_with_it_at_its_time(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            result = box.run("import subprocess; subprocess.run(['sleep', '306'])", timeout_seconds=0.5)
            return outcome(result), [one for one in box.processes() if "306" in one["argv"]]

    assert caller(claim) == ("timeout", [])


def test_an_interrupt_ends_what_runs_and_nothing_else(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            box.run("kept = 7")
            idle = box.interrupt()
            found: list[object] = []
            thread = threading.Thread(
                target=lambda: found.append(box.run("open('begun', 'w'); import time; time.sleep(60)"))
            )
            thread.start()
            while not box.files.exists("begun"):
                time.sleep(0.02)
            sent = box.interrupt()
            thread.join(20)
            return idle, sent, found[0].exit_code, outcome(found[0]), box.run("print(kept)").stdout

    assert caller(claim) == (False, True, 130, "failed", "7\n")


def test_an_interrupt_that_comes_late_meets_no_other_run(caller: Caller) -> None:
    """A run whose time is over in the very moment in which it ends must not take the next one along."""

    def claim() -> object:
        spoilt = []
        with Sandbox() as box:
            box.run("import time; kept = 7")
            for number in range(40):
                box.run("time.sleep(0.01)", timeout_seconds=0.0105 + 0.0001 * (number % 10))
                after = box.run("print(kept)")
                if after.stdout != "7\n" and not after.state_lost:
                    spoilt.append((after.stdout, after.stderr[-200:], after.signal))
        return spoilt

    assert caller(claim) == []


def test_runs_cancelled_at_any_moment_leave_the_interpreter_usable(caller: Caller) -> None:
    def claim() -> object:
        import random

        async def cancelled() -> object:
            chance = random.Random(5)
            found = []
            async with AsyncSandbox() as box:
                await box.run("import time; kept = 7")
                for number in range(30):
                    waiting = asyncio.ensure_future(box.run(f"time.sleep({number % 3 * 0.004})"))
                    await asyncio.sleep(chance.random() * 0.008)
                    waiting.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await waiting
                    result = await box.run("print(kept)")
                    found.append((result.stdout, result.state_lost, result.stderr))
            return set(found)

        return asyncio.run(cancelled())

    assert caller(claim) == {("7\n", False, "")}


def test_a_run_that_is_cancelled_twice_is_still_over_before_the_next(caller: Caller) -> None:
    def claim() -> object:
        async def cancelled() -> object:
            async with AsyncSandbox() as box:
                await box.run("import time; kept = 7")
                code = "try:\n    while True: time.sleep(60)\nexcept KeyboardInterrupt: time.sleep(0.3)"
                waiting = asyncio.ensure_future(box.run(code))
                await asyncio.sleep(0.3)
                waiting.cancel()
                await asyncio.sleep(0.05)
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
                result = await box.run("print(kept)")
                return result.stdout, result.state_lost

        return asyncio.run(cancelled())

    assert caller(claim) == ("7\n", False)


def test_a_run_that_nobody_waits_for_and_that_ignores_it_is_killed(caller: Caller) -> None:
    def claim() -> object:
        async def cancelled() -> object:
            async with AsyncSandbox() as box:
                await box.run("kept = 7")
                code = "import time\nwhile True:\n    try: time.sleep(60)\n    except KeyboardInterrupt: pass"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(box.run(code), 0.3)
                result = await box.run("print('kept' in globals())")
                return result.stdout, result.state_lost

        return asyncio.run(cancelled())

    assert caller(claim) == ("False\n", True)


# ---- side by side ---------------------------------------------------------------------------------------------------


def test_runs_of_one_interpreter_wait_for_each_other_in_order(caller: Caller) -> None:
    def claim() -> object:
        async def all_of_them() -> object:
            async with AsyncSandbox() as box:
                await box.run("order = []")
                await asyncio.gather(*(box.run(f"order.append({number})") for number in range(20)))
                return (await box.run("print(order == list(range(20)))")).stdout

        return asyncio.run(all_of_them())

    assert caller(claim) == "True\n"


def test_interpreters_go_side_by_side_in_one_workspace(caller: Caller) -> None:
    def claim() -> object:
        async def both() -> object:
            async with AsyncSandbox() as box:
                wait = "import os, time; open('from-python', 'w')\n"
                wait += "while not os.path.exists('from-bash'): time.sleep(0.01)\nprint('python')"
                other = "touch from-bash; while ! [ -e from-python ]; do sleep 0.01; done; echo bash"
                results = await asyncio.gather(
                    box.run(wait, timeout_seconds=20), box.run(other, interpreter="bash", timeout_seconds=20)
                )
                return [result.stdout for result in results]

        return asyncio.run(both())

    assert caller(claim) == ["python\n", "bash\n"]


def test_whoever_waited_for_a_run_that_took_the_sandbox_down_has_a_turn_in_the_next(caller: Caller) -> None:
    def claim() -> object:
        async def two() -> object:
            async with AsyncSandbox(memory_mb=100) as box:
                await box.run("kept = 7")
                hog = asyncio.ensure_future(box.run("data = b''\nwhile True: data += b'x' * 5_000_000"))
                waiting = [asyncio.ensure_future(box.run("print(6 * 7)")) for _ in range(3)]
                results = [await task for task in (hog, *waiting)]
                return [(outcome(result), result.stdout) for result in results], results[1].state_lost

        return asyncio.run(two())

    assert caller(claim) == ([("memory", ""), *[("ok", "42\n")] * 3], True)

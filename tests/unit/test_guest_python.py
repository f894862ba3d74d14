"""The Python driver on the real interpreter, without a sandbox: what a session keeps, and what a script cannot tell.

GUEST_PYTHONS, paths separated by colons, names other interpreters to try than the system's own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest_harness import Driver, Run

import hutch

GUEST = str(Path(hutch.__file__).parent / "guest")
BOOT = f"import sys; sys.path.insert(0, {GUEST!r}); import python; python.main()"
PYTHONS = os.environ.get("GUEST_PYTHONS", "/usr/bin/python3").split(":")
STARTS = {
    "imported, without site": ["-S", "-c", BOOT],
    "imported, with site": ["-c", BOOT],
    "script, without site": ["-S", f"{GUEST}/python.py"],
    "script, with site": [f"{GUEST}/python.py"],
}


@pytest.fixture(params=PYTHONS, scope="session")
def python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def version(python: str) -> tuple[int, int]:
    text = subprocess.check_output([python, "-S", "-c", "import sys; print(*sys.version_info[:2])"])
    major, minor = text.split()
    return int(major), int(minor)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tmp_path / "workspace")}


@pytest.fixture
def driver(python: str, env: dict[str, str], tmp_path: Path) -> Iterator[Driver]:
    with Driver([python, *STARTS["imported, without site"]], tmp_path, env=env) as driver:
        yield driver


def good(run: Run) -> str:
    """What a run printed that went well."""
    assert (run.code, run.stderr, run.died) == (0, b"", None), run
    return run.stdout.decode()


def interrupted(driver: Driver, code: str) -> Run:
    """A run that is interrupted once it has printed `going`."""
    driver.start(code)
    driver.wait_for(b"going\n")
    driver.interrupt()
    return driver.finish()


# ---- starting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", STARTS)
def test_every_way_to_start_gives_the_same_session(
    start: str, python: str, env: dict[str, str], tmp_path: Path
) -> None:
    code = "import sys\nprint(sys.argv, sys.path[0] == '', sys.flags.no_site, 'python' in sys.modules, exit)"
    with Driver([python, *STARTS[start]], tmp_path, env=env) as driver:
        assert good(driver.run("x = 6")) == ""
        assert good(driver.run("print(x * 7)")) == "42\n"
        assert good(driver.run(code)) == "[''] True 0 False Use exit() or Ctrl-D (i.e. EOF) to exit\n"
        assert GUEST not in good(driver.run("print(sys.path)"))
        assert driver.hang_up() == 0


def test_the_host_going_away_ends_the_driver(driver: Driver) -> None:
    good(driver.run("x = 1"))
    assert driver.hang_up() == 0


def test_a_driver_that_ends_itself_says_nothing(driver: Driver) -> None:
    run = driver.run("import os; print('last'); os._exit(9)")
    assert run == Run(None, b"last\n", b"", died=9 << 8)


# ---- what site adds -------------------------------------------------------------------------------------------------


def test_site_is_what_it_is_in_an_ordinary_start(
    driver: Driver, python: str, version: tuple[int, int], env: dict[str, str]
) -> None:
    packages = driver.home / ".local/lib" / "python{}.{}".format(*version) / "site-packages"
    packages.mkdir(parents=True)
    (packages / "elsewhere").mkdir()
    (packages / "added.pth").write_text("elsewhere\nimport sys; sys.from_pth = True\n")
    (packages / "usercustomize.py").write_text("import sys; sys.customized = list(sys.path)\n")
    code = textwrap.dedent("""
        import builtins, os, site, sys, sysconfig
        print(sys.path[1:], sys.from_pth, sys.customized, sys.prefix, sys.exec_prefix, sys.flags, tuple(sys.flags))
        print(sorted(vars(builtins)), site.ENABLE_USER_SITE, site.USER_SITE, hasattr(sys, "__interactivehook__"))
        print(exit, quit, help, sysconfig.get_paths())
    """)
    good(driver.run("before = 1"))
    ours = good(driver.run(code))
    assert str(packages / "elsewhere") in ours
    assert ours == plain(python, driver, code, env).stdout.decode()


def test_site_waits_for_the_first_code_that_can_tell(driver: Driver, version: tuple[int, int]) -> None:
    packages = driver.home / ".local/lib" / "python{}.{}".format(*version) / "site-packages"
    packages.mkdir(parents=True)
    (packages / "usercustomize.py").write_text("print('customized')\n")
    assert good(driver.run("class A:\n    def __init__(self): print('no need')\nA()")) == "no need\n"
    assert good(driver.run("import math")) == "customized\n"
    assert good(driver.run("import sys")) == ""


@pytest.mark.parametrize("name", ["exit", "quit", "help", "copyright", "credits", "license"])
def test_what_site_adds_to_the_builtins_is_there_at_once(name: str, driver: Driver) -> None:
    assert good(driver.run(f"print(type({name}).__name__)")) in ("Quitter\n", "_Helper\n", "_Printer\n")


def test_modules_come_from_the_working_directory(driver: Driver) -> None:
    (driver.workspace / "mine.py").write_text("value = 5")
    assert good(driver.run("import mine; print(mine.value)")) == "5\n"


# ---- the namespace --------------------------------------------------------------------------------------------------


def test_there_are_no_names_but_those_of_an_interactive_session(driver: Driver, python: str) -> None:
    ours = good(driver.run("print(sorted(globals()), __name__, __doc__, __package__, __spec__, __loader__)"))
    theirs = subprocess.check_output(
        [python, "-c", "print(sorted(globals()), __name__, __doc__, __package__, __spec__, __loader__)"], text=True
    )
    assert ours == theirs


def test_state_is_kept_and_functions_see_what_came_later(driver: Driver) -> None:
    good(driver.run("def f(): return later"))
    good(driver.run("later = 7"))
    assert good(driver.run("print(f())")) == "7\n"


def test_classes_can_be_pickled_annotated_and_looked_up(driver: Driver) -> None:
    good(driver.run("import dataclasses, pickle, sys, typing"))
    good(driver.run("@dataclasses.dataclass\nclass P:\n    x: 'int'\n    y: 'P | None' = None"))
    code = "print(pickle.loads(pickle.dumps(P(3))), P.__module__, sys.modules['__main__'].P is P)"
    assert good(driver.run(code)) == "P(x=3, y=None) __main__ True\n"
    good(driver.run("class Q:\n    x: 'P'"))
    assert good(driver.run("print(typing.get_type_hints(Q)['x'] is P)")) == "True\n"


@pytest.mark.parametrize("flags", ["-", "echo"])
def test_features_of_the_future_stay_switched_on(flags: str, driver: Driver) -> None:
    good(driver.run("from __future__ import annotations\ndef f(x: Missing): pass", flags=flags))
    assert good(driver.run("def g(x: Missing): pass\nprint(g.__annotations__)", flags=flags)) == "{'x': 'Missing'}\n"


def test_deleting_every_name_leaves_a_usable_session(driver: Driver) -> None:
    good(driver.run("globals().clear()"))
    good(driver.run("import builtins\nassert __builtins__ is builtins\nlen = 3"))
    assert good(driver.run("print(len, builtins.len('ab'))")) == "3 2\n"


@pytest.mark.parametrize(
    "code",
    [
        "print = len = isinstance = BaseException = compile = exec = None",
        "import builtins\nfor name in list(vars(builtins)):\n    if name not in ('print', '__import__'):"
        "\n        setattr(builtins, name, None)",
        "import sys\nsys.settrace(lambda *_: 1 / 0)",
        "import sys\nsys.setprofile(lambda *_: 1 / 0)",
        "import sys\nsys.setrecursionlimit(50)",
        "import sys\nsys.stdout = sys.stderr = sys.stdin = None",
        "import sys\ndel sys.stdout, sys.stderr, sys.stdin, sys.excepthook, sys.displayhook",
        "import sys\nsys.argv = sys.path = None",
        "import sys\nsys.stdout.close(); sys.stderr.close(); sys.stdin.close()",
        "import os\nos.closerange(3, 256)",
        "import os\nos.close(0); os.close(1); os.close(2)",
        "import os, sys, shutil\nshutil.rmtree(os.path.dirname(f.__code__.co_filename))",
        "import os, signal\nos.write = os.getpid = signal.signal = None",
        "import sys\nclass S:\n    def flush(self): raise KeyError\n    def write(self, text): raise KeyError\n"
        "sys.stdout = sys.stderr = S()",
        "import sys\nsys.modules['ctypes'] = 5",
        "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\nwhile True: os.dup(0)",
        "import sys\ndel sys.modules['__main__']",
    ],
)
def test_clumsy_code_does_not_hurt_the_driver(code: str, driver: Driver) -> None:
    driver.run("def f(): return 41")
    driver.run(code)
    assert driver.run("1 / 0").code == 1
    assert driver.run("def g(): return f() + 1").code == 0
    assert driver.run("raise SystemExit(g())").code == 42


def test_a_trace_function_sees_user_code_only(driver: Driver) -> None:
    good(driver.run("import sys\nseen = set()\ndef trace(frame, *_):\n    seen.add(frame.f_code.co_name)"))
    good(driver.run("sys.settrace(trace)"))
    good(driver.run("def f(): pass"))
    good(driver.run("f()\nsys.settrace(None)"))
    assert good(driver.run("print(sorted(seen))")) == "['<module>', 'f']\n"


# ---- sources and tracebacks -----------------------------------------------------------------------------------------


def test_a_traceback_shows_the_lines_of_every_run_it_passes(driver: Driver) -> None:
    good(driver.run("def f(x):\n    return 1 / x"))
    run = driver.run("f(\n  0)")
    assert (run.code, run.stdout) == (1, b"")
    lines = run.stderr.decode().replace("^", "").replace("~", "").split("\n")
    assert [line.strip() for line in lines if line.strip()] == [
        "Traceback (most recent call last):",
        f'File "{driver.runs}/2.py", line 1, in <module>',
        "f(",
        *(["0)"] if "0)" in run.stderr.decode() else []),
        f'File "{driver.runs}/1.py", line 2, in f',
        "return 1 / x",
        "ZeroDivisionError: division by zero",
    ]


def test_sources_can_be_inspected(driver: Driver) -> None:
    good(driver.run("import inspect, warnings"))
    good(driver.run("def f():\n    return 'found'\n"))
    assert good(driver.run("print(inspect.getsource(f))")) == "def f():\n    return 'found'\n\n"
    run = driver.run("warnings.warn('careful')")
    assert run.code == 0
    assert run.stderr.decode() == f"{driver.runs}/4.py:1: UserWarning: careful\n  warnings.warn('careful')\n"


def test_sources_take_up_little_room(driver: Driver) -> None:
    big = "#" * (1 << 20)
    good(driver.run(f"x = 1\n{big}"))
    assert not (driver.runs / "1.py").exists()
    for _ in range(10):
        good(driver.run(big))
    kept = sorted(int(file.stem) for file in driver.runs.iterdir())
    assert kept == [4, 5, 6, 7, 8, 9, 10, 11]
    for _ in range(3):
        good(driver.run("pass"))
    kept = sorted(int(file.stem) for file in driver.runs.iterdir())
    assert kept == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


ENDINGS = {
    "chain": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error",
    "context": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    int('x')",
    "no context": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError from None",
    "group": "import sys\nif sys.version_info < (3, 11): raise SystemExit\n"
    "raise ExceptionGroup('several', [ValueError(1), KeyError(2)])",
    "note": "error = ValueError('x')\nerror.__notes__ = ['a note']\nraise error",
    "syntax": "x = 1\ndef f(:\n    pass",
    "indentation": "if True:\npass",
    "name": "def f():\n    return undefined_name\nf()",
    "recursion": "def f(): return f()\nf()",
    "hook": "import sys\nsys.excepthook = lambda kind, value, trace: print('mine', kind, value, trace.tb_next)\n1 / 0",
    "hook that fails": "import sys\ndef hook(*_): raise KeyError\nsys.excepthook = hook\n1 / 0",
    "hook that exits": "import sys\nsys.excepthook = lambda *_: sys.exit(7)\n1 / 0",
    "no hook": "import sys\nsys.excepthook = sys.__excepthook__\n1 / 0",
    "exit": "exit()",
    "exit 5": "exit(5)",
    "exit -1": "import sys\nsys.exit(-1)",
    "exit 300": "raise SystemExit(300)",
    "exit true": "raise SystemExit(True)",
    "exit text": "import sys\nsys.exit('some text')",
    "exit tuple": "raise SystemExit(1, 2)",
    "exit none": "import sys\nsys.exit(None)",
    "base": "class Odd(BaseException): pass\nraise Odd('x')",
    "bad repr": "class Odd(Exception):\n    def __str__(self): raise KeyError\nraise Odd",
    "falsy": "class Odd(Exception):\n    def __len__(self): return 0\nraise Odd",
    "own traceback": "class Odd(Exception):\n    def with_traceback(self, _): raise KeyError\nraise Odd",
    "import": "import json\njson.loads('{')",
    "missing module": "import surely_not_there",
    "generator": "def g():\n    yield 1 / 0\nlist(g())",
    "cookie": "# coding: latin-1\nprint(ascii('é'))",
    "bom": "\ufeffprint(ascii('é'))",
    "crlf": "x = '''a\r\nb'''\r\nif x:\r\n    print(repr(x))\r\n1 / 0\r\n",
    "form feed": "\x0cx = 1\n\x0cif x:\n\x0c    print(x)\n1 / 0",
    "invalid escape": "print('\\d')\n1 / 0",
    "syntax warning": "print(5 is 5)",
    "warning": "import warnings\nwarnings.warn('x', DeprecationWarning)",
    "empty": "",
    "comment": "# nothing",
    "docstring": "'''About.'''\nprint(__doc__)",
    "stack overflow in the parser": "(" * 300 + ")" * 300,
}


def shape(run: Run) -> Run:
    """A run without the number of frames that fit on the stack, and without addresses."""
    return run._replace(stderr=re.sub(rb"repeated \d+ more|0x[0-9a-f]+", b"", run.stderr))


def plain(python: str, driver: Driver, code: str, env: dict[str, str], stdin: bytes = b"") -> Run:
    """The same code as a script of the same name, run by the interpreter itself."""
    script = driver.runs / "main.py"
    script.write_bytes(code.encode())
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(driver.home), "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", **env}
    ended = subprocess.run(
        [python, str(script)], cwd=driver.workspace, env=clean, input=stdin, capture_output=True, timeout=30
    )
    script.unlink()
    return Run(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.parametrize("name", ENDINGS)
def test_a_script_ends_as_it_does_without_the_driver(
    name: str, driver: Driver, python: str, env: dict[str, str]
) -> None:
    expected = plain(python, driver, ENDINGS[name], env)
    assert shape(driver.run(ENDINGS[name], flags="once")) == shape(expected)


@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_ends_as_a_script_and_the_session_goes_on(
    name: str, driver: Driver, python: str, env: dict[str, str]
) -> None:
    expected = plain(python, driver, ENDINGS[name], env)
    good(driver.run("kept = 1"))
    run = driver.run(ENDINGS[name])
    script, own = str(driver.runs / "main.py").encode(), str(driver.runs / "2.py").encode()
    assert shape(run) == shape(Run(expected.code, expected.stdout, expected.stderr.replace(script, own)))
    assert good(driver.run("print(kept)")) == "1\n"


def test_the_last_error_is_kept_for_the_debugger(driver: Driver) -> None:
    driver.run("def f():\n    local = 5\n    1 / 0\nf()")
    code = "import sys\nprint(sys.last_type, sys.last_traceback.tb_next.tb_frame.f_locals)"
    assert good(driver.run(code)) == "<class 'ZeroDivisionError'> {'local': 5}\n"


@pytest.mark.parametrize("flags", ["-", "once"])
def test_an_unknown_encoding_is_a_syntax_error(flags: str, driver: Driver) -> None:
    run = driver.run("# coding: surely-not\nprint(1)", flags=flags)
    assert (run.code, run.stdout) == (1, b"")
    assert run.stderr.endswith(b"SyntaxError: unknown encoding: surely-not\n")


def test_a_long_literal_works(driver: Driver) -> None:
    text = "x" * 10_000_000
    assert good(driver.run(f"t = '{text}'\nprint(len(t))")) == "10000000\n"
    assert good(driver.run("print(t.count('x'))")) == "10000000\n"


# ---- echo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("6 * 7", "42\n"),
        ("x = 5\nx + 1", "6\n"),
        ("'text'", "'text'\n"),
        ("1\n2\n3", "3\n"),
        ("None", ""),
        ("x = 3", ""),
        ("", ""),
        ("for i in range(3): i", ""),
        ("1; 2;", "2\n"),
        ("from __future__ import annotations\ndef f(x: Missing): pass\nf.__annotations__", "{'x': 'Missing'}\n"),
        ("import asyncio\nawait asyncio.sleep(0, 'slept')", "'slept'\n"),
        ("import asyncio\nx = await asyncio.sleep(0, 'slept')\nx", "'slept'\n"),
        ("import sys\nsys.displayhook = lambda value: print('mine', value)\n1", "mine 1\n"),
    ],
)
@pytest.mark.parametrize("before", [None, "pass"])
def test_the_value_of_a_last_expression_is_shown(code: str, printed: str, before: str | None, driver: Driver) -> None:
    if before is not None:
        good(driver.run(before))
    assert good(driver.run(code, flags="echo")) == printed


def test_the_last_shown_value_has_a_name(driver: Driver) -> None:
    good(driver.run("6 * 7", flags="echo"))
    assert good(driver.run("_ + 1", flags="echo")) == "43\n"


def test_an_error_while_a_value_is_shown_is_an_error_of_the_run(driver: Driver) -> None:
    run = driver.run("class A:\n    def __repr__(self): return 1 / 0\nA()", flags="echo")
    assert run.code == 1
    assert run.stderr.decode().count(str(driver.runs)) == 2
    assert GUEST not in run.stderr.decode()


# ---- standard input -------------------------------------------------------------------------------------------------


def test_input_is_read_line_by_line_and_then_ends(driver: Driver) -> None:
    run = driver.run("print(input(), input())\nimport sys\nprint(repr(sys.stdin.read()))\ninput()", b"a\nb\nc\nd")
    assert run.stdout == b"a b\n'c\\nd'\n"
    assert run.stderr.endswith(b"EOFError: EOF when reading a line\n")


def test_no_input_is_the_end_of_input(driver: Driver) -> None:
    assert driver.run("input()").stderr.endswith(b"EOFError: EOF when reading a line\n")


def test_each_run_has_its_own_input(driver: Driver) -> None:
    assert good(driver.run("print(input())", b"one\nleft over\n")) == "one\n"
    assert good(driver.run("import sys, subprocess\nprint(sys.stdin.read())")) == "\n"
    assert good(driver.run("print(input())", b"two\n")) == "two\n"
    assert good(driver.run("subprocess.run(['cat'])")) == ""
    assert good(driver.run("subprocess.run(['cat'])", b"three")) == "three"
    assert good(driver.run("sys.stdin.close()\nimport os\nos.close(0)")) == ""
    assert good(driver.run("subprocess.run(['cat'])\nprint(sys.stdin, sys.stdin is sys.__stdin__)", b"four ")) == (
        "four <_io.TextIOWrapper name='<stdin>' mode='r' encoding='utf-8'> True\n"
    )


def test_input_may_be_any_bytes(driver: Driver) -> None:
    data = bytes(range(256)) * 8192
    code = "import sys, hashlib\nprint(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    import hashlib

    assert good(driver.run(code, data)) == hashlib.sha256(data).hexdigest() + "\n"


# ---- interrupts -----------------------------------------------------------------------------------------------------

ENDLESS = {
    "sleep": "import time\nprint('going')\ntime.sleep(100)",
    "busy": "print('going')\nwhile True: pass",
    "child": "import subprocess\nsubprocess.run(['sh', '-c', 'echo going; exec sleep 100'])",
    "lock": "import threading\nprint('going')\nthreading.Event().wait()",
    "asyncio.run": "import asyncio\nasync def f():\n    print('going')\n    await asyncio.sleep(100)\nasyncio.run(f())",
    "await": "import asyncio\nprint('going')\nawait asyncio.sleep(100)",
    "await busy": "import asyncio\nasync def f():\n    print('going')\n    while True: pass\nawait f()",
    "await blocked": "import asyncio, time\nasync def f():\n    print('going')\n    time.sleep(100)\nawait f()",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_interrupt_ends_the_run_and_keeps_the_state(name: str, driver: Driver, version: tuple[int, int]) -> None:
    good(driver.run("kept = 1"))
    run = interrupted(driver, ENDLESS[name])
    assert (run.code, run.stdout) == (130, b"going\n")
    assert run.stderr.decode().rstrip().endswith("KeyboardInterrupt"), run.stderr
    assert f'File "{driver.runs}/2.py", line' in run.stderr.decode() or version < (3, 11), run.stderr
    assert GUEST not in run.stderr.decode()
    assert good(driver.run("print(kept)")) == "1\n"
    assert interrupted(driver, ENDLESS[name]).code == 130
    assert good(driver.run("import asyncio\nprint(await asyncio.sleep(0, 'still usable'))")) == "still usable\n"


def test_an_interrupt_while_nothing_runs_does_nothing(driver: Driver) -> None:
    good(driver.run("import time\nx = 1"))
    for _ in range(20):
        driver.interrupt_while_idle()
        assert good(driver.run("x += 1\ntime.sleep(0)")) == ""
    for _ in range(3):
        driver.interrupt_while_idle()
    assert good(driver.run("print(x)")) == "21\n"


def test_an_interrupt_that_follows_the_header_is_for_that_run(driver: Driver) -> None:
    good(driver.run("import time\nx = 1"))
    for _ in range(50):
        driver.start("time.sleep(100)")
        driver.interrupt()
        run = driver.finish()
        assert run.code == 130
        assert run.stderr.endswith(b"KeyboardInterrupt\n")
    assert good(driver.run("print(x)")) == "1\n"


def test_a_handler_of_the_user_is_kept(driver: Driver) -> None:
    good(driver.run("import signal, time\nseen = []\nsignal.signal(signal.SIGINT, lambda *_: seen.append(1))"))
    driver.interrupt_while_idle()
    run = interrupted(driver, "print('going')\nwhile not seen: time.sleep(0.001)\nprint('seen')")
    assert run == Run(0, b"going\nseen\n", b"")
    assert good(driver.run("print(seen)\nsignal.signal(signal.SIGINT, signal.default_int_handler)")) == "[1]\n"
    assert interrupted(driver, ENDLESS["sleep"]).code == 130
    good(driver.run("signal.signal(signal.SIGINT, signal.SIG_IGN)"))
    assert good(driver.run("print(signal.getsignal(signal.SIGINT).name)")) == "SIG_IGN\n"
    good(driver.run("signal.signal(signal.SIGINT, signal.SIG_DFL)"))
    driver.interrupt_while_idle()
    run = interrupted(driver, ENDLESS["sleep"])
    assert run.died == signal.SIGINT


def test_the_handler_is_the_usual_one_during_a_run(driver: Driver) -> None:
    code = "import signal\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert good(driver.run(code)) == "True\n"


def test_children_have_the_default_action_for_interrupts(driver: Driver) -> None:
    code = """
        import subprocess, threading
        read = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
        go = threading.Event()
        def start():
            go.wait()
            import subprocess, sys
            print(subprocess.check_output([sys.executable, "-c", read], text=True).strip(), flush=True)
        thread = threading.Thread(target=start)
        thread.start()
        threading.Timer(0.01, go.set).start()
    """
    good(driver.run(textwrap.dedent(code)))
    driver.wait_for(b"True")
    good(driver.run("thread.join()"))
    assert good(driver.run("print(subprocess.check_output([__import__('sys').executable, '-c', read]))")) == (
        "b'True\\n'\n"
    )


def test_an_interrupted_run_can_be_handled_by_its_code(driver: Driver) -> None:
    code = "import time\ntry:\n    print('going')\n    time.sleep(100)\nexcept KeyboardInterrupt:\n    print('caught')"
    assert interrupted(driver, code) == Run(0, b"going\ncaught\n", b"")
    code = "import asyncio\ntry:\n    print('going')\n    await asyncio.sleep(100)\nfinally:\n    print('cleaned')"
    run = interrupted(driver, code)
    assert (run.code, run.stdout) == (130, b"going\ncleaned\n")


# ---- await ----------------------------------------------------------------------------------------------------------


def test_await_works_in_one_loop_that_is_kept(driver: Driver) -> None:
    good(driver.run("import asyncio\nloop = None\nasync def f(): return asyncio.get_running_loop()"))
    good(driver.run("loop = await f()\nqueue = asyncio.Queue()\ntask = asyncio.create_task(queue.get())"))
    good(driver.run("await queue.put('passed on')"))
    assert good(driver.run("print(await task, await f() is loop)")) == "passed on True\n"
    code = "async def count():\n    yield 1\n    yield 2\nprint([x async for x in count()])"
    assert good(driver.run(code)) == "[1, 2]\n"
    assert good(driver.run("print(asyncio.run(f()) is loop)")) == "False\n"
    assert good(driver.run("print(await f() is loop)")) == "True\n"
    good(driver.run("loop.close()"))
    assert good(driver.run("print(await f() is loop)")) == "False\n"


def test_an_error_in_awaited_code_shows_the_users_frames_only(driver: Driver) -> None:
    good(driver.run("async def f():\n    return 1 / 0"))
    run = driver.run("await f()")
    assert run.code == 1
    text = run.stderr.decode()
    assert text.startswith(f'Traceback (most recent call last):\n  File "{driver.runs}/2.py", line 1, in <module>\n')
    assert text.endswith("ZeroDivisionError: division by zero\n")
    assert "asyncio" not in text
    assert driver.run("async def g(): exit(6)\nawait g()") == Run(6, b"", b"")
    assert good(driver.run("import gc\ngc.collect()")) == ""


# ---- threads, forks, descriptors ------------------------------------------------------------------------------------


def test_threads_go_on_between_runs(driver: Driver) -> None:
    code = """
        import threading
        go, done = threading.Event(), threading.Event()
        def work():
            go.wait()
            while not done.is_set():
                print("tick")
                done.wait(0.001)
        thread = threading.Thread(target=work)
        thread.start()
    """
    good(driver.run(textwrap.dedent(code)))
    good(driver.run("go.set()"))
    for _ in range(3):
        driver.printed()
        driver.wait_for(b"tick\ntick\n")
    run = driver.run("done.set(); thread.join(); print('joined')")
    assert run.stdout.endswith(b"joined\n")


@pytest.mark.parametrize("flags", ["-", "once"])
def test_a_fork_that_falls_through_ends_with_its_own_code(flags: str, driver: Driver) -> None:
    code = """
        import os
        for end in ("pass", "exit(3)", "1 / 0"):
            pid = os.fork()
            if pid == 0:
                print("child")
                exec(end)
                break
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        else:
            print("parent")
    """
    run = driver.run(textwrap.dedent(code), flags=flags)
    assert (run.code, run.stdout) == (0, b"child\n0\nchild\n3\nchild\n1\nparent\n")
    assert run.stderr.endswith(b"ZeroDivisionError: division by zero\n")


def test_neither_forks_nor_programs_hold_the_descriptors_of_the_driver(driver: Driver) -> None:
    code = """
        import os, subprocess, sys
        def shown():
            fds = os.listdir("/proc/self/fd")
            return sorted(int(fd) for fd in fds if os.path.exists(f"/proc/self/fd/{fd}"))
        own = shown()
        if os.fork() == 0:
            print(shown())
            os._exit(0)
        os.wait()
        print(subprocess.check_output("ls /proc/self/fd", shell=True, close_fds=False).split())
        print([fd for fd in own if 2 < fd < 256], len(own))
    """
    assert good(driver.run(textwrap.dedent(code))) == "[0, 1, 2]\n[b'0', b'1', b'2', b'3']\n[] 6\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("flags", ["-", "once"])
def test_multiprocessing_works(method: str, flags: str, driver: Driver) -> None:
    (driver.workspace / "work.py").write_text("import sys\ndef square(x): return x * x, sys.flags.no_site\n")
    code = f"""
        import multiprocessing, work
        if __name__ == "__main__":
            with multiprocessing.get_context({method!r}).Pool(2) as pool:
                print(pool.map(work.square, [1, 2, 3]))
    """
    for _ in range(1 if flags == "once" else 2):
        assert good(driver.run(textwrap.dedent(code), flags=flags)) == "[(1, 0), (4, 0), (9, 0)]\n"


def test_functions_of_the_session_can_be_run_in_forks(driver: Driver) -> None:
    good(driver.run("import multiprocessing\ndef double(x): return 2 * x"))
    code = "with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(double, range(4)))"
    assert good(driver.run(code)) == "[0, 2, 4, 6]\n"


def test_what_children_and_libraries_print_comes_before_the_end(driver: Driver) -> None:
    code = """
        import ctypes, os, subprocess, sys
        os.write(1, b"raw ")
        subprocess.run(["printf", "child "])
        ctypes.CDLL(None).printf(b"libc ")
        sys.stdout = open(1, "w", closefd=False)
        print("buffered", end=" ")
    """
    assert sorted(good(driver.run(textwrap.dedent(code))).split()) == ["buffered", "child", "libc", "raw"]


# ---- scripts --------------------------------------------------------------------------------------------------------

SCRIPTS = {
    "names": "print(sorted(globals()), __name__, __file__, type(__loader__), __spec__)",
    "arguments": "import sys\nprint(sys.argv, sys.path[1:], sys.flags)",
    "source": "print(open(__file__).read())",
    "threads": "import threading, time\ndef f():\n    time.sleep(0.05)\n    print('thread')\n"
    "threading.Thread(target=f).start()\nprint('main')",
    "daemon": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\nprint('main')",
    "busy daemon": "import threading\ndef f():\n    while True: helper()\ndef helper(): pass\n"
    "threading.Thread(target=f, daemon=True).start()\nprint('main')",
    "atexit": "import atexit\natexit.register(print, 'one')\natexit.register(print, 'two')\nprint('main')\n1 / 0",
    "atexit that fails": "import atexit\natexit.register(print, 'one')\natexit.register(lambda: 1 / 0)",
    "threads after exit": "import threading, time\ndef f():\n    time.sleep(0.05)\n    print('thread')\n"
    "threading.Thread(target=f).start()\nraise SystemExit(130)",
    "atexit after exit": "import atexit, sys\natexit.register(print, 'at exit')\nsys.exit(3)",
    "pool": "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor().submit(print, 'pool')",
    "finalizer": "class A:\n    def __del__(self): print('gone')\na = A()\nprint('main')",
    "finalizer order": "class A:\n    def __init__(self, n): self.n = n\n    def __del__(self): print(self.n)\n"
    "a, _b, __c__ = A('a'), A('_b'), A('__c__')",
    "finalizer with helpers": "import sys\ndef show(text): sys.stdout.write(text)\n"
    "class A:\n    def __del__(self): show('gone')\nclass B(A): pass\na, b = A(), B()",
    "finalizer after error": "class A:\n    def __del__(self): print('gone')\ndef f():\n    a = A()\n    1 / 0\nf()",
    "weak finalizer": "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, print, 'finalized')",
    "logging": "import logging\nlogging.basicConfig(level=20)\nlogging.info('x')",
    "asyncio": "import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))",
    "await": "await f()",
    "input": "print(input() + '!')",
    "exit from a thread": "import sys, threading\nt = threading.Thread(target=sys.exit)\nt.start()\nt.join()",
    "error in a thread": "import threading\ndef f(): raise SystemExit(3)\nthreading.Thread(target=f).start()",
    "hard exit": "import os\nprint(1)\nos._exit(4)",
    "no descriptors": "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
    "try:\n    while True: os.dup(0)\nexcept OSError as error: print(error)",
    "no newline": "import sys\nsys.stdout.write('no newline')",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_cannot_tell_the_difference(name: str, driver: Driver, python: str, env: dict[str, str]) -> None:
    expected = plain(python, driver, SCRIPTS[name], env, stdin=b"typed\n")
    run = driver.run(SCRIPTS[name], stdin=b"typed\n", flags="once")
    if run.died is not None:
        run = Run(os.waitstatus_to_exitcode(run.died), run.stdout, run.stderr)
    assert shape(run) == shape(expected)


@pytest.mark.parametrize(
    "code",
    [
        "f = open('out', 'w'); f.write('written')",
        "f = open('out', 'wb'); f.write(b'written')",
        "f = open('out', 'w+b'); f.write(b'written')",
        "f = open('out', 'w'); f.write('written'); f.me = [f, f]; a = [f]; a.append(a); del f",
        "import holder; holder.f = open('out', 'w'); holder.f.write('written')",
        "import threading; f = open('out', 'w'); f.write('written')\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "def f():\n    g = open('out', 'w'); g.write('written'); 1 / 0\nf()",
    ],
)
def test_what_a_script_wrote_is_on_disk_when_it_has_ended(code: str, driver: Driver) -> None:
    (driver.workspace / "holder.py").touch()
    driver.run(code, flags="once")
    assert (driver.workspace / "out").read_text() == "written"


def test_a_script_can_be_interrupted(driver: Driver) -> None:
    driver.start("import atexit, time\natexit.register(print, 'end')\nprint('going')\ntime.sleep(100)", flags="once")
    driver.wait_for(b"going\n")
    driver.interrupt()
    run = driver.finish()
    assert (run.code, run.stdout) == (130, b"going\nend\n")
    assert run.stderr.endswith(b"KeyboardInterrupt\n")


def test_a_script_that_waits_for_its_threads_can_be_interrupted(driver: Driver) -> None:
    code = """
        import threading
        threading._register_atexit(print, "going")
        threading.Thread(target=threading.Event().wait).start()
    """
    driver.start(textwrap.dedent(code), flags="once")
    driver.wait_for(b"going\n")
    driver.interrupt()
    run = driver.finish()
    assert run.code in (0, 130)  # newer interpreters keep it for themselves
    assert b"KeyboardInterrupt" in run.stderr


def test_an_interrupted_script_does_not_wait_for_its_threads(driver: Driver) -> None:
    code = """
        import atexit, threading, time
        atexit.register(print, "end")
        threading.Thread(target=threading.Event().wait).start()
        print("going")
        time.sleep(100)
    """
    driver.start(textwrap.dedent(code), flags="once")
    driver.wait_for(b"going\n")
    driver.interrupt()
    run = driver.finish()
    assert (run.code, run.stdout) == (130, b"going\nend\n")

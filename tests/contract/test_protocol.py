"""What code in a sandbox can do with the threads by which hutch holds it: nothing, but to lose the sandbox."""

from __future__ import annotations

import threading
import time

import pytest

from hutch import Sandbox

from .harness import need
from .live_harness import Caller, error_of, outcome

# ---- what programs hold ---------------------------------------------------------------------------------------------

MULTIPROCESSING = """
import multiprocessing, os
def show():
    links = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')[:-1]]
    print(*[link for link in links if 'socket' in link or 'memfd' in link], '0 1 2 3', flush=True)
process = multiprocessing.get_context('fork').Process(target=show)
process.start()
process.join()
"""
FORK = """
import os
if os.fork() == 0:
    print(*os.listdir('/proc/self/fd'), flush=True)
    os._exit(0)
os.wait()
"""
INHERIT = """
import subprocess
print(subprocess.run(['ls', '/proc/self/fd'], close_fds=False, capture_output=True, text=True).stdout)
"""
LISTERS = {
    "exec": ("exec", "ls /proc/self/fd"),
    "python, a program": ("python", "import subprocess; print(subprocess.getoutput('ls /proc/self/fd'))"),
    "python, a program that inherits all": ("python", INHERIT),
    "python, a fork": ("python", FORK),
    "python, multiprocessing": ("python", MULTIPROCESSING),
    "bash, a program": ("bash", "ls /proc/self/fd"),
    "bash, a subshell": ("bash", "(ls /proc/self/fd)"),
    "bash, a pipeline": ("bash", "ls /proc/self/fd | cat"),
    "bash, in the background": ("bash", "ls /proc/self/fd & wait"),
    "bash, a substitution": ("bash", 'echo "$(ls /proc/self/fd)"'),
    "bash, another": ("bash", "bash -c 'ls /proc/self/fd'"),
    "node, a program": ("node", "console.log(require('child_process').execSync('ls /proc/self/fd').toString())"),
    "node, a program that inherits": (
        "node",
        "require('child_process').spawnSync('ls', ['/proc/self/fd'], {stdio: 'inherit'})",
    ),
}


@pytest.mark.parametrize("way", LISTERS)
def test_programs_hold_no_descriptor_but_the_standard_three(caller: Caller, way: str) -> None:
    if way.startswith("node"):
        need("node")

    def claim(kind: str, code: str) -> object:
        with Sandbox() as box:
            result = box.exec(["sh", "-c", code]) if kind == "exec" else box.run(code, interpreter=kind)
            return result.check().stdout.split()

    # the fourth is the directory that is listed
    assert sorted(caller(claim, *LISTERS[way])) == ["0", "1", "2", "3"]


def test_a_second_interpreter_sees_nothing_of_the_first(caller: Caller) -> None:
    """They are one user's, and may look at each other; what holds them is not to be found there."""

    def claim() -> object:
        with Sandbox() as box:
            box.run("1")
            code = "cd /proc; for p in [0-9]*; do ls -l $p/fd 2>/dev/null; done | grep -c 'socket:'"
            return box.exec(["bash", "-c", code]).stdout, box.run("print(1)").stdout

    sockets, said = caller(claim)
    assert int(sockets) <= 1, "its own, that of the interpreter"
    assert said == "1\n"


# ---- pid 1 ----------------------------------------------------------------------------------------------------------

PID_1 = {
    "memory": "open('/proc/1/mem', 'rb').read(1)",
    "variables": "open('/proc/1/environ', 'rb').read(1)",
    "map": "open('/proc/1/maps').read(1)",
    "descriptors": "os.listdir('/proc/1/fd')",
    "a descriptor": "os.readlink('/proc/1/fd/205')",
    "root": "os.listdir('/proc/1/root')",
    "directory": "os.readlink('/proc/1/cwd')",
    "program": "os.readlink('/proc/1/exe')",
    "stack": "open('/proc/1/stack').read(1)",
    "system call": "open('/proc/1/syscall').read(1)",
    "trace": "call('ptrace', 16, 1, 0, 0)",
    "seize": "call('ptrace', 0x4206, 1, 0, 0)",
    "read": "call('process_vm_readv', 1, vector, 1, vector, 1, 0)",
    "write": "call('process_vm_writev', 1, vector, 1, vector, 1, 0)",
    "take a descriptor": "take(1, 205)",
    "limit": "resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))",
    "memory, by name": "os.open('/proc/1/mem', os.O_RDWR)",
    "control group": "open('/proc/1/oom_score_adj', 'w').write('1000')",
}
HELPERS = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(64)
class part(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]
vector = ctypes.byref(part(ctypes.addressof(buffer), 8))
def check(result):
    if result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def call(name, *words):
    check(getattr(libc, name)(*words))
def take(pid, number):
    fd = os.pidfd_open(pid)
    check(libc.syscall(438, fd, number, 0))
"""


@pytest.mark.parametrize("how", PID_1)
def test_pid_1_lets_nobody_look(caller: Caller, how: str) -> None:
    def claim(helpers: str, act: str) -> object:
        with Sandbox() as box:
            box.run(helpers).check()
            result = box.run(f"try: {act}; print('done')\nexcept OSError as error: print(type(error).__name__)")
            return result.stdout, box.exec(["echo", "alive"]).stdout

    said, alive = caller(claim, HELPERS, PID_1[how])
    assert said in ("PermissionError\n", "OSError\n", "ProcessLookupError\n", "FileNotFoundError\n")
    assert alive == "alive\n"


def test_pid_1_cannot_be_killed_or_stopped_from_inside(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            code = "import os\nfor n in range(1, 65):\n    try: os.kill(1, n)\n    except OSError: pass\nprint('done')"
            return box.run(code).stdout, box.exec(["echo", "alive"]).stdout

    assert caller(claim) == ("done\n", "alive\n")


# ---- an interpreter that lies ---------------------------------------------------------------------------------------

# How code finds what its own process is held by: it shares the process, so that nothing can keep it from looking.
CONTROL = """
import os, sys, threading, time
def _find():
    for fd in sorted(map(int, os.listdir('/proc/self/fd'))):
        try:
            if fd > 2 and os.readlink(f'/proc/self/fd/{fd}').startswith('socket:'): return fd
        except OSError: pass
def _token():
    frame = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get('token'), bytes): return frame.f_locals['token']
        frame = frame.f_back
control = _find()
def say(data):
    while data: data = data[os.write(control, data):]
"""
LIES = {
    "garbage": "say(b'garbage\\n')",
    "nothing": "say(b'\\n')",
    "NUL": "say(b'\\0' * 100 + b'\\n')",
    "ready again": "say(b'ready\\n')",
    "done, of nobody": "say(b'done\\n')",
    "done, of another": "say(b'done ' + b'0' * 32 + b' 0\\n')",
    "done, with an empty token": "say(b'done  0\\n')",
    "done, out of range": "say(b'done ' + _token() + b' 256\\n')",
    "done, negative": "say(b'done ' + _token() + b' -1\\n')",
    "done, in other digits": "say(b'done ' + _token() + ' ٣\\n'.encode())",
    "done, and more": "say(b'done ' + _token() + b' 0 more\\n')",
    "done, in capitals": "say(b'DONE ' + _token() + b' 0\\n')",
    "done, twice at once": "say((b'done ' + _token() + b' 0\\n') * 2)",
    "a long line": "say(b'x' * 129)",
    "a line of a gigabyte": "chunk = b'x' * (1 << 20)\nfor _ in range(1024): say(chunk)",
    "a million lines": "chunk = b'\\n' * (1 << 20)\nfor _ in range(16): say(chunk)",
    "a good word among many bad ones": "say(b'x\\n' * 1000 + b'done ' + _token() + b' 0\\n')",
}


@pytest.mark.parametrize("lie", LIES)
def test_an_interpreter_that_lies_loses_its_sandbox_and_nobody_else_does(caller: Caller, lie: str) -> None:
    def claim(control: str, code: str) -> object:
        def memory() -> int:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        with Sandbox() as good, Sandbox() as bad:
            good.run("kept = 1")
            found: list[object] = []
            thread = threading.Thread(
                target=lambda: found.append(good.run("import time; time.sleep(0.5); print('done')").stdout)
            )
            thread.start()
            bad.run(control).check()
            before = memory()
            started = time.monotonic()
            error = error_of(bad.run, f"{code}\ntime.sleep(60)", timeout_seconds=30)
            took = time.monotonic() - started
            grown = memory() - before
            thread.join()
            after = bad.run("print('control' in globals())")
            return (
                error[:2],
                took < 25,
                grown < 30_000_000,
                found,
                good.run("print(kept)").stdout,
                after.stdout,
                after.state_lost,
            )

    error, quick, flat, meanwhile, good, after, lost = caller(claim, CONTROL, LIES[lie])
    assert error == ("ProtocolError", "protocol.interpreter")
    assert quick
    assert flat
    assert meanwhile == ["done\n"]
    assert good == "1\n"
    assert (after, lost) == ("False\n", True)


@pytest.mark.parametrize(
    "last",
    [
        "",
        "os.close(control)\n",
        "os.dup2(os.open('/dev/null', os.O_RDWR), control)\n",
        "say(b'done ')\n",
        "say(_token())\n",
    ],
)
def test_an_interpreter_that_falls_silent_is_ended_at_its_time(caller: Caller, last: str) -> None:
    def claim(control: str, last: str) -> object:
        with Sandbox() as box:
            box.run(control).check()
            code = f"{last}import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)"
            result = box.run(code, timeout_seconds=0.5)
            after = box.run("print('control' in globals())")
            return outcome(result), result.state_lost, after.stdout, after.state_lost

    assert caller(claim, CONTROL, last) == ("timeout", True, "False\n", True)


def test_a_run_that_claims_its_end_before_it_comes_forges_nothing_but_itself(caller: Caller) -> None:
    """The word of the driver about its own run is all that there is. Its second word is one too many."""

    def claim(control: str) -> object:
        with Sandbox() as box:
            box.run(control).check()
            first = box.run("say(b'done ' + _token() + b' 7\\n'); time.sleep(0.3)")
            time.sleep(0.6)
            after = box.run("print('control' in globals())")
            return first.exit_code, after.stdout, after.state_lost

    assert caller(claim, CONTROL) == (7, "False\n", True)


def test_a_child_that_reads_what_was_meant_for_the_interpreter_gains_nothing(caller: Caller) -> None:
    def claim(control: str) -> object:
        with Sandbox() as box:
            box.run(control).check()
            thief = "import subprocess\nos.set_inheritable(control, True)\n"
            thief += "subprocess.Popen(['sh', '-c', f'setsid cat <&{control} >stolen'], close_fds=False)"
            box.run(thief).check()
            words = []
            while words[-1:] != ["ok"] and len(words) < 4:
                result = box.run("print(6 * 7)", timeout_seconds=1)
                words.append(outcome(result))
            return words, result.stdout

    words, said = caller(claim, CONTROL)
    assert set(words[:-1]) <= {"timeout", "failed"}, "either may be faster"
    assert words[-1] == "ok"
    assert said == "42\n"


SPOIL = """
import os
for fd in map(int, os.listdir('/proc/self/fd')):
    try:
        if 'memfd:code' in os.readlink(f'/proc/self/fd/{fd}'):
            os.ftruncate(fd, 100_000_000)
            os.pwrite(fd, b'print("spoilt")' * 100, 0)
    except OSError:
        pass
"""


def test_the_code_of_a_run_is_not_to_be_changed_by_the_run_before(caller: Caller) -> None:
    def claim(spoil: str) -> object:
        with Sandbox() as box:
            box.run(spoil).check()
            return box.run("print('mine')").stdout

    assert caller(claim, SPOIL) == "mine\n"


def test_a_stopped_machine_of_many_liars_stays_calm(caller: Caller) -> None:
    def claim(control: str, code: str) -> object:
        def lie(found: list[object]) -> None:
            with Sandbox() as box:
                box.run(control).check()
                found.append(error_of(box.run, f"{code}\ntime.sleep(60)")[1])

        found: list[object] = []
        threads = [threading.Thread(target=lie, args=(found,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found

    assert caller(claim, CONTROL, LIES["a line of a gigabyte"]) == ["protocol.interpreter"] * 8

"""Sandboxes that wait for one run each, and how many may run at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from hutch import AsyncPool, AsyncSandbox, Pool

from .live_harness import Caller, error_of, open_files, outcome, wait_until

# ---- one run each ---------------------------------------------------------------------------------------------------

MARK = """
import os, subprocess, sys, builtins, threading
for place in ('/tmp', '/workspace', '/home/sandbox', '/dev/shm', '/run/hutch/runs'):
    try: open(f'{place}/mark', 'w').write('mark')
    except OSError: pass
os.environ['MARK'] = builtins.mark = 'mark'
subprocess.Popen(['sleep', '307'], start_new_session=True)
os.chdir('/tmp')
"""
LOOK = """
import os, builtins
found = [place for place in ('/tmp', '/workspace', '/home/sandbox', '/dev/shm', '/run/hutch/runs')
         if os.path.exists(f'{place}/mark')]
found += [name for name in ('MARK',) if name in os.environ] + [hasattr(builtins, 'mark')]
found += [open(f'/proc/{pid}/cmdline').read() for pid in os.listdir('/proc') if pid.isdigit() and int(pid) > 2
          and 'sleep' in open(f'/proc/{pid}/cmdline').read()]
print(found, os.getcwd(), os.getpid() < 6)
"""


@pytest.mark.parametrize("size", [0, 1, 3])
def test_nothing_of_a_run_is_there_for_the_next(caller: Caller, size: int) -> None:
    def claim(size: int, mark: str, look: str) -> object:
        with Pool(size=size) as pool:
            return [(pool.run(mark).check(), pool.run(look).check().stdout)[1] for _ in range(4)]

    assert caller(claim, size, MARK, LOOK) == ["[False] /workspace True\n"] * 4


def test_a_waiting_sandbox_is_used_and_replaced(caller: Caller) -> None:
    def claim() -> object:
        async def hits() -> object:
            async with AsyncPool(size=2) as pool:
                inner = pool._pool
                await inner.wait_until_full()
                before, waiting = inner.ready, list(inner._ready)
                result = await pool.run("print(1)")
                used = waiting[0] not in inner._ready
                await asyncio.wait_for(waiting[0].closed, 10)
                await inner.wait_until_full()
                return before, result.stdout, used, inner.ready

        return asyncio.run(hits())

    assert caller(claim) == (2, "1\n", True, 2)


def test_a_busy_pool_grows_and_has_a_bound(caller: Caller) -> None:
    def claim() -> object:
        async def grow() -> object:
            async with AsyncPool(size=1) as pool:
                results = await asyncio.gather(*(pool.run("print(1)") for _ in range(12)))
                inner = pool._pool
                for _ in range(500):
                    if inner.ready > 1:
                        break
                    await asyncio.sleep(0.02)
                await inner.wait_until_full()
                return {result.stdout for result in results}, 1 < inner.ready <= 4

        return asyncio.run(grow())

    assert caller(claim) == ({"1\n"}, True)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_waiting_sandbox_that_dies_is_replaced(caller: Caller, how: int) -> None:
    def claim(how: int) -> object:
        from hutch.engine import census

        def mine() -> set[int]:
            return {living.pid for living in census.find_sandboxes() if living.owner == os.getpid()}

        with Pool(size=2) as pool:
            wait_until(lambda: len(mine()) == 2)
            time.sleep(0.1)
            before = mine()
            for pid in before:
                os.kill(pid, how)
            replaced = wait_until(lambda: len(mine()) == 2 and not mine() & before)
            return replaced, pool.run("print(1)").stdout

    assert caller(claim, how) == (True, "1\n")


def test_an_interpreter_that_dies_while_it_waits_is_not_noticed_by_a_run(caller: Caller) -> None:
    def claim() -> object:
        async def kill_them() -> object:
            from hutch.engine import census

            async with AsyncPool(size=2) as pool:
                await pool._pool.wait_until_full()
                for live in list(pool._pool._ready):
                    for program in census.find_programs(live.child_pid):
                        await live.agent.request("kill", program.pid, 9)
                results = [await pool.run("print(1)") for _ in range(3)]
                return [(result.stdout, result.state_lost) for result in results]

        return asyncio.run(kill_them())

    assert caller(claim) == [("1\n", False)] * 3


def test_close_leaves_nothing_even_while_it_fills_and_runs(caller: Caller) -> None:
    def claim() -> object:
        async def leave() -> object:
            from hutch.engine import census

            left = []
            for pause in (0, 0.01, 0.05, 0.2):
                pool = await AsyncPool(size=3).start()
                running = [asyncio.ensure_future(pool.run("import time; time.sleep(60)")) for _ in range(2)]
                await asyncio.sleep(pause)
                await pool.close()
                left.append(len([living for living in census.find_sandboxes() if living.owner == os.getpid()]))
                done = await asyncio.gather(*running, return_exceptions=True)
                left += [type(error).__name__ for error in done if not isinstance(error, hutch.HutchError)]
            return left

        return asyncio.run(leave())

    import hutch

    assert caller(claim) == [0, 0, 0, 0]


def test_map_keeps_the_order_and_gives_one_result_each(caller: Caller) -> None:
    def claim() -> object:
        codes = [f"import time; time.sleep({0.2 if n == 0 else 0}); print({n})" for n in range(15)] + [
            "1 / 0",
            "exit(3)",
        ]
        with Pool(size=3) as pool:
            results = pool.map(iter(codes))
            return [result.stdout for result in results], [result.exit_code for result in results[-3:]], pool.map([])

    said, codes, nothing = caller(claim)
    assert said == [f"{n}\n" for n in range(15)] + ["", ""]
    assert codes == [0, 1, 3]
    assert nothing == []


def test_map_that_must_not_fail_ends_all_when_one_does(caller: Caller) -> None:
    def claim() -> object:
        with Pool(size=2) as pool:
            started = time.monotonic()
            error = error_of(pool.map, ["1 / 0", *["import time; time.sleep(50)"] * 5], check=True)
            return error[:2], time.monotonic() - started < 20

    assert caller(claim) == (("CommandError", "command.failed"), True)


def test_every_environment_can_wait(caller: Caller) -> None:
    def claim() -> object:
        said = []
        for environment, code in (("python", "print(1)"), ("shell", "echo 1; exit 4"), ("node", "console.log(1)")):
            with Pool(environment, size=1) as pool:
                result = pool.run(code, stdin="x")
                said.append((result.stdout, result.exit_code))
        return said

    assert caller(claim) == [("1\n", 0), ("1\n", 4), ("1\n", 0)]


# ---- as a script ----------------------------------------------------------------------------------------------------

SCRIPTS = {
    "functions registered for the end are called": (
        "import atexit; atexit.register(print, 'end'); print('begin')",
        "begin\nend\n",
        0,
    ),
    "threads are joined": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
        "thread\n",
        0,
    ),
    "it is the main program": (
        "print(__name__, len(__import__('sys').argv), __file__.endswith('.py'))",
        "__main__ 1 True\n",
        0,
    ),
    "files that were not closed are written": (
        "f = open('x', 'w'); f.write('1')\nimport atexit, os\natexit.register(lambda: None)",
        "",
        0,
    ),
    "an exit code is one": ("import sys; print('x'); sys.exit(5)", "x\n", 5),
    "code behind a main guard runs": ("if __name__ == '__main__': print('main')", "main\n", 0),
    "main is called": ("def main(): print('called')\nmain()", "called\n", 0),
    "annotations and docstrings are in place": (
        '"""Doc."""\nx: int = 1\nprint(__doc__, __annotations__)',
        "Doc. {'x': <class 'int'>}\n",
        0,
    ),
}


@pytest.mark.parametrize("claim_of", SCRIPTS)
def test_a_run_of_a_pool_is_like_a_script(caller: Caller, claim_of: str) -> None:
    def claim(code: str) -> object:
        with Pool(size=1) as pool:
            result = pool.run(code)
            return result.stdout, result.exit_code, result.stderr

    code, said, exit_code = SCRIPTS[claim_of]
    assert caller(claim, code) == (said, exit_code, "")


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        ({}, "import time; time.sleep(60)", "timeout"),
        ({"memory_mb": 100}, "x = b''\nwhile True: x += bytes(5_000_000)", "memory"),
        ({"max_output_mb": 1, "keep_kb": 4}, "while True: print('x' * 9999)", "output"),
    ],
)
def test_limits_hold_for_a_run_of_a_pool(caller: Caller, options: dict[str, object], code: str, expected: str) -> None:
    def claim(options: dict[str, object], code: str) -> object:
        with Pool(size=1, timeout_seconds=3, **options) as pool:
            return outcome(pool.run(code)), pool.run("print(1)").stdout

    assert caller(claim, options, code) == (expected, "1\n")


# ---- what cannot be started -----------------------------------------------------------------------------------------


def test_what_cannot_start_says_so_each_time_and_is_not_tried_in_between(caller: Caller) -> None:
    def claim() -> object:
        from hutch.engine import engine

        attempts = []
        original = engine.LiveSandbox

        class Counted(original):
            def __init__(self, *words: object) -> None:
                attempts.append(time.monotonic())
                super().__init__(*words)

        engine.LiveSandbox = Counted
        try:
            with Pool(size=3, env={"PYTHONHOME": "/nowhere"}) as pool:
                errors = {error_of(pool.run, "1")[:2] for _ in range(3)}
                wait_until(lambda: attempts and time.monotonic() - attempts[-1] > 0.5)
                before = len(attempts)
                time.sleep(0.5)
                return errors, len(attempts) - before, before < 20
        finally:
            engine.LiveSandbox = original

    errors, spinning, few = caller(claim)
    assert errors == {("StartError", "start.interpreter")}
    assert spinning == 0
    assert few


def test_what_does_not_stay_is_given_up(caller: Caller) -> None:
    """A limit that even waiting is too much for must not keep the machine busy for ever."""

    def claim() -> object:
        from hutch.engine import engine

        attempts = []
        original = engine.LiveSandbox

        class Doomed(original):
            def __init__(self, *words: object) -> None:
                attempts.append(time.monotonic())
                super().__init__(*words)
                self._loop.call_later(0.15, self.close)

        engine.LiveSandbox = Doomed
        try:
            with Pool(size=2) as pool:
                settled = wait_until(lambda: attempts and time.monotonic() - attempts[-1] > 2, 25)
                engine.LiveSandbox = original
                return settled, len(attempts) < 60, pool.run("print(1)").stdout
        finally:
            engine.LiveSandbox = original

    assert caller(claim) == (True, True, "1\n")


@pytest.mark.parametrize("size", [-1, 1025])
def test_a_size_that_no_pool_has_is_refused(caller: Caller, size: int) -> None:
    def claim(size: int) -> object:
        return error_of(Pool, size=size)[:2]

    assert caller(claim, size) == ("SpecError", "spec.pool-size")


def test_a_pool_that_was_not_started_or_is_closed_says_so(caller: Caller) -> None:
    def claim() -> object:
        pool = Pool()
        first = error_of(pool.run, "1")[:2]
        with pool:
            pool.run("1")
        pool.close()
        return first, error_of(pool.run, "1")[:2]

    assert caller(claim) == (("SpecError", "spec.started"), ("SpecError", "spec.started"))


# ---- how many at once -----------------------------------------------------------------------------------------------


def test_only_so_many_run_and_wait_and_the_others_are_told_at_once(caller: Caller) -> None:
    def claim() -> object:
        from hutch.engine.admission import Admission
        from hutch.sandbox import House

        async def crowd() -> object:
            House.of_this_loop().engine.admission = Admission(running=2, waiting=3)
            async with AsyncPool(size=2) as pool:
                code = "open('x', 'w'); import time; time.sleep(0.3)"
                tasks = [asyncio.ensure_future(pool.run(code)) for _ in range(8)]
                started = time.monotonic()
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                quick = time.monotonic() - started < 0.3
                done = await asyncio.gather(*tasks, return_exceptions=True)
                busy = [error.code for error in done if isinstance(error, hutch.HostError)]
                return busy, quick, sum(not isinstance(error, Exception) for error in done)

        return asyncio.run(crowd())

    import hutch

    assert caller(claim) == (["host.busy"] * 3, True, 5)


def test_memory_is_promised_only_once(caller: Caller) -> None:
    def claim() -> object:
        from hutch.engine.admission import Admission
        from hutch.sandbox import House

        async def crowd() -> object:
            House.of_this_loop().engine.admission = Admission(memory_bytes=300 << 20)
            async with AsyncSandbox(memory_mb=200) as one, AsyncSandbox(memory_mb=200) as other:
                first = asyncio.ensure_future(one.run("import time; time.sleep(0.4); print(time.monotonic())"))
                await asyncio.sleep(0.05)
                second = await other.run("import time; print(time.monotonic())")
                return float(second.stdout) > float((await first).stdout), await self_error()

        async def self_error() -> object:
            async with AsyncSandbox(memory_mb=400) as large:
                try:
                    await large.run("1")
                except hutch.HostError as error:
                    return error.code

        return asyncio.run(crowd())

    import hutch

    assert caller(claim) == (True, "host.memory")


def test_whoever_stops_waiting_gives_the_turn_to_others(caller: Caller) -> None:
    def claim() -> object:
        from hutch.engine.admission import Admission
        from hutch.sandbox import House

        async def crowd() -> object:
            House.of_this_loop().engine.admission = Admission(running=1, waiting=10)
            async with AsyncPool(size=1) as pool:
                first = asyncio.ensure_future(pool.run("import time; time.sleep(0.3)"))
                await asyncio.sleep(0.02)
                waiting = [asyncio.ensure_future(pool.run(f"print({n})")) for n in range(4)]
                await asyncio.sleep(0.02)
                waiting[0].cancel()
                waiting[2].cancel()
                done = await asyncio.wait_for(asyncio.gather(first, *waiting, return_exceptions=True), 30)
                return [getattr(result, "stdout", type(result).__name__) for result in done]

        return asyncio.run(crowd())

    assert caller(claim) == ["", "CancelledError", "1\n", "CancelledError", "3\n"]


@pytest.mark.parametrize("name", ["HUTCH_MAX_RUNNING", "HUTCH_MEMORY_BUDGET_MB"])
def test_the_settings_are_obeyed_and_checked(caller: Caller, name: str) -> None:
    def claim(name: str) -> object:
        async def engine() -> object:
            from hutch.engine.engine import Engine

            os.environ[name] = "7"
            admission = Engine().admission
            os.environ[name] = "many"
            return admission._running, admission._memory, error_of(Engine)[:2]

        try:
            return asyncio.run(engine())
        finally:
            del os.environ[name]

    running, memory, error = caller(claim, name)
    assert (running == 7) == (name == "HUTCH_MAX_RUNNING")
    assert (memory == 7 << 20) == (name == "HUTCH_MEMORY_BUDGET_MB")
    assert error == ("SpecError", "spec.setting")


# ---- many -----------------------------------------------------------------------------------------------------------


def test_fifty_sandboxes_at_once_work_and_are_gone_afterwards(caller: Caller) -> None:
    def claim() -> object:
        from hutch.engine import census

        async def fifty() -> object:
            boxes = await asyncio.gather(*(AsyncSandbox(memory_mb=64).start() for _ in range(50)))
            results = await asyncio.gather(
                *(box.run(f"print({n})", timeout_seconds=None) for n, box in enumerate(boxes))
            )
            await asyncio.gather(*(box.close() for box in boxes))
            left = [living for living in census.find_sandboxes() if living.owner == os.getpid()]
            return [result.stdout for result in results] == [f"{n}\n" for n in range(50)], len(left)

        return asyncio.run(fifty())

    assert caller(claim) == (True, 0)


def test_two_hundred_runs_leave_no_more_than_one(caller: Caller) -> None:
    def claim() -> object:
        def below() -> int:
            tasks = Path("/proc/self/task").glob("*/children")
            return sum(len(children.read_text().split()) for children in tasks)

        with Pool(size=2) as pool:
            pool.map(["print(1)"] * 20)  # it has grown as far as it does
            wait_until(lambda: below() == 8 and time.sleep(0.2) is None and below() == 8)
            before = open_files(), below(), len(os.listdir("/proc/self/task"))
            said = [pool.run(f"print({n})").stdout for n in range(200)]
            settled = wait_until(lambda: (open_files(), below()) <= before[:2], 10)
            after = open_files(), below(), len(os.listdir("/proc/self/task"))
            return said == [f"{n}\n" for n in range(200)], settled, before, after

    fine, settled, before, after = caller(claim)
    assert fine
    assert settled, f"descriptors, children and threads: {before} before, {after} afterwards"


def test_a_process_that_may_open_few_files_is_told_so_and_goes_on(caller: Caller) -> None:
    def claim() -> object:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        boxes = []
        found = None
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        others = [os.open("/dev/null", os.O_RDONLY) for _ in range(256 - 60 - open_files())]
        try:
            while found is None and len(boxes) < 20:
                box = hutch.Sandbox()
                try:
                    boxes.append(box.start())
                    box.run("1")
                except hutch.HutchError as error:
                    found = type(error).__name__, error.code
            still = boxes[0].run("print(1)").stdout
            boxes.pop().close()
            boxes.pop().close()
            return found, still, boxes[0].exec(["echo", "2"]).stdout
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in others:
                os.close(fd)
            for box in boxes:
                box.close()

    import hutch

    found, still, after = caller(claim)
    assert found == ("HostError", "host.refused")
    assert (still, after) == ("1\n", "2\n")

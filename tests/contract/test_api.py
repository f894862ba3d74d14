"""Using hutch from Python: from threads, loops and forks, with callbacks, and however the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hutch import AsyncSandbox, HutchError, Pool, Sandbox

from .harness import PYTHON, Hutch, descendants, living, wait_until
from .live_harness import Caller, error_of, outcome, script_of
from .test_network import tunnel


@pytest.fixture
def sessions(hutch: Hutch) -> Iterator[None]:
    """Sessions of one test alone."""
    yield
    import shutil

    shutil.rmtree(hutch.home / ".local" / "share" / "hutch", ignore_errors=True)


def program(hutch: Hutch, function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[int, str, str]:
    """Run a function as a program of its own; its exit code and what it said."""
    with hutch.popen([PYTHON, "-W", "always", "-c", script_of(function, *arguments)], **options) as child:
        try:
            out, err = child.communicate(timeout=45)
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
            pytest.fail(f"the program did not end: {out[-2000:]} {err[-2000:]}")
    return child.returncode, out, err


# ---- threads and loops ----------------------------------------------------------------------------------------------


def test_one_sandbox_serves_many_threads(caller: Caller) -> None:
    def claim() -> object:
        found: list[object] = []

        def work(box: Sandbox, number: int) -> None:
            for _ in range(3):
                box.files.write(f"f{number}", str(number))
                found.append(box.exec(["cat", f"f{number}"]).stdout == str(number))
                found.append(box.run(f"print({number})").stdout == f"{number}\n")

        with Sandbox() as box:
            threads = [threading.Thread(target=work, args=(box, number)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        return len(found), all(found)

    assert caller(claim) == (48, True)


def test_a_blocking_sandbox_works_inside_a_running_loop(caller: Caller) -> None:
    def claim() -> object:
        async def main() -> object:
            with Sandbox() as box, Pool(size=1) as pool:
                said = [box.run("print(1)").stdout, pool.run("print(2)").stdout]
                said += [output.text for output in box.stream("print(3)")]
            return "".join(said)

        return asyncio.run(main())

    assert caller(claim) == "1\n2\n3\n"


def test_loops_that_come_and_go_leave_nothing(caller: Caller) -> None:
    def claim() -> object:
        from hutch.sandbox import House

        async def main() -> str:
            async with AsyncSandbox() as box:
                return (await box.run("print(1)")).stdout

        said = {asyncio.run(main()) for _ in range(5)}
        return said, len([loop for loop in House._all if loop.is_closed()]) <= 1

    assert caller(claim) == ({"1\n"}, True)


def test_sandboxes_started_by_a_thread_outlive_it(caller: Caller) -> None:
    def claim() -> object:
        boxes: list[Sandbox] = []
        thread = threading.Thread(target=lambda: boxes.append(Sandbox().start()))
        thread.start()
        thread.join()
        boxes[0].run("x = 1")
        time.sleep(0.2)
        said = boxes[0].run("print(x)").stdout
        boxes[0].close()
        return said

    assert caller(claim) == "1\n"


def test_what_is_used_before_its_start_or_after_its_end_says_so(caller: Caller) -> None:
    def claim() -> object:
        box = Sandbox()
        before = [error_of(box.run, "1")[1], error_of(box.exec, ["true"])[1], error_of(box.files.list)[1]]
        box.close()
        with Sandbox() as other:
            pass
        other.close()
        return before, [error_of(other.run, "1")[1], error_of(other.exec, ["true"])[1], error_of(other.files.list)[1]]

    assert caller(claim) == (["spec.started"] * 3, ["sandbox.closed"] * 3)


def test_a_wrong_request_is_refused_before_anything_starts(caller: Caller) -> None:
    def claim() -> object:
        return [
            error_of(Sandbox, "pyhton")[:2],
            error_of(Sandbox, memory_mb="much")[:2],
            error_of(Sandbox, unknown=1)[:2],
            error_of(Pool, "python", size=2, network="some")[0],
        ]

    found = caller(claim)
    assert all(error[0] == "SpecError" for error in found[:3])
    assert found[3] == "SpecError"


def test_a_close_while_it_starts_leaves_nothing(caller: Caller) -> None:
    def claim() -> object:
        from hutch.engine import census

        async def main() -> object:
            found = []
            for pause in (0, 0.001, 0.003, 0.01, 0.03):
                box = AsyncSandbox()
                starting = asyncio.ensure_future(box.start())
                await asyncio.sleep(pause)
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
                await box.close()
                found.append(len([living for living in census.find_sandboxes() if living.owner == os.getpid()]))
            return found

        return asyncio.run(main())

    assert caller(claim) == [0] * 5


# ---- callbacks and streams ------------------------------------------------------------------------------------------


def test_callbacks_get_the_output_in_order_and_in_the_thread_of_the_caller(caller: Caller) -> None:
    def claim() -> object:
        pieces: list[tuple[str, str, bool]] = []
        here = threading.get_ident()

        def note(stream: str) -> object:
            return lambda text: pieces.append((stream, text, threading.get_ident() == here))

        code = "import sys, time\nfor n in range(5):\n    print(n, flush=True); time.sleep(0.03)\n"
        code += "    print(-n, file=sys.stderr, flush=True); time.sleep(0.03)"
        with Sandbox() as box:
            result = box.run(code, on_stdout=note("out"), on_stderr=note("err"))
        texts = {name: "".join(text for stream, text, _ in pieces if stream == name) for name in ("out", "err")}
        return (
            texts == {"out": result.stdout, "err": result.stderr},
            all(place for _, _, place in pieces),
            "".join(p[1] for p in pieces),
        )

    same, here, order = caller(claim)
    assert same
    assert here
    assert order == "0\n0\n1\n-1\n2\n-2\n3\n-3\n4\n-4\n"


@pytest.mark.parametrize("how", ["run", "exec", "pool"])
@pytest.mark.parametrize(
    "code",
    ["print(1, flush=True); import time; time.sleep(30)", "print(1)", "import os; os.write(1, b'x'); os._exit(3)"],
)
@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_what_a_callback_raises_ends_the_run_and_is_raised(caller: Caller, how: str, code: str, kind: str) -> None:
    def claim(how: str, code: str, kind: str) -> object:
        def fail(text: str) -> None:
            raise ZeroDivisionError(text)

        async def use() -> object:
            async with AsyncSandbox() as box, AsyncPool(size=1) as pool:
                acts = {"run": lambda: box.run(code, on_stdout=fail), "pool": lambda: pool.run(code, on_stdout=fail)}
                acts["exec"] = lambda: box.exec(["python3", "-c", code], on_stdout=fail)
                try:
                    await acts[how]()
                except ZeroDivisionError:
                    return (await box.run("print(2)")).stdout

        started = time.monotonic()
        if kind == "async":
            said = asyncio.run(use())
        else:
            with Sandbox() as box, Pool(size=1) as pool:
                acts = {"run": lambda: box.run(code, on_stdout=fail), "pool": lambda: pool.run(code, on_stdout=fail)}
                acts["exec"] = lambda: box.exec(["python3", "-c", code], on_stdout=fail)
                try:
                    acts[how]()
                    said = None
                except ZeroDivisionError:
                    said = box.run("print(2)").stdout
        return said, time.monotonic() - started < 20

    from hutch import AsyncPool

    assert caller(claim, how, code, kind) == ("2\n", True)


def test_a_stream_is_read_while_the_run_lasts_and_has_a_result(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            running = box.stream("import time\nfor n in range(3): print(n, flush=True); time.sleep(0.1)")
            early = None
            texts = []
            for output in running:
                texts.append(output.text)
                early = early or error_of(lambda: running.result)[1]
            return "".join(texts), early, running.result.stdout, {output.stream for output in box.stream("1/0")}

    assert caller(claim) == ("0\n1\n2\n", "spec.running", "0\n1\n2\n", {"stderr"})


def test_a_stream_that_is_left_early_ends_the_run(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            box.run("kept = 7")
            running = box.stream("import time\nwhile True: print('x', flush=True); time.sleep(0.01)")
            started = time.monotonic()
            for _ in running:
                break
            after = box.run("print(kept)")
            return after.stdout, time.monotonic() - started < 20, error_of(lambda: running.result)[1]

    assert caller(claim) == ("7\n", True, "spec.running")


def test_a_stream_that_is_left_early_in_a_loop_ends_the_run(caller: Caller) -> None:
    def claim() -> object:
        async def main() -> object:
            async with AsyncSandbox() as box:
                await box.run("kept = 7")
                outputs = box.stream("import time\nwhile True: print('x', flush=True); time.sleep(0.01)").__aiter__()
                async with contextlib.aclosing(outputs):
                    async for _ in outputs:
                        break
                return (await box.run("print(kept)")).stdout

        return asyncio.run(main())

    assert caller(claim) == "7\n"


def test_check_makes_an_error_of_a_failure(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            fine = box.run("print(1)", check=True).stdout
            return fine, error_of(box.run, "1/0", check=True)[:2], error_of(box.exec, ["false"], check=True)[:2]

    assert caller(claim) == ("1\n", ("CommandError", "command.failed"), ("CommandError", "command.failed"))


def test_an_exception_in_the_block_goes_through_and_cleans_up(caller: Caller) -> None:
    def claim() -> object:
        from hutch.engine import census

        try:
            with Sandbox() as box:
                box.run("1")
                raise ZeroDivisionError
        except ZeroDivisionError:
            return [living.id for living in census.find_sandboxes() if living.owner == os.getpid()]

    assert caller(claim) == []


# ---- interrupts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["run", "callback", "exec", "stream", "pool"])
def test_ctrl_c_while_waiting_ends_the_wait_and_the_run(hutch: Hutch, how: str) -> None:
    def main(how: str) -> None:
        with Sandbox() as box, Pool(size=1) as pool:
            box.run("kept = 7")
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            code = "import time\nwhile True: print('x', flush=True); time.sleep(0.1)"
            try:
                if how == "run":
                    box.run(code)
                elif how == "callback":
                    box.run(code, on_stdout=lambda text: None)
                elif how == "exec":
                    box.exec(["sleep", "60"])
                elif how == "pool":
                    pool.run(code)
                else:
                    for _ in box.stream(code):
                        pass
            except KeyboardInterrupt:
                print("interrupted", box.run("print(kept)").stdout.strip())

    assert program(hutch, main, how) == (0, "interrupted 7\n", "")


# ---- forks ----------------------------------------------------------------------------------------------------------


def test_a_fork_has_sandboxes_of_its_own_and_leaves_those_of_its_parent(hutch: Hutch) -> None:
    def main() -> None:
        import json

        box = Sandbox().start()
        box.run("x = 1")
        process = box.spawn(["cat"])
        reader, writer = os.pipe()
        if os.fork() == 0:
            acts = [
                lambda: box.run("1"),
                lambda: box.run("1", on_stdout=print),
                lambda: box.exec(["true"]),
                lambda: box.files.list(),
                lambda: list(box.stream("1")),
                lambda: process.write("x"),
                lambda: process.resize(1, 1),
                lambda: box.close(),
            ]
            codes = [error_of(act)[1] for act in acts]
            with Sandbox() as own:
                said = own.run("print(2)").stdout
            os.write(writer, json.dumps([codes, said]).encode())
            sys.exit(0)  # with all that is done at the end of a process
        os.close(writer)
        with open(reader) as file:
            codes, said = json.load(file)
        status = os.wait()[1]
        process.write("y")
        process.close_stdin()
        print(json.dumps([sorted(set(codes)), said, status, box.run("print(x)").stdout, process.wait().stdout]))
        box.close()

    code, out, err = program(hutch, main)
    assert (code, err) == (0, "")
    assert json.loads(out) == [["sandbox.forked"], "2\n", 0, "1\n", "y"]


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_a_fork_that_lives_on_keeps_no_sandbox_alive(hutch: Hutch, kind: str) -> None:
    def main(kind: str) -> None:
        def fork() -> int:
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            return pid

        async def use() -> int:
            async with AsyncSandbox() as box:
                await box.run("1")
                return fork()

        if kind == "async":
            pid = asyncio.run(asyncio.wait_for(use(), 20))
        else:
            with Sandbox() as box:
                box.run("1")
                pid = fork()
        print("closed", os.waitpid(pid, os.WNOHANG) == (0, 0))
        os.kill(pid, signal.SIGKILL)
        os.wait()

    assert program(hutch, main, kind) == (0, "closed True\n", "")


@pytest.mark.usefixtures("sessions")
def test_a_fork_that_lives_on_keeps_no_session(hutch: Hutch) -> None:
    def main() -> None:
        with Sandbox(session="forked") as box:
            box.run("1")
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
        try:
            with Sandbox.reconnect("forked") as box:
                print(box.run("print(1)").stdout.strip())
                box.destroy()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.wait()

    assert program(hutch, main) == (0, "1\n", "")


def test_multiprocessing_with_sandboxes_in_each_process(hutch: Hutch) -> None:
    def main() -> None:
        import multiprocessing

        with Sandbox() as box:
            box.run("x = 1")
            context = multiprocessing.get_context("fork")
            results = context.SimpleQueue()

            def work(number: int) -> None:
                with Sandbox() as own:
                    results.put(own.run(f"print({number})").stdout.strip())

            workers = [context.Process(target=work, args=(number,)) for number in range(4)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            print(*sorted(results.get() for _ in workers), box.run("print(x)").stdout.strip())

    assert program(hutch, main) == (0, "0 1 2 3 1\n", "")


# ---- how a process ends ---------------------------------------------------------------------------------------------

ENDS = {
    "by itself": "pass",
    "by an exception": "raise ZeroDivisionError",
    "by os._exit": "os._exit(0)",
    "by SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "by SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "by its end while a thread waits": "threading.Thread(target=hang, daemon=True).start(); time.sleep(0.2)",
    "by becoming another program": "os.execvp('sleep', ['sleep', '0.5'])",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_cleans_up_nothing_leaves_nothing(hutch: Hutch, end: str) -> None:
    """That nothing is left is asked after every test. Killed between two steps, a process may leave an empty cgroup."""

    def main(end: str) -> None:
        box = Sandbox().start()
        box.run("import subprocess; subprocess.Popen(['sleep', '308'], start_new_session=True)")
        pool = Pool(size=2).start()
        pool.run("1")
        asynchronous = asyncio.new_event_loop()
        other = AsyncSandbox()
        asynchronous.run_until_complete(other.start())

        def hang() -> None:
            with contextlib.suppress(HutchError):
                box.run("import time; time.sleep(60)")

        print("ready", flush=True)
        exec(end, {**globals(), "hang": hang})

    started = time.monotonic()
    _, out, _ = program(hutch, main, ENDS[end])
    assert out == "ready\n"
    assert time.monotonic() - started < 40
    assert hutch.command("gc").exit_code == 0


def test_a_process_with_a_network_ends_as_well(hutch: Hutch) -> None:
    def main() -> None:
        box = Sandbox(network="full").start()
        print(box.run("print(1)").stdout, end="")

    with tunnel(hutch) as options:
        assert program(hutch, main, **options) == (0, "1\n", "")


def test_a_network_is_there_for_commands_as_well(hutch: Hutch) -> None:
    def main() -> None:
        with Sandbox("shell", network="full") as box:
            print(box.exec(["sh", "-c", "cut -d: -f1 /proc/net/dev; cat /etc/resolv.conf"]).stdout, end="")

    with tunnel(hutch) as options:
        code, said, _ = program(hutch, main, **options)
    assert code == 0
    assert "tap0" in said
    assert said.endswith("nameserver 10.0.2.3\n")


def test_a_process_that_is_killed_takes_everything_along(hutch: Hutch) -> None:
    def main() -> None:
        boxes = [Sandbox().start() for _ in range(3)]
        boxes[0].run("import subprocess; subprocess.Popen(['sleep', '309'], start_new_session=True)")
        print("ready", flush=True)
        boxes[1].run("import time; time.sleep(60)")

    with hutch.popen([PYTHON, "-c", script_of(main)]) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        below = descendants(child.pid)
        assert len(below) >= 9
        child.kill()
        child.communicate()
        assert wait_until(lambda: not living(below))


# ---- sessions -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sessions")
def test_files_of_a_session_stay_and_its_state_does_not(hutch: Hutch) -> None:
    def first() -> None:
        with Sandbox(session="kept") as box:
            box.run("x = 1; open('file', 'w').write('content'); open('/home/sandbox/h', 'w'); open('/tmp/t', 'w')")
            print(box.id)

    def second(word: str) -> None:
        with Sandbox.reconnect(word) as box:
            code = "import os; print('x' in globals(), open('file').read(), "
            result = box.run(code + "*map(os.path.exists, ('/home/sandbox/h', '/tmp/t')))")
            print(result.stdout.strip(), result.state_lost, result.session == box.id, box.run("1").state_lost)

    code, session, err = program(hutch, first)
    assert (code, err) == (0, "")
    for word in ("kept", session.strip()):
        assert program(hutch, second, word) == (0, "False content True False True True False\n", "")


@pytest.mark.usefixtures("sessions")
def test_a_session_belongs_to_one_process_at_a_time(hutch: Hutch) -> None:
    def holder() -> None:
        with Sandbox(session="held") as box:
            box.run("1")
            print("ready", flush=True)
            sys.stdin.read()

    def other() -> None:
        print(*error_of(Sandbox.reconnect("held").start), sep="|")

    with hutch.popen([PYTHON, "-c", script_of(holder)], stdin=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        _, out, _ = program(hutch, other)
        kind, code, message = out.strip().split("|")
        assert (kind, code) == ("SessionError", "session.busy")
        assert str(child.pid) in message
        child.communicate("")
    assert program(hutch, other)[1] == "", "let go of, it is free"


@pytest.mark.usefixtures("sessions")
def test_a_session_is_bound_to_what_it_was_made_with(hutch: Hutch) -> None:
    def main() -> None:
        with Sandbox(session="bound", memory_mb=128) as box:
            box.run("1")
        print(error_of(Sandbox("node", session="bound").start)[1])
        print(error_of(Sandbox(session="bound", memory_mb=256).start)[1])
        with Sandbox("python", session="bound", memory_mb=128) as box:
            print(box.run("print(1)").stdout.strip())
        print(error_of(Sandbox.reconnect("nothing").start)[1])
        box = Sandbox.reconnect("bound").start()
        box.destroy()
        box.close()
        print(error_of(Sandbox.reconnect("bound").start)[1])

    words = ["session.environment", "session.request", "1", "session.unknown", "session.unknown"]
    assert program(hutch, main) == (0, "\n".join(words) + "\n", "")


@pytest.mark.usefixtures("sessions")
def test_a_session_that_cannot_be_opened_is_not_kept_from_others(hutch: Hutch) -> None:
    def main(home: str) -> None:
        import shutil

        with Sandbox(session="broken") as box:
            box.run("1")
            where = f"{home}/.local/share/hutch/sessions/{box.id}/workspace"
        os.rename(where, f"{where}-away")
        Path(where).write_text("not a directory")
        box = Sandbox.reconnect("broken")
        print(error_of(box.start)[0], error_of(box.run, "1")[1])
        os.unlink(where)
        os.rename(f"{where}-away", where)
        print(box.start().run("print(1)").stdout.strip())
        box.close()
        shutil.rmtree(f"{home}/.local/share/hutch")

    code, out, err = program(hutch, main, str(hutch.home))
    assert (code, err) == (0, "")
    assert out == "SessionError spec.started\n1\n"


@pytest.mark.usefixtures("sessions")
def test_two_of_one_process_share_a_session_and_the_last_closes_it(hutch: Hutch) -> None:
    def main() -> None:
        with Sandbox(session="shared") as one:
            with Sandbox(session="shared") as other:
                one.run("x = 1")
                print(other.run("print(x)").stdout.strip())
            print(one.run("print(x)").stdout.strip())

    assert program(hutch, main) == (0, "1\n1\n", "")


@pytest.mark.usefixtures("sessions")
def test_a_session_survives_the_kill_of_its_process(hutch: Hutch) -> None:
    def first() -> None:
        box = Sandbox(session="killed").start()
        box.run("open('file', 'w').write('content')")
        os.kill(os.getpid(), signal.SIGKILL)

    def second() -> None:
        with Sandbox.reconnect("killed") as box:
            result = box.run("print(open('file').read())")
            print(result.stdout.strip(), result.state_lost)

    assert program(hutch, first)[0] == -9
    assert program(hutch, second)[1].startswith("content")


@pytest.mark.usefixtures("sessions")
def test_a_session_that_nobody_uses_rests_and_comes_back(caller: Caller) -> None:
    def claim() -> object:
        from hutch.engine import session

        async def main() -> object:
            async with AsyncSandbox(session="resting") as box:
                await box.run("x = 1; open('file', 'w')")
                inner = box._box
                await inner.rest("idle")
                alive = inner.live is not None
                result = await box.run("import os; print('x' in globals(), os.path.exists('file'))")
                again = await box.run("print(1)")
                await box.destroy()
                return alive, result.stdout, result.state_lost, again.state_lost

        before = session.IDLE_SECONDS
        try:
            return asyncio.run(main())
        finally:
            session.IDLE_SECONDS = before

    assert caller(claim) == (False, "False True\n", True, False)


@pytest.mark.usefixtures("sessions")
def test_an_idle_session_is_ended_and_a_busy_one_is_not(caller: Caller) -> None:
    def claim() -> object:
        from hutch.config import data_directory
        from hutch.engine.engine import Engine
        from hutch.engine.interpreter import Run
        from hutch.engine.session import Sessions
        from hutch.engine.store import Store

        async def main() -> object:
            engine = Engine()
            sessions = Sessions(engine, Store(data_directory()), idle_seconds=0.2)
            idle = await sessions.open("idle", {"environment": "python"})
            busy = await sessions.open("busy", {"environment": "python"})
            await idle.start()
            running = asyncio.ensure_future(
                busy.run(Run(code="import time; time.sleep(1.5); print('whole')", limits=busy.spec.policy.limits))
            )
            for _ in range(400):
                if idle.live is None:
                    break
                await asyncio.sleep(0.02)
            result = idle.live is None, busy.live is not None, (await running).stdout
            for session in (idle, busy):
                await sessions.destroy(session)
            await sessions.close_all()
            await engine.close()
            return result

        return asyncio.run(main())

    assert caller(claim) == (True, True, "whole\n")


def test_outcomes_are_words_that_programs_can_compare(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            result = box.run("print(1)")
            return outcome(result), result.ok, result.to_json()["outcome"], result.outcome is hutch.Outcome.OK

    import hutch

    assert caller(claim) == ("ok", True, "ok", True)

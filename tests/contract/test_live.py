"""A sandbox that stays: commands in it, what they leave running, and what becomes of it when they attack it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time

import pytest

from hutch import AsyncSandbox, Sandbox

from .live_harness import Caller, error_of, open_files, outcome, wait_until

# ---- commands -------------------------------------------------------------------------------------------------------


def test_words_arrive_as_they_were_given(caller: Caller) -> None:
    def claim() -> object:
        words = ["a b", "", "*", "$HOME", "-n", "ü\n", "\udcff"]
        with Sandbox() as box:
            return (
                box.exec(["python3", "-c", "import sys; print(ascii(sys.argv[1:]))", *words]).stdout == f"{words!a}\n"
            )

    assert caller(claim)


def test_variables_come_beside_those_of_the_sandbox(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox(env={"ONE": "1", "TWO": "2"}) as box:
            return box.exec(["sh", "-c", "echo $ONE $TWO $THREE $HOME"], env={"TWO": "zwei", "THREE": ""}).stdout

    assert caller(claim) == "1 zwei /home/sandbox\n"


@pytest.mark.parametrize(("cwd", "expected"), [(".", "/workspace"), ("a/b", "/workspace/a/b"), ("/tmp", "/tmp")])
def test_a_command_starts_where_it_is_told(caller: Caller, cwd: str, expected: str) -> None:
    def claim(cwd: str) -> object:
        with Sandbox() as box:
            box.files.mkdir("a/b")
            return box.exec(["pwd"], cwd=cwd).stdout

    assert caller(claim, cwd) == f"{expected}\n"


@pytest.mark.parametrize("cwd", ["no/such", "file", "/root/x"])
def test_a_directory_that_is_not_there_is_named(caller: Caller, cwd: str) -> None:
    def claim(cwd: str) -> object:
        with Sandbox() as box:
            box.files.write("file", "")
            result = box.exec(["true"], cwd=cwd)
            return result.exit_code, result.stderr, outcome(result)

    code, said, word = caller(claim, cwd)
    assert code in (126, 127)
    assert cwd in said
    assert word == "failed"


def test_a_missing_program_is_told_as_a_shell_would(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            result = box.exec(["no-such-program"])
            return result.exit_code, result.stderr, outcome(result), result.state_lost

    assert caller(claim) == (127, "hutch: no-such-program: No such file or directory\n", "failed", False)


@pytest.mark.parametrize("program", ["./plain", "/tmp", "./noise", "/etc/passwd"])
def test_what_cannot_be_executed_is_told_as_a_shell_would(caller: Caller, program: str) -> None:
    def claim(program: str) -> object:
        with Sandbox() as box:
            box.files.write("plain", "#!/bin/sh\n")
            box.files.write("noise", "noise")
            box.exec(["chmod", "+x", "noise"])
            result = box.exec([program])
            return result.exit_code, result.stderr

    code, said = caller(claim, program)
    assert code == 126
    assert said.startswith(f"hutch: {program}: ")


def test_a_script_of_the_workspace_is_executed(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            box.files.write("bin/script", "#!/bin/sh\necho script $1\n")
            box.exec(["chmod", "755", "bin/script"], check=True)
            return box.exec(["./script", "ran"], cwd="bin").stdout

    assert caller(claim) == "script ran\n"


def test_too_many_words_are_refused_and_not_half_executed(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            result = box.exec(["echo", *["x" * 100_000] * 60])
            return result.exit_code, result.stderr, box.exec(["echo", "next"]).stdout

    assert caller(claim) == (126, "hutch: echo: Argument list too long\n", "next\n")


@pytest.mark.parametrize("argv", [[], ["a\0b"], "ls", ["\ud800"]])
def test_what_cannot_be_a_command_is_refused(caller: Caller, argv: object) -> None:
    def claim(argv: object) -> object:
        with Sandbox() as box:
            return error_of(box.exec, argv)

    kind, code, _ = caller(claim, argv)
    assert (kind, code) == ("SpecError", "spec.command")


@pytest.mark.parametrize(
    "options", [{"cwd": "a\0b"}, {"env": {"A": "a\0b"}}, {"env": {"A=B": ""}}, {"stdin": "\ud800"}]
)
def test_what_cannot_be_an_option_is_refused(caller: Caller, options: dict[str, object]) -> None:
    def claim(options: dict[str, object]) -> object:
        with Sandbox() as box:
            return error_of(box.exec, ["true"], **options)[0]

    assert caller(claim, options) == "SpecError"


@pytest.mark.parametrize("code", [0, 1, 3, 126, 255])
def test_exit_codes_are_those_of_the_program(caller: Caller, code: int) -> None:
    def claim(code: int) -> object:
        with Sandbox() as box:
            result = box.exec(["sh", "-c", f"exit {code}"])
            return result.exit_code, result.signal, outcome(result)

    assert caller(claim, code) == (code, None, "ok" if code == 0 else "failed")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM", "SIGPIPE", "SIGUSR1"])
def test_deaths_by_signal_are_named(caller: Caller, name: str) -> None:
    def claim(name: str) -> object:
        with Sandbox() as box:
            result = box.exec(["sh", "-c", f"kill -{name[3:]} $$; sleep 5"])
            return result.exit_code, result.signal, outcome(result)

    assert caller(claim, name) == (None, name, "failed")


# ---- input and output -----------------------------------------------------------------------------------------------


def test_input_arrives_byte_for_byte(caller: Caller) -> None:
    def claim() -> object:
        import hashlib

        data = bytes(range(256)) * 12_000
        with Sandbox() as box:
            said = box.exec(["sha256sum"], stdin=data).stdout
        return said.split()[0] == hashlib.sha256(data).hexdigest()

    assert caller(claim)


def test_without_input_there_is_an_end_at_once(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            return box.exec(["cat"], timeout_seconds=10).ok

    assert caller(claim)


def test_input_that_nobody_reads_stops_nobody(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            return box.exec(["true"], stdin=b"x" * 5_000_000).ok

    assert caller(claim)


def test_output_that_is_no_text_is_kept_as_far_as_text_can(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            result = box.exec(["printf", r"a\377b\000\303\274"])
            return result.stdout, box.exec(["sh", "-c", "echo out; echo err >&2"]).stderr

    assert caller(claim) == ("a\ufffdb\0ü", "err\n")


def test_letters_are_not_cut_in_two_on_their_way(caller: Caller) -> None:
    def claim() -> object:
        pieces: list[str] = []
        code = r"printf 'a\303'; sleep 0.1; printf '\274b'"
        with Sandbox() as box:
            box.exec(["sh", "-c", code], on_stdout=pieces.append)
        return "".join(pieces)

    assert caller(claim) == "aüb"


def test_much_output_is_kept_at_both_ends(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox(keep_kb=2) as box:
            result = box.exec(["seq", "100000"])
            return (
                result.ok,
                result.truncated,
                len(result.stdout),
                result.dropped_bytes,
                result.stdout[:4],
                result.stdout[-7:],
            )

    ok, truncated, size, dropped, head, tail = caller(claim)
    assert ok
    assert truncated
    assert 2048 < size < 2200
    assert dropped == 588895 - 2048
    assert (head, tail) == ("1\n2\n", "100000\n")


def test_a_flood_ends_the_program_and_nothing_else(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox(max_output_mb=1, keep_kb=16) as box:
            box.run("kept = 1")
            result = box.exec(["yes"])
            return outcome(result), result.limits_hit, box.run("print(kept)").stdout

    assert caller(claim) == ("output", ("output",), "1\n")


def test_what_commands_printed_is_not_kept_when_they_are_over(caller: Caller) -> None:
    """A sandbox that is used for days must not hold on to every output of those days."""

    def claim() -> object:
        def memory() -> int:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        with Sandbox() as box:
            argv = ["head", "-c", "1000000", "/dev/zero"]
            for _ in range(10):
                box.exec(argv)
            before = memory()
            for _ in range(60):
                box.exec(argv)
            return memory() - before

    assert caller(claim) < 20_000_000


# ---- talking to one -------------------------------------------------------------------------------------------------


def test_a_conversation(caller: Caller) -> None:
    def claim() -> object:
        heard = []
        with Sandbox() as box:
            process = box.spawn(["python3", "-uc", "while True: print(eval(input()))"])
            for question in ("1 + 1", "'x' * 3"):
                process.write(f"{question}\n")
                line = ""
                for output in process:
                    line += output.text
                    if line.endswith("\n"):
                        break
                heard.append(line)
            process.close_stdin()
            result = process.wait()
            return heard, result.exit_code, "EOFError" in result.stderr

    assert caller(claim) == (["2\n", "xxx\n"], 1, True)


def test_output_is_read_to_its_end_and_then_has_one(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            process = box.spawn(["sh", "-c", "echo a; sleep 0.05; echo b >&2; sleep 0.05; echo c"])
            first = [(output.stream, output.text) for output in process]
            return first, list(process), process.wait().stdout

    assert caller(claim) == ([("stdout", "a\n"), ("stderr", "b\n"), ("stdout", "c\n")], [], "a\nc\n")


def test_whoever_writes_to_a_program_that_ended_is_not_kept(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            process = box.spawn(["sleep", "0.2"])
            process.write(b"x" * 3_000_000)
            result = process.wait()
            process.write("more")
            process.close_stdin()
            return result.ok, process.signal(signal.SIGTERM)

    assert caller(claim) == (True, False)


def test_two_threads_can_write_to_one_program(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            process = box.spawn(["sh", "-c", "sleep 0.2; wc -c"])
            threads = [threading.Thread(target=process.write, args=(b"x" * 1_000_000,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            stuck = sum(thread.is_alive() for thread in threads)
            process.close_stdin()
            return stuck, process.wait().stdout.strip()

    assert caller(claim) == (0, "4000000")


def test_signals_reach_the_program_and_its_group(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            code = "import signal, subprocess, sys\ndef caught(*_): sys.exit('caught')\n"
            code += "signal.signal(signal.SIGUSR1, caught); child = subprocess.Popen(['sleep', '30'])\n"
            process = box.spawn(["python3", "-c", f"{code}sys.stdout.write('ready\\n')\nsignal.pause()"])
            next(iter(process))
            sent = process.signal(signal.SIGUSR1)
            result = process.wait()
            left = wait_until(lambda: not [one for one in box.processes() if "sleep" in one["argv"]], 5)
            return sent, result.exit_code, result.stdout, result.stderr, left

    assert caller(claim) == (True, 1, "ready\n", "caught\n", True)


@pytest.mark.parametrize("size", [(24, 80), (33, 144)])
def test_a_terminal_has_the_size_that_was_asked_for(caller: Caller, size: tuple[int, int]) -> None:
    def claim(size: tuple[int, int]) -> object:
        with Sandbox() as box:
            process = box.spawn(["sh", "-c", "tty; stty size; test -t 0 && test -t 1 && test -t 2"], terminal=size)
            return process.wait().stdout, process.wait().exit_code

    said, code = caller(claim, size)
    assert said.split() == ["/dev/pts/0", str(size[0]), str(size[1])]
    assert code == 0


def test_a_terminal_can_be_resized_and_says_so(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            code = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.05; done"
            process = box.spawn(["bash", "-c", code], terminal=(24, 80), timeout_seconds=20)
            next(iter(process))
            process.resize(50, 132)
            return process.wait().stdout.split()

    assert caller(claim) == ["ready", "50", "132"]


def test_a_terminal_passes_control_characters_on(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            process = box.spawn(["sh", "-c", "echo ready; cat; echo over; exec sleep 30"], terminal=(24, 80))
            next(iter(process))
            process.write("hello\n")
            process.close_stdin()  # Ctrl-D
            wait_until(lambda: any("over" in output.text for output in process))
            process.write("\x03")
            return process.wait().signal

    assert caller(claim) == "SIGINT"


def test_a_background_program_that_floods_a_terminal_stops_nobody(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            started = time.monotonic()
            process = box.spawn(["bash", "-c", "trap '' HUP; yes & sleep 0.2"], terminal=(24, 80))
            result = process.wait()
            return (
                outcome(result) in ("ok", "output"),
                time.monotonic() - started < 20,
                box.exec(["echo", "next"]).stdout,
            )

    assert caller(claim) == (True, True, "next\n")


# ---- several, and in the background ---------------------------------------------------------------------------------


def test_commands_go_side_by_side_each_with_its_own_output(caller: Caller) -> None:
    def claim() -> object:
        async def all_of_them() -> list[str]:
            async with AsyncSandbox() as box:
                barrier = "while [ $(ls m* | wc -l) -lt 20 ]; do sleep 0.02; done"
                codes = [f"touch m{number}; {barrier}; seq {number}; echo {number} >&2" for number in range(20)]
                results = await asyncio.gather(*(box.exec(["sh", "-c", code], timeout_seconds=30) for code in codes))
                return [
                    number
                    for number, result in enumerate(results)
                    if result.stdout.split() != [str(n + 1) for n in range(number)] or result.stderr != f"{number}\n"
                ]

        return asyncio.run(all_of_them())

    assert caller(claim) == []


def test_hundreds_of_requests_at_once_are_all_answered(caller: Caller) -> None:
    def claim() -> object:
        async def all_of_them() -> object:
            async with AsyncSandbox() as box:
                await asyncio.gather(*(box.files.write(f"{number}", str(number)) for number in range(600)))
                results = await asyncio.gather(*(box.exec(["cat", f"{number}"]) for number in range(0, 600, 10)))
                return [result.stdout for result in results] == [str(number) for number in range(0, 600, 10)]

        return asyncio.run(all_of_them())

    assert caller(claim)


def test_a_background_process_outlives_its_parent_and_is_listed_and_killed(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            started = time.monotonic()
            box.exec(["sh", "-c", "setsid sleep 300 & echo"])
            quick = time.monotonic() - started < 20

            def sleepers() -> list[int]:
                return [one["pid"] for one in box.processes() if one["argv"] == ["sleep", "300"]]

            found = wait_until(sleepers)
            (pid,) = sleepers()
            killed = box.kill(pid)
            return quick, found, pid > 1, killed, wait_until(lambda: not sleepers()), box.kill(pid)

    assert caller(claim) == (True, True, True, True, True, False)


@pytest.mark.parametrize("pid", [0, 1, -1, 999_999])
def test_only_programs_can_be_killed(caller: Caller, pid: int) -> None:
    def claim(pid: int) -> object:
        with Sandbox() as box:
            return box.kill(pid), box.exec(["echo", "alive"]).stdout

    assert caller(claim, pid) == (False, "alive\n")


def test_output_of_a_background_process_does_not_block_it(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            box.exec(["sh", "-c", "(seq 200000; touch finished) &"])
            return wait_until(lambda: box.files.exists("finished"))

    assert caller(claim)


def test_a_flood_from_the_background_costs_little(caller: Caller) -> None:
    """What nobody wants to read is not read as fast as it can be written."""

    def claim() -> object:
        with Sandbox() as box:
            box.exec(["sh", "-c", "yes & yes &"])
            time.sleep(0.2)
            before = time.process_time()
            time.sleep(1)
            return time.process_time() - before, box.exec(["echo", "next"]).stdout

    used, said = caller(claim)
    assert used < 0.5
    assert said == "next\n"


def test_a_program_keeps_no_descriptor_of_ours_open(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            box.exec(["true"])
            before = open_files()
            for _ in range(20):
                box.exec(["echo"])
            return open_files() - before

    assert caller(claim) == 0


# ---- time -----------------------------------------------------------------------------------------------------------


def test_a_command_is_killed_at_its_time_with_all_of_its_session(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            box.run("kept = 1")
            result = box.exec(["sh", "-c", "trap '' TERM INT; sleep 301 & echo begun; wait"], timeout_seconds=0.5)
            gone = wait_until(lambda: not [one for one in box.processes() if "301" in one["argv"]], 5)
            return outcome(result), result.stdout, result.duration_ms < 20_000, gone, box.run("print(kept)").stdout

    assert caller(claim) == ("timeout", "begun\n", True, True, "1\n")


def test_a_command_that_nobody_waits_for_any_more_is_killed(caller: Caller) -> None:
    def claim() -> object:
        async def cancelled() -> object:
            async with AsyncSandbox() as box:
                waiting = asyncio.ensure_future(box.exec(["sleep", "302"]))
                while not [one for one in await box.processes() if "302" in one["argv"]]:
                    await asyncio.sleep(0.02)
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
                for _ in range(500):
                    if not [one for one in await box.processes() if "302" in one["argv"]]:
                        break
                    await asyncio.sleep(0.02)
                return waiting.cancelled(), await box.processes() != [], (await box.exec(["echo", "next"])).stdout

        return asyncio.run(cancelled())

    assert caller(claim) == (True, True, "next\n")


def test_commands_cancelled_at_any_moment_leave_nothing(caller: Caller) -> None:
    def claim() -> object:
        async def cancelled() -> object:
            import random

            chance = random.Random(1)
            async with AsyncSandbox() as box:
                await box.exec(["true"])
                before = open_files()
                for _ in range(60):
                    waiting = asyncio.ensure_future(box.exec(["sleep", "303"]))
                    for _ in range(chance.randrange(12)):
                        await asyncio.sleep(0)
                    await asyncio.sleep(chance.random() * 0.002)
                    waiting.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await waiting
                for _ in range(500):
                    left = [one for one in await box.processes() if "303" in one["argv"]]
                    if not left and open_files() <= before:
                        break
                    await asyncio.sleep(0.02)
                return len(left), open_files() - before, (await box.exec(["echo", "next"])).stdout

        return asyncio.run(cancelled())

    assert caller(claim) == (0, 0, "next\n")


# ---- limits ---------------------------------------------------------------------------------------------------------

HOG = "data = b''\nwhile True: data += b'x' * 5_000_000"


@pytest.mark.parametrize("how", ["run", "exec"])
def test_memory_is_told_and_the_sandbox_is_usable_afterwards(caller: Caller, how: str) -> None:
    def claim(how: str, code: str) -> object:
        with Sandbox(memory_mb=100) as box:
            box.run("kept = 1")
            result = box.run(code) if how == "run" else box.exec(["python3", "-c", code])
            after = box.run("print(6 * 7)")
            return outcome(result), "memory" in result.limits_hit, after.stdout, outcome(after)

    assert caller(claim, how, HOG) == ("memory", True, "42\n", "ok")


def test_a_limit_that_was_hit_before_is_not_blamed_on_the_next(caller: Caller) -> None:
    def claim(code: str) -> object:
        with Sandbox(memory_mb=100) as box:
            box.exec(["python3", "-c", code])
            result = box.exec(["sh", "-c", "exit 3"])
            return outcome(result), result.limits_hit

    assert caller(claim, HOG) == ("failed", ())


def test_processes_are_limited_and_the_sandbox_is_usable_afterwards(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox(pids=20) as box:
            code = "import subprocess\nfor n in range(40): subprocess.Popen(['sleep', '300'], start_new_session=True)"
            result = box.run(code)
            first = box.exec(["true"])
            box.run("import subprocess", timeout_seconds=10)
            return (
                outcome(result) in ("failed", "pids"),
                first.exit_code in (0, 126),
                [box.run("print(1)").stdout for _ in range(2)][1],
            )

    assert caller(claim) == (True, True, "1\n")


# ---- attacks on the sandbox itself ----------------------------------------------------------------------------------

ATTACKS = {
    "kill everything": "import os; os.kill(-1, 9)",
    "kill everything else, too": "import os, signal\nfor n in range(1, 65):\n    for p in (-1, 1):\n"
    "        try: os.kill(p, n) if n not in (19, 20, 21, 22) else None\n        except OSError: pass",
    "stop itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "stop everything": "import os, signal; os.kill(-1, signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP)",
    "close everything": "import os; os.closerange(0, 70000)",
    "close everything and go on": "import os, time; os.closerange(0, 70000)\nwhile True: time.sleep(1)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "fork bomb of sessions": "import os\nwhile 1:\n    try: os.fork() == 0 and os.setsid()\n    except OSError: pass",
    "fill the runs": "open('/run/hutch/runs/x', 'wb').write(bytes(1 << 30))",
    "remove the runs": "import shutil; shutil.rmtree('/run/hutch/runs', ignore_errors=True); print('x' * 9)",
    "fill everything": "import os\nfor d in ('/tmp', '/workspace', '/home/sandbox', '/dev/shm', '/run/hutch/runs'):\n"
    "    for n in range(9):\n        try: open(f'{d}/{n}', 'wb').write(bytes(200 << 20))\n        except OSError: pass",
    "become another program": "import os; os.execvp('sleep', ['sleep', '305'])",
    "ignore everything": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "exhaust descriptors": "import os\nwhile True: os.dup(0)",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_after_an_attack_on_the_sandbox_the_next_run_works_and_is_told(caller: Caller, attack: str) -> None:
    def claim(code: str) -> object:
        with Sandbox(memory_mb=600) as box:
            box.run("kept = 1")
            started = time.monotonic()
            result = box.run(code, timeout_seconds=2)
            took = time.monotonic() - started
            after = box.run("print('kept' in globals(), 6 * 7)", timeout_seconds=30)
            return outcome(result), took, after.stdout, result.state_lost or after.state_lost, outcome(after)

    word, took, said, lost, after = caller(claim, ATTACKS[attack])
    assert word != "killed"
    assert took < 25
    assert said == f"{not lost} 42\n", "the state is there, or it is said that it is lost"
    assert after == "ok"


STOPPER = """
import os, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        while True:
            try: os.kill(-1, signal.SIGSTOP)
            except OSError: pass
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("how", ["run", "exec"])
def test_whoever_stops_every_new_process_does_not_stop_the_clock(caller: Caller, how: str) -> None:
    """A program can be stopped before it is even executed, while pid 1 waits to hear how that went."""

    def claim(how: str, code: str) -> object:
        with Sandbox() as box:
            box.exec(["python3", "-c", code], timeout_seconds=2)
            started = time.monotonic()
            for _ in range(2):
                result = box.run("1", timeout_seconds=1) if how == "run" else box.exec(["true"], timeout_seconds=1)
                assert outcome(result) in ("ok", "timeout", "failed"), result
            return time.monotonic() - started

    assert caller(claim, how, STOPPER) < 25


def test_a_sandbox_that_is_killed_from_outside_is_replaced_and_that_is_told(caller: Caller) -> None:
    def claim() -> object:
        from hutch.engine import census

        with Sandbox() as box:
            box.run("kept = 1")
            box.files.write("file", "1")
            mine = [living for living in census.find_sandboxes() if living.owner == os.getpid()]
            os.kill(mine[0].pid, signal.SIGTERM)
            wait_until(lambda: box._box._box.live is None)  # hutch has heard of it
            result = box.run("print('kept' in globals())")
            return len(mine), result.stdout, result.state_lost, box.run("1").state_lost, box.files.exists("file")

    assert caller(claim) == (1, "False\n", True, False, False)


def test_lost_files_are_told_to_a_command_as_well(caller: Caller) -> None:
    def claim() -> object:
        from hutch.engine import census

        with Sandbox() as box:
            first = box.exec(["touch", "file"])
            mine = [living for living in census.find_sandboxes() if living.owner == os.getpid()]
            os.kill(mine[0].pid, signal.SIGTERM)
            wait_until(lambda: box._box._box.live is None)  # hutch has heard of it
            second, third = box.exec(["ls"]), box.exec(["ls"])
            return first.state_lost, second.state_lost, second.stdout, third.state_lost

    assert caller(claim) == (False, True, "", False)


@pytest.mark.parametrize("what", ["run", "exec", "files", "spawn"])
def test_whoever_waits_while_the_sandbox_is_closed_is_told(caller: Caller, what: str) -> None:
    def claim(what: str) -> object:
        box = Sandbox().start()
        box.run("1")
        found: list[object] = []

        def use() -> None:
            if what == "run":
                found.append(error_of(box.run, "import time; time.sleep(60)"))
            elif what == "exec":
                found.append(error_of(box.exec, ["sleep", "60"]))
            elif what == "spawn":
                found.append(error_of(box.spawn(["sleep", "60"]).wait))
            else:
                box.close()
                found.append(error_of(box.files.read, "x"))

        thread = threading.Thread(target=use)
        thread.start()
        time.sleep(0.3)
        box.close()
        thread.join(20)
        return found[0][:2] if found else None, error_of(box.run, "1")[:2]

    assert caller(claim, what) == (("GoneError", "sandbox.closed"), ("GoneError", "sandbox.closed"))

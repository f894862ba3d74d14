"""The node driver on the real node, without a sandbox: what a session keeps, and what ends a run but not the session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest_harness import Driver, Run

import hutch

GUEST = str(Path(hutch.__file__).parent / "guest" / "node.js")
NODE = os.environ.get("GUEST_NODE", "/usr/bin/node")


@pytest.fixture(autouse=True)
def _need_node() -> None:
    if not os.access(NODE, os.X_OK):
        must = os.environ.get("HUTCH_MUST", "").split(",")
        (pytest.fail if {"node", "all"} & set(must) else pytest.skip)("node is not installed")


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    with Driver([NODE, GUEST], tmp_path) as driver:
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


# ---- what a session keeps -------------------------------------------------------------------------------------------


def test_every_kind_of_name_can_be_declared_again(driver: Driver) -> None:
    good(driver.run("const a = 1; let b = 2; class C { x = 1 }; function f() { return a + b }; var v = 9"))
    assert good(driver.run("console.log(a, b, new C().x, f(), v)")) == "1 2 1 3 9\n"
    good(driver.run("const a = 10; let b = 20; class C { x = 2 }; var v = 90"))
    assert good(driver.run("console.log(a, b, new C().x, f(), v)")) == "10 20 2 30 90\n"


def test_a_function_sees_later_names(driver: Driver) -> None:
    good(driver.run("function late() { return later }"))
    assert good(driver.run("const later = 5; console.log(late())")) == "5\n"


def test_await_stands_at_the_top(driver: Driver) -> None:
    assert good(driver.run("const x = await new Promise((go) => setTimeout(go, 10, 7)); console.log(x)")) == "7\n"
    assert good(driver.run("for await (const n of [1, 2]) console.log(x + n)")) == "8\n9\n"


def test_modules_are_required_from_the_working_directory(driver: Driver) -> None:
    (driver.workspace / "mine.js").write_text("module.exports = { answer: 42 }")
    package = driver.workspace / "node_modules" / "there"
    package.mkdir(parents=True)
    (package / "index.js").write_text("module.exports = 'found'")
    assert (
        good(driver.run("console.log(require('./mine').answer, require('there'), require('path').sep)"))
        == "42 found /\n"
    )


def test_modules_are_imported_from_the_working_directory(driver: Driver) -> None:
    (driver.workspace / "mine.mjs").write_text("export const answer = 42")
    package = driver.workspace / "node_modules" / "only-esm"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"type": "module", "exports": {"import": "./i.js"}}')
    (package / "i.js").write_text("export default 'esm'")
    code = "console.log((await import('./mine.mjs')).answer, (await import('fs')).existsSync('/'))"
    assert good(driver.run(code)) == "42 true\n"
    assert good(driver.run("console.log((await import('only-esm')).default)")) == "esm\n"


@pytest.mark.parametrize(
    "code",
    [
        "'import(1)'",
        '"import(1)"',
        "`import(1)`",
        "`${`import(${1})`}`",
        "/import\\(1\\)/.source.replaceAll('\\\\', '')",
        "'a' /* import( */ && 'import(1)'",
        "[1, 2].map((x) => x / 2 / 1) && 'import(1)'",
        "((s) => s)('import(1)') // import('x')",
        "({ import(x) { return `import(${x})` } }).import(1)",
        "(function () { return /[/]import\\(1/.test('/import(1') && 'import(1)' })()",
    ],
)
def test_the_word_import_is_left_alone_where_it_is_none(driver: Driver, code: str) -> None:
    assert good(driver.run(f"console.log({code.split('//')[0]})\n// import(2)")) == "import(1)\n"


def test_the_last_value_is_shown_on_request(driver: Driver) -> None:
    assert good(driver.run("({ a: 1, b: [1, 'x'] })", flags="echo")) == "{ a: 1, b: [ 1, 'x' ] }\n"
    assert good(driver.run("10n ** 3n", flags="echo")) == "1000n\n"
    assert good(driver.run("-0", flags="echo")) == "-0\n"
    assert good(driver.run("undefined", flags="echo")) == ""
    assert good(driver.run("await 'later'", flags="echo")) == "'later'\n"
    assert good(driver.run("1 + 1")) == ""


# ---- how runs end ---------------------------------------------------------------------------------------------------


def test_an_error_gives_1_and_the_stack_of_the_users_own(driver: Driver) -> None:
    run = driver.run("function bad() { throw new Error('boom') }\nbad()")
    assert (run.code, run.stdout) == (1, b"")
    file = f"{driver.runs}/1.js"
    assert run.stderr.decode() == f"Uncaught Error: boom\n    at bad ({file}:1:24)\n    at {file}:2:1\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("await Promise.reject(new Error('rejected'))", "Error: rejected"),
        ("Promise.reject(new Error('unhandled'))", "Error: unhandled"),
        ("throw 5", "Uncaught 5"),
        ("throw null", "Uncaught null"),
        ("missing", "ReferenceError: missing is not defined"),
        ("setTimeout(() => { throw new Error('timer') }, 1); await new Promise((go) => setTimeout(go, 100))", "timer"),
        ("throw new Error('outer', { cause: new Error('inner') })", "[cause]: Error: inner"),
    ],
)
def test_what_is_thrown_gives_1_and_is_shown(driver: Driver, code: str, said: str) -> None:
    run = driver.run(code)
    assert run.code == 1
    assert said in run.stderr.decode()
    assert "node:inspector" not in run.stderr.decode()
    assert GUEST not in run.stderr.decode()
    assert good(driver.run("console.log(1)")) == "1\n"


def test_a_syntax_error_shows_its_place(driver: Driver) -> None:
    run = driver.run("let fine = 1\nlet z = ;")
    assert run.code == 1
    assert run.stderr.decode().startswith(f"{driver.runs}/1.js:2\nlet z = ;\n        ^\n\nUncaught SyntaxError")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("process.exit(3)", 3),
        ("process.exit()", 0),
        ("process.exitCode = 4", 4),
        ("process.exitCode = 5; process.exit()", 5),
        ("process.exit(256 + 7)", 7),
        ("setTimeout(() => process.exit(6), 5); await new Promise(() => {})", 6),
        ("(() => { process.exit(8) })(); console.log('never')", 8),
    ],
)
def test_exit_ends_the_run_and_not_the_session(driver: Driver, code: str, expected: int) -> None:
    good(driver.run("const kept = 1"))
    run = driver.run(code)
    assert (run.code, run.stdout, run.stderr) == (expected, b"", b"")
    assert good(driver.run("console.log(kept, process.exitCode)")) == "1 undefined\n"


def test_pending_work_does_not_delay_the_end_and_goes_on(driver: Driver) -> None:
    good(driver.run("let n = 0; setInterval(() => n++, 1); setTimeout(() => console.log('late'), 30)"))
    assert good(driver.run("await new Promise((go) => setTimeout(go, 200)); console.log(n > 5)")) == "late\ntrue\n"


def test_what_fails_between_runs_does_not_end_the_process(driver: Driver) -> None:
    good(driver.run("setTimeout(() => { throw new Error('between') }, 1)"))
    run = driver.run("await new Promise((go) => setTimeout(go, 100)); console.log('alive')")
    assert run.stdout == b"alive\n"
    assert b"between" in run.stderr


def test_ten_megabytes_arrive_before_the_end(driver: Driver) -> None:
    assert len(driver.run("process.stdout.write('x'.repeat(10_000_000))").stdout) == 10_000_000


# ---- input, interrupts, children ------------------------------------------------------------------------------------


def test_each_run_has_its_own_input(driver: Driver) -> None:
    read = "console.log(require('fs').readFileSync(0, 'utf8'))"
    assert good(driver.run(read, stdin=b"first")) == "first\n"
    assert good(driver.run(read)) == "\n"
    stream = "let text = ''; for await (const part of process.stdin) text += part; console.log(text)"
    assert good(driver.run(stream, stdin=b"second")) == "second\n"
    assert good(driver.run(stream, stdin=b"third")) == "third\n"
    assert (
        good(driver.run("console.log(require('child_process').execSync('cat', {stdio: ['inherit']}) + '')", stdin=b"c"))
        == "c\n"
    )


@pytest.mark.parametrize(
    "code",
    [
        "console.log('going'); while (true) {}",
        "console.log('going'); await new Promise(() => {})",
        "console.log('going'); require('child_process').execSync('sleep 100')",
        "console.log('going'); for (;;) await 1",
    ],
)
def test_an_interrupt_ends_the_run_and_keeps_the_state(driver: Driver, code: str) -> None:
    good(driver.run("const kept = 7"))
    assert interrupted(driver, code).code == 130
    assert good(driver.run("console.log(kept)")) == "7\n"


def test_an_interrupt_while_idle_means_nothing(driver: Driver) -> None:
    good(driver.run("const kept = 7"))
    for _ in range(3):
        driver.interrupt()
    assert good(driver.run("console.log(kept)")) == "7\n"


def test_who_handles_interrupts_is_asked(driver: Driver) -> None:
    code = "process.once('SIGINT', () => { console.log('handled'); go() }); let go; const wait = new Promise((g) => (go = g));"
    run = interrupted(driver, f"{code} console.log('going'); await wait")
    assert (run.code, run.stdout) == (0, b"going\nhandled\n")


def test_children_do_not_hold_the_control_descriptors(driver: Driver) -> None:
    held = good(driver.run("console.log(require('child_process').execSync('ls /proc/self/fd') + '')")).split()
    assert held == ["0", "1", "2", "3"], "3 is the directory itself"


def test_the_end_of_the_host_is_the_end(driver: Driver) -> None:
    driver.start("await new Promise(() => {})")
    driver.hang_up()
    assert driver.finish().died == 0


# ---- as a script ----------------------------------------------------------------------------------------------------


def test_a_script_runs_to_the_end_of_its_work(driver: Driver) -> None:
    code = "setTimeout(() => console.log('later', require.main === module), 30); process.on('exit', () => console.log('bye'))"
    assert good(driver.run(code, flags="once")) == "later true\nbye\n"


def test_a_script_has_its_file_and_its_input(driver: Driver) -> None:
    code = "console.log(__filename, process.argv[1] === __filename, require('fs').readFileSync(0) + '')"
    assert good(driver.run(code, stdin=b"in", flags="once")) == f"{driver.runs}/main.js true in\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("process.exit(3)", 3),
        ("process.exitCode = 4", 4),
        ("setTimeout(() => process.exit(5), 5); setInterval(() => {}, 9)", 5),
    ],
)
def test_a_script_ends_with_its_code(driver: Driver, code: str, expected: int) -> None:
    run = driver.run(code, flags="once")
    assert (run.code, run.stderr) == (expected, b"")


@pytest.mark.parametrize("code", ["throw new Error('x')", "Promise.reject(new Error('x'))", "let z = ;"])
def test_a_script_that_fails_ends_its_process_with_1(driver: Driver, code: str) -> None:
    run = driver.run(code, flags="once")
    assert run.died is not None
    assert os.waitstatus_to_exitcode(run.died) == 1
    assert b"Error: " in run.stderr

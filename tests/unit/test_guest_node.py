"""The Node.js driver on the real runtime, without a sandbox: what a session keeps, and what ends a run.

GUEST_NODES, paths separated by colons, names other runtimes to try than the system's own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest_harness import Driver, Run

import hutch

GUEST = str(Path(hutch.__file__).parent / "guest" / "node.js")
NODES = os.environ.get("GUEST_NODES", "/usr/bin/node").split(":")

pytestmark = pytest.mark.skipif(shutil.which(NODES[0]) is None, reason="there is no Node.js here")


@pytest.fixture(params=NODES)
def argv(request: pytest.FixtureRequest) -> list[str]:
    return [request.param, "--no-force-async-hooks-checks", GUEST]


@pytest.fixture
def driver(argv: list[str], tmp_path: Path) -> Iterator[Driver]:
    with Driver([*argv, "session"], tmp_path) as driver:
        yield driver


@pytest.fixture
def script(argv: list[str], tmp_path: Path) -> Iterator[Driver]:
    """A driver for one run."""
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


SLEEP = "await new Promise((done) => setTimeout(done, 10));"
FOREVER = "await new Promise(() => {});"

# ---- what a session keeps -------------------------------------------------------------------------------------------


def test_declarations_are_seen_by_later_runs_and_can_be_made_again(driver: Driver) -> None:
    good(driver.run("let a = 1; const b = 2; var c = 3; class D {}; function sum() { return a + b + c; }"))
    assert good(driver.run("console.log(sum(), new D())")) == "6 D {}\n"
    good(driver.run("let a = 10; const b = 20; var c = 30; class D { e() {} }; { let a = 5; }"))
    assert good(driver.run("console.log(sum(), typeof D.prototype.e)")) == "60 function\n"


def test_await_works_at_the_top_level(driver: Driver) -> None:
    assert good(driver.run(f"const x = await Promise.resolve(7); {SLEEP} console.log(x)")) == "7\n"
    assert good(driver.run("for await (const y of [x, 8]) console.log(y)")) == "7\n8\n"


def test_a_run_finds_what_a_repl_has(driver: Driver) -> None:
    (driver.workspace / "own.js").write_text(
        "exports.x = __filename.slice(-6); exports.main = require.main === module;"
    )
    (driver.workspace / "node_modules" / "pack").mkdir(parents=True)
    (driver.workspace / "node_modules" / "pack" / "index.js").write_text("module.exports = 'packed';")
    code = """
        console.log(require("./own"), require("pack"), require("node:path").sep, os.EOL.length, typeof fs.readFileSync);
        console.log(this === globalThis, require.main === module, exports === module.exports, typeof __filename);
        console.log(__dirname === process.cwd(), process.argv.length, process.execArgv.length);
    """
    assert good(driver.run(code)).splitlines() == [
        "{ x: 'own.js', main: false } packed / 1 function",
        "true true true string",
        "true 1 0",
    ]
    assert good(driver.run("const fs = require('fs'), os = 1; var path = 2; console.log(typeof fs, os, path)")) == (
        "object 1 2\n"
    )


def test_modules_can_be_imported_in_every_way(driver: Driver) -> None:
    (driver.workspace / "own.mjs").write_text("export default 1; export const two = 2, three = 3;")
    (driver.workspace / "node_modules" / "pack").mkdir(parents=True)
    (driver.workspace / "node_modules" / "pack" / "package.json").write_text('{"exports": {"import": "./a.mjs"}}')
    (driver.workspace / "node_modules" / "pack" / "a.mjs").write_text("export const name = 'packed';")
    assert good(driver.run("console.log((await import('./own.mjs')).two, (await import('pack')).name)")) == "2 packed\n"
    code = """import one, { two, three as drei } from "./own.mjs";
import * as own from './own.mjs'
import {
  name,
} from "pack";
import "./own.mjs"; import path, * as all from "path"
console.log(one, two, drei, own.two, name, all.default === path, import.meta.url.endsWith("/main.js"));
throw new Error("line 8");"""
    run = driver.run(code)
    assert run.stdout == b"1 2 3 2 packed true true\n", run
    assert b"1.js:8\n" not in run.stderr
    assert b"2.js:8\n" in run.stderr
    assert good(driver.run("const later = () => import('fs'); console.log(typeof (await later()).readFileSync)")) == (
        "function\n"
    )


def test_only_code_is_taken_for_an_import(driver: Driver) -> None:
    code = r"""
        // import("a")
        /* import x from "b" */
        const text = "import('c')" + 'import.meta' + `import("d") ${`${(await import("path")).sep}`} import("e")`;
        const o = { import(a) { return a; }, b: /import\("f/.source };
        console.log(text, o.import(1), o.b, 4 / 2 / 1);
        console.log(`
import x from "y"
`.trim());
    """
    assert good(driver.run(code)) == (
        """import('c')import.metaimport("d") / import("e") 1 import\\("f 2\nimport x from "y"\n"""
    )


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("[1, { a: 'x' }]", "[ 1, { a: 'x' } ]\n"),
        ("'text'", "'text'\n"),
        ("let x = 1", ""),
        ("undefined", ""),
        ("null", "null\n"),
        ("-0", "-0\n"),
        ("2n ** 70n", "1180591620717411303424n\n"),
        ("Symbol('s')", "Symbol(s)\n"),
        ("({ a: 1 })", "{ a: 1 }\n"),
        ("{ a: 1, b: [2] }", "{ a: 1, b: [ 2 ] }\n"),
        ("{ let y = 1; y + 1 }", "2\n"),
        ("await Promise.resolve(5)", "5\n"),
        ("Promise.resolve(6)", "Promise { 6 }\n"),
        ("for (const z of [1, 2]) z", "2\n"),
        ("(function named() {})", "[Function: named]\n"),
        ("", ""),
        ("// nothing", ""),
    ],
)
def test_the_last_value_is_shown_when_asked_for(driver: Driver, code: str, shown: str) -> None:
    assert good(driver.run(code, flags="echo")) == shown
    assert driver.run(code).stdout == b""


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_shows_the_code_and_nothing_of_the_driver(driver: Driver) -> None:
    good(driver.run("function thrower() {\n  throw new TypeError('deep');\n}"))
    file = f"{driver.runs}/1.js"
    assert ended(driver.run("\nthrower();")) == (
        1,
        "",
        f"{file}:2\n  throw new TypeError('deep');\n        ^\n\n"
        f"TypeError: deep\n    at thrower ({file}:2:9)\n    at {driver.runs}/2.js:2:1\n",
    )
    run = driver.run("try { thrower() } catch (error) { console.log(error.stack) }")
    assert good(run) == f"TypeError: deep\n    at thrower ({file}:2:9)\n    at {driver.runs}/3.js:1:7\n"


@pytest.mark.parametrize(
    ("code", "head", "tail"),
    [
        ("let q = ;", ":1\nlet q = ;\n        ^\n\n", "SyntaxError: Unexpected token ';'\n"),
        ("ok();\n\tnull.x", ":2\n\tnull.x\n\t     ^\n\n", "TypeError: Cannot read properties of null"),
        (f"{SLEEP}\nnull.x", ":2\nnull.x\n     ^\n\n", "TypeError: Cannot read properties of null"),
        ("JSON.parse('{')", ":1\nJSON.parse('{')\n     ^\n\n", "SyntaxError: "),
        ("fs.readFileSync('/nope')", ":1\n", "Error: ENOENT: no such file or directory, open '/nope'\n"),
        ("process.kill('x')", ":1\n", 'TypeError [ERR_INVALID_ARG_TYPE]: The "pid" argument'),
        ("throw 5", "", "Uncaught 5\n"),
        (f"{SLEEP} throw {{ a: 1 }}", "", "Uncaught { a: 1 }\n"),
        ("throw undefined", "", "Uncaught undefined\n"),
        ("Promise.reject(new Error('lost')); 1", ":1\n", "Error: lost\n"),
        ("(async () => { await null; throw new Error('late') })()", ":1\n", "Error: late\n"),
        (f"setTimeout(() => {{ throw new Error('timer') }}, 1); {FOREVER}", ":1\n", "Error: timer\n"),
        ("require('./nope')", ":1\n", "Error: Cannot find module './nope'\n"),
    ],
)
def test_whatever_is_not_caught_is_reported_and_fails_the_run(driver: Driver, code: str, head: str, tail: str) -> None:
    good(driver.run("let kept = 1; function ok() {}"))
    run = driver.run(code)
    text = run.stderr.decode()
    assert (run.code, run.stdout) == (1, b""), run
    assert text.startswith(f"{driver.runs}/2.js{head}" if head else tail), text
    assert tail in text
    assert "guest/node.js" not in text
    assert "node:inspector" not in text
    assert good(driver.run("console.log(kept)")) == "1\n"


def test_an_error_between_runs_is_shown_and_harms_nobody(driver: Driver) -> None:
    good(driver.run("let kept = 1; process.once('SIGUSR2', () => { throw new Error('between') })"))
    os.kill(driver.pid, signal.SIGUSR2)
    driver.wait_for(b"Error: between")
    assert "Error: between" in driver.printed()[1].decode()
    assert good(driver.run("console.log(kept)")) == "1\n"


def test_code_can_handle_what_nobody_caught(driver: Driver) -> None:
    code = f"process.once('uncaughtException', (e) => console.log(e.message)); setTimeout(() => null.x, 1); {SLEEP}"
    assert good(driver.run(code)) == "Cannot read properties of null (reading 'x')\n"


# ---- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("process.exit(3)", 3),
        ("process.exit()", 0),
        ("try { process.exit(4) } catch { console.log('caught') } finally { console.log('finally') }", 4),
        ("[1, 2].forEach((x) => process.exit(x))", 1),
        ("new Promise(() => process.exit(5))", 5),
        (f"{SLEEP} process.exit(6)", 6),
        (f"setTimeout(() => process.exit(7), 1); {FOREVER}", 7),
        (f"process.nextTick(() => process.exit(8)); {FOREVER}", 8),
        ("(async () => { await 1; process.exit(9) })().catch((e) => { console.error(e); process.exit(1) })", 9),
        (f"fs.readFile('/', () => {{ try {{ process.exit(10) }} catch (e) {{ console.log(e) }} }}); {FOREVER}", 10),
        ("process.exitCode = 11", 11),
        ("process.exitCode = 12; process.exit()", 12),
    ],
)
def test_exit_ends_the_run_and_not_the_session(driver: Driver, code: str, status: int) -> None:
    good(driver.run("let kept = 1"))
    assert ended(driver.run(code)) == (status, "", "")
    assert good(driver.run("console.log(kept, process.exitCode)")) == "1 undefined\n"


def test_listeners_for_the_exit_are_called_once(driver: Driver) -> None:
    good(driver.run("process.on('exit', (code) => console.log('bye', code))"))
    assert ended(driver.run("process.exit(2)")) == (2, "bye 2\n", "")
    assert ended(driver.run("process.exit(3)")) == (3, "", "")


def test_what_is_pending_goes_on_between_runs_and_delays_none(driver: Driver) -> None:
    code = """
        const server = require("net").createServer((socket) => socket.end("hello")).listen("./socket");
        setInterval(() => {}, 1000);
        process.once("SIGUSR2", () => setTimeout(() => console.log("late"), 1));
        require("child_process").spawn("sleep", ["100"]);
    """
    assert good(driver.run(code)) == ""
    os.kill(driver.pid, signal.SIGUSR2)
    driver.wait_for(b"late\n")
    driver.printed()
    code = 'for await (const data of require("net").connect("./socket")) console.log(String(data))'
    assert good(driver.run(code)) == "hello\n"


def test_a_promise_that_is_the_last_value_is_waited_for(driver: Driver) -> None:
    assert good(driver.run(f"async function main() {{ {SLEEP} console.log('done') }}\nmain()")) == "done\n"


def test_the_driver_ends_with_its_host(driver: Driver) -> None:
    good(driver.run("process.on('exit', () => console.log('never')); setInterval(() => {}, 1000)"))
    assert driver.hang_up() == 0
    assert driver.printed() == (b"", b"")


def test_the_driver_ends_with_its_host_before_any_run(argv: list[str], tmp_path: Path) -> None:
    with Driver(argv, tmp_path) as driver:
        assert driver.hang_up() == 0


# ---- interrupts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "console.log('going'); while (true) {}",
        "try { for (;;) console.log('going') } catch { console.log('never') } finally { console.log('never') }",
        f"setTimeout(() => console.log('going'), 1); {FOREVER}",
        "await 1; console.log('going'); while (true) {}",
        f"setTimeout(() => {{ console.log('going'); while (true) {{}} }}, 1); {FOREVER}",
        "(async () => { for (;;) { await 1; console.log('going') } })()",
        "require('child_process').execSync('echo going; exec sleep 100', { stdio: 'inherit' })",
    ],
)
def test_an_interrupt_ends_the_run_and_keeps_the_state(driver: Driver, code: str) -> None:
    good(driver.run("let kept = 1"))
    run = interrupted(driver, code)
    assert run.code == 130, run
    assert set(run.stdout.splitlines()) == {b"going"}
    code = f"console.log(kept); {SLEEP} await new Promise(setImmediate); await null; console.log('alive')"
    assert good(driver.run(code)) == "1\nalive\n"


def test_the_first_run_of_a_driver_that_was_not_told_of_a_session_can_be_interrupted(script: Driver) -> None:
    assert interrupted(script, "let kept = 1; console.log('going'); while (true) {}").code == 130
    assert good(script.run("console.log(kept)")) == "1\n"


def test_code_that_listens_for_interrupts_gets_them(driver: Driver) -> None:
    code = "process.on('SIGINT', () => { console.log('mine'); go() }); let go; setTimeout(console.log, 1, 'going');"
    assert interrupted(driver, f"{code} await new Promise((done) => (go = done))").stdout == b"going\nmine\n"
    good(driver.run("process.removeAllListeners('SIGINT')"))
    assert interrupted(driver, f"setTimeout(console.log, 1, 'going'); {FOREVER}").code == 130
    assert interrupted(driver, "console.log('going'); for (;;);").code == 130


def test_an_interrupt_before_the_first_run_changes_nothing(driver: Driver) -> None:
    driver.interrupt()
    driver.interrupt()
    assert good(driver.run(f"{SLEEP} console.log('alive')")) == "alive\n"


# ---- descriptors, input and output ----------------------------------------------------------------------------------


def test_programs_inherit_nothing_of_the_driver(driver: Driver) -> None:
    code = """
        const { execSync } = require("child_process");
        console.log(String(execSync("ls -l /proc/self/fd; grep Sig /proc/self/status")));
    """
    text = good(driver.run(code))
    assert re.findall(r" (\d+) -> (?!/proc)", text) == ["0", "1", "2"], text
    signals = dict(re.findall(r"Sig(Ign|Cgt|Blk):\s+(\w+)", text))
    assert [int(signals[name], 16) & 2 for name in ("Ign", "Cgt", "Blk")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("code", "out"),
    [
        ("console.log(fs.readFileSync(0, 'utf8'))", "one\ntwo\n"),
        ("console.log(fs.readFileSync('/dev/stdin', 'utf8'))", "one\ntwo\n"),
        ("process.stdin.on('data', (d) => console.log(`${d}`)).on('end', () => console.log('end'))", "one\ntwo\nend\n"),
        ("for await (const d of process.stdin) console.log(String(d))", "one\ntwo\n"),
        ("require('readline').createInterface(process.stdin).on('line', (l) => console.log(l))", "one\ntwo\n"),
        ("require('child_process').execSync('cat', { stdio: 'inherit' }); console.log()", "one\ntwo\n"),
        ("1", ""),
    ],
)
def test_each_run_has_its_own_input(driver: Driver, code: str, out: str) -> None:
    for _ in range(2):
        assert good(driver.run(code, b"one\ntwo")) == out
    assert good(driver.run("console.log(JSON.stringify(fs.readFileSync(0, 'utf8')))")) == '""\n'
    code = "let all = ''; process.stdin.on('data', (d) => (all += d)).on('end', () => console.log(all.length))"
    assert good(driver.run(code, b"x" * 3_000_000)) == "3000000\n"


def test_all_output_is_out_when_the_run_ends(driver: Driver) -> None:
    run = driver.run("process.stdout.write('x'.repeat(10e6)); console.error('y'.repeat(1e6)); process.exit(1)")
    assert (run.code, len(run.stdout), len(run.stderr)) == (1, 10_000_000, 1_000_001)
    run = driver.run("for (let i = 0; i < 20000; i++) console.log(i); process.stdout.write(Buffer.from([0, 255]))")
    assert run.stdout.split() == [b"%d" % i for i in range(20000)] + [b"\0\xff"]
    assert driver.run("process.stdout.write('aé', 'latin1', () => console.log('b'))").stdout == b"a\xe9b\n"
    code = "fs.writeFileSync('file', 'x'); const read = fs.createReadStream('file'); read.pipe(process.stdout);"
    assert good(driver.run(f"{code} await new Promise((done) => read.on('end', done))")) == "x"


def test_much_code_is_no_problem(driver: Driver) -> None:
    assert good(driver.run("const big = '" + "é" * 2_500_000 + "'; console.log(big.length)")) == "2500000\n"
    assert good(driver.run("x = 1;\n" * 200_000 + "console.log(typeof (await import('fs')).stat)")) == "function\n"
    assert good(driver.run("")) == ""


def test_globals_that_code_replaces_are_not_needed(driver: Driver) -> None:
    good(
        driver.run(
            "setImmediate = setTimeout = Promise.prototype.then = fs.readSync = fs.writeSync = () => {}; let x = 1"
        )
    )
    good(driver.run("fs.closeSync(0)"))
    assert driver.run("x + 1", flags="echo").code == 0


# ---- once -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status", "out", "err"),
    [
        ("console.log(require.main === module, this === exports, process.argv.length); return", 0, "true true 2\n", ""),
        ("setTimeout(() => console.log('later'), 10); console.log('now')", 0, "now\nlater\n", ""),
        ("process.on('exit', (c) => console.log('exit', c)); process.exitCode = 4", 4, "exit 4\n", ""),
        ("process.on('exit', () => (process.exitCode = 9)); process.exit(3)", 9, "", ""),
        ("process.stdout.write('x'.repeat(5000)); process.exit(0)", 0, "x" * 5000, ""),
        ("throw new Error('x')", 1, "", "Error: x\n    at Object.<anonymous> ("),
        ("function f( {", 1, "", "SyntaxError: "),
        ("setTimeout(() => null.x, 1)", 1, "", "TypeError: Cannot read"),
        ("Promise.reject(new Error('lost')); setTimeout(console.log, 100, 'never')", 1, "", "Error: lost"),
        ("console.log(await Promise.resolve(3)); setTimeout(console.log, 1, 4)", 0, "3\n4\n", ""),
        ("import { sep } from 'path';\nconsole.log(sep)", 0, "/\n", ""),
        ("await 1;\nthrow new Error('x')", 1, "", "main.js:2\n"),
        ("await 1; let q = ;", 1, "", "SyntaxError: Unexpected token"),
        (FOREVER, 13, "", "unsettled top-level await"),
        ("await 1; process.exit(6)", 6, "", ""),
        ("process.on('uncaughtException', (e) => console.log(e)); setTimeout(() => { throw 5 })", 0, "5\n", ""),
        ("process.stdin.on('data', (d) => console.log(String(d))).on('end', () => console.log('end'))", 0,
         "input\nend\n", ""),
        ("import('path').then((path) => console.log(path.sep))", 0, "/\n", ""),
    ],
)  # fmt: skip
def test_the_only_run_is_a_script(script: Driver, code: str, status: int, out: str, err: str) -> None:
    run = script.run(code, b"input", "once")
    assert (run.code, run.stdout.decode()) == (status, out), run
    text = run.stderr.decode()
    assert (err in text) if err else (text == "")
    assert "guest/node.js" not in text


def test_an_interrupt_ends_the_only_run_with_its_process(script: Driver) -> None:
    script.start("console.log('going'); while (true) {}", flags="once")
    script.wait_for(b"going\n")
    script.interrupt()
    assert script.finish() == Run(None, b"going\n", b"", 2)

"""Ordinary programs work inside: a sandbox that nothing runs in protects nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import Hutch, need

PYTHON_PROGRAMS = {
    "threads": """
import threading
done = []
workers = [threading.Thread(target=done.append, args=(n,)) for n in range(20)]
[w.start() for w in workers]; [w.join() for w in workers]
print(len(done))
""",
    "multiprocessing": """
import multiprocessing
def double(n): return 2 * n
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(double, range(5)) == [0, 2, 4, 6, 8]
    from multiprocessing import shared_memory
    block = shared_memory.SharedMemory(create=True, size=99); block.buf[0] = 7; block.close(); block.unlink()
    print(multiprocessing.Lock().acquire())
""",
    "sqlite": """
import sqlite3
base = sqlite3.connect("/workspace/base.db")
base.execute("pragma journal_mode=wal"); base.execute("create table t(n)")
base.executemany("insert into t values (?)", [(n,) for n in range(50)]); base.commit()
print(base.execute("select sum(n) from t").fetchone())
""",
    "ssl": """
import hashlib, secrets, ssl
print(ssl.create_default_context().verify_mode, len(secrets.token_bytes(9)), hashlib.sha256(b"x").hexdigest()[:6])
""",
    "asyncio": """
import asyncio
async def serve(reader, writer):
    writer.write(await reader.readline()); await writer.drain(); writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"hello\\n"); print(await reader.readline()); writer.close(); server.close()
    child = await asyncio.create_subprocess_exec("echo", "child", stdout=asyncio.subprocess.PIPE)
    print((await child.communicate())[0])
asyncio.run(main())
""",
    "subprocess": """
import subprocess
print(subprocess.run("echo one | tr a-z A-Z", shell=True, capture_output=True, text=True).stdout)
""",
    "temporary files": """
import os, tempfile
with tempfile.TemporaryDirectory() as place:
    open(place + "/x", "w").write("x"); os.symlink("x", place + "/y"); print(open(place + "/y").read(), place[:5])
""",
    "signals": """
import os, signal
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1)); os.kill(os.getpid(), signal.SIGUSR1); print(seen)
""",
    "unicode": "print('gr\\u00fc\\u00df dich \\U0001f407'); open('/workspace/n\\u00e4me', 'w').write('x')",
    "own modules": """
open("/workspace/helper.py", "w").write("answer = 42")
import helper; print(helper.answer)
""",
}
SHELL_PROGRAMS = {
    "pipes": "seq 1000 | sort -rn | head -1 | xargs echo",
    "job control": "set -m; sleep 0.1 & sleep 0.1 & jobs; fg %1 >/dev/null; wait; echo waited",
    "interactive": "bash -ic 'set -o | grep monitor; cd /tmp && pwd' 2>/dev/null",
    "here documents": "cat <<END\nhello\nEND\n",
    "process substitution": "diff <(echo a) <(echo a) && echo same",
    "tar": "mkdir d; echo x > d/f; ln -s f d/l; tar czf a.tgz d && rm -r d && tar xzf a.tgz && cat d/l",
    "copying": "mkdir d; echo x > d/f; cp -a d e; touch -r d/f e/f; mkfifo p; find . | sort | tr '\\n' ' '",
    "locks": "flock /tmp/lock echo locked",
    "script": "script -qec 'echo on a terminal' /dev/null",
    "environment": "id -un; hostname; echo $HOME $PWD; date +%Z",
}
GIT = """
git config --global user.email a@b && git config --global user.name a && git init -q -b main repo && cd repo
echo one > file && git add file && git commit -qm first && git checkout -qb other && echo two >> file
git commit -qam second && git gc -q && git fsck && git log --format=%s | tr '\\n' ' '
"""
C_PROGRAM = """
cat > main.c <<'END'
#include <pthread.h>
#include <stdio.h>
static void *work(void *value) { *(int *)value = 42; return 0; }
int main(void) { pthread_t t; int n; pthread_create(&t, 0, work, &n); pthread_join(t, 0); printf("%d\\n", n); }
END
gcc -O1 -pthread main.c -o main && ./main
"""
JAVA = """
cat > Main.java <<'END'
public class Main {
  public static void main(String[] a) throws Exception {
    Thread t = new Thread(() -> System.out.println("from a thread")); t.start(); t.join();
  }
}
END
javac -J-Xmx256m Main.java && java -Xmx128m Main
"""
GO = """
export GOCACHE=/tmp/go GOFLAGS=-mod=mod GO111MODULE=auto GOTOOLCHAIN=local
cat > main.go <<'END'
package main
import "fmt"
func main() { c := make(chan int); go func() { c <- 42 }(); fmt.Println(<-c) }
END
go build -o main main.go && ./main
"""
RUST = """
cat > main.rs <<'END'
fn main() { let t = std::thread::spawn(|| 42); println!("{}", t.join().unwrap()); }
END
/usr/bin/rustc main.rs -o main && ./main
"""
NODE_PROGRAMS = {
    "the language": "console.log([1, 2, 3].map(n => n * 2).join())",
    "promises": "(async () => { await null; console.log(await Promise.all([1, 2])) })()",
    "a server of its own": """
const http = require("http");
const server = http.createServer((_, answer) => answer.end("hello")).listen(0, "127.0.0.1", () =>
  http.get(`http://127.0.0.1:${server.address().port}`, answer =>
    answer.on("data", data => { console.log(String(data)); server.close(); })));
""",
    "workers": """
const { Worker } = require("worker_threads");
new Worker("require('worker_threads').parentPort.postMessage(42)", { eval: true }).on("message", n => console.log(n));
""",
    "children": "console.log(require('child_process').execSync('echo child').toString())",
    "files": "const fs = require('fs'); fs.writeFileSync('x', 'y'); console.log(fs.readFileSync('x', 'utf8'))",
}
ROOM = ("--memory", "2G", "--pids", "512", "--tmp", "1G", "--timeout", "45", "--cpus", "2")


@pytest.mark.parametrize("name", PYTHON_PROGRAMS)
def test_python(hutch: Hutch, name: str) -> None:
    ran = hutch.run(PYTHON_PROGRAMS[name])
    assert (ran.outcome, ran.err) == ("ok", "")
    assert ran.out.strip()


@pytest.mark.parametrize("name", SHELL_PROGRAMS)
def test_shell(hutch: Hutch, name: str) -> None:
    ran = hutch.shell(f"set -e\n{SHELL_PROGRAMS[name]}")
    assert ran.outcome == "ok", ran
    assert ran.out.strip()


@pytest.mark.parametrize("name", NODE_PROGRAMS)
def test_node(hutch: Hutch, name: str) -> None:
    need("node")
    ran = hutch.run(NODE_PROGRAMS[name], "-e", "node")
    assert (ran.outcome, ran.err) == ("ok", "")
    assert ran.out.strip()


def test_git_in_the_sandboxs_own_workspace(hutch: Hutch) -> None:
    need("git")
    ran = hutch.shell(GIT)
    assert (ran.outcome, ran.out) == ("ok", "second first "), ran.err


@pytest.mark.parametrize(
    ("component", "script", "expected"),
    [
        ("gcc", C_PROGRAM, "42\n"),
        ("java", JAVA, "from a thread\n"),
        ("go", GO, "42\n"),
        ("rustc", RUST, "42\n"),
        ("perl", 'perl -MPOSIX -e \'print strftime("%Y", gmtime(0)), "\\n"\'', "1970\n"),
    ],
    ids=["gcc", "java", "go", "rustc", "perl"],
)
def test_compilers_and_runtimes(hutch: Hutch, component: str, script: str, expected: str) -> None:
    need(component)
    ran = hutch.shell(script, *ROOM)
    assert (ran.outcome, ran.out) == ("ok", expected), ran.err


def test_building_in_a_writable_project(hutch: Hutch, project: Path) -> None:
    need("gcc")
    ran = hutch.shell(C_PROGRAM, "--workspace", project)
    assert (ran.outcome, ran.out) == ("ok", "42\n"), ran.err
    assert (project / "main").stat().st_mode & 0o111


def test_a_program_can_be_read_from_a_file_or_from_standard_input(hutch: Hutch) -> None:
    file = hutch.write(hutch.home / "program.py", "print('from a file')")
    assert hutch.command("run", "-f", file).stdout == "from a file\n"
    assert hutch.command("run", "-", stdin="print('from input')").stdout == "from input\n"


def test_a_missing_interpreter_is_not_a_failed_program(hutch: Hutch) -> None:
    ran = hutch.run("print(1)", "-e", "cobol")
    assert (ran.exit_code, ran.outcome) == (2, "spec.unknown")
    assert "python" in ran.json["error"]["hint"]


def test_many_runs_at_once(hutch: Hutch) -> None:
    children = [hutch.start("run", f"print({number})") for number in range(8)]
    answers = [child.communicate(timeout=50)[0] for child in children]
    assert answers == [f"{number}\n" for number in range(8)]

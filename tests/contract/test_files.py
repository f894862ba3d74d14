"""Files of the workspace from outside: whole, inside, and never led astray by what the guest plants."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from hutch import AsyncSandbox, Sandbox

from .live_harness import Caller, error_of, open_files

# ---- what they do ---------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_inside_and_outside(caller: Caller) -> None:
    def claim() -> object:
        data = bytes(range(256)) * 5000
        with Sandbox() as box:
            box.files.write("a/b/c.bin", data)
            box.files.write("text", "ü\n")
            box.files.write("empty", b"")
            inside = box.run("import hashlib; print(hashlib.sha256(open('a/b/c.bin', 'rb').read()).hexdigest())").stdout
            import hashlib

            return (
                box.files.read("a/b/c.bin") == data,
                inside.strip() == hashlib.sha256(data).hexdigest(),
                box.files.read("text"),
                box.files.read_text("text"),
                box.files.read("empty"),
            )

    assert caller(claim) == (True, True, b"\xc3\xbc\n", "ü\n", b"")


def test_what_is_written_inside_is_read_outside(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            box.run("open('out', 'wb').write(b'\\0\\xff')")
            return (
                box.files.read("out"),
                box.files.read("./out"),
                box.files.read("/workspace/out"),
                box.files.read("x/../out"),
            )

    assert caller(claim) == (b"\0\xff",) * 4


def test_a_directory_is_listed_by_name_with_what_is_known(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            box.exec(["sh", "-c", "mkdir d; echo abc > b; ln -s b a; mkfifo c; chmod 640 b"]).check()
            entries = box.files.list()
            below = (box.files.write("d/x", "1"), box.files.list("d"))[1]
            return (
                [(e.path, e.name, e.kind) for e in entries],
                (entries[1].size, entries[1].mode),
                [e.path for e in below],
                box.files.list("d/../d") == below,
            )

    listed, known, below, same = caller(claim)
    assert listed == [("a", "a", "link"), ("b", "b", "file"), ("c", "c", "other"), ("d", "d", "directory")]
    assert known == (4, 0o640)
    assert below == ["d/x"]
    assert same


def test_files_are_found_moved_and_removed(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            files = box.files
            files.write("a", "1")
            files.move("a", "new/b")
            found = [files.exists(path) for path in ("a", "new", "new/b", "new/b/c")]
            files.write("c", "2")
            files.move("c", "new/b")
            moved = files.read("new/b")
            files.mkdir("tree/x/y")
            files.mkdir("tree/x/y")
            files.write("tree/x/y/z", "")
            files.remove("tree", recursive=True)
            files.remove("new/b")
            files.remove("new")
            return found, moved, files.stat("/workspace").kind, files.list()

    assert caller(claim) == ([False, True, True, False], b"2", "directory", [])


@pytest.mark.parametrize(
    ("act", "code"),
    [
        ("box.files.read('none')", "files.missing"),
        ("box.files.read('d')", "files.kind"),
        ("box.files.list('none')", "files.missing"),
        ("box.files.list('f')", "files.refused"),
        ("box.files.stat('none/x')", "files.missing"),
        ("box.files.remove('none')", "files.missing"),
        ("box.files.remove('d')", "files.refused"),
        ("box.files.remove('.', recursive=True)", "files.path"),
        ("box.files.write('d', 'x')", "files.refused"),
        ("box.files.write('f/x', 'x')", "files.refused"),
        ("box.files.write('.', 'x')", "files.path"),
        ("box.files.write('x/', 'x')", "files.path"),
        ("box.files.mkdir('f/x')", "files.refused"),
        ("box.files.move('none', 'x')", "files.missing"),
        ("box.files.move('d', 'd/below')", "files.refused"),
        ("box.files.move('f', 'd')", "files.refused"),
        ("box.files.write('f', '\\ud800')", "files.text"),
        ("box.files.write('\\ud800', '')", "files.text"),
        ("box.files.upload('/no/such/file', 'x')", "files.host"),
        ("box.files.upload('/dev/zero', 'x')", "files.kind"),
        ("box.files.download('f', '/no/such/directory/f')", "files.host"),
        ("box.files.download('none', '/tmp/never')", "files.missing"),
    ],
)
def test_what_cannot_be_done_is_explained_and_changes_nothing(caller: Caller, act: str, code: str) -> None:
    def claim(act: str) -> object:
        with Sandbox() as box:
            box.files.write("d/content", "1")
            box.files.write("f", "1")
            error = error_of(lambda: eval(act, {"box": box}))
            left = box.exec(["find", ".", "-mindepth", "1"]).stdout.split()
            return error[:2], sorted(left), box.files.read("f")

    assert caller(claim, act) == (("SpecError", code), ["./d", "./d/content", "./f"], b"1")


OUTSIDE = [
    "..",
    "../x",
    "/etc/passwd",
    "a/../../etc/passwd",
    "/workspace/../etc",
    "/",
    "//etc/passwd",
    "x\0y",
    "/workspace2/x",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_out_of_the_workspace_are_refused(caller: Caller, path: str) -> None:
    def claim(path: str) -> object:
        with Sandbox() as box:
            files = box.files
            box.files.write("f", "1")
            acts = (
                lambda: files.read(path),
                lambda: files.write(path, "x"),
                lambda: files.list(path),
                lambda: files.stat(path),
                lambda: files.exists(path),
                lambda: files.mkdir(path),
                lambda: files.remove(path),
                lambda: files.move("f", path),
                lambda: files.move(path, "g"),
                lambda: files.upload("/etc/hostname", path),
                lambda: files.download(path, "/tmp/never"),
            )
            return {error_of(act)[1] for act in acts}

    assert caller(claim, path) == {"files.path"}


# ---- names ----------------------------------------------------------------------------------------------------------

NAMES = [
    "x" * 255,
    "ü" * 127,
    "😀" * 63,
    ".hidden",
    "-rf",
    "a b",
    "a\nb",
    "*",
    "'",
    '"',
    "\\",
    "$(x)",
    "\udcff\udcfe",
    "\u202e",
    "con",
    "a" * 249 + ".bin",
]


@pytest.mark.parametrize("name", NAMES, ids=[ascii(name)[:20] for name in NAMES])
def test_every_name_that_a_file_can_have_is_taken(caller: Caller, name: str) -> None:
    def claim(name: str) -> object:
        import shutil
        import tempfile

        place = tempfile.mkdtemp(dir=os.environ["HOME"])
        try:
            with Sandbox() as box:
                files = box.files
                files.write(name, "1")
                files.write(f"d/{name}/f", "2")
                listed = [entry.name for entry in files.list()]
                files.move(name, f"d/{name}/g")
                transfer = files.download("d", f"{place}/d")
                files.upload(f"{place}/d", "e")
                read = files.read(f"e/{name}/g")
                inside = box.run("import os; print(ascii(os.listdir('d')[0]))").stdout.strip()
                files.remove(f"d/{name}", recursive=True)
                return (
                    sorted(listed) == sorted(["d", name]),
                    inside == ascii(name),
                    read,
                    transfer.files,
                    files.list("d"),
                )
        finally:
            shutil.rmtree(place)

    assert caller(claim, name) == (True, True, b"1", 2, [])


@pytest.mark.parametrize(
    "path",
    ["x" * 256, "ü" * 128, "a/" * 2100 + "a", "é/" * 1400 + "x"],
    ids=["name", "letters", "path", "letters in a path"],
)
def test_names_that_no_file_can_have_are_refused(caller: Caller, path: str) -> None:
    def claim(path: str) -> object:
        with Sandbox() as box:
            return error_of(box.files.write, path, "x")[:2], error_of(box.files.remove, path)[:2], box.files.list()

    assert caller(claim, path) == (("SpecError", "files.path"), ("SpecError", "files.path"), [])


# ---- links and special files ----------------------------------------------------------------------------------------

PLANTED = """
import os, socket
links = {'passwd': '/etc/passwd', 'etc': '/etc', 'up': '..', 'root': '/proc/self/root', 'broken': 'nowhere'}
links |= {'loop': 'loop', 'inside': 'real', 'tmp': '/tmp'}
for name, target in links.items(): os.symlink(target, name)
os.mkdir('real'); open('real/file', 'w').write('1')
os.mkfifo('fifo'); socket.socket(socket.AF_UNIX).bind('socket')
os.mkdir('tree'); os.mkfifo('tree/fifo'); os.symlink('/etc/passwd', 'tree/link'); os.symlink('/etc', 'tree/directory')
open('tree/file', 'w').write('2')
"""


@pytest.mark.parametrize(
    "path", ["passwd", "etc/passwd", "up/etc/passwd", "root/etc/passwd", "broken", "loop", "inside/file", "loop/x"]
)
def test_no_link_is_followed_to_read_or_to_change(caller: Caller, path: str) -> None:
    def claim(code: str, path: str) -> object:
        with Sandbox() as box:
            box.run(code).check()
            files = box.files
            found = {error_of(files.read, path)[1], error_of(files.list, path)[1]}
            if "/" in path:
                found |= {
                    error_of(files.write, path, "x")[1],
                    error_of(files.remove, path)[1],
                    error_of(files.mkdir, path + "x")[1],
                }
                found |= {error_of(files.move, path, "y")[1], error_of(files.move, "real/file", path)[1]}
                found.add(error_of(files.stat, path)[1])
            found |= {error_of(files.download, path, "/tmp/never")[1]}
            return (
                found,
                box.run("print(open('real/file').read(), len(os.listdir('/etc')) > 3)").stdout,
                os.path.lexists("/tmp/never"),
            )

    found, inside, leaked = caller(claim, PLANTED, path)
    assert found <= {"files.link", "files.refused", "files.missing", "files.kind"}
    assert inside == "1 True\n"
    assert not leaked


@pytest.mark.parametrize("path", ["passwd", "etc", "broken", "tmp"])
def test_a_link_itself_can_be_seen_replaced_moved_and_removed(caller: Caller, path: str) -> None:
    def claim(code: str, path: str) -> object:
        with Sandbox() as box:
            box.run(code).check()
            files = box.files
            kind = files.stat(path).kind
            files.move(path, "elsewhere")
            moved = files.stat("elsewhere").kind
            files.move("elsewhere", path)
            files.write(path, "mine")
            return (
                kind,
                moved,
                files.stat(path).kind,
                files.read(path),
                box.run("print(open('/etc/passwd').read()[:4])").stdout,
            )

    assert caller(claim, PLANTED, path) == ("link", "link", "file", b"mine", "root\n")


def test_a_tree_with_links_is_removed_without_what_they_lead_to(caller: Caller) -> None:
    def claim(code: str) -> object:
        with Sandbox() as box:
            box.run(
                code
                + "\nos.symlink('/workspace/real', 'tree/real')\nopen('/tmp/kept', 'w')\nos.symlink('/tmp', 'tree/tmp')"
            ).check()
            box.files.remove("tree", recursive=True)
            return (
                box.files.exists("tree"),
                box.files.read("real/file"),
                box.run("print(os.path.exists('/tmp/kept'))").stdout,
            )

    assert caller(claim, PLANTED) == (False, b"1", "True\n")


@pytest.mark.parametrize("path", ["fifo", "socket"])
def test_special_files_are_not_read_and_nobody_waits_for_them(caller: Caller, path: str) -> None:
    def claim(code: str, path: str) -> object:
        with Sandbox() as box:
            box.run(code).check()
            started = time.monotonic()
            codes = {error_of(box.files.read, path)[1], error_of(box.files.download, path, "/tmp/never")[1]}
            kind = box.files.stat(path).kind
            box.files.write(path, "now a file")
            return codes, kind, box.files.read(path), time.monotonic() - started < 20

    codes, kind, content, quick = caller(claim, PLANTED, path)
    assert codes <= {"files.kind", "files.refused"}
    assert (kind, content, quick) == ("other", b"now a file", True)


# ---- whole, and of a size -------------------------------------------------------------------------------------------


def test_a_reader_inside_never_sees_half_a_file(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            sizes = (3, 700_000)
            box.files.write("file", b"0" * sizes[0])
            code = "import os\nseen = set()\nwhile not os.path.exists('stop'):\n    data = open('file', 'rb').read()\n"
            code += "    seen.add((len(data), len(set(data))))\nprint(sorted(seen))"
            found: list[str] = []
            thread = threading.Thread(target=lambda: found.append(box.run(code).stdout))
            thread.start()
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline:
                for size in sizes:
                    box.files.write("file", b"%d" % (size % 10) * size)
            box.files.write("stop", "")
            thread.join(20)
            return found, [entry.name for entry in box.files.list()]

    found, left = caller(claim)
    assert found == ["[(3, 1), (700000, 1)]\n"]
    assert left == ["file", "stop"]


def test_what_is_too_large_is_refused_on_both_ways(caller: Caller) -> None:
    def claim() -> object:
        from hutch.engine import files

        with Sandbox(tmp_mb=300) as box:
            box.exec(["truncate", "-s", "65M", "large"]).check()
            found = [error_of(box.files.read, "large")[1]]
            found.append(error_of(box.files.write, "x", bytes(files.MAX_FILE_BYTES + 1))[1])
            box.exec(["truncate", "-s", "64M", "large"]).check()
            return found, len(box.files.read("large")), box.files.exists("x")

    assert caller(claim) == (["files.size", "files.size"], 64 * 1024 * 1024, False)


def test_a_full_workspace_is_an_error_and_leaves_no_part(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox(tmp_mb=1) as box:
            error = error_of(box.files.write, "big", bytes(3_000_000))
            return error[1], "No space left" in error[2], box.files.list()

    assert caller(claim) == ("files.refused", True, [])


def test_a_crowded_directory_is_refused_in_time(caller: Caller) -> None:
    def claim() -> object:
        from hutch.engine import files

        files.MAX_TREE_FILES = 1000
        try:
            with Sandbox() as box:
                box.run("for n in range(1500): open(f'{n}', 'w')").check()
                return (
                    error_of(box.files.list)[1],
                    error_of(box.files.download, ".", "/tmp/never")[1],
                    len(os.listdir("/tmp/never")),
                )
        finally:
            os.rmdir("/tmp/never")
            files.MAX_TREE_FILES = 100_000

    assert caller(claim) == ("files.size", "files.size", 0)


def test_a_tree_as_deep_as_paths_go_is_removed_and_not_followed_for_ever(caller: Caller) -> None:
    def claim(place: str) -> object:
        with Sandbox() as box:
            code = "import os\nfor _ in range(250): os.mkdir('d'); os.chdir('d')\nos.chdir('/workspace')"
            box.run(code).check()
            error = error_of(box.files.download, ".", place)
            box.files.remove("d", recursive=True)
            return error[1], box.files.list(), len(os.listdir(place))

    place = caller.hutch.home / "deep"
    try:
        assert caller(claim, str(place)) == ("files.size", [], 1)
    finally:
        import shutil

        shutil.rmtree(place)


# ---- ownership and modes --------------------------------------------------------------------------------------------


def test_what_is_written_belongs_to_the_user_inside(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            box.files.write("d/f", "1")
            code = "import os; s, t = os.stat('d/f'), os.stat('d')\n"
            code += "print(s.st_uid, s.st_gid, t.st_uid, oct(s.st_mode & 0o7777))\n"
            code += "open('d/f', 'a').write('2'); os.remove('d/f'); os.rmdir('d')"
            return box.run(code).check().stdout

    assert caller(claim) == "1000 1000 1000 0o644\n"


def test_a_mode_is_kept_but_for_the_bits_that_give_rights(caller: Caller) -> None:
    def claim() -> object:
        with Sandbox() as box:
            box.exec(["sh", "-c", "touch script suid; chmod 755 script; chmod 6750 suid || chmod 750 suid"]).check()
            box.files.write("script", "new")
            box.files.write("suid", "new")
            return [oct(box.files.stat(name).mode) for name in ("script", "suid")]

    assert caller(claim) == ["0o755", "0o750"]


# ---- trees ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(caller: Caller) -> Path:
    """A directory of the identity's own, with links and special files in it."""
    place = caller.hutch.home / "tree"
    write = caller.hutch.write
    write(place / "plain", "1")
    write(place / "below" / "script", "#!/bin/sh\n").chmod(0o4755)
    write(place / "below" / "deeper" / "data", bytes(300_000))
    for name, target in (("link", "/etc/passwd"), ("below/directory", "/etc")):
        (place / name).symlink_to(target)
    os.mkfifo(place / "fifo")
    for path in (place, *place.rglob("*")):
        caller.hutch.give(path)
    return place


def test_a_tree_goes_up_and_down_again_but_for_links(caller: Caller, tree: Path) -> None:
    def claim(tree: str, back: str) -> object:
        with Sandbox() as box:
            up = box.files.upload(tree, "copy")
            inside = box.exec(["find", "copy", "-type", "f", "-printf", "%P %s %m %u\n"]).stdout.splitlines()
            box.run("import os; os.symlink('/etc/passwd', 'copy/planted'); os.mkfifo('copy/pipe')").check()
            down = box.files.download("copy", back)
            one = box.files.download("copy/plain", f"{back}/one")
            return (
                (up.files, up.bytes, sorted(up.skipped)),
                sorted(inside),
                (down.files, sorted(down.skipped)),
                one.files,
            )

    back = caller.hutch.home / "back"
    try:
        up, inside, down, one = caller(claim, str(tree), str(back))
        files = {
            str(path.relative_to(back)): path.lstat().st_mode & 0o7777 for path in back.rglob("*") if path.is_file()
        }
        links = [path for path in back.rglob("*") if path.is_symlink()]
    finally:
        import shutil

        shutil.rmtree(back, ignore_errors=True)
        shutil.rmtree(tree)
    assert up == (3, 300_011, sorted(f"{tree}/{name}" for name in ("below/directory", "fifo", "link")))
    assert inside == ["below/deeper/data 300000 644 sandbox", "below/script 10 755 sandbox", "plain 1 644 sandbox"]
    assert down == (3, ["copy/pipe", "copy/planted"])
    assert one == 1
    assert files == {"below/deeper/data": 0o644, "below/script": 0o755, "plain": 0o644, "one": 0o644}
    assert links == []


def test_a_download_writes_through_no_link_that_lies_there(caller: Caller) -> None:
    def claim(home: str) -> object:
        victim, place = f"{home}/victim", f"{home}/place"
        os.makedirs(f"{victim}/directory")
        os.mkdir(place)
        Path(f"{victim}/file").write_text("kept")
        os.symlink(f"{victim}/file", f"{place}/file")
        os.symlink(f"{victim}/directory", f"{place}/below")
        try:
            with Sandbox() as box:
                box.files.write("a/file", "new")
                box.files.download("a", place)
                box.files.write("b/below/planted", "new")
                error = error_of(box.files.download, "b", place)
                box.files.download("a/file", f"{place}/file")
            content = Path(f"{place}/file").read_text()
            return (
                Path(f"{victim}/file").read_text(),
                os.path.islink(f"{place}/file"),
                content,
                error[1],
                os.listdir(f"{victim}/directory"),
            )
        finally:
            import shutil

            shutil.rmtree(victim)
            shutil.rmtree(place)

    assert caller(claim, str(caller.hutch.home)) == ("kept", False, "new", "files.host", [])


def test_a_file_that_grows_while_it_is_copied_does_not_grow_for_ever(caller: Caller) -> None:
    def claim(home: str) -> object:
        target = f"{home}/growing"
        with Sandbox() as box:
            code = "import subprocess; subprocess.Popen('while :; do head -c 1000000 /dev/zero >> f; done', shell=True)"
            box.run(f"open('f', 'wb').write(bytes(5_000_000))\n{code}")
            try:
                transfer = box.files.download("f", target)
                return transfer.bytes == os.stat(target).st_size, transfer.bytes >= 5_000_000
            finally:
                os.unlink(target)

    assert caller(claim, str(caller.hutch.home)) == (True, True)


# ---- races ----------------------------------------------------------------------------------------------------------

SWAP = """
import ctypes, os
libc = ctypes.CDLL(None)
os.makedirs('/tmp/outside/sub', exist_ok=True)
os.makedirs('d/sub', exist_ok=True)
os.path.lexists('l') or os.symlink('/tmp/outside', 'l')
while not os.path.exists('stop'):
    libc.renameat2(-100, b'd', -100, b'l', 2)  # RENAME_EXCHANGE
print(sorted(name for _, _, names in os.walk('/tmp/outside') for name in names))
"""


def test_a_directory_that_is_swapped_for_a_link_leads_nobody_outside(caller: Caller) -> None:
    def claim(code: str, home: str) -> object:
        from hutch import HutchError

        with Sandbox() as box:
            found: list[str] = []
            thread = threading.Thread(target=lambda: found.append(box.run(code, timeout_seconds=50).stdout))
            thread.start()
            done = 0
            deadline = time.monotonic() + 2
            number = 0
            while time.monotonic() < deadline:
                number += 1
                for act in (
                    lambda number=number: box.files.write(f"d/sub/file{number}", "x"),
                    lambda number=number: box.files.mkdir(f"d/dir{number}"),
                    lambda number=number: box.files.remove(f"d/dir{number}", recursive=True),
                    lambda number=number: box.files.move(f"d/sub/file{number}", f"d/moved{number}"),
                    lambda: box.files.list("d"),
                ):
                    with contextlib.suppress(HutchError):
                        act()
                        done += 1
            box.files.write("stop", "")
            thread.join(20)
            return found, done > 20

    found, worked = caller(claim, SWAP, str(caller.hutch.home))
    assert found == ["[]\n"]
    assert worked


def test_a_tree_on_the_host_that_is_swapped_for_a_link_uploads_nothing_else(caller: Caller) -> None:
    """The directory may be one that a guest can write."""

    def claim(home: str) -> object:
        import shutil

        from hutch import HutchError

        place, secret = f"{home}/swapped", f"{home}/secret"
        os.makedirs(f"{place}/d")
        os.mkdir(secret)
        Path(f"{secret}/key").write_text("secret")
        Path(f"{place}/d/key").write_text("public")
        os.symlink(secret, f"{home}/link")
        stop = threading.Event()

        def swap() -> None:
            while not stop.is_set():
                os.rename(f"{place}/d", f"{home}/kept")
                os.rename(f"{home}/link", f"{place}/d")
                os.rename(f"{place}/d", f"{home}/link")
                os.rename(f"{home}/kept", f"{place}/d")

        thread = threading.Thread(target=swap)
        seen = set()
        with Sandbox() as box:
            thread.start()
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline:
                with contextlib.suppress(HutchError):
                    box.files.upload(place, "up")
                    seen.add(box.files.read("up/d/key"))
            stop.set()
            thread.join()
        for path in (place, secret):
            shutil.rmtree(path)
        os.unlink(f"{home}/link")
        return seen

    assert caller(claim, str(caller.hutch.home)) <= {b"public"}


def test_a_write_that_is_cancelled_writes_to_no_other_file(caller: Caller) -> None:
    """The thread that writes still holds the number of a descriptor that may be somebody else's by now."""

    def claim() -> object:
        async def cancelled() -> object:
            data = b"x" * 30_000_000
            async with AsyncSandbox() as box:
                await box.exec(["true"])
                before = open_files()
                for number in range(12):
                    writing = asyncio.ensure_future(box.files.write("large", data))
                    await asyncio.sleep(0.001 * number)
                    writing.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await writing
                    victim = os.memfd_create("victim")
                    await asyncio.sleep(0.01)
                    size = os.fstat(victim).st_size
                    os.close(victim)
                    if size:
                        return "written to another file", size
                names = [entry.name for entry in await box.files.list()]
                return [name for name in names if name != "large"], open_files() - before

        return asyncio.run(cancelled())

    assert caller(claim) == ([], 0)


def test_many_at_once_are_done_at_once(caller: Caller) -> None:
    def claim() -> object:
        async def many() -> object:
            async with AsyncSandbox() as box:
                await asyncio.gather(*(box.files.write(f"d{n % 7}/f{n}", bytes(n)) for n in range(300)))
                data = await asyncio.gather(*(box.files.read(f"d{n % 7}/f{n}") for n in range(300)))
                return [len(one) for one in data] == list(range(300))

        return asyncio.run(many())

    assert caller(claim)


def test_the_mode_of_what_is_made_does_not_depend_on_ours(caller: Caller) -> None:
    def claim() -> object:
        before = os.umask(0o077)
        try:
            with Sandbox() as box:
                box.files.write("d/f", "1")
                modes = [stat.S_IMODE(box.files.stat(path).mode) for path in ("d", "d/f")]
                return modes, box.exec(["sh", "-c", "umask"]).stdout
        finally:
            os.umask(before)

    assert caller(claim) == ([0o755, 0o644], "0022\n")

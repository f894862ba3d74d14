"""Sessions on disk: found, kept whole when processes are killed, and removed without leaving their directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hutch
from hutch.engine import record, store, tree
from hutch.engine.record import Record, encode_record, parse_record
from hutch.engine.store import Store
from hutch.errors import HostError, HutchError, SessionError, SpecError
from hutch.process import make_token

SOURCE = Path(hutch.__file__).parent.parent
NAMESPACE = os.stat("/proc/self/ns/pid").st_ino
DEAD = f"1073741823-5-{NAMESPACE}-0badcafe"
ELSEWHERE = f"1073741823-5-{NAMESPACE + 1}-0badcafe"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return Path(os.path.realpath(tmp_path)) / "data"


@pytest.fixture
def sessions(data: Path) -> Store:
    return Store(str(data))


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before


def create(sessions: Store, name: str | None = None, **more: Any) -> Record:
    return sessions.create(name, "python", {"environment": "python", "pids": 7}, **more)


def refusal(act: Any, *arguments: Any, **options: Any) -> HutchError:
    with pytest.raises(HutchError) as caught:
        act(*arguments, **options)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


# ---- records --------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
times = st.datetimes().map(lambda moment: f"{moment:%Y-%m-%dT%H:%M:%S}".rjust(19, "0") + ".123Z")
labels = st.text("abcXYZ019_-", min_size=1, max_size=64)
paths = st.text(st.characters(exclude_characters="\0"), max_size=20).map("/{}".format)
records = st.builds(
    Record,
    id=st.text("0123456789abcdef", min_size=8, max_size=8),
    environment=st.text(),
    request=st.dictionaries(st.text(), json_values, max_size=4),
    created_at=times,
    workspace=paths,
    name=st.none() | labels,
    profile=st.none() | st.text(),
    rootfs_path=st.none() | paths,
    last_run_at=st.none() | times,
    pid=st.none() | st.integers(1, 2**22),
    agent=st.none() | st.text(),
    description=st.none() | st.text(),
    unknown=st.dictionaries(st.text().filter(lambda key: key not in record._KEYS), json_values, max_size=3),
)

WHOLE = {
    "sessionId": "ab12cd34",
    "name": "mine",
    "profile": "strict",
    "rootfsPath": "/nix/store/x",
    "workspace": "/w",
    "createdAt": "2026-01-02T10:11:12Z",
    "lastExecAt": "2026-01-02T10:11:12.345Z",
    "pid": 7,
    "agent": "a",
    "description": "d",
    "environment": "python",
    "request": {"pids": 7},
}


@given(records)
def test_a_record_is_read_as_it_was_written(written: Record) -> None:
    assert parse_record(encode_record(written), "/x/ab12cd34") == written


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_junk_is_a_corrupt_session(text: bytes) -> None:
    with pytest.raises(SessionError) as caught:
        parse_record(text, "/x/ab12cd34")
    assert caught.value.code == "session.corrupt"


@given(st.sampled_from(sorted(WHOLE)), json_values)
def test_a_key_is_right_or_refused(key: str, value: object) -> None:
    try:
        parsed = parse_record(json.dumps({**WHOLE, key: value}).encode(), "/x/ab12cd34")
    except SessionError as error:
        problem = error.details
    else:
        problem = "" if parsed.to_json()[key] == value else "changed"
    assert problem == "" or problem.startswith(f"{key} is not ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sessionId", "AB12CD34"),
        ("sessionId", "../../ab"),
        ("sessionId", None),
        ("name", ""),
        ("name", "a" * 65),
        ("name", "a/b"),
        ("name", "é"),
        ("workspace", "relative"),
        ("workspace", "/a\0b"),
        ("workspace", None),
        ("createdAt", "2026-01-02"),
        ("createdAt", "2026-01-02T10:11:12"),
        ("createdAt", "2026-01-02T10:11:12+02:00"),
        ("createdAt", "2026-01-02T10:11:12.Z"),
        ("createdAt", "٢٠٢٦-01-02T10:11:12Z"),
        ("lastExecAt", 5),
        ("pid", True),
        ("pid", 0),
        ("pid", "7"),
        ("request", []),
        ("environment", None),
    ],
)
def test_what_is_not_right_is_named(key: str, value: object) -> None:
    error = refusal(parse_record, json.dumps({**WHOLE, key: value}).encode(), "/x/ab12cd34")
    assert (error.code, error.details.split()[0]) == ("session.corrupt", key)
    assert "rm -r /x/ab12cd34" in error.hint


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b'{"a": NaN}', b'{"a": 1e999}', b'{"a": ' + b"9" * 9999 + b"}"])
def test_json_that_cannot_be_written_again_is_not_read(text: bytes) -> None:
    assert refusal(parse_record, text, "/x/ab12cd34").code == "session.corrupt"


def test_the_keys_are_those_that_tools_expect() -> None:
    parsed = parse_record(json.dumps(WHOLE).encode(), "/x/ab12cd34")
    assert parsed.to_json() == WHOLE
    short = {key: WHOLE[key] for key in ("sessionId", "workspace", "createdAt", "environment", "request")}
    assert parse_record(json.dumps(short).encode(), "/x/ab12cd34").to_json() == {key: short.get(key) for key in WHOLE}


# ---- made and found -------------------------------------------------------------------------------------------------


def test_what_does_not_exist_is_empty_and_is_not_made(sessions: Store, data: Path) -> None:
    assert (sessions.all(), sessions.ids(), sessions.broken(), sessions.repair()) == ([], [], {}, [])
    for act in (sessions.find, sessions.lock, sessions.remove):
        error = refusal(act, "ab12cd34")
        assert (type(error), error.code) == (SessionError, "session.unknown")
        assert "create one" in error.hint
    assert sessions.holder("ab12cd34") is None
    assert not data.exists()


def test_a_session_is_whole_and_private(sessions: Store, data: Path) -> None:
    old = os.umask(0o077)
    try:
        made = create(sessions, "mine", profile="custom:git", agent="me", description="x", rootfs_path="/r")
    finally:
        os.umask(old)
    root = data / "sessions" / made.id
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [root.parent, root, *root.iterdir()]}
    shared = dict.fromkeys(store.SHARED, 0o755)
    private = {"sessions": 0o700, made.id: 0o700, "logs": 0o700, "lock": 0o600, "metadata.json": 0o600}
    assert modes == {**shared, **private}
    assert made.workspace == str(root / "workspace") == sessions.path(made.id, "workspace")
    assert json.loads((root / "metadata.json").read_text()) == made.to_json()
    assert made.to_json()["request"] == {"environment": "python", "pids": 7}
    assert sessions.find(made.id) == made
    assert sessions.all() == [made]


def test_a_mild_umask_opens_nothing(sessions: Store) -> None:
    old = os.umask(0)
    try:
        made = create(sessions)
    finally:
        os.umask(old)
    for path in (sessions.directory, sessions.path(made.id), sessions.path(made.id, "logs")):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(sessions.path(made.id, "metadata.json")).st_mode) == 0o600


def test_sandboxes_own_what_they_write_and_nothing_else(sessions: Store) -> None:
    owner = (65534, 65534) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    made = create(sessions, owner=owner)
    owners = {name: os.stat(sessions.path(made.id, name)) for name in os.listdir(sessions.path(made.id))}
    theirs = {name for name, found in owners.items() if (found.st_uid, found.st_gid) == owner}
    assert theirs >= set(store.SHARED)
    if os.geteuid() == 0:
        assert theirs == set(store.SHARED)
        assert os.stat(sessions.path(made.id)).st_uid == 0


def test_a_workspace_may_lie_elsewhere(sessions: Store) -> None:
    made = create(sessions, workspace="/srv/project")
    assert sessions.find(made.id).workspace == "/srv/project"


def test_the_data_directory_may_be_reached_through_a_link(tmp_path: Path, data: Path) -> None:
    data.mkdir()
    (tmp_path / "link").symlink_to(data)
    made = create(Store(str(tmp_path / "link")))
    assert made.workspace == f"{data}/sessions/{made.id}/workspace"


def test_a_session_is_found_by_id_name_and_beginning(sessions: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["aa110000", "aa220000", "bb000000"])
    monkeypatch.setattr(os, "urandom", lambda size: bytes.fromhex(next(ids)) if size == 4 else bytes(size))
    monkeypatch.setattr(store, "make_token", lambda: DEAD)
    for name in ("work", "work", "aa"):
        create(sessions, name)
    assert sessions.find("aa110000").id == "aa110000"
    assert sessions.find("aa22").id == "aa220000"
    assert sessions.find("b").id == "bb000000"
    assert refusal(sessions.find, "b", prefix=False).code == "session.unknown"
    assert sessions.find("aa", prefix=False).name == "aa"
    assert sessions.find("aa").id == "bb000000"  # a name goes before the beginning of an id
    for word, listed in (("work", "aa110000, aa220000"), ("a", "aa110000, aa220000")):
        error = refusal(sessions.find, word)
        assert (error.code, listed in error.hint) == ("session.ambiguous", True)
    error = refusal(sessions.find, "wrk")
    assert error.message == 'there is no session "wrk"; did you mean "work"?'
    assert error.hint == "use one of: work, aa110000, work, aa220000, aa, bb000000"


@pytest.mark.parametrize("word", ["", "..", "../sessions", "x" * 1000, "a\nb", "\ud800", "ab12cd34/", ".creating"])
def test_a_strange_word_is_an_unknown_session(word: str, sessions: Store) -> None:
    create(sessions)
    for act in (sessions.find, sessions.lock, sessions.remove, sessions.path):
        assert refusal(act, word).code == "session.unknown"


@pytest.mark.parametrize("name", ["", "a b", "../x", "a" * 65, "é", "a\n"])
def test_a_name_is_a_label(name: str, sessions: Store, data: Path) -> None:
    error = refusal(create, sessions, name)
    assert (type(error), error.code) == (SpecError, "spec.session-name")
    assert not data.exists()


@pytest.mark.parametrize("request_", [{"a": object()}, {"a": float("nan")}, {("a", "b"): 1}, {"a": "x" * (1 << 20)}])
def test_a_request_that_cannot_be_kept_is_refused(request_: dict[Any, Any], sessions: Store) -> None:
    error = refusal(sessions.create, None, "python", request_)
    assert (type(error), error.code) == (SpecError, "spec.value")
    assert os.listdir(sessions.directory) == []


def test_sessions_are_listed_by_age(sessions: Store) -> None:
    made = [create(sessions, f"n{number}") for number in range(5)]
    sessions.update(made[0].replace(created_at="2999-01-01T00:00:00Z"))
    assert [listed.name for listed in sessions.all()][-1] == "n0"
    assert sorted(listed.id for listed in sessions.all()) == sessions.ids()


# ---- changed --------------------------------------------------------------------------------------------------------


def test_an_update_is_kept_and_so_is_what_we_do_not_know(sessions: Store) -> None:
    made = create(sessions)
    file = Path(sessions.path(made.id, "metadata.json"))
    file.write_text(json.dumps({**made.to_json(), "later": {"a": [1]}}))
    found = sessions.find(made.id)
    sessions.update(found.replace(last_run_at="2026-01-02T10:11:12.345Z", pid=7))
    after = json.loads(file.read_text())
    assert after == {**made.to_json(), "later": {"a": [1]}, "lastExecAt": "2026-01-02T10:11:12.345Z", "pid": 7}
    assert sorted(os.listdir(sessions.path(made.id))) == sorted([*store.SHARED, "lock", "logs", "metadata.json"])


def test_a_wrong_update_changes_nothing(sessions: Store) -> None:
    made = create(sessions)
    assert refusal(sessions.update, made.replace(name="a b")).code == "spec.value"
    assert refusal(sessions.update, made.replace(pid="x")).code == "spec.value"
    assert sessions.find(made.id) == made


def test_what_was_removed_is_unknown(sessions: Store) -> None:
    made = create(sessions)
    sessions.remove(made.id)
    assert os.listdir(sessions.directory) == []
    for act in (sessions.find, sessions.lock, sessions.remove):
        assert refusal(act, made.id).code == "session.unknown"
    assert refusal(sessions.update, made).code == "session.unknown"


def test_a_full_disk_leaves_nothing_and_changes_nothing(sessions: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    made = create(sessions)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        for act in (lambda: create(sessions), lambda: sessions.update(made.replace(agent="x"))):
            error = refusal(act)
            assert (type(error), error.code) == (HostError, "host.data")
            assert "No space left on device" in error.message
    assert os.listdir(sessions.directory) == [made.id]
    assert sessions.find(made.id) == made
    assert [name for name in os.listdir(sessions.path(made.id)) if name.startswith(".")] == []


# ---- damaged --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "missing", "other", "link", "directory"])
def test_a_damaged_session_is_told_and_hides_no_other(damage: str, sessions: Store, tmp_path: Path) -> None:
    good, bad = create(sessions, "good"), create(sessions, "bad")
    file = Path(sessions.path(bad.id, "metadata.json"))
    text = file.read_bytes()
    file.unlink()
    if damage == "cut":
        file.write_bytes(text[: len(text) // 2])
    elif damage == "other":
        shutil.copy(sessions.path(good.id, "metadata.json"), file)
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(text)
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "directory":
        file.mkdir()
    for word in (bad.id, bad.id[:7]):
        error = refusal(sessions.find, word)
        assert (type(error), error.code) == (SessionError, "session.corrupt")
        assert f"rm -r {sessions.path(bad.id)}" in error.hint
    assert sessions.all() == [good]
    assert {name: error.code for name, error in sessions.broken().items()} == {bad.id: "session.corrupt"}
    assert Store(os.path.dirname(sessions.directory)).ids() == sorted([good.id, bad.id])  # repair keeps it
    sessions.remove(bad.id)
    assert sessions.ids() == [good.id]


def test_a_link_in_the_place_of_a_session_is_none(sessions: Store, tmp_path: Path) -> None:
    made = create(sessions)
    os.rename(sessions.path(made.id), tmp_path / "moved")
    os.symlink(tmp_path / "moved", sessions.path(made.id))
    assert sessions.all() == []
    for act in (sessions.find, sessions.lock, sessions.remove):
        assert refusal(act, made.id).code == "session.corrupt"
    assert (tmp_path / "moved" / "metadata.json").exists()


@pytest.mark.parametrize("level", ["data", "sessions"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_directory_that_others_can_write_is_refused(level: str, mode: int, sessions: Store, data: Path) -> None:
    create(sessions)
    place = data if level == "data" else data / "sessions"
    place.chmod(mode)
    if level == "data" and mode != 0o777:
        assert len(sessions.all()) == 1
        return
    for act in (sessions.all, lambda: create(sessions), lambda: Store(str(data))):
        error = refusal(act)
        assert (type(error), error.code, error.hint) == (HostError, "host.data", f"chmod go-w {place}")


@pytest.mark.parametrize("level", ["data", "sessions"])
def test_a_directory_of_someone_else_is_refused(
    level: str, sessions: Store, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(sessions)
    place = str(data if level == "data" else data / "sessions")
    real = os.fstat

    def fake_fstat(fd: int) -> os.stat_result:
        found = real(fd)
        if not os.path.samestat(found, os.stat(place)):
            return found
        return os.stat_result([*found[:4], os.geteuid() + 1, *found[5:]])

    monkeypatch.setattr(os, "fstat", fake_fstat)
    error = refusal(sessions.all)
    assert (type(error), error.code) == (HostError, "host.data")
    assert error.message.startswith(f"{place} belongs to user ")
    assert "HUTCH_DATA_DIR" in error.hint


@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_a_planted_sessions_directory_is_refused(kind: str, sessions: Store, data: Path, tmp_path: Path) -> None:
    data.mkdir()
    (tmp_path / "theirs").mkdir()
    if kind == "file":
        (data / "sessions").touch()
    else:
        (data / "sessions").symlink_to(tmp_path / "theirs" if kind == "link" else tmp_path / "nowhere")
    error = refusal(create, sessions)
    assert (type(error), error.code) == (HostError, "host.data")
    assert "is not a directory" in error.message
    assert f"mv {data}/sessions" in error.hint
    assert list((tmp_path / "theirs").iterdir()) == []
    assert not (tmp_path / "nowhere").exists()


def test_a_file_in_the_place_of_the_data_directory_is_told(data: Path) -> None:
    data.touch()
    assert refusal(Store, str(data)).message == f"{data} is not a directory"


# ---- locked ---------------------------------------------------------------------------------------------------------

HOLDER = """
import sys; sys.path.insert(0, sys.argv[1])
from hutch.engine.store import Store
lock = Store(sys.argv[2]).lock(sys.argv[3])
print("held", flush=True); sys.stdin.read()
"""


def holding(sessions: Store, session: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", HOLDER, str(SOURCE), os.path.dirname(sessions.directory), session],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


@pytest.mark.parametrize("by", ["kill", "terminate"])
def test_a_lock_names_its_holder_and_ends_with_it(by: str, sessions: Store) -> None:
    made, other = create(sessions), create(sessions)
    with holding(sessions, made.id) as child:
        try:
            for act in (sessions.lock, sessions.remove):
                error = refusal(act, made.id)
                assert (type(error), error.code) == (SessionError, "session.busy")
                assert error.message == f"session {made.id} is in use by process {child.pid}"
            assert (sessions.holder(made.id), sessions.holder(other.id)) == (child.pid, None)
            sessions.lock(other.id).release()
            sessions.update(made.replace(agent="x"))  # needs no lock
        finally:
            getattr(child, by)()
        child.wait()
    assert sessions.holder(made.id) is None
    with sessions.lock(made.id) as lock:
        assert lock.session_id == made.id
        assert sessions.holder(made.id) == os.getpid()


def test_a_lock_is_for_one_within_a_process_too(sessions: Store) -> None:
    made = create(sessions)
    lock = sessions.lock(made.id)
    assert str(os.getpid()) in refusal(sessions.lock, made.id).message
    lock.release()
    lock.release()
    assert Path(sessions.path(made.id, "lock")).read_text() == ""
    sessions.lock(made.id).release()


def test_whoever_holds_the_lock_may_remove(sessions: Store) -> None:
    made = create(sessions)
    with sessions.lock(made.id) as lock:
        sessions.remove(made.id, lock=lock)
    assert sessions.ids() == []


def test_a_lock_of_a_session_that_was_just_removed_is_none(sessions: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = create(sessions)
    real = fcntl.flock

    def remove_first(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        sessions.remove(made.id)
        real(fd, how)

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(fcntl, "flock", remove_first)
    assert refusal(sessions.lock, made.id).code == "session.unknown"
    assert set(os.listdir("/proc/self/fd")) <= set(before)


def test_a_look_at_the_holder_does_not_make_a_session_busy(sessions: Store) -> None:
    made = create(sessions)
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            sessions.holder(made.id)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(200):
            sessions.lock(made.id).release()
    finally:
        done.set()
        thread.join()


COUNTERS = """
import os
session = store.create("counted", "python", {}).id
file = f"{directory}/counter"
open(file, "w").write("0")
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        left = 25
        while left:
            try:
                lock = store.lock(session)
            except SessionError as error:
                assert error.code == "session.busy", error
                continue
            count = int(open(file).read())
            os.sched_yield()
            open(file, "w").write(str(count + 1))
            lock.release()
            left -= 1
        os._exit(0)
    children.append(pid)
print([os.waitpid(pid, 0)[1] for pid in children], open(file).read())
"""


def drive(script: str, directory: str) -> str:
    """Run a script in a process of its own, which may fork: it has no threads."""
    head = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
    head += "import difflib, hashlib, json  # before a script becomes someone who cannot read them\n"
    head += "from hutch.engine.store import Store\nfrom hutch.errors import SessionError\n"
    head += f"directory = {directory!r}\nstore = Store(directory)\n"
    said = subprocess.run([sys.executable, "-I", "-S", "-c", head + script], capture_output=True, text=True, timeout=50)
    assert (said.returncode, said.stderr) == (0, "")
    return said.stdout


def test_two_processes_never_hold_one_lock(data: Path) -> None:
    assert drive(COUNTERS, str(data)) == "[0, 0, 0, 0] 100\n"


# ---- removed --------------------------------------------------------------------------------------------------------


def test_links_in_a_session_do_not_lead_removal_outside(sessions: Store, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "deeper").mkdir(parents=True)
    (precious / "file").write_text("keep")
    (precious / "deeper" / "file").write_text("keep")
    made = create(sessions)
    for place in ("workspace", "home", "cache", "logs", "workspace/a", "workspace/a/b"):
        directory = Path(sessions.path(made.id, place))
        directory.mkdir(exist_ok=True)
        (directory / "to-directory").symlink_to(precious)
        (directory / "to-file").symlink_to(precious / "file")
        (directory / "up").symlink_to("../../../..")
        (directory / "twin").hardlink_to(precious / "file")
    shutil.rmtree(sessions.path(made.id, "home"))
    os.symlink(precious, sessions.path(made.id, "home"))
    sessions.remove(made.id)
    assert os.listdir(sessions.directory) == []
    assert sorted(str(path.relative_to(precious)) for path in precious.rglob("*")) == ["deeper", "deeper/file", "file"]
    assert ((precious / "file").read_text(), (precious / "file").stat().st_nlink) == ("keep", 1)


def test_names_of_every_kind_are_removed(sessions: Store) -> None:
    made = create(sessions)
    workspace = Path(sessions.path(made.id, "workspace"))
    for name in (b"\xff\xfe", b"a\nb", b"-rf", b" ", b"x" * 255, "é".encode()):
        Path(os.fsdecode(bytes(workspace) + b"/" + name)).mkdir()
        Path(os.fsdecode(bytes(workspace) + b"/" + name + b"/" + name)).touch()
    os.mkfifo(workspace / "fifo")
    sessions.remove(made.id)
    assert os.listdir(sessions.directory) == []


def test_depth_does_not_stop_removal(sessions: Store) -> None:
    made = create(sessions)
    here = os.open(sessions.path(made.id, "workspace"), os.O_RDONLY)
    for _ in range(1200):  # deeper than a path is long, a stack is high, or descriptors are many
        os.mkdir("directory", dir_fd=here)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        below = os.open("directory", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    sessions.remove(made.id)
    assert os.listdir(sessions.directory) == []


CLOSED = """
import os
if os.geteuid() == 0:
    os.chown(directory, 65534, 65534)
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
made = store.create("closed", "python", {})
for path in ("a", "a/b", "a/b/c", "a/g", "d", "e", "e/f"):
    os.mkdir(f"{made.workspace}/{path}")
    open(f"{made.workspace}/{path}/file", "w").close()
os.chmod(f"{made.workspace}/e", 0o500)
os.chmod(f"{made.workspace}/e/f", 0o500)
for path in ("a/b/c", "a/b", "a/g", "a", "d"):
    os.chmod(f"{made.workspace}/{path}", 0)
store.remove(made.id)
print(os.listdir(store.directory))
"""


def test_modes_do_not_stop_removal() -> None:
    directory = tempfile.mkdtemp()  # pytest's own lie where an ordinary user cannot go
    try:
        assert drive(CLOSED, directory) == "[]\n"
    finally:
        shutil.rmtree(directory)


def test_what_is_swapped_during_removal_does_not_lead_outside(sessions: Store, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    for number in range(20):
        (precious / f"file{number}").touch()
    done = threading.Event()
    places: list[str] = []

    def swap() -> None:
        while not done.is_set():
            for place in places[-1:]:
                try:
                    os.rename(f"{place}/real", f"{place}/real.old")
                    os.symlink(precious, f"{place}/real")
                    os.unlink(f"{place}/real")
                    os.rename(f"{place}/real.old", f"{place}/real")
                except OSError:
                    continue

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(20):
            made = create(sessions)
            os.makedirs(f"{made.workspace}/a/real/b/c")
            session = os.open(f"{made.workspace}/a", os.O_PATH)
            places.append(f"/proc/self/fd/{session}")  # as a guest, whose directory is what it is, whatever its name
            try:
                sessions.remove(made.id)
            except HostError:
                pass  # it was busier than we are patient
            finally:
                places.pop()
                os.close(session)
    finally:
        done.set()
        thread.join()
    assert len(list(precious.iterdir())) == 20
    assert sessions.ids() == []


def test_a_directory_that_is_not_empty_for_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "top" / "busy").mkdir(parents=True)
    real = tree.unlink

    def refill(directory: int, name: str) -> bool:
        done = real(directory, name)
        (tmp_path / "top" / "busy" / "again").touch()
        return done

    (tmp_path / "top" / "busy" / "file").touch()
    monkeypatch.setattr(tree, "unlink", refill)
    parent = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="not empty"):
            tree.remove_tree(parent, "top")
    finally:
        os.close(parent)


def test_what_cannot_be_removed_is_told_and_no_session_any_more(
    sessions: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    made = create(sessions)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        error = refusal(sessions.remove, made.id)
    assert (type(error), error.code) == (HostError, "host.data")
    assert error.hint.startswith(f"rm -r {sessions.directory}/.removing-{made.id}-")
    assert sessions.ids() == []
    assert sessions.repair() == []  # we are alive, and may be at it


# ---- repaired -------------------------------------------------------------------------------------------------------


def stray(sessions: Store, session: str, token: str) -> list[str]:
    """What a process with this token may leave."""
    for name in (f".creating-{token}-11111111", f".removing-22222222-{token}"):
        os.makedirs(f"{sessions.directory}/{name}/workspace/a")
        Path(f"{sessions.directory}/{name}/workspace/a/file").touch()
    Path(sessions.path(session, f".metadata.json-{token}")).write_text("{")
    return sorted(
        f"{sessions.directory}/{name}"
        for name in (
            f".creating-{token}-11111111",
            f".removing-22222222-{token}",
            f"{session}/.metadata.json-{token}",
        )
    )


def test_what_the_dead_left_is_removed(sessions: Store) -> None:
    made = create(sessions)
    left = stray(sessions, made.id, DEAD)
    assert sorted(sessions.repair()) == left
    assert sessions.repair() == []
    assert os.listdir(sessions.directory) == [made.id]
    stray(sessions, made.id, DEAD)
    assert Store(os.path.dirname(sessions.directory)).all() == [made]  # opening it is enough
    assert not any(os.path.lexists(path) for path in left)


@pytest.mark.parametrize("token", [make_token(), ELSEWHERE, "mine"], ids=["ours", "elsewhere", "strange"])
def test_what_the_living_make_is_left_for_a_day(token: str, sessions: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = create(sessions)
    left = stray(sessions, made.id, token)
    assert sessions.repair() == []
    assert all(map(os.path.exists, left))
    assert sessions.all() == [made]
    later = time.time() + 24 * 3600 + 60
    monkeypatch.setattr(time, "time", lambda: later)
    assert sorted(sessions.repair()) == left


@pytest.mark.parametrize("name", ["notes", ".git", "AB12CD34", "ab12cd3", ".hutch-work-1"])
def test_what_is_not_ours_is_left(name: str, sessions: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = create(sessions)
    Path(sessions.directory, name).mkdir()
    later = time.time() + 48 * 3600
    monkeypatch.setattr(time, "time", lambda: later)
    assert sessions.repair() == []
    assert Path(sessions.directory, name).is_dir()
    assert sessions.all() == [made]


def test_two_may_repair_at_once(sessions: Store) -> None:
    made = create(sessions)
    for _ in range(10):
        stray(sessions, made.id, DEAD)
        threads = [threading.Thread(target=sessions.repair) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sessions.repair()
        assert os.listdir(sessions.directory) == [made.id]
        assert sorted(os.listdir(sessions.path(made.id))) == sorted([*store.SHARED, "lock", "logs", "metadata.json"])


# ---- killed ---------------------------------------------------------------------------------------------------------

CHECKS = """
import json, os, random, signal, time

PARTS = ["cache", "home", "lock", "logs", "metadata.json", "workspace"]

def whole(session):
    root = f"{store.directory}/{session}"
    found = sorted(name for name in os.listdir(root) if not name.startswith("."))
    metadata = json.load(open(f"{root}/metadata.json"))
    assert (found, metadata["sessionId"]) == (PARTS, session), (found, metadata)
    return metadata

def visible():
    "Before anything is repaired, every name that looks like a session is one."
    names = [name for name in os.listdir(store.directory) if not name.startswith(".")]
    return {name: whole(name) for name in names}

def mended():
    "A process that opens the store now finds it clean."
    before = visible()
    again = Store(directory)
    assert again.broken() == {}
    assert visible() == before
    assert [name for name in os.listdir(store.directory) if name.startswith(".")] == []
    for session in again.ids():
        assert sorted(os.listdir(f"{store.directory}/{session}")) == PARTS
        again.lock(session).release()
    return before

def fill(record):
    for path in ("a/b/c", "d"):
        os.makedirs(f"{record.workspace}/{path}")
        open(f"{record.workspace}/{path}/file", "w").close()
"""

STEPS = (
    CHECKS
    + """
CALLS = ("mkdir", "open", "close", "rename", "fsync", "unlink", "rmdir", "fchmod", "fchown", "listdir", "stat", "fstat")

def arm(step):
    "Die just before the step-th call to the kernel."
    left = [step]
    for name in CALLS:
        def call(*arguments, real=getattr(os, name), **options):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)
        setattr(os, name, call)

def killed_at(step, act):
    pid = os.fork()
    if pid == 0:
        try:
            arm(step)
            act()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])

def each_step(prepare, act, check):
    step = 1
    while True:
        subject = prepare()
        died = killed_at(step, lambda: act(subject))
        check(subject, mended(), died)
        if not died:
            return step - 1
        step += 1

def prepare():
    for session in store.ids():
        store.remove(session)
    record = store.create("old", "python", {})
    fill(record)
    return record

def created(record, found, died):
    assert record.id in found and len(found) in ((1, 2) if died else (2,)), found

def updated(record, found, died):
    assert list(found) == [record.id]
    assert found[record.id]["description"] in ((None, "new") if died else ("new",))

def removed(record, found, died):
    assert list(found) in (([record.id], []) if died else ([],))

owner = (os.geteuid(), os.getegid())
print(each_step(prepare, lambda record: store.create("new", "python", {}, owner=owner), created))
print(each_step(prepare, lambda record: store.update(record.replace(description="new")), updated))
print(each_step(prepare, lambda record: store.remove(record.id), removed))
"""
)


def test_a_kill_before_any_call_to_the_kernel_leaves_nothing_half_done(data: Path) -> None:
    steps = [int(line) for line in drive(STEPS, str(data)).split()]
    assert [count > least for count, least in zip(steps, (30, 10, 30), strict=True)] == [True] * 3


HURRY = (
    CHECKS
    + """
def work(acknowledge):
    while True:
        record = store.create("hurry", "python", {"a": "x" * random.choice([0, 10_000])})
        acknowledge("created", record.id)
        if random.random() < 0.5:
            fill(record)
        for number in range(random.choice([0, 1, 3])):
            store.update(record.replace(description=str(number) * 5000))
            acknowledge("updated", record.id, number)
        if random.random() < 0.7:
            acknowledge("removing", record.id)
            store.remove(record.id)
            acknowledge("removed", record.id)
        mine = [other for other in store.all() if other.name == "hurry"]
        assert all(other.workspace.endswith(f"{other.id}/workspace") for other in mine)

def start():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        random.seed()
        try:
            work(lambda *words: os.write(writer, " ".join(map(str, words)).encode() + b"\\n"))
        except BaseException as error:
            os.write(writer, f"failed {error!r}\\n".encode())
        os._exit(1)
    os.close(writer)
    return pid, open(reader)

rounds, said = 0, 0
while rounds < 25:
    rounds += 1
    workers = [start(), start()]
    workers[0][1].readline()
    for pid, _ in workers:
        time.sleep(random.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
    for pid, _ in workers:
        os.waitpid(pid, 0)
    found = mended()
    kept, updates = set(), {}
    for _, file in workers:
        for line in file:
            said += 1
            word, session, *number = line.split()
            assert word != "failed", line
            if word == "created":
                kept.add(session)
            elif word == "updated":
                updates[session] = int(number[0])
            elif word == "removing":
                kept.discard(session)
            elif word == "removed":
                assert session not in found, session
        file.close()
    assert kept <= found.keys(), kept - found.keys()
    for session in kept & updates.keys():
        assert int(found[session]["description"][0]) >= updates[session]
    for session in list(found):
        store.remove(session)
assert os.listdir(store.directory) == []
print(rounds, said > rounds)
"""
)


def test_sessions_survive_processes_that_are_killed_in_a_hurry(data: Path) -> None:
    assert drive(HURRY, str(data)) == "25 True\n"


RACE = """
import os
for _ in range(30):
    record = store.create(None, "python", {})
    session = record.id
    os.makedirs(store.path(session, "workspace", "a", "b"))
    children = []
    for act in ("remove", "remove", "update", "update", "lock"):
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                getattr(store, act)(record if act == "update" else session)
            except SessionError as error:
                code = 1 if error.code in ("session.unknown", "session.busy") else 3
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                code = 4
            os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert max(codes) <= 1, codes
    assert codes[:2].count(0) <= 1, codes
    for left in store.ids():
        store.remove(left)
    assert os.listdir(store.directory) == [], os.listdir(store.directory)
print("done")
"""


def test_one_session_may_be_removed_changed_and_locked_at_once(data: Path) -> None:
    assert drive(RACE, str(data)) == "done\n"

"""What a sandbox uses, seen from outside."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hutch.isolation import usage

MIB = 1024 * 1024


def fake_proc(monkeypatch: pytest.MonkeyPatch, texts: dict[str, str]) -> None:
    monkeypatch.setattr(usage, "read_text", lambda path: texts.get(path, ""))
    monkeypatch.setattr(usage, "_tasks", lambda pid: ["1", "2"] if f"/proc/{pid}/status" in texts else [])


def test_memory_of_a_tree_counts_the_children_of_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_proc(
        monkeypatch,
        {
            "/proc/5/status": "Name:\tx\nRssAnon:\t100 kB\nRssFile:\t900 kB\nRssShmem:\t10 kB\nVmSwap:\t1 kB\n",
            "/proc/5/task/1/children": "6 ",
            "/proc/5/task/2/children": "7 ",
            "/proc/6/status": "RssAnon:\t1000 kB\n",
            "/proc/7/status": "RssAnon:\t10000 kB\n",
        },
    )
    assert sorted(usage.tree_pids(5)) == [5, 6, 7]
    assert usage.tree_memory([5, 6, 7]) == (111 + 1000 + 10000) * 1024


def test_shared_pages_of_large_processes_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/5/status": "RssAnon:\t40000 kB\n"}
    fake_proc(monkeypatch, texts)
    assert usage.tree_memory([5]) == 40000 * 1024
    texts["/proc/5/smaps_rollup"] = "Rss: 40000 kB\nPss_Anon:\t20000 kB\nPss_Shmem:\t5 kB\nSwapPss:\t1 kB\n"
    assert usage.tree_memory([5]) == 20006 * 1024


def test_a_process_that_is_gone_uses_nothing() -> None:
    assert usage.tree_memory(usage.tree_pids(2**30)) == 0


def test_this_process_uses_something() -> None:
    assert usage.tree_memory(usage.tree_pids(os.getpid())) > MIB


def disk(path: Path | str) -> int:
    used = usage.tree_disk(str(path))
    assert used is not None
    return used


def write(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.write(os.urandom(size))
        os.fsync(file.fileno())  # some filesystems count a block when it is on disk


def test_disk_use_counts_blocks_and_does_not_follow_links(tmp_path: Path) -> None:
    empty = disk(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "sparse").touch()
    os.truncate(tmp_path / "a" / "sparse", 1 << 40)
    (tmp_path / "a" / "up").symlink_to("/usr")
    few = disk(tmp_path)
    assert empty == 0 < few < MIB
    write(tmp_path / "a" / "full", 2 * MIB)
    assert disk(tmp_path) >= few + 2 * MIB


def test_an_empty_file_counts_for_something(tmp_path: Path) -> None:
    for index in range(10):
        (tmp_path / str(index)).touch()
    assert disk(tmp_path) == 10 * usage._FILE_BYTES


def test_the_look_at_the_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(20):
        (tmp_path / str(index)).touch()
    assert usage.tree_disk(f"{tmp_path}/gone") == 0
    monkeypatch.setattr(usage, "_DISK_ENTRIES", 19)
    assert usage.tree_disk(str(tmp_path)) is None
    monkeypatch.setattr(usage, "_DISK_ENTRIES", 20)
    assert usage.tree_disk(str(tmp_path)) is not None


def test_the_look_at_the_disk_ends_in_a_deep_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_DISK_DEPTH", 5)
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "1/2/3/4/5").mkdir(parents=True)
    assert usage.tree_disk(str(tmp_path)) is not None
    (tmp_path / "1/2/3/4/5/6").mkdir()
    assert usage.tree_disk(str(tmp_path)) is None
    assert len(os.listdir("/proc/self/fd")) <= before


def test_growth_counts_from_the_start_and_with_what_has_no_name(tmp_path: Path) -> None:
    write(tmp_path / "before", MIB)
    growing = usage.Disk(str(tmp_path), "/workspace")
    assert growing.growth([]) == 0
    write(tmp_path / "after", MIB)
    assert MIB <= growing.growth([]) < 2 * MIB
    unnamed = [("/workspace/a (deleted)", 5 * MIB), ("/memfd:/workspace/a (deleted)", 100 * MIB), ("/tmp/a", MIB)]
    assert growing.growth(unnamed) == growing.growth([]) + 5 * MIB


def test_files_without_a_name_are_found_by_who_holds_them(tmp_path: Path) -> None:
    def held() -> int:
        return sum(size for _, size in usage.look_at_descriptors([os.getpid(), os.getpid(), 2**30]).unnamed)

    with open(tmp_path / "a", "w+b") as file:
        file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
        before = held()
        os.unlink(tmp_path / "a")
        assert held() - before == pytest.approx(MIB, rel=0.1)


def test_a_directory_that_was_closed_cannot_be_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growing = usage.Disk(str(tmp_path), "/workspace")

    def refuse(*_arguments: object, **_options: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert usage.tree_disk(str(tmp_path)) is None
    assert growing.growth([]) > 2**60


def test_sockets_are_counted_once(tmp_path: Path) -> None:
    before = usage.look_at_descriptors([os.getpid()]).sockets
    one, other = socket.socketpair()
    with one, other, one.dup():
        assert usage.look_at_descriptors([os.getpid(), os.getpid()]).sockets == before + 2

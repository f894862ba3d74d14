"""What of the host may be shown, and what in it is kept out of reach."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hutch.errors import HostError, SpecError
from hutch.isolation import mounts
from hutch.isolation.mounts import PROTECTED, CheckedMount, check_mounts
from hutch.model import HostPath, Mount, Unsafe


@pytest.fixture
def project(tmp_path: Path) -> Path:
    # The directory of a test may itself lie behind a link.
    directory = Path(os.path.realpath(tmp_path)) / "project"
    directory.mkdir()
    return directory


def check(
    path: Path | str, *, writable: bool = False, unsafe: tuple[Unsafe, ...] = (), private: tuple[str, ...] = ()
) -> CheckedMount:
    mount = Mount(host_path=str(path), guest_path="/data", writable=writable)
    return check_mounts((mount,), unsafe, private)[0]


def refusal(path: Path | str, **options: object) -> SpecError:
    with pytest.raises(SpecError) as caught:
        check(path, **options)  # type: ignore[arg-type]
    assert caught.value.hint
    return caught.value


# ---- what may be shown ----------------------------------------------------------------------------------------------


def test_a_checked_mount_is_pinned_to_what_was_looked_at(project: Path) -> None:
    info = project.stat()
    assert check(project) == CheckedMount(
        host_path=str(project),
        guest_path="/data",
        writable=False,
        directory=True,
        device=f"{os.major(info.st_dev)}:{os.minor(info.st_dev)}",
        inode=info.st_ino,
        uid=info.st_uid,
        gid=info.st_gid,
    )


def test_a_file_may_be_shown_and_is_not_guarded(project: Path) -> None:
    (project / "a").touch()
    checked = check(project / "a", writable=True)
    assert (checked.directory, checked.guarded, checked.writable) == (False, False, True)


def test_paths_are_made_absolute(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    assert check(".").host_path == str(project)
    monkeypatch.setenv("HOME", str(project))
    (project / "in").mkdir()
    assert check("~/in/").host_path == f"{project}/in"


def test_mounts_keep_their_order(project: Path) -> None:
    asked = tuple(Mount(host_path=str(project), guest_path=f"/{name}") for name in "cab")
    assert [mount.guest_path for mount in check_mounts(asked, (), ())] == ["/c", "/a", "/b"]


# ---- what may not ---------------------------------------------------------------------------------------------------


def test_what_is_missing_is_named(project: Path) -> None:
    error = refusal(project / "gone")
    assert error.code == "mount.missing"
    assert error.message.startswith(f"mount {project}/gone:/data: ")
    assert "exists" in error.hint


@pytest.mark.parametrize("tail", ["", "/in", "/in/."])
def test_a_path_through_a_link_is_refused(tail: str, project: Path) -> None:
    (project / "real" / "in").mkdir(parents=True)
    (project / "link").symlink_to("real")
    error = refusal(f"{project}/link{tail}")
    assert error.code == "mount.symlink"
    assert f"{project}/real" in error.hint


def test_a_link_to_nothing_is_refused(project: Path) -> None:
    (project / "link").symlink_to("nothing")
    assert refusal(project / "link").code == "mount.symlink"


def test_special_files_are_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(project / "fifo")
    monkeypatch.chdir(project)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for name in ("fifo", "socket"):
            error = refusal(project / name)
            assert (error.code, error.hint) == ("mount.kind", "mount the directory around it")


@pytest.mark.parametrize("path", ["/proc", "/sys", "/dev", "/dev/shm", "/proc/sys", "/proc/1"])
@pytest.mark.parametrize("unsafe", [(), tuple(Unsafe)])
def test_kernel_filesystems_are_never_shown(path: str, unsafe: tuple[Unsafe, ...]) -> None:
    if not os.path.isdir(path):
        pytest.skip(f"this machine has no {path}")
    assert refusal(path, unsafe=unsafe).code == "mount.system"


@pytest.mark.parametrize("path", ["/run", "/var/run"])
def test_the_sockets_of_services_are_never_shown(path: str) -> None:
    if not os.path.isdir(path):
        pytest.skip(f"this machine has no {path}")
    assert refusal(path, unsafe=tuple(Unsafe)).code in ("mount.system", "mount.symlink")


def test_the_whole_machine_is_not_shown_even_read_only() -> None:
    assert refusal("/").code == "mount.whole-machine"
    assert refusal("/", writable=True).code == "mount.whole-machine"


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_a_home_and_what_holds_it_are_not_shown_writable(
    levels: int, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = project / "homes" / "me"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    shown = [home, *home.parents][levels]
    error = refusal(shown, writable=True)
    assert error.code == "mount.home"
    assert "--unsafe-writable-home" in error.hint
    assert check(shown).writable is False
    assert check(shown, writable=True, unsafe=(Unsafe.WRITABLE_HOME,)).writable is True


def test_a_directory_in_the_home_may_be_writable(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project))
    (project / "code").mkdir()
    assert check(project / "code", writable=True).guarded


def test_a_home_behind_a_link_is_still_the_home(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "real").mkdir()
    (project / "link").symlink_to("real")
    monkeypatch.setenv("HOME", str(project / "link"))
    assert refusal(project / "real", writable=True).code == "mount.home"


@pytest.mark.parametrize("below", ["", "sessions", "sessions/a"])
def test_the_files_of_hutch_are_never_writable(below: str, project: Path) -> None:
    (project / "sessions" / "a").mkdir(parents=True)
    error = refusal(project / below, writable=True, private=(str(project),), unsafe=tuple(Unsafe))
    assert error.code == "mount.private"
    assert check(project / below, private=(str(project),)).writable is False


def test_what_holds_the_files_of_hutch_is_not_writable_either(project: Path) -> None:
    (project / "share" / "hutch").mkdir(parents=True)
    assert refusal(project / "share", writable=True, private=(f"{project}/share/hutch",)).code == "mount.private"


def test_the_files_of_hutch_are_found_behind_a_link(project: Path) -> None:
    (project / "real" / "hutch").mkdir(parents=True)
    (project / "link").symlink_to("real")
    error = refusal(project / "real" / "hutch", writable=True, private=(f"{project}/link/hutch",))
    assert error.code == "mount.private"


# ---- protected paths ------------------------------------------------------------------------------------------------


def test_only_writable_directories_are_guarded(project: Path) -> None:
    assert check(project).guarded is False
    assert check(project, writable=True).guarded is True
    assert check(project, writable=True, unsafe=(Unsafe.UNPROTECTED_MOUNTS,)).guarded is False


def test_every_protected_path_is_either_present_or_absent(project: Path) -> None:
    (project / ".git" / "hooks").mkdir(parents=True)
    (project / ".envrc").touch()
    (project / ".github" / "workflows").mkdir(parents=True)
    checked = check(project, writable=True)
    assert set(checked.present) == {".git", ".envrc", ".github/workflows"}
    assert set(checked.absent) == set(PROTECTED) - set(checked.present)
    assert len(checked.present) + len(checked.absent) == len(PROTECTED)


def test_no_repository_can_be_made_of_the_project_itself(project: Path) -> None:
    """git takes a directory with HEAD, objects and refs for a repository, and obeys its config."""
    assert "HEAD" in check(project, writable=True).absent
    for name in ("objects", "refs", "hooks"):
        (project / name).mkdir()
    (project / "HEAD").touch()
    checked = check(project, writable=True)
    assert {"HEAD", "hooks"} <= set(checked.present)
    assert {"config", "commondir"} <= set(checked.absent)


def test_where_a_git_file_points_to_inside_the_project_is_protected(project: Path) -> None:
    (project / "store").mkdir()
    (project / "sub").mkdir()
    (project / ".git").write_text(f"gitdir: {project}/store\n")
    (project / "sub" / ".git").write_text("gitdir: /elsewhere\n")
    present = check(project, writable=True).present
    assert {".git", "store", "sub/.git"} <= set(present)
    assert not any("elsewhere" in name for name in present)


def test_a_closed_directory_of_ours_could_hide_a_repository(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "a").mkdir()
    real = os.scandir

    def closed(path: str) -> object:
        if str(path).endswith("/a"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(HostError) as caught:
        check(project, writable=True)
    assert (caught.value.code, caught.value.hint) == ("host.protect", f"chmod u+rwx {project}/a")


def test_a_file_in_the_way_of_a_protected_path_is_protected_itself(project: Path) -> None:
    (project / ".github").touch()
    checked = check(project, writable=True)
    assert ".github" in checked.present
    assert ".github/workflows" not in (*checked.present, *checked.absent)


@pytest.mark.parametrize("name", [".git", ".claude", ".envrc", ".github/workflows", ".github"])
def test_a_protected_path_that_is_a_link_is_refused(name: str, project: Path) -> None:
    link = project / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to("elsewhere")
    error = refusal(project, writable=True)
    assert error.code == "mount.protected-symlink"
    assert str(link) in error.message
    assert "read-only" in error.hint
    assert check(project).writable is False


def test_a_protected_file_with_a_second_name_is_refused(project: Path) -> None:
    (project / ".envrc").touch()
    (project / "other").hardlink_to(project / ".envrc")
    error = refusal(project, writable=True)
    assert error.code == "mount.protected-hardlink"
    assert f"cp {project}/.envrc" in error.hint


def test_a_protected_path_that_may_not_be_looked_at_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.lstat

    def closed(path: str) -> os.stat_result:
        if str(path).endswith(".github/workflows"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    (project / ".github").mkdir()
    monkeypatch.setattr(os, "lstat", closed)
    with pytest.raises((SpecError, HostError)):
        check(project, writable=True)


def test_nested_repositories_are_protected_four_levels_down(project: Path) -> None:
    for path in ("a/.git", "a/b/.git", "a/b/c/.git", "a/b/c/d/.git", "node_modules/x/.git"):
        (project / path).mkdir(parents=True)
    (project / "sub").mkdir()
    (project / "sub" / ".git").write_text("gitdir: ../.git/modules/sub\n")
    nested = set(check(project, writable=True).present)
    assert nested == {"a/.git", "a/b/.git", "a/b/c/.git", "sub/.git"}


def test_more_directories_than_can_be_searched_are_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_NESTED_DIRECTORIES", 10)
    for index in range(9):
        (project / f"{index:02}").mkdir()
    assert check(project, writable=True).guarded
    (project / "09").mkdir()
    with pytest.raises(HostError, match="more than 10 directories") as caught:
        check(project, writable=True)
    assert caught.value.code == "host.protect"
    assert "--unsafe-unprotected-mounts" in caught.value.hint


def test_the_search_for_repositories_does_not_follow_links(project: Path, tmp_path: Path) -> None:
    (tmp_path / "outside" / "a" / ".git").mkdir(parents=True)
    (project / "link").symlink_to(tmp_path / "outside")
    (project / "loop").symlink_to(".")
    assert check(project, writable=True).present == ()


def test_a_nested_repository_that_is_a_link_is_refused(project: Path) -> None:
    (project / "a").mkdir()
    (project / "a" / ".git").symlink_to("/tmp")
    assert refusal(project, writable=True).code == "mount.protected-symlink"


# ---- the work directory ---------------------------------------------------------------------------------------------


def test_the_work_directory_is_the_first_place_on_the_same_mount(project: Path) -> None:
    mount = check(project, writable=True)
    place = mounts.require_work_directory(mount, ["/nonexistent", "/proc", str(project.parent), "/"], "t")
    assert place == f"{project.parent}/.hutch-work-t"
    assert not os.path.exists(place)


def test_the_directory_around_the_project_is_the_last_resort(project: Path) -> None:
    assert mounts.require_work_directory(check(project, writable=True), [], "t") == f"{project.parent}/.hutch-work-t"


def test_no_place_for_the_work_directory_is_an_error(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = check(project, writable=True)
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    with pytest.raises(HostError) as caught:
        mounts.require_work_directory(mount, ["/nonexistent"], "t")
    assert caught.value.code == "host.protect"
    assert str(project.parent) in caught.value.hint
    assert "/nonexistent" in caught.value.details
    assert "--unsafe-unprotected-mounts" in caught.value.hint


def test_a_bind_of_the_same_filesystem_is_another_mount(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = check(project, writable=True)
    ids = {str(project): "mnt_id: 1", "/elsewhere": "mnt_id: 2", str(project.parent): "mnt_id: 1"}
    monkeypatch.setattr(mounts, "_mount_id", ids.__getitem__)
    monkeypatch.setattr(os, "access", lambda _path, _mode: True)
    place = mounts.require_work_directory(mount, ["/elsewhere"], "t")
    assert place == HostPath(f"{project.parent}/.hutch-work-t")

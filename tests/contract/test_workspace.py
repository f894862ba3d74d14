"""A writable project: what tools on the host obey stays as it is, and nothing of ours stays in it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .harness import Hutch, end, need, picture

FILES = [
    ".gitmodules", ".gitattributes", ".gitconfig", ".mcp.json", ".pre-commit-config.yaml", ".envrc", ".npmrc",
    ".yarnrc", ".yarnrc.yml", ".pnpmfile.cjs", ".bashrc", ".bash_profile", ".profile", ".zshrc", ".zprofile",
    ".ripgreprc",
]  # fmt: skip
DIRECTORIES = [
    ".git", ".claude", ".codex", ".agents", ".cursor", ".gemini", ".vscode", ".idea", ".zed", ".devcontainer", ".husky",
    ".github/workflows",
]  # fmt: skip
EXCHANGE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.renameat2(-100, b"x", -100, b"{path}", 2): raise SystemExit(os.strerror(ctypes.get_errno()))
"""
ATTACKS = {
    "write": "echo evil > {path}; echo evil > {path}/inner",
    "append": "echo evil >> {path}; echo evil >> {path}/kept",
    "truncate": "truncate -s 0 {path}; truncate -s 0 {path}/kept",
    "remove": "rm -rf {path}",
    "rename away": "mv {path} moved",
    "rename over": "echo evil > f; mv -T f {path}; mkdir d; echo evil > d/inner; mv -T d {path}; mv -f f {path}",
    "exchange": "mkdir x; echo evil > x/inner; python3 -c '" + EXCHANGE + "'",
    "hard link over": "echo evil > f; ln -f f {path}; ln -fT f {path}",
    "hard link to": "ln {path} alias && echo evil > alias; ln {path}/kept alias && echo evil > alias",
    "symlink over": "ln -sfT /workspace/elsewhere {path}; ln -sf /workspace/elsewhere {path}",
    "make directory": "mkdir -p {path}/deep; echo evil > {path}/deep/inner",
    "change mode": "chmod 777 {path} {path}/kept",
    "change times": "touch {path} {path}/kept",
    "bind over": "mount --bind /tmp {path}; umount -l {path}; echo evil > {path}/inner; echo evil > {path}",
}  # fmt: skip
GIT = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
GIT |= {"GIT_COMMITTER_EMAIL": "a@b"}


def git(hutch: Hutch, project: Path, *words: str) -> str:
    """Run git on the host, as the project's owner."""
    with hutch.popen(["git", "-C", str(project), *words], variables=GIT) as child:
        out, err = child.communicate(timeout=30)
    assert child.returncode == 0, err
    return out


def plant(hutch: Hutch, project: Path) -> None:
    """A project that has every protected path."""
    for name in FILES:
        hutch.write(project / name, "kept")
    for name in DIRECTORIES:
        hutch.write(project / name / "kept", "kept")


def attack(script: str) -> str:
    """One attack on every protected path; each may fail, and all are made."""
    return "\n".join(f"( {script.format(path=path)} ) 2>>/tmp/said" for path in (*FILES, *DIRECTORIES)) + "\ntrue"


def protected_part(project: Path) -> dict[str, tuple[object, ...]]:
    heads = (*FILES, *DIRECTORIES)
    whole = picture(project)
    return {name: whole[name] for name in whole if any(f"{name}/".startswith(f"{head}/") for head in heads)}


# ---- protected paths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ATTACKS)
def test_protected_paths_hold_when_they_exist(hutch: Hutch, project: Path, name: str) -> None:
    plant(hutch, project)
    before = protected_part(project)
    assert len(before) == len(FILES) + 2 * len(DIRECTORIES)
    ran = hutch.shell(attack(ATTACKS[name]) + "; echo done > ordinary; wc -l < /tmp/said", "--workspace", project)
    assert (ran.outcome, ran.json["protected"]) == ("ok", "prevented"), ran.err
    assert int(ran.out) >= len(before) // 2, "the attacks were made, and refused"
    assert (project / "ordinary").read_text() == "done\n"
    assert protected_part(project) == before


@pytest.mark.parametrize("name", ATTACKS)
def test_protected_paths_hold_when_they_do_not_exist_yet(hutch: Hutch, project: Path, name: str) -> None:
    ran = hutch.shell(attack(ATTACKS[name]) + "; echo done > ordinary", "--workspace", project)
    assert (ran.outcome, ran.json["protected"]) == ("ok", "prevented"), ran.err
    assert (project / "ordinary").read_text() == "done\n"
    assert protected_part(project) == {}


@pytest.mark.parametrize("existing", [True, False], ids=["existing", "absent"])
def test_workflows_hold_when_the_directory_above_is_renamed(hutch: Hutch, project: Path, existing: bool) -> None:
    if existing:
        hutch.write(project / ".github" / "workflows" / "ci.yml", "kept")
    script = "mv .github aside; rm -rf .github; mkdir -p .github/workflows; echo evil > .github/workflows/ci.yml; true"
    hutch.shell(script, "--workspace", project)
    workflow = project / ".github" / "workflows" / "ci.yml"
    assert (workflow.read_text() if workflow.exists() else "absent") == ("kept" if existing else "absent")


@pytest.mark.parametrize("kind", ["directory", "file"])
@pytest.mark.parametrize("where", ["sub", "a/b/c"])
@pytest.mark.parametrize(
    "script",
    [
        "echo evil > {nested}/config; echo evil > {nested}; mkdir -p {nested}/hooks; echo evil > {nested}/hooks/x",
        "rm -rf {nested}; mv {nested} {nested}.old; ln -sfn /tmp {nested}",
        "mv {above} {above}.old && mkdir -p {nested}/hooks && echo evil > {nested}/hooks/post-checkout",
        "mv {top} moved && mkdir -p {nested}/hooks && echo evil > {nested}/hooks/post-checkout",
    ],
    ids=["write", "replace", "rename-parent", "rename-top"],
)
def test_a_nested_repository_holds(hutch: Hutch, project: Path, kind: str, where: str, script: str) -> None:
    nested = project / where / ".git"
    hutch.write(nested / "config" if kind == "directory" else nested, "kept")
    before = picture(nested)
    words = {"nested": f"{where}/.git", "above": where, "top": where.split("/")[0]}
    ran = hutch.shell(f"({script.format(**words)}) 2>&1; true", "--workspace", project)
    assert ran.outcome == "ok"
    assert picture(nested) == before


@pytest.mark.parametrize("path", [".git", ".git/hooks", ".mcp.json", ".github", ".claude"])
def test_a_protected_path_that_is_a_symlink_is_refused(hutch: Hutch, project: Path, path: str) -> None:
    link = project / path
    hutch.write(link.parent / "elsewhere", "x")
    link.symlink_to(link.parent / "elsewhere")
    ran = hutch.run("print(1)", "--workspace", project)
    if path == ".git/hooks":
        # .git is read-only as a whole; where a link in it leads makes no difference
        assert ran.outcome == "ok"
        return
    assert (ran.exit_code, ran.outcome) == (2, "mount.protected-symlink")
    assert str(link) in ran.json["error"]["message"]
    assert hutch.run("print(1)", "--project", project).outcome == "ok", "read-only it may be shown"


def test_a_protected_file_with_a_second_name_is_refused(hutch: Hutch, project: Path) -> None:
    os.link(hutch.write(project / ".npmrc", "kept"), project / "alias")
    ran = hutch.run("print(1)", "--workspace", project)
    assert (ran.exit_code, ran.outcome) == (2, "mount.protected-hardlink")
    assert "cp " in ran.json["error"]["hint"]


@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_a_protected_path_of_another_kind_is_refused(hutch: Hutch, project: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(project / ".envrc")
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(project / ".envrc"))
    hutch.give(project / ".envrc")
    ran = hutch.run("print(1)", "--workspace", project)
    assert (ran.exit_code, ran.outcome) == (2, "mount.protect")
    assert ran.json["error"]["hint"]


def test_unprotected_mounts_are_asked_for_by_name_and_reported(hutch: Hutch, project: Path) -> None:
    ran = hutch.shell("echo x > .envrc", "--workspace", project, "--unsafe-unprotected-mounts")
    assert (ran.outcome, ran.json["protected"], ran.json["unsafe"]) == ("ok", None, ["unsafe_unprotected_mounts"])
    assert (project / ".envrc").read_text() == "x\n"


def test_a_single_writable_file_can_be_mounted(hutch: Hutch, project: Path) -> None:
    file = hutch.write(project / "notes.txt", "old\n")
    ran = hutch.shell("echo new >> /notes.txt", "--mount", f"{file}:/notes.txt:rw")
    assert ran.outcome == "ok", ran
    assert file.read_text() == "old\nnew\n"
    assert file.stat().st_uid == hutch.uid


# ---- the host goes on working meanwhile -----------------------------------------------------------------------------


def attack_during(hutch: Hutch, project: Path, on_host: Callable[[], object], script: str) -> str:
    """Start a sandbox, change the project on the host, and only then let the sandbox attack."""
    code = f"echo ready; read -r go; ({script}) 2>&1; ls -la; echo end"
    with hutch.running(code, "-e", "shell", "--stdin", "--workspace", project, stdin=subprocess.PIPE) as live:
        on_host()
        out, err = live.process.communicate("go\n", timeout=30)
    assert out.endswith("end\n"), err
    return out


def test_git_config_holds_when_the_host_rewrites_it_meanwhile(hutch: Hutch, project: Path) -> None:
    need("git")
    git(hutch, project, "init", "-q")
    script = "ls .git; cat .git/config >/dev/null; echo '[core] fsmonitor=evil' >> .git/config; rm -f .git/config; "
    script += "mv .git g; echo evil > .git/hooks/post-commit; mkdir .git/new"
    attack_during(hutch, project, lambda: git(hutch, project, "config", "x.y", "host"), script)
    text = (project / ".git" / "config").read_text()
    assert "host" in text
    assert "evil" not in text
    assert not (project / ".git" / "hooks" / "post-commit").exists()
    assert not (project / ".git" / "new").exists()


def test_a_file_holds_that_the_host_creates_meanwhile(hutch: Hutch, project: Path) -> None:
    script = "echo evil > .mcp.json; rm -f .mcp.json; mv .mcp.json x; echo evil > f; mv -f f .mcp.json"
    attack_during(hutch, project, lambda: hutch.write(project / ".mcp.json", "the host's"), script)
    assert (project / ".mcp.json").read_text() == "the host's"


def test_a_directory_holds_that_the_host_replaces_meanwhile(hutch: Hutch, project: Path) -> None:
    hutch.write(project / ".git" / "hooks" / "kept", "kept")

    def replace() -> None:
        shutil.rmtree(project / ".git" / "hooks")
        hutch.write(project / ".git" / "hooks" / "again", "again")

    script = "echo evil > .git/hooks/post-commit; mkdir -p .git/hooks; echo evil > .git/hooks/again"
    attack_during(hutch, project, replace, script)
    assert {path.name for path in (project / ".git" / "hooks").iterdir()} == {"again"}
    assert (project / ".git" / "hooks" / "again").read_text() == "again"


def test_protection_holds_when_the_host_removes_a_protected_path_meanwhile(hutch: Hutch, project: Path) -> None:
    hutch.write(project / ".envrc", "kept")
    attack_during(hutch, project, (project / ".envrc").unlink, "echo evil > .envrc; mv -f .envrc x; touch .envrc")
    assert not (project / ".envrc").exists()


def test_two_sandboxes_work_on_one_project_at_once(hutch: Hutch, project: Path) -> None:
    with hutch.running("echo ready; sleep 60", "-e", "shell", "--workspace", project):
        ran = hutch.shell("echo second > second.txt; echo evil > .envrc", "--workspace", project)
    assert ran.outcome == "failed"
    assert (project / "second.txt").read_text() == "second\n"
    assert not (project / ".envrc").exists()


# ---- nothing of ours stays ------------------------------------------------------------------------------------------

UNTOUCHED = {
    "nothing": "true",
    "reading": "find . -type f -exec cat {} + >/dev/null; ls -laR >/dev/null",
    "refused attempts": "echo x > .envrc; mkdir .claude/x; rm -rf .git; rm -f src/kept.txt.absent; true",
    "a file made and removed": "echo x > a; mkdir b; mv a b/a; rm -r b",
    "a directory renamed and renamed back": "mv src other; mv other src",
}


@pytest.fixture
def populated(hutch: Hutch, project: Path) -> Path:
    """A project with something of everything, and an attribute of the user's own."""
    hutch.write(project / "src" / "kept.txt", "kept")
    hutch.write(project / "src" / "deep" / "er" / "x", "x")
    hutch.write(project / ".git" / "config", "kept")
    hutch.write(project / ".github" / "CODEOWNERS", "kept")
    (project / "link").symlink_to("src/kept.txt")
    hutch.give(project / "link")
    (project / "src" / "kept.txt").chmod(0o640)
    os.setxattr(project / "src", "user.note", b"mine")
    return project


@pytest.mark.parametrize("name", UNTOUCHED)
def test_the_tree_is_left_exactly_as_it_was(hutch: Hutch, populated: Path, name: str) -> None:
    before = picture(populated)
    ran = hutch.shell(UNTOUCHED[name], "--workspace", populated)
    assert ran.outcome == "ok", ran
    assert picture(populated) == before


@pytest.mark.parametrize(
    "script",
    [
        "mkdir new",
        "mkdir -p new/deep/er",
        "mkdir a b; mv a b/inner",
        "mkdir a b c; mv a b/inner; mv b c/outer",
        "mv src moved",
        "mkdir .github/ISSUE_TEMPLATE",
        "mkdir -p .github/x/y; mv .github/x .github/z",
        "rm -r src; mkdir src",
        "echo x > new.txt; ln new.txt also.txt",
    ],
)
@pytest.mark.parametrize("with_github", [True, False], ids=["github", "no-github"])
def test_no_hidden_attribute_stays_on_what_was_changed(
    hutch: Hutch, populated: Path, script: str, with_github: bool
) -> None:
    if not with_github:
        shutil.rmtree(populated / ".github")
    hutch.shell(script, "--workspace", populated)
    marked = {name: seen[4] for name, seen in picture(populated).items() if seen[4]}
    assert set(marked) <= {"src", "moved"}
    assert set(marked.values()) <= {(("user.note", b"mine"),)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=["KILL", "TERM", "INT"])
def test_the_tree_is_left_as_it_was_when_hutch_is_killed(hutch: Hutch, populated: Path, number: int) -> None:
    before = picture(populated)
    with hutch.running("echo ready; sleep 60", "-e", "shell", "--workspace", populated) as live:
        end(live.process, number)
        deadline = time.monotonic() + 5
        while picture(populated) != before and time.monotonic() < deadline:
            time.sleep(0.02)
    assert picture(populated) == before


def test_a_project_with_any_name_can_be_mounted(hutch: Hutch, project: Path) -> None:
    for name in ("with space", "comma,colon=equals", "new\nline", "ünï\\cödé", "-dash", "$(id)", "x" * 200):
        odd = project / name
        odd.mkdir()
        hutch.give(odd)
        ran = hutch.shell("echo made > file; echo evil > .envrc", "--workspace", odd)
        assert ran.json["protected"] == "prevented", (name, ran)
        assert os.listdir(odd) == ["file"], name


def test_git_works_in_a_workspace_without_touching_its_own_settings(hutch: Hutch, project: Path) -> None:
    """.git is read-only as a whole: looking works, and says what changed; committing is for the user."""
    need("git")
    git(hutch, project, "init", "-q")
    hutch.write(project / "a.txt", "one\n")
    git(hutch, project, "add", "a.txt")
    git(hutch, project, "commit", "-qm", "first")
    script = "git config --global --add safe.directory '*'; echo two >> a.txt; git diff --stat; git log --oneline; "
    ran = hutch.shell(script + "git status --short; git commit -am second", "--workspace", project)
    assert "1 file changed" in ran.out
    assert "first" in ran.out
    assert ran.outcome == "failed"
    assert git(hutch, project, "log", "--format=%s").split() == ["first"]
    assert git(hutch, project, "status", "--short") == " M a.txt\n"


def test_what_tools_obey_and_is_not_protected_is_reported(hutch: Hutch, project: Path) -> None:
    hutch.write(project / "CLAUDE.md", "as it was")
    hutch.write(project / "flake.nix", "as it was")
    script = "echo x > AGENTS.md; echo more >> CLAUDE.md; cat flake.nix; git init -q sub/new; mkdir plain"
    ran = hutch.shell(script, "--workspace", project)
    assert ran.outcome == "ok", ran
    assert ran.json["reported"] == [f"{project}/{name}" for name in ("AGENTS.md", "CLAUDE.md", "sub/new/.git")]
    assert "warning: the program made or changed" in ran.stderr
    assert hutch.shell("cat AGENTS.md; git -C sub/new status", "--workspace", project).json["reported"] == []


def test_a_mark_of_the_filesystem_cannot_be_carried_into_the_next_run(hutch: Hutch, project: Path) -> None:
    """A directory that was renamed through the top keeps a mark, by which a later overlay would let it be renamed."""
    hutch.write(project / "b" / "lib" / "file")
    assert hutch.shell("mv b/lib lib; mv lib b/lib", "--workspace", project).outcome == "ok"
    assert all(not seen[4] for seen in picture(project).values())
    hutch.write(project / "b" / "lib" / ".git" / "config", "theirs")
    code = "import os; os.rename('b/lib', 'b/old')"
    assert hutch.run(code, "--workspace", project).outcome == "failed"
    assert (project / "b" / "lib" / ".git" / "config").read_text() == "theirs"


def test_a_repository_cannot_be_hidden_from_the_next_run(hutch: Hutch, project: Path) -> None:
    hutch.write(project / "sub" / ".git" / "hooks" / "kept")
    hutch.shell("chmod 0300 sub", "--workspace", project)
    script = "chmod 755 sub; echo evil > sub/.git/hooks/post-checkout"
    hutch.shell(script, "--workspace", project)
    (project / "sub").chmod(0o755)
    assert os.listdir(project / "sub" / ".git" / "hooks") == ["kept"]


def test_the_project_itself_cannot_be_made_a_repository(hutch: Hutch, project: Path) -> None:
    script = "mkdir objects refs; printf '[core]\\n\\tfsmonitor = false\\n' > config; echo 'ref: refs/heads/x' > HEAD"
    ran = hutch.shell(script, "--workspace", project)
    assert ran.outcome == "failed"
    assert not (project / "HEAD").exists()


def test_the_directory_that_a_git_file_points_to_is_protected(hutch: Hutch, project: Path) -> None:
    hutch.write(project / "store" / "config", "theirs")
    hutch.write(project / ".git", f"gitdir: {project}/store\n")
    assert hutch.shell("echo evil >> store/config", "--workspace", project).outcome == "failed"
    assert (project / "store" / "config").read_text() == "theirs"


def test_other_files_beside_a_missing_protected_path_can_be_made(hutch: Hutch, project: Path) -> None:
    assert hutch.shell("mkdir .github/ISSUE_TEMPLATE; echo x > .github/a", "--workspace", project).outcome == "ok"
    assert (project / ".github" / "a").read_text() == "x\n"
    assert (project / ".github").stat().st_uid == hutch.uid

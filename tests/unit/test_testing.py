"""The stand-ins for users' own tests: they answer as told, behave like the real thing, and cannot be asked for."""

from __future__ import annotations

import asyncio
import inspect

import pytest

import hutch
from hutch import blocking, spec, testing
from hutch.errors import CommandError, SpecError


def test_a_fake_answers_what_it_was_told() -> None:
    with testing.FakeSandbox({"print(1)": "1\n", "ls -la": testing.make_result("", "no", 2)}) as box:
        assert box.run("print(1)").stdout == "1\n"
        assert box.run("anything else").ok
        assert box.exec(["ls", "-la"]).exit_code == 2
    assert box.runs == ["print(1)", "anything else"]
    assert box.commands == [("ls", "-la")]
    assert not box.is_open


def test_a_fake_may_be_a_function_of_the_code() -> None:
    box = testing.FakeSandbox(lambda code: code.upper())
    assert [result.stdout for result in box.map(["a", "b"])] == ["A", "B"]


def test_a_fake_calls_back_and_checks() -> None:
    heard: list[str] = []
    box = testing.FakeSandbox({"x": testing.make_result("out", "err", 1)})
    box.run("x", on_stdout=heard.append, on_stderr=heard.append)
    assert heard == ["out", "err"]
    with pytest.raises(CommandError):
        box.run("x", check=True)


def test_fake_files_are_kept_and_bounded_like_the_real_ones() -> None:
    files = testing.FakeFiles()
    files.write("a/b.txt", "hi")
    files.write("/workspace/c", b"\xff")
    assert (files.read_text("a/b.txt"), files.read("c")) == ("hi", b"\xff")
    assert [(entry.path, entry.kind) for entry in files.list()] == [("a", "directory"), ("c", "file")]
    assert [entry.path for entry in files.list("a")] == ["a/b.txt"]
    files.remove("a", recursive=True)
    assert not files.exists("a")
    for path in ("../x", "/etc/passwd", "missing"):
        with pytest.raises(SpecError):
            files.read(path)


def test_the_awaited_fake_is_the_same() -> None:
    async def use() -> str:
        async with testing.AsyncFakeSandbox({"x": "y"}) as box:
            await box.files.write("a", "b")
            assert await box.files.read_text("a") == "b"
            return (await box.run("x")).stdout + str((await box.exec(["true"])).ok)

    assert asyncio.run(use()) == "yTrue"


@pytest.mark.parametrize("name", ["run", "exec", "start", "close", "interrupt"])
def test_a_fake_takes_what_the_real_one_takes(name: str) -> None:
    real = inspect.signature(getattr(blocking.Sandbox, name))
    fake = inspect.signature(getattr(testing.FakeSandbox, name))
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in fake.parameters.values())
    assert takes_any or set(fake.parameters) <= set(real.parameters)


@pytest.mark.parametrize("key", ["backend", "environment", "source"])
@pytest.mark.parametrize("word", ["fake", "testing", "hutch.testing"])
def test_no_request_leads_to_a_fake(key: str, word: str) -> None:
    with pytest.raises(hutch.HutchError):
        spec.parse({key: word})

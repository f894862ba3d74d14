"""A process that uses hutch as a library, for each identity, and does what tests tell it.

Starting Python and importing hutch for every claim would take longer than the claims. So one `Caller` serves many
tests: it is sent the source of a function, calls it, and sends back what it returned. After each call it must be as it
was before: no descriptor more, and nothing said on its standard error, where asyncio complains of what was forgotten.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import select
import struct
import subprocess
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest

from hutch import HutchError

from .harness import PYTHON, Hutch, descendants

ANSWER_SECONDS = 40

# ---- what claims have at hand there ---------------------------------------------------------------------------------


def outcome(result: Any) -> str:
    """How a run ended, in a word."""
    word: str = result.outcome.value
    return word


def error_of(act: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[str, str, str]:
    """The class, code and message of the error that a call raises."""
    try:
        value = act(*arguments, **options)
    except HutchError as error:
        return type(error).__name__, error.code, error.message
    raise AssertionError(f"no error, but {value!r}")


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    """Poll; the last answer counts."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return bool(condition())
        time.sleep(0.01)
    return True


def open_files() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def source_of(function: Callable[..., Any]) -> str:
    """The source of a function that may be defined inside a test."""
    return textwrap.dedent(inspect.getsource(function))


PREAMBLE = """
from __future__ import annotations
import asyncio, contextlib, errno, functools, gc, os, pickle, resource, signal, socket, stat, struct, sys, threading
import time, traceback
from pathlib import Path
import hutch
from hutch import *
""" + "\n".join(map(source_of, (outcome, error_of, wait_until, open_files)))

_SERVER = """
def _serve():
    answers = os.dup(1)
    os.dup2(2, 1)
    with Sandbox() as box:  # what is opened once and stays: the descriptors of the loop
        box.run("1")
    before = open_files()
    while True:
        size = sys.stdin.buffer.read(8)
        if not size:
            return
        source, name, arguments = pickle.loads(sys.stdin.buffer.read(struct.unpack("<Q", size)[0]))
        names = {**globals(), "__name__": "claim"}
        try:
            exec(compile(source, "<claim>", "exec"), names)
            answer = (True, names[name](*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        del names
        gc.collect()
        if not wait_until(lambda: open_files() <= before, 3) and answer[0]:
            held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]]
            answer = (False, f"{open_files() - before} descriptors more than before: {held}")
        data = pickle.dumps(answer)
        for part in (struct.pack("<Q", len(data)), data):
            while part:
                part = part[os.write(answers, part):]

_serve()
"""


def script_of(function: Callable[..., Any], *arguments: Any) -> str:
    """A whole program that calls a function, for claims about the end of the process that uses hutch."""
    return f"{PREAMBLE}\n{source_of(function)}\n{function.__name__}(*{arguments!r})\n"


# ---- the process ----------------------------------------------------------------------------------------------------


class Caller:
    """One process of one identity with hutch imported."""

    def __init__(self, hutch: Hutch) -> None:
        self.hutch = hutch
        self._said = os.memfd_create("said", os.MFD_CLOEXEC)
        self._process: subprocess.Popen[Any] | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    def start(self) -> None:
        """Start the process, and wait until it is ready."""
        self._process = self.hutch.popen(
            [PYTHON, "-W", "always", "-c", PREAMBLE + _SERVER],
            stdin=subprocess.PIPE,
            stderr=self._said,
            text=False,
            errors=None,
        )
        self(_nothing)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Have a function called there, and get what it returns. It sees its arguments, hutch, and nothing of ours."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        request = pickle.dumps((source_of(function), function.__name__, arguments))
        deadline = time.monotonic() + ANSWER_SECONDS
        said_before = os.fstat(self._said).st_size
        try:
            process.stdin.write(struct.pack("<Q", len(request)) + request)
            process.stdin.flush()
            (size,) = struct.unpack("<Q", _read(process.stdout.fileno(), 8, deadline))
            ok, value = pickle.loads(_read(process.stdout.fileno(), size, deadline))
        except (OSError, TimeoutError) as error:
            below = len(descendants(process.pid))
            self.end()
            said = self._heard(said_before)
            pytest.fail(f"the process did not answer ({error}); {below} processes below it\n{said}")
        said = self._heard(said_before)
        if not ok:
            pytest.fail(f"{value}\n{said}", pytrace=False)
        if said:
            pytest.fail(f"said on standard error:\n{said}", pytrace=False)
        return value

    def _heard(self, start: int) -> str:
        return os.pread(self._said, 5000, start).decode(errors="replace")

    def end(self) -> None:
        """End the process, with whatever it takes."""
        process, self._process = self._process, None
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def close(self) -> None:
        """Let go of everything."""
        if self.is_running:
            self.end()
        os.close(self._said)


def _nothing() -> None:
    """What is called to see that a process is there."""


def _read(fd: int, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"within {ANSWER_SECONDS} s")
        chunk = os.read(fd, size - len(data))
        if not chunk:
            raise OSError("it is gone")
        data += chunk
    return data

"""A process that uses hutch as a library, for each identity, and does what tests tell it.

Starting Python and importing hutch for every claim would take longer than the claims. So one `Caller` serves many
tests: it is sent the source of a function, calls it, and sends back what it returned. After each call it must be as it
was before: no descriptor more, and nothing said on its standard error, where asyncio complains of what was forgotten.
"""

from __future__ import annotations

import inspect
import os
import pickle
import select
import struct
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from .harness import DEADLINE_SECONDS, PYTHON, Hutch, descendants

PREAMBLE = """
import asyncio, contextlib, functools, gc, os, pickle, signal, struct, sys, threading, time, traceback
from pathlib import Path
import hutch
from hutch import *
from hutch import AsyncPool, AsyncSandbox, Pool, Sandbox

def outcome(result):
    return result.outcome.value

def error_of(act, *arguments, **options):
    try:
        value = act(*arguments, **options)
    except HutchError as error:
        return (type(error).__name__, error.code, error.message, error.hint)
    raise AssertionError(f"no error, but {value!r}")

def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return bool(condition())
        time.sleep(0.01)
    return True

def open_files():
    return len(os.listdir("/proc/self/fd"))
"""

_SERVER = """
def _serve():
    answers = os.dup(1)
    os.dup2(2, 1)
    with Sandbox() as box:  # what is opened once and stays: the loop's own descriptors, caches
        box.run("1")
        box.exec(["true"])
    before = open_files()
    while True:
        size = sys.stdin.buffer.read(8)
        if not size:
            return
        source, name, arguments, options = pickle.loads(sys.stdin.buffer.read(struct.unpack("<Q", size)[0]))
        names = {**globals(), "__name__": "claim"}
        try:
            exec(compile(source, "<claim>", "exec"), names)
            answer = (True, names[name](*arguments, **options))
        except BaseException:
            answer = (False, traceback.format_exc())
        del names
        gc.collect()
        if not wait_until(lambda: open_files() <= before, 3) and answer[0]:
            held = [os.readlink(f"/proc/self/fd/{fd}") for fd in sorted(os.listdir("/proc/self/fd"), key=int)
                    if os.path.exists(f"/proc/self/fd/{fd}") or True and os.path.lexists(f"/proc/self/fd/{fd}")]
            answer = (False, f"{open_files() - before} descriptors more than before: {held}")
        data = pickle.dumps(answer)
        for part in (struct.pack("<Q", len(data)), data):
            while part:
                part = part[os.write(answers, part):]

_serve()
"""


class Caller:
    """One process of one identity with hutch imported."""

    def __init__(self, hutch: Hutch) -> None:
        self.hutch = hutch
        self._said = tempfile.TemporaryFile()
        self._process: subprocess.Popen[Any] | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._start().pid

    def _start(self) -> subprocess.Popen[Any]:
        if self._process is None:
            self._said.truncate(0)
            self._process = self.hutch.popen(
                [PYTHON, "-W", "always", "-c", PREAMBLE + _SERVER],
                stdin=subprocess.PIPE,
                stderr=self._said,
                text=False,
                errors=None,
            )
            self.call(_nothing)
        return self._process

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Have a function called there, and get what it returns. It sees its arguments, hutch, and nothing of ours."""
        self._start()
        return self.call(function, *arguments, **options)

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        request = pickle.dumps((source_of(function), function.__name__, arguments, options))
        deadline = time.monotonic() + DEADLINE_SECONDS
        said_before = self._said.seek(0, os.SEEK_END)
        try:
            process.stdin.write(struct.pack("<Q", len(request)) + request)
            process.stdin.flush()
            (size,) = struct.unpack("<Q", self._read(process.stdout.fileno(), 8, deadline))
            ok, value = pickle.loads(self._read(process.stdout.fileno(), size, deadline))
        except (OSError, struct.error, TimeoutError) as error:
            self._fail(f"the process did not answer ({error!r})")
        self._said.seek(said_before)
        said = self._said.read().decode(errors="replace")
        if not ok:
            pytest.fail(f"{value}\n{said}", pytrace=False)
        if said:
            pytest.fail(f"said on standard error:\n{said}", pytrace=False)
        return value

    def _read(self, fd: int, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"after {DEADLINE_SECONDS} s")
            chunk = os.read(fd, size - len(data))
            if not chunk:
                raise OSError("it is gone")
            data += chunk
        return data

    def _fail(self, reason: str) -> NoReturn:
        """Say what is known, and have the next call start another process."""
        assert self._process is not None
        below = len(descendants(self._process.pid))
        self.close()
        self._said.seek(0)
        pytest.fail(f"{reason}; {below} processes below it\n{self._said.read().decode(errors='replace')}")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            process, self._process = self._process, None
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _nothing() -> None:
    """What is called to see that a process is there."""


def source_of(function: Callable[..., Any]) -> str:
    """The source of a function that may be defined inside a test."""
    return textwrap.dedent(inspect.getsource(function))


def script_of(function: Callable[..., Any], *arguments: Any) -> str:
    """A whole program that calls a function, for claims about the end of the process that uses hutch."""
    return f"{PREAMBLE}\n{source_of(function)}\n{function.__name__}(*{arguments!r})\n"

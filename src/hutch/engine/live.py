"""A sandbox that stays: started once, with an agent inside that starts programs when it is told to.

Nothing here waits for the start: requests are sent at once and lie in the socket until pid 1 reads them. If the sandbox
does not start, whoever waits gets the reason. Whatever way a sandbox is left, its lifeline is closed, which makes the
warden kill and clean up, and the warden is waited for.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time

from .. import process
from ..errors import GoneError, HostError, HutchError
from ..isolation import jail, limits, network
from ..model import Outcome, Result
from . import state, verdict
from .agent import Agent, gone, refused
from .interpreter import Interpreter
from .planning import Prepared

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .pipes import Capture

_SAID_BYTES = 4000
_STATUS_BYTES = 4096
_IDLE_SECONDS = 1.0
_START_SECONDS = 30.0
_ATTEMPTS, _PAUSE_SECONDS = 100, 0.02
"""To remove the cgroups of a sandbox that lost its warden."""


class LiveSandbox:
    """One sandbox, from its start to its end."""

    def __init__(self, prepared: Prepared, label: str = "-") -> None:
        """Start it.

        Raises:
            HostError: this machine refused a part of it at once.
        """
        self.plan = prepared.plan
        self.token = prepared.token
        self.label = label
        self.started_at = time.time()
        self.busy = 0
        """How many programs somebody waits for."""
        self._warden_path = prepared.warden
        self._loop = asyncio.get_running_loop()
        self._reports: list[list[str]] = []
        self._report_tail = b""
        self._cgroups = [directory for directory, _ in self.plan.cgroups]
        self._counters = limits.hit_counters(self.plan.cgroups)
        self.hits: dict[str, int] = {}
        """The evidence, as it was looked at last."""
        self._verdict: Outcome | None = None
        self._fault: HutchError | None = None
        self._slirp: network.Slirp | None = None
        self._fds: dict[str, int] = {}
        self._on_end: dict[object, Callable[[], None]] = {}
        self._interpreters: dict[str, Interpreter] = {}
        self._is_orphaned = False
        self.child_pid = 0
        self.started: asyncio.Future[None] = self._loop.create_future()
        self.started.add_done_callback(_look_at)
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Done when nothing of it is left."""
        self._obeyed = verdict.look_for_obeyed(self.plan)
        self._sampler = verdict.Sampler(self.plan)
        self._sampling: asyncio.TimerHandle | None = None
        limits.make_cgroups(self.plan.cgroups)
        try:
            self._start()
        except BaseException as error:
            state.clean_up(self.plan)
            if isinstance(error, OSError):
                raise refused(error) from error
            raise
        self._overdue = self._loop.call_later(_START_SECONDS, self._is_late)
        if self._sampler.is_needed:
            self._sample()

    # ---- start ----

    def _start(self) -> None:
        for path, uid, gid in self.plan.work_directories:
            state.make_work_directory(path, jail.WORK, uid, gid)
        opened: list[int] = []
        warden: process.Process | None = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            their = {}
            for name in ("status", "lifeline", "gate"):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                self._fds[name], their[name] = (reader, writer) if name == "status" else (writer, reader)
                opened.append(their[name])
            opened.append(null := os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            opened.append(words := os.memfd_create("plan", os.MFD_CLOEXEC))
            # Only bubblewrap writes here, and only if it fails; programs get pipes of their own.
            said = self._fds["said"] = os.memfd_create("said", os.MFD_CLOEXEC)
            text = jail.to_words(self.plan, control=theirs.fileno(), **their)
            while text:
                text = text[os.write(words, text) :]
            self._warden = warden = process.spawn(
                [self._warden_path, "--args", str(words), self.token, self.plan.environment, self.label],
                stdin=null,
                stdout=said,
                stderr=said,
                fds=(words, theirs.fileno(), *their.values()),
                closes_all=True,
            )
            self._fds["warden"] = os.pidfd_open(warden.pid)
        except BaseException:
            ours.close()
            for name in tuple(self._fds):
                self._close(name)
            if warden is not None:
                warden.wait()  # without its lifeline it ends by itself
            raise
        finally:
            theirs.close()
            for fd in opened:
                os.close(fd)
        self.agent = Agent(ours, self.fail)
        os.set_blocking(self._fds["status"], False)
        self._loop.add_reader(self._fds["status"], self._read_status)
        self._loop.add_reader(self._fds["warden"], self._warden_ended)

    def _is_late(self) -> None:
        if not self.started.done():
            from . import diagnosis

            self.fail(diagnosis.explain_failure("start", 0, f"not ready after {_START_SECONDS:g} s"))

    def _read_status(self) -> None:
        try:
            chunk = os.read(self._fds["status"], _STATUS_BYTES)
        except (BlockingIOError, KeyError):
            return
        if not chunk:
            self._loop.remove_reader(self._fds["status"])
            return
        lines = (self._report_tail + chunk).split(b"\n")
        self._report_tail = lines.pop()
        for line in lines:
            words = line.decode("utf-8", "replace").split(" ", 3)
            self._reports.append(words)
            if words[0] == "child":
                self.child_pid = int(words[1])
            elif words[0] == "started":
                self._overdue.cancel()
                self._close("gate")
                self._close("said")
                if not self.started.done():
                    self.started.set_result(None)
            elif words[0] == "hold":
                self._loop.create_task(self._connect(int(words[1])))
            elif words[0] == "ended":
                self._ended()

    async def _connect(self, pid: int) -> None:
        try:
            self._slirp = await self._loop.run_in_executor(None, network.start_slirp, pid)
            os.write(self._fds["gate"], b"1")
        except HutchError as error:
            self.fail(error)
        except (KeyError, OSError):
            return  # closed meanwhile
        finally:
            if self.closed.done() and self._slirp is not None:
                await self._loop.run_in_executor(None, self._slirp.close)

    def interpreter(self, name: str) -> Interpreter:
        """One of its interpreters, not yet started when it is asked for the first time.

        Raises:
            HostError: the environment has no such interpreter.
        """
        if name not in self._interpreters:
            self._interpreters[name] = Interpreter(self, name)
        return self._interpreters[name]

    # ---- looking at it ----

    def evidence(self) -> dict[str, int]:
        """How often each limit of a cgroup was hit so far."""
        if self._counters and not self._is_over:
            self.hits = limits.count_hits(self._counters)
        return self.hits

    def find_reported(self) -> tuple[str, ...]:
        """Paths that tools on the host obey and that changed since this was asked last."""
        if self.plan.protected is None:
            return ()
        before, self._obeyed = self._obeyed, verdict.look_for_obeyed(self.plan)
        return verdict.find_changed(before, self._obeyed)

    def _sample(self) -> None:
        if self.busy or not self._sampler.is_asleep():
            try:
                over = self._sampler.look(time.monotonic(), self.child_pid)
            except HostError:
                over = None  # no descriptor left to look with; at the next look there may be
            if over is not None:
                self.kill(over)
                return
        # Nobody waits for an idle sandbox; what runs in its background is looked at, but not all the time.
        pause = _IDLE_SECONDS if not self.busy else self._sampler.next_look - time.monotonic()
        self._sampling = self._loop.call_later(max(0.001, pause), self._sample)

    def watch(self) -> None:
        """Look at it closely from now on: somebody waits for a program in it."""
        self.busy += 1
        if self._sampling is not None and self.busy == 1 and not self._is_over:
            self._sampling.cancel()
            self._sampling = self._loop.call_later(verdict.SAMPLE_SECONDS, self._sample)

    def unwatch(self) -> None:
        """The opposite."""
        self.busy -= 1

    # ---- the end ----

    @property
    def _is_over(self) -> bool:
        return "lifeline" not in self._fds

    @property
    def is_alive(self) -> bool:
        """Whether programs can be started in it."""
        return not self._is_over

    def require_alive(self) -> None:
        """Return where programs can be started in it.

        Raises:
            HostError, StartError: it never started.
            GoneError: it is over.
        """
        if self._is_over:
            self.started.result()
            raise gone()

    def on_end(self, callback: Callable[[], None]) -> Callable[[], object]:
        """Have something called when the sandbox is no more. What is returned takes that back."""
        if self._is_over:
            return self._loop.call_soon(callback).cancel
        key = object()
        self._on_end[key] = callback
        return lambda: self._on_end.pop(key, None)

    def kill(self, outcome: Outcome) -> None:
        """End it because of a limit."""
        if self._verdict is None and not self._is_over:
            self._verdict = outcome
        self._end(gone())

    def fail(self, fault: HutchError) -> None:
        """End it because it cannot be trusted, or never started."""
        if self._fault is None and not self._is_over:
            self._fault = fault
        self._end(fault)

    def close(self) -> None:
        """End it. `closed` tells when nothing is left."""
        if not self._is_over and self._fault is None and self._verdict is None:
            self._fault = GoneError("the sandbox was closed", code="sandbox.closed", hint="start a new one")
        self._end(self._fault or gone())

    def verdict(self) -> Outcome:
        """Why it ended, for whoever ran a program in it.

        Raises:
            HutchError: it was not the program's doing.
        """
        if self._fault is not None:
            raise self._fault
        return self._verdict or Outcome.KILLED

    def _end(self, error: HutchError) -> None:
        if self._is_over:
            return
        if self._sampling is not None:
            self._sampling.cancel()
        self._overdue.cancel()
        self.evidence()
        self._close("lifeline")
        self._close("gate")
        self.agent.close(error)
        if not self.started.done():
            self.started.set_exception(error)
        callbacks = tuple(self._on_end.values())
        self._on_end.clear()
        for callback in callbacks:
            callback()

    def _ended(self) -> None:
        """Every process of it is gone."""
        if self._is_over:
            return
        if not self.started.done() and self._fault is None:
            self._fault = self._start_error()
            self._end(self._fault)
            return
        hits = self.evidence()
        if self._verdict is None and self._fault is None and hits.get("memory"):
            self._verdict = Outcome.MEMORY
        self._end(gone())

    def _start_error(self) -> HutchError:
        from . import diagnosis

        for words in self._reports:
            if words[0] == "error" and len(words) >= 3:
                return diagnosis.explain_failure(words[1], int(words[2]), words[3] if len(words) > 3 else "")
        said = os.pread(self._fds["said"], _SAID_BYTES, 0).decode("utf-8", "replace").strip()
        return diagnosis.explain_failure("bwrap", 0, said)

    def _warden_ended(self) -> None:
        self._read_status()
        self._is_orphaned = not any(words[0] == "ended" for words in self._reports)
        if self._is_orphaned:
            state.kill_orphans(self.plan, self.child_pid)
        self._ended()
        self._loop.remove_reader(self._fds["warden"])
        self._warden.wait()
        for name in tuple(self._fds):
            self._close(name)
        if self._slirp is None:
            self._set_closed()
            return
        try:
            self._loop.run_in_executor(None, self._slirp.close).add_done_callback(lambda _: self._set_closed())
        except RuntimeError:  # the whole interpreter ends, and no thread takes work any more
            self._slirp.close()
            self._set_closed()

    def _set_closed(self, attempts: int = _ATTEMPTS) -> None:
        state.clean_up(self.plan)
        if self._is_orphaned and attempts and any(map(os.path.isdir, self._cgroups)):
            # Nobody waited for what was killed just now to be gone.
            self._loop.call_later(_PAUSE_SECONDS, self._set_closed, attempts - 1)
            return
        if not self.closed.done():
            self.closed.set_result(None)

    def _close(self, name: str) -> None:
        fd = self._fds.pop(name, -1)
        if fd >= 0:
            if name == "status":
                self._loop.remove_reader(fd)
            os.close(fd)

    def forget(self) -> None:
        """In a forked process: close our copies of what keeps it alive, and touch nothing else. It is not ours."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    # ---- results ----

    def result(
        self,
        capture: Capture,
        *,
        exit_code: int | None,
        signal_name: str | None,
        outcome: Outcome | None,
        hits_before: dict[str, int],
        started: float,
    ) -> Result:
        """What came of one program.

        Args:
            capture: what it printed.
            exit_code, signal_name: how it ended.
            outcome: set where we ended it.
            hits_before: the evidence from before it started.
            started: when that was, on the monotonic clock.
        """
        hit = {name for name, count in self.evidence().items() if count > hits_before.get(name, 0)}
        if outcome is not None:
            hit.add(outcome.value)
        found = outcome or verdict.judge(exit_code, signal_name, tuple(hit))
        dropped = sum(stream.dropped for stream in capture.streams)
        return Result(
            outcome=found,
            exit_code=exit_code,
            signal=signal_name,
            stdout=capture.streams[0].text(),
            stderr=capture.streams[1].text(),
            truncated=bool(dropped) or found is Outcome.OUTPUT,
            dropped_bytes=dropped,
            duration_ms=int((time.monotonic() - started) * 1000),
            limits_hit=tuple(sorted(hit)),
            env=self.plan.environment,
            source=self.plan.source,
            enforced=self.plan.enforced,
            protected=self.plan.protected,
            reported=self.find_reported(),
            unsafe=self.plan.unsafe,
        )


def _look_at(future: asyncio.Future[None]) -> None:
    """An exception that nobody waited for is not to be printed by asyncio."""
    if not future.cancelled():
        future.exception()

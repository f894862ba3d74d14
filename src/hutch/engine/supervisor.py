"""Carrying out a Plan: one sandbox from start to end.

One loop over descriptors: both outputs, the warden's reports, the input, and a clock. Whatever way it is left, the
lifeline is closed, which makes the warden kill the sandbox and clean up, and the warden is waited for.
"""

from __future__ import annotations

import os
import select
import time

from .. import process
from ..errors import HutchError
from ..isolation import jail, limits, network
from ..model import Outcome, Plan, Result, Value
from . import state, verdict
from .output import READ_BYTES, Sink, Stream, cannot_write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..model import HostPath

_DRAIN_SECONDS = 0.3


class Streams(Value):
    """Where a run's input comes from and where its output goes, beside the Result."""

    stdin_fd: int | None = None
    """Read and passed on. Never handed to the sandbox itself: it may be a terminal, or open for writing."""
    stdin: bytes = b""
    stdout_fd: int | None = None
    stderr_fd: int | None = None


def run(plan: Plan, warden: HostPath, streams: Streams | None = None, token: str = "") -> Result:
    """Execute a plan to its end.

    Args:
        plan: what to execute.
        warden: the program that carries it out.
        streams: where input comes from and output goes, beside the Result.
        token: the name of the sandbox, for those who list what lives.

    Raises:
        HostError: this machine refused a layer of the isolation.
        StartError: the sandbox never started for another reason.
    """
    return _Run(plan, warden, streams or Streams(), token).run()


class _Run:
    def __init__(self, plan: Plan, warden: HostPath, streams: Streams, token: str) -> None:
        self.plan = plan
        self.label = [token, plan.environment, "-"] if token else []
        self.warden = warden
        self.streams = streams
        self.captured = [Stream(plan.limits.keep_bytes), Stream(plan.limits.keep_bytes)]
        self.sinks = [Sink(fd) if fd is not None else None for fd in (streams.stdout_fd, streams.stderr_fd)]
        self.cgroups = [directory for directory, _ in plan.cgroups]
        self.reports: list[list[str]] = []
        self._report_tail = b""
        self.verdict: Outcome | None = None
        """Set when we ourselves end the run."""
        self.evidence: set[str] = set()
        self.child_pid = 0
        self.slirp: network.Slirp | None = None
        self.poller = select.poll()
        self.pending_input = memoryview(streams.stdin)
        self.fds: dict[str, int] = {}

    # ---- life ----

    def run(self) -> Result:
        started = time.monotonic()
        guest: process.Process | None = None
        self.sampler = verdict.Sampler(self.plan)
        obeyed = verdict.look_for_obeyed(self.plan)
        limits.make_cgroups(self.plan.cgroups)
        try:
            guest = self._start()
            deadline = None
            if self.plan.limits.timeout_seconds is not None:
                deadline = started + self.plan.limits.timeout_seconds
            self._watch(deadline)
        finally:
            self._stop(guest)
            if guest is None or not self._ended():
                state.clean_up(self.plan)
        reported = verdict.find_changed(obeyed, verdict.look_for_obeyed(self.plan))
        return self._result(int((time.monotonic() - started) * 1000)).replace(reported=reported)

    def _start(self) -> process.Process:
        for path, uid, gid in self.plan.work_directories:
            state.make_work_directory(path, jail.WORK, uid, gid)
        pipes = {name: os.pipe2(os.O_CLOEXEC) for name in ("stdout", "stderr", "status", "lifeline", "gate")}
        stdin = self._stdin()
        words = os.memfd_create("plan", os.MFD_CLOEXEC)
        theirs = [pipes["stdout"][1], pipes["stderr"][1], pipes["status"][1], pipes["lifeline"][0], pipes["gate"][0]]
        try:
            status, lifeline, gate = theirs[2:]
            _write_all(words, jail.to_words(self.plan, status=status, lifeline=lifeline, gate=gate))
            guest = process.spawn(
                [self.warden, "--args", str(words), *self.label],
                stdin=stdin,
                stdout=theirs[0],
                stderr=theirs[1],
                fds=(words, status, lifeline, gate),
                closes_all=True,
            )
        except BaseException:
            for name, pipe in pipes.items():
                os.close(pipe[1] if name in ("lifeline", "gate") else pipe[0])
            raise
        finally:
            for fd in (*theirs, stdin, words):
                os.close(fd)
        self.fds |= {name: pipe[1] if name in ("lifeline", "gate") else pipe[0] for name, pipe in pipes.items()}
        self.fds["warden"] = os.pidfd_open(guest.pid)
        return guest

    def _stdin(self) -> int:
        if self.streams.stdin_fd is None and not self.streams.stdin:
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write, False)
        self.fds["stdin"] = write
        return read

    def _stop(self, guest: process.Process | None) -> None:
        self._close("lifeline")
        self._close("gate")
        if guest is not None:
            guest.wait()
        if self.slirp is not None:
            self.slirp.close()
        for name in tuple(self.fds):
            self._close(name)

    def _close(self, name: str) -> None:
        fd = self.fds.pop(name, -1)
        if fd >= 0:
            os.close(fd)

    # ---- the loop ----

    def _watch(self, deadline: float | None) -> None:
        names = {self.fds[name]: name for name in ("stdout", "stderr", "status", "warden")}
        for fd in names:
            os.set_blocking(fd, False)
            self.poller.register(fd, select.POLLIN)
        if "stdin" in self.fds:
            names[self.fds["stdin"]] = "stdin"
            if self.streams.stdin_fd is not None:
                names[self.streams.stdin_fd] = "input"
            self._register_input()
        sampler = self.sampler
        reading = {"stdout", "stderr", "status"}
        ended = False
        drained_by = None
        while reading or any(sink and sink.is_blocked for sink in self.sinks):
            now = time.monotonic()
            if drained_by is not None and now >= drained_by and reading - {"status"}:
                # Someone outside the sandbox holds a copy of its output; nothing more is the program's.
                for name in reading - {"status"}:
                    self.poller.unregister(self.fds[name])
                reading &= {"status"}
                self._close("lifeline")
            if self.verdict is None and not ended:
                if deadline is not None and now >= deadline:
                    self._kill(Outcome.TIMEOUT)
                over = sampler.look(now, self.child_pid)
                if over is not None:
                    self._kill(over)
            for fd, events in self.poller.poll(self._patience(deadline, sampler, drained_by, ended=ended)):
                name = names.get(fd, "sink")
                if name in ("stdout", "stderr", "status"):
                    if not self._read(fd, name):
                        self.poller.unregister(fd)
                        reading.discard(name)
                elif name == "warden":
                    self.poller.unregister(fd)
                    if "status" in reading:
                        self._read(self.fds["status"], "status")  # its last words
                    if not self._ended():
                        self._warden_is_gone()
                        drained_by = time.monotonic() + _DRAIN_SECONDS
                        if "status" in reading:
                            self.poller.unregister(self.fds["status"])
                            reading.discard("status")
                elif name == "input":
                    self._read_input(fd)
                elif name == "stdin":
                    self._write_input(broken=bool(events & (select.POLLERR | select.POLLHUP)))
                else:
                    self._flush(fd)
            if not ended and self._ended():
                ended = True
                drained_by = time.monotonic() + _DRAIN_SECONDS
                self.evidence |= set(limits.read_evidence(self.cgroups))
            if ended and reading <= {"status"}:
                # Both outputs are at their end; the warden may clean up.
                self._close("lifeline")

    def _patience(
        self, deadline: float | None, sampler: verdict.Sampler, drained_by: float | None, *, ended: bool
    ) -> float | None:
        times = [sampler.next_look] if sampler.is_needed and self.verdict is None and not ended else []
        if drained_by is not None and time.monotonic() < drained_by:
            times.append(drained_by)
        if deadline is not None and self.verdict is None and not ended:
            times.append(deadline)
        if not times:
            return None
        return max(0.0, min(times) - time.monotonic()) * 1000 + 0.5

    def _ended(self) -> bool:
        return any(report[0] == "ended" for report in self.reports)

    def _kill(self, verdict: Outcome) -> None:
        self.verdict = verdict
        self.evidence |= set(limits.read_evidence(self.cgroups))
        self._close("lifeline")

    def _warden_is_gone(self) -> None:
        self.evidence |= set(limits.read_evidence(self.cgroups))
        state.kill_orphans(self.plan, self.child_pid)

    def _read(self, fd: int, name: str) -> bool:
        try:
            chunk = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        if name == "status":
            self._report(chunk)
            return True
        index = 0 if name == "stdout" else 1
        room = self.plan.limits.output_bytes - sum(stream.total for stream in self.captured)
        if len(chunk) > room and self.verdict is None:
            self._kill(Outcome.OUTPUT)
        chunk = chunk[: max(0, room)]
        if chunk:
            self.captured[index].feed(chunk)
            self._pass_on(index, chunk, fd)
        return True

    def _pass_on(self, index: int, chunk: bytes, source: int) -> None:
        sink = self.sinks[index]
        if sink is None:
            return
        sink.feed(chunk)
        if self.verdict is None:
            # The program waits for its reader as it would on a pipe of its own.
            self.poller.modify(source, 0)
        self.poller.register(sink.fd, select.POLLOUT)

    def _flush(self, fd: int) -> None:
        for index, sink in enumerate(self.sinks):
            if sink is None or sink.fd != fd:
                continue
            if sink.is_blocked:
                try:
                    sink.flush_some()
                except BrokenPipeError:
                    raise
                except OSError as error:
                    raise cannot_write(error) from error
            if not sink.is_blocked:
                source = self.fds.get(("stdout", "stderr")[index])
                if source is not None:
                    try:
                        self.poller.modify(source, select.POLLIN)
                    except OSError:
                        pass  # at its end, and no longer watched
        if not any(sink and sink.fd == fd and sink.is_blocked for sink in self.sinks):
            self.poller.unregister(fd)

    def _report(self, chunk: bytes) -> None:
        lines = (self._report_tail + chunk).split(b"\n")
        self._report_tail = lines.pop()
        for line in lines:
            words = line.decode("utf-8", "replace").split(" ", 3)
            self.reports.append(words)
            if words[0] == "child":
                self.child_pid = int(words[1])
            elif words[0] == "deadline" and self.verdict is None:
                self.verdict = Outcome.TIMEOUT
            elif words[0] == "hold":
                self.slirp = network.start_slirp(int(words[1]))
                os.write(self.fds["gate"], b"1")

    # ---- input ----

    def _register_input(self) -> None:
        if self.pending_input:
            self.poller.register(self.fds["stdin"], select.POLLOUT)
        elif self.streams.stdin_fd is not None:
            self.poller.register(self.fds["stdin"], 0)  # to hear that nobody reads any more
            self.poller.register(self.streams.stdin_fd, select.POLLIN)
        else:
            self._end_input()

    def _end_input(self) -> None:
        fd = self.fds.get("stdin")
        if fd is not None:
            _unregister(self.poller, fd)
            self._close("stdin")
        if self.streams.stdin_fd is not None:
            _unregister(self.poller, self.streams.stdin_fd)

    def _read_input(self, fd: int) -> None:
        try:
            chunk = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._end_input()
            return
        self.pending_input = memoryview(chunk)
        _unregister(self.poller, fd)
        self.poller.register(self.fds["stdin"], select.POLLOUT)

    def _write_input(self, *, broken: bool) -> None:
        if broken:
            self._end_input()
            return
        try:
            written = os.write(self.fds["stdin"], self.pending_input[:READ_BYTES])
        except BlockingIOError:
            return
        except OSError:
            self._end_input()
            return
        self.pending_input = self.pending_input[written:]
        if not self.pending_input:
            self._register_input()

    # ---- the end ----

    def _result(self, duration_ms: int) -> Result:
        words = {report[0]: report for report in self.reports}
        if self.verdict is None and ("started" not in words or "error" in words):
            raise self._start_error(words.get("error"))
        if "exec" in words:
            from . import diagnosis

            raise diagnosis.explain_exec(self.plan, int(words["exec"][1]))
        exit_code, signal_name = verdict.read_status(int(words["exit"][1])) if "exit" in words else (None, None)
        hit = tuple(sorted(self.evidence | ({self.verdict.value} if self.verdict else set())))
        outcome = self.verdict or verdict.judge(exit_code, signal_name, hit)
        return Result(
            outcome=outcome,
            exit_code=exit_code,
            signal=signal_name,
            stdout=self.captured[0].text(),
            stderr=self.captured[1].text(),
            truncated=any(stream.dropped for stream in self.captured) or outcome is Outcome.OUTPUT,
            dropped_bytes=sum(stream.dropped for stream in self.captured),
            duration_ms=duration_ms,
            limits_hit=hit,
            env=self.plan.environment,
            source=self.plan.source,
            enforced=self.plan.enforced,
            protected=self.plan.protected,
            unsafe=self.plan.unsafe,
        )

    def _start_error(self, report: list[str] | None) -> HutchError:
        from . import diagnosis

        said = self.captured[1].text().strip()
        if report is not None and len(report) >= 3:
            operation, number, text = report[1], int(report[2]), report[3] if len(report) > 3 else ""
            return diagnosis.explain_failure(operation, number, text)
        return diagnosis.explain_failure("bwrap", 0, said)


def _unregister(poller: select.poll, fd: int) -> None:
    try:
        poller.unregister(fd)
    except KeyError:
        return


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)

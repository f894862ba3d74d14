"""A sandbox as its user has it: there whenever it is needed, started when it first is, and again when it ended."""

from __future__ import annotations

import asyncio
import time

from ..errors import GoneError, HutchError, StartError
from ..model import Result, Spec
from .files import Files
from .interpreter import Run
from .program import Command, Program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..isolation.mounts import CheckedMount
    from .agent import Agent
    from .engine import Engine
    from .live import LiveSandbox
    from .pipes import Listener

_NOT_BEGUN = ("sandbox.gone", "start.full")
"""Of a run that raises these nothing was run."""


class Box:
    """One user's sandbox. What it keeps ends with it; a Session keeps its files."""

    def __init__(self, engine: Engine, spec: Spec) -> None:
        self.spec = spec
        self.used_at = time.monotonic()
        self.files = Files(self._agent, self._note_file)
        self._engine = engine
        self._live: LiveSandbox | None = None
        self._starting = asyncio.Lock()
        self._had_state: set[str] = set()
        """Interpreters whose state went away together with the sandbox, and whose next run was not told so yet."""
        self._used_interpreters: set[str] = set()
        self._is_renewed = False
        """Whether files and programs went away with an earlier sandbox, and nobody was told so yet."""
        self._is_open = True

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for a program in it."""
        return self._live is not None and self._live.busy > 0

    @property
    def live(self) -> LiveSandbox | None:
        """Its sandbox, while there is one."""
        return self._live if self._live is not None and self._live.is_alive else None

    # ---- using it ----

    async def run(self, run: Run, interpreter: str | None = None, listener: Listener | None = None) -> Result:
        """Run code in one of its interpreters, by default that of its environment.

        Raises:
            HostError, StartError: the sandbox cannot be started, or has no such interpreter.
            GoneError: it was closed.
        """
        name = interpreter or self.spec.environment.interpreter
        async with self._engine.admission.ask(self.spec.policy.limits.memory_bytes):
            try:
                result = await self._run(name, run, listener)
            except asyncio.CancelledError:
                self._note_run(run, name, "abandoned")
                raise
            except (GoneError, StartError) as error:
                if error.code not in _NOT_BEGUN:
                    raise
                # Another run took the sandbox down, or left no room in it. This one is told so, and has its turn.
                await self.rest("full")
                result = await self._run(name, run, listener)
        self.used_at = time.monotonic()
        return self._written(run, name, result)

    async def _run(self, name: str, run: Run, listener: Listener | None) -> Result:
        live = await self.start()
        self._used_interpreters.add(name)
        result = await live.interpreter(name).run(run, listener)
        lost = name in self._had_state or self._is_renewed
        self._had_state.discard(name)
        self._is_renewed = False
        return result.replace(state_lost=result.state_lost or lost)

    async def execute(self, command: Command, listener: Listener | None = None) -> Result:
        """Run a command to its end.

        Raises:
            HostError, StartError: the sandbox cannot be started.
            GoneError: it was closed.
        """
        async with self._engine.admission.ask(self.spec.policy.limits.memory_bytes):
            try:
                result = await (await Program.start(await self.start(), command, listener)).wait()
            except asyncio.CancelledError:
                self._note_run(command, "", "abandoned")
                raise
        self.used_at = time.monotonic()
        lost, self._is_renewed = self._is_renewed, False
        return self._written(command, "", result.replace(state_lost=lost))

    async def start_program(self, command: Command, listener: Listener | None = None) -> Program:
        """Start a command that the caller talks to.

        Raises:
            HostError, StartError: the sandbox cannot be started.
            GoneError: it was closed.
        """
        program = await Program.start(await self.start(), command, listener)
        self._note_run(command, "", "started")
        return program

    async def interrupt(self, interpreter: str | None = None) -> bool:
        """End what an interpreter runs now, as Ctrl-C would. False if it runs nothing."""
        live = self.live
        if live is None:
            return False
        return await live.interpreter(interpreter or self.spec.environment.interpreter).interrupt()

    async def kill(self, pid: int, number: int) -> bool:
        """Send a signal to a process, by the number that it has inside. False if there is none."""
        live = self.live
        if live is None:
            return False
        try:
            await live.agent.request("kill", pid, number)
        except OSError:
            return False
        return True

    async def start(self) -> LiveSandbox:
        """The sandbox, started if there is none.

        Raises:
            HostError, StartError: it cannot be started.
            GoneError: it was closed.
        """
        async with self._starting:
            if not self._is_open:
                raise self._closed()
            self.used_at = time.monotonic()
            if self.live is None:
                if self._live is not None:
                    self._had_state |= self._used_interpreters
                    self._used_interpreters.clear()
                    self._is_renewed = not self._keeps_files
                self._live = await self._engine.start(self.spec, own=self._own_mounts(), label=self._label())
            live = self._live
            assert live is not None
            return live

    async def _agent(self) -> Agent:
        return (await self.start()).agent

    async def rest(self, reason: str) -> None:
        """End the sandbox and wait until nothing is left of it; the next use starts another one."""
        live = self._live
        if live is not None and not live.closed.done():
            live.close()
            await asyncio.wait([live.closed])

    async def close(self) -> None:
        """End it for good."""
        self._is_open = False
        async with self._starting:  # who began to start it gets to the end of that, and no further
            await self.rest("closed")

    # ---- what a Session does otherwise ----

    _keeps_files = False
    """Whether the files are still there in the next sandbox."""

    def _closed(self) -> HutchError:
        return GoneError("the sandbox was closed", code="sandbox.closed", hint="make a new one")

    def _own_mounts(self) -> tuple[CheckedMount, ...]:
        return ()

    def _label(self) -> str:
        return "-"

    def _written(self, what: Run | Command, interpreter: str, result: Result) -> Result:
        return result

    def _note_run(self, what: Run | Command, interpreter: str, how: str) -> None:
        return

    def _note_file(self, action: str, path: str, size: int) -> None:
        return

"""A host program that uses hutch until it is told to stop, or killed. What it says before and after each write is law.

Every line on standard output is one event. `try` announces a write, `wrote` says that hutch said it was done; from then
on it must be there, whoever is killed.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import random
import signal
import sys
import traceback
from typing import Any

import hutch

NAMES = 12
SESSIONS = 3
TASKS = 3

NASTY = [
    ("import os\nfor _ in range(20): os.fork() or os.setsid()", {}),
    ("x = bytearray(10**8)", {"memory_mb": 32}),
    ("while True: print('x' * 1000)", {}),
    ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", {}),
    ("import subprocess\nsubprocess.Popen(['sleep', '60'], start_new_session=True)", {}),
]


def tell(event: str, **details: Any) -> None:
    """One event, in one piece."""
    os.write(1, json.dumps({"event": event, **details}).encode() + b"\n")


class Visitor:
    """Does one thing after the other."""

    def __init__(self, name: str, seed: int, pool: hutch.AsyncPool) -> None:
        self._name = name
        self._chance = random.Random(seed)
        self._ready = pool
        self._open: dict[str, hutch.AsyncSandbox] = {}

    async def go(self) -> None:
        """For ever."""
        works = {"pool": 5, "session": 8, "sandbox": 2, "nasty": 1, "one_shot": 1, "destroy": 1}
        while True:
            work = self._chance.choices(list(works), list(works.values()))[0]
            try:
                how = await getattr(self, f"_{work}")()
            except hutch.HutchError as error:
                how = error.code
            except asyncio.CancelledError:
                raise
            except BaseException:  # noqa: BLE001  # whatever it is, it must not be
                tell("bug", text=traceback.format_exc()[-3000:])
                how = "bug"
            tell("did", work=work, how=how)

    def _token(self) -> str:
        return f"{self._chance.getrandbits(64):016x}"

    async def _pool(self) -> str:
        token = self._token()
        return expect(await self._ready.run(f"print('{token}')"), token)

    async def _nasty(self) -> str:
        code, request = self._chance.choice(NASTY)
        async with hutch.AsyncSandbox(timeout_seconds=5, max_output_mb=1, **request) as box:
            return (await box.run(code)).outcome.value

    async def _one_shot(self) -> str:
        token = self._token()
        result = await asyncio.to_thread(hutch.run, f"print('{token}')")
        return expect(result, token)

    async def _sandbox(self) -> str:
        box = await hutch.AsyncSandbox(timeout_seconds=10).start()
        try:
            token = self._token()
            await box.run(f"x = '{token}'")
            await box.exec(["sh", "-c", "sleep 60 & true"])
            result = await box.run("print(x)")
            return expect(result, token) if not result.state_lost else "state lost"
        finally:
            await box.close()

    async def _session(self) -> str:
        name = f"{self._name}-{self._chance.randrange(SESSIONS)}"
        if name not in self._open:
            box = hutch.AsyncSandbox(session=name, timeout_seconds=30)
            await box.start()
            self._open[name] = box
        box = self._open[name]
        assert box.id is not None
        try:
            for _ in range(self._chance.randrange(1, 5)):
                await self._touch(box, box.id)
        finally:
            if self._chance.random() < 0.3:
                del self._open[name]
                await box.close()
        return "ok"

    async def _touch(self, box: hutch.AsyncSandbox, session: str) -> None:
        token = self._token()
        what = self._chance.randrange(4)
        if what == 0:
            path = f"f{self._chance.randrange(NAMES)}"
            tell("try", session=session, path=path, token=token)
            await box.files.write(path, token * self._chance.choice((1, 100, 10000)))
            tell("wrote", session=session, path=path, token=token)
        elif what == 1:
            result = await box.run(f"with open('log', 'a') as file: file.write('{token}\\n')")
            if result.ok:
                tell("logged", session=session, token=token)
        elif what == 2:
            result = await box.exec(["sh", "-c", f"echo {token} >> log"])
            if result.ok:
                tell("logged", session=session, token=token)
        else:
            await box.run("import os; print(os.listdir())")

    async def _destroy(self) -> str:
        if not self._open or self._chance.random() < 0.5:
            return "nothing"
        name = self._chance.choice(list(self._open))
        box = self._open.pop(name)
        tell("destroying", session=box.id)
        await box.destroy()
        tell("destroyed", session=box.id)
        return "ok"


def expect(result: hutch.Result, token: str) -> str:
    """What came of it; a result that is called good must be."""
    if result.ok and result.stdout != f"{token}\n":
        tell("bug", text=f"expected {token}, got {result}")
    return result.outcome.value


def describe(context: dict[str, Any]) -> str:
    """What the event loop complains of."""
    error = context.get("exception")
    trace = "".join(traceback.format_exception(error)) if error is not None else ""
    return f"{context.get('message')}\n{trace}"[-3000:]


async def main(slot: str, seed: int) -> None:
    """Some visitors at once, until standard input ends."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: tell("bug", text=describe(context)))
    over = asyncio.Event()
    loop.add_reader(0, over.set)
    async with hutch.AsyncPool(size=2) as pool:
        visitors = [Visitor(f"{slot}-{index}", seed + index, pool) for index in range(TASKS)]
        tasks = [loop.create_task(visitor.go()) for visitor in visitors]
        await over.wait()
        loop.remove_reader(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    from hutch.sandbox import House

    await House.of_this_loop().close()
    tell("over", descriptors=len(os.listdir("/proc/self/fd")))


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))

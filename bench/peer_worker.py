"""Libraries of others, measured in a process that runs in the interpreter they were installed for."""

from __future__ import annotations

import subprocess
import time
from typing import Any

from protocol import serve

PRINT = "print(1)"


class Jupyter:
    """A kernel, spoken to as a notebook does. It is a plain process: what a live interpreter costs unguarded."""

    def __init__(self) -> None:
        self._kept: Any = None

    def _start(self) -> Any:
        from jupyter_client.manager import start_new_kernel

        return start_new_kernel(kernel_name="python3", stderr=subprocess.DEVNULL)

    def _run(self, kernel: Any) -> None:
        said: list[str] = []

        def hear(message: Any) -> None:
            if message["header"]["msg_type"] == "stream":
                said.append(message["content"]["text"])

        status = kernel[1].execute_interactive(PRINT, output_hook=hear)["content"]["status"]
        assert (status, "".join(said)) == ("ok", "1\n")

    def cold(self) -> float:
        """From nothing to the first result."""
        started = time.perf_counter()
        kernel = self._start()
        self._run(kernel)
        spent = time.perf_counter() - started
        self._end(kernel)
        return spent

    def live(self) -> float:
        """One more run."""
        if self._kept is None:
            self._kept = self._start()
            self._run(self._kept)
        started = time.perf_counter()
        self._run(self._kept)
        return time.perf_counter() - started

    def _end(self, kernel: Any) -> None:
        kernel[1].stop_channels()
        kernel[0].shutdown_kernel(now=True)

    def close(self) -> None:
        """End what runs."""
        if self._kept is not None:
            self._end(self._kept)


class LlmSandbox:
    """A session of llm-sandbox, with its own bubblewrap back-end."""

    def __init__(self) -> None:
        self._kept: Any = None

    def _start(self) -> Any:
        from llm_sandbox import SandboxSession
        from llm_sandbox.const import SandboxBackend

        session = SandboxSession(backend=SandboxBackend.BUBBLEWRAP, lang="python")
        session.open()
        return session

    def _run(self, session: Any) -> None:
        result = session.run(PRINT)
        assert (result.exit_code, result.stdout) == (0, "1\n"), result

    def cold(self) -> float:
        """From nothing to the first result."""
        started = time.perf_counter()
        session = self._start()
        self._run(session)
        spent = time.perf_counter() - started
        session.close()
        return spent

    def live(self) -> float:
        """One more run, which is a new sandbox each time."""
        if self._kept is None:
            self._kept = self._start()
        started = time.perf_counter()
        self._run(self._kept)
        return time.perf_counter() - started

    def close(self) -> None:
        """End what runs."""
        if self._kept is not None:
            self._kept.close()


if __name__ == "__main__":
    KINDS = {"jupyter": Jupyter(), "llm-sandbox": LlmSandbox()}

    def answer(do: str, request: dict[str, Any]) -> dict[str, Any]:
        """Measure a row once."""
        kind, _, row = request["row"].rpartition("-")
        return {"seconds": getattr(KINDS[kind], row)()}

    try:
        serve(answer)
    finally:
        for kind in KINDS.values():
            kind.close()

"""The way to the daemon of one user and one data directory: finding it, starting it, asking it.

Both sides check who the other is: the kernel tells the uid, and the first line tells version, code and data directory.
After that a connection carries one request, and one JSON value a line in both directions. `_socket` and not `socket`:
the latter imports more than this whole module needs.
"""

from __future__ import annotations

import _socket
import fcntl
import json
import os
import select
import sys
import time

from .. import __version__, errors, process
from ..config import cache_directory, data_directory
from ..errors import GoneError, HostError, HutchError, SandboxError, SpecError
from .place import (
    SOCKET,
    code_identity,
    home_directory,
    is_private,
    log_path,
    open_log,
    open_own,
    require_private,
    socket_directory,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Self

    OnOutput = Callable[[int, bytes], object]

LINE_BYTES = 128 * 1024 * 1024
"""Of one message: the longest code and the longest input fit."""
STREAMS = ("stdout", "stderr")

_HELLO_SECONDS = 10.0
_START_SECONDS = 30.0
_READ_BYTES = 256 * 1024
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "SSL_CERT_FILE")
_PREFIXES = ("HUTCH_", "XDG_", "NIXOSANDBOX_")
_BOOT = (
    "import sys; ready, directory, *sys.path[:] = sys.argv[1:]; "
    "from hutch.serve.daemon import main; main(int(ready), directory)"
)


# ---- a connection ---------------------------------------------------------------------------------------------------


class Connection:
    """One request to the daemon, and what comes back."""

    def __init__(self, sock: _socket.socket, pid: int) -> None:
        self._socket = sock
        self.pid = pid
        """Of the daemon."""
        self._received = bytearray()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message.

        Raises:
            SpecError: it is too long.
            OSError: the daemon is gone.
        """
        line = encode(message)
        if len(line) > LINE_BYTES:
            raise SpecError(
                f"the request has {len(line)} bytes",
                code="spec.message",
                hint="write large inputs to a file, and mount its directory: --mount DIR:/data",
            )
        self._socket.sendall(line)

    def receive(self, seconds: float | None = None, wake: int | None = None) -> dict[str, Any] | None:
        """The next message; None if there is no more.

        Args:
            seconds: for how long to wait.
            wake: a pipe that is written to when a signal comes, and that waiting must not miss.

        Raises:
            TimeoutError: it did not come in time.
            HostError: what came is no message.
        """
        self._socket.settimeout(seconds)
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if wake is not None:
                self._wait(wake)
            try:
                chunk = self._socket.recv(_READ_BYTES)
            except (ConnectionResetError, BrokenPipeError):
                chunk = b""
            if not chunk:
                return None
            self._received += chunk
            if len(self._received) > LINE_BYTES + _READ_BYTES:
                raise _not_ours()
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            return parse_message(line)
        except SpecError as error:
            raise _not_ours() from error

    def _wait(self, wake: int) -> None:
        poller = select.poll()
        poller.register(self._socket.fileno(), select.POLLIN)
        poller.register(wake, select.POLLIN)
        while ready := [fd for fd, _ in poller.poll()]:
            if self._socket.fileno() in ready:
                return
            os.read(wake, 4096)

    def finish(self, on_output: OnOutput | None = None, wake: int | None = None) -> Any:
        """Wait for the result; output is handed over as it comes.

        Raises:
            HutchError: what the daemon could not do.
            GoneError: it ended meanwhile.
        """
        while True:
            message = self.receive(wake=wake)
            if message is None:
                raise GoneError(
                    "the daemon that keeps sandboxes ended meanwhile",
                    code="sandbox.daemon",
                    details=_log_tail(),
                    hint="do it again: the files of a session are kept, the state of its interpreters is not",
                )
            event = message.get("event")
            if event in STREAMS:
                if on_output is not None:
                    on_output(STREAMS.index(event), str(message.get("data")).encode("utf-8", "surrogateescape"))
            elif event == "result":
                return message.get("result")
            elif event == "error":
                raise read_error(message.get("error"))
            else:
                raise _not_ours()

    def close(self) -> None:
        """Hang up. A run that was not finished is interrupted."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def encode(message: Mapping[str, Any]) -> bytes:
    """One message as a line."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def parse_message(line: bytes) -> dict[str, Any]:
    """A line as a message.

    Raises:
        SpecError: it is none.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpecError(
            "a message is not JSON", code="spec.message", details=str(error)[:200], hint="send one JSON object a line"
        ) from error
    if not isinstance(message, dict):
        raise SpecError("a message is not a JSON object", code="spec.message", hint="send one JSON object a line")
    return message


def peer_of(sock: Any) -> tuple[int, int]:
    """pid and uid of who is at the other end, as the kernel tells."""
    told = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    return int.from_bytes(told[:4], sys.byteorder), int.from_bytes(told[4:8], sys.byteorder)


def write_error(error: HutchError) -> dict[str, str]:
    """An error as a message carries it."""
    return {"class": type(error).__name__, **error.to_json()}


def read_error(told: Any) -> HutchError:
    """The error that a message carries."""
    if not isinstance(told, dict):
        return _not_ours()
    kind = getattr(errors, str(told.get("class")), None)
    if not (isinstance(kind, type) and issubclass(kind, HutchError)):
        kind = SandboxError
    code, message, details, hint = (str(told.get(key, "")) for key in ("code", "message", "details", "hint"))
    return kind(message, code=code, details=details, hint=hint)


def _not_ours() -> HostError:
    return _trouble("the daemon sent what is no answer")


def _trouble(message: str, details: str = "") -> HostError:
    return HostError(
        message,
        code="host.daemon",
        details=details or _log_tail(),
        hint=f"read {log_path()}; --no-daemon does without it",
    )


def _log_tail() -> str:
    try:
        with open(log_path(), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
            return file.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""


# ---- finding and starting it ----------------------------------------------------------------------------------------


def ask(operation: str, *, start: bool = False, **fields: Any) -> Any:
    """Have the daemon do something that is not a run.

    Args:
        operation: what.
        start: start a daemon if there is none; else the answer is then None.
        **fields: what belongs to it.

    Raises:
        HutchError: what it could not do.
    """
    connection = connect() if start else find()
    if connection is None:
        return None
    with connection:
        connection.send({"op": operation, **fields})
        return connection.finish()


def retire() -> None:
    """End the daemon, if there is one, with everything that it keeps."""
    for directory in _directories():
        connection = _connect(directory)
        if connection is None:
            continue
        with connection:
            connection.send({"retire": True})
            while connection.receive(_HELLO_SECONDS) is not None:
                pass


def connect() -> Connection:
    """A connection to the daemon, which is started if there is none.

    Raises:
        HostError: it cannot be started, does not answer, or belongs to somebody else.
    """
    connection = find()
    if connection is not None:
        return connection
    home = home_directory()
    require_private(home)
    lock = open_own(f"{home}/daemon.lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = find()  # somebody was faster
        if connection is None:
            _start()
            connection = find()
    finally:
        os.close(lock)
    if connection is None:
        raise _trouble("the daemon was started, and is not the one that was meant")
    return connection


def find() -> Connection | None:
    """A connection to the daemon, if there is one of our own code. One of other code is made to end.

    Raises:
        HostError: it does not answer, belongs to somebody else, or is of other code and busy.
    """
    for directory in _directories():
        connection = _connect(directory)
        if connection is None:
            continue
        if _greet(connection):
            return connection
        connection.close()
    return None


def _directories() -> list[str]:
    """Where its socket may be: where we would have it, and where whoever started it had it."""
    places = [str(socket_directory())]
    try:
        places.append(os.readlink(f"{home_directory()}/address"))
    except OSError:
        pass
    return [place for place in dict.fromkeys(places) if is_private(place)]


def _connect(directory: str) -> Connection | None:
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(_HELLO_SECONDS)
        sock.connect(f"{directory}/{SOCKET}")
        pid, uid = peer_of(sock)
    except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise _trouble(f"the daemon at {directory}/{SOCKET} cannot be reached ({error.strerror or error})") from error
    if uid != os.geteuid():
        sock.close()
        raise HostError(
            f"the daemon at {directory}/{SOCKET} belongs to user {uid}, not to you",
            code="host.runtime",
            hint=f"rm -r {process.quote(directory)}",
        )
    return Connection(sock, pid)


def _greet(connection: Connection) -> bool:
    """Say who we are. False if the daemon is about to end."""
    hello = {"version": __version__, "code": code_identity(), "data": os.path.realpath(data_directory())}
    try:
        connection.send({"hello": hello})
        answer = connection.receive(_HELLO_SECONDS)
        if answer is None:
            return False
        if answer.get("event") == "error":
            raise read_error(answer.get("error"))
        if answer.get("event") == "hello":
            return True
        while connection.receive(_HELLO_SECONDS) is not None:
            pass  # it hangs up when it is gone
    except TimeoutError:
        raise HostError(
            f"the daemon, process {connection.pid}, does not answer",
            code="host.daemon",
            details=_log_tail(),
            hint=f"kill {connection.pid}; then try again",
        ) from None
    except (BrokenPipeError, ConnectionResetError):
        return False
    return False


_started: list[process.Process] = []


def _start() -> None:
    """Start a daemon, and wait until it can be asked."""
    if not sys.executable:
        raise _trouble("no Python is known to start the daemon with")
    for child in _started:
        child.poll()
    directory = socket_directory()
    require_private(directory)
    ready, theirs = os.pipe2(os.O_CLOEXEC)
    opened = [theirs]
    try:
        opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        opened.append(open_log())
        child = process.spawn(
            [sys.executable, "-I", "-S", "-c", _BOOT, str(theirs), directory, *_module_paths()],
            stdin=opened[1],
            stdout=opened[2],
            stderr=opened[2],
            fds=(theirs,),
            variables=_clean_variables(),
        )
    except BaseException:
        os.close(ready)
        raise
    finally:
        for fd in opened:
            os.close(fd)
    _started.append(child)
    try:
        said = _read_line(ready, time.monotonic() + _START_SECONDS)
    finally:
        os.close(ready)
    if said == b"ready\n":
        return
    if said.endswith(b"\n"):
        raise read_error(parse_message(said))
    child.kill()
    child.wait()
    raise _trouble("the daemon did not start")


def _read_line(fd: int, deadline: float) -> bytes:
    said = b""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while not said.endswith(b"\n") and poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        chunk = os.read(fd, 65536)
        if not chunk:
            break
        said += chunk
    return said


def _module_paths() -> list[str]:
    """Where modules are found here; not in the current directory, which is not the daemon's."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        here = os.getcwd()
    except OSError:
        here = ""
    paths = [path for path in sys.path if os.path.isabs(path) and (path != here or path == package)]
    return paths if package in paths else [package, *paths]


def _clean_variables() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if name in _VARIABLES or name.startswith(_PREFIXES)}
    kept["HUTCH_DATA_DIR"] = data_directory()
    if "HUTCH_CACHE_DIR" in kept:
        kept["HUTCH_CACHE_DIR"] = cache_directory()
    return kept

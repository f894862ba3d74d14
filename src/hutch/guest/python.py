"""The Python driver: one interpreter in which runs follow each other, as at an interactive prompt.

Start it as a script, or, which is faster because the compiled form is then found beside it, with
`python3 -S -c 'import sys; sys.path.insert(0, GUEST); import python; python.main()' RUNS`.

The first answer is to come in hardly more time than the bare interpreter needs to start. So this module lives on what
is built into the interpreter, and with `-S` it runs `site`, a third of an ordinary start, only before the first code
that could tell: code that imports, or names one of the few things that `site` adds.
"""

import _warnings
import posix
import sys
from _imp import _fix_co_filename  # type: ignore[attr-defined]
from _io import BufferedRandom, BufferedReader, BufferedWriter, FileIO, TextIOWrapper

# Not `signal`, which imports enum.
from _signal import SIGINT, default_int_handler, getsignal, raise_signal, signal  # type: ignore[import-not-found]
from _thread import _count as count_threads
from sys import __excepthook__ as show_error
from sys import getprofile, gettrace, setprofile, settrace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import CodeType, FrameType, TracebackType
    from typing import Any, NoReturn

# User code may replace what is built in. Functions defined below this line keep what is there now.
BUILTINS = sys.modules["builtins"]
__builtins__ = dict(vars(BUILTINS))  # type: ignore[assignment]

SOURCE_BYTES, SOURCES_BYTES, PAGE_BYTES = 1 << 20, 8 << 20, 4096
FUTURES = 0x1FE0000  # all features of __future__, in the flags of compile() and of code
ONLY_AST, TOP_LEVEL_AWAIT, COROUTINE = 0x400, 0x2000, 0x80

DEFINITIONS = (type, type(sys), type(vars), type(lambda: None))
WRITERS = {TextIOWrapper, BufferedWriter, BufferedRandom}

# Code without any of these neither imports anything nor uses what `site` adds to the builtins.
SITE_WORDS = (
    b"import exit quit help copyright credits license eval exec breakpoint await async "
    b"__builtins__ __loader__ __spec__ __globals__ __self__ __subclasses__ f_builtins f_globals"
).split()


class Stop(BaseException):
    """The driver's own way out of a call that does something else than it needs."""


class Driver:
    """What outlives a run, and the way of a run through it."""

    def __init__(self, runs: str) -> None:
        self.is_waiting = self.is_interrupted = False
        self.idle = self._on_sigint_while_idle
        self.handler: Any = default_int_handler
        signal(SIGINT, self.idle)
        # Out of the way of code that closes all it might have inherited.
        top = min(posix.sysconf("SC_OPEN_MAX"), 1024)
        for fd in (3, 4, 5):
            posix.dup2(fd, top - fd, inheritable=False)
            posix.close(fd)
        self.control, self.code, self.stdin = top - 3, top - 4, top - 5
        posix.write(self.control, b"ready\n")  # the rest is prepared while the host sends the header

        self.pid = posix.getpid()
        self.runs = runs
        self.kept: list[tuple[str, int]] = []
        self.kept_bytes = 0
        self.futures = 0
        self.has_compiled = False
        self.loop: Any = None
        self.trace: Any = None
        self.profile: Any = None
        self.has_site = not sys.flags.no_site
        self.encoding, self.errors = sys.stdin.encoding, sys.stdin.errors
        self.empty_stdin: Any = sys.stdin  # the host starts us with none
        self.null_device = posix.stat("/dev/null").st_rdev
        main = type(sys)("__main__")
        self.names = main.__dict__
        self.names.update(__loader__=sys.__loader__, __builtins__=BUILTINS)
        if "__annotations__" in vars(sys.modules["__main__"]):  # up to 3.13
            self.names["__annotations__"] = {}
        sys.modules["__main__"] = main
        sys.argv = [""]
        posix.register_at_fork(after_in_child=self._forget_host)

    def serve(self) -> "NoReturn":
        """Take runs until the host is gone."""
        while True:
            token, number, code_bytes, stdin_bytes, _, flags = self._next_header().split()[1:7]
            source = posix.pread(self.code, int(code_bytes), 0)
            is_once = b"once" in flags
            path = f"{self.runs}/{'main' if is_once else int(number)}.py"
            self._keep(path, source, SOURCES_BYTES if is_once else SOURCE_BYTES)
            if stdin_bytes != b"0" or not self._is_stdin_empty():
                self._open_stdin("/dev/null" if stdin_bytes == b"0" else f"/proc/self/fd/{self.stdin}")
            if is_once:
                self._become_script(path)
            if not self.has_site and any(word in source for word in SITE_WORDS):
                self._load_site()
            self.names.setdefault("__builtins__", BUILTINS)  # code whose names lack them would be given ours

            code, is_over = 130, False
            while True:
                try:
                    if not is_over:
                        is_over = True
                        code = self._run(source, path, is_once=is_once, is_echo=b"echo" in flags)
                    self.handler = signal(SIGINT, self.idle)
                    break
                except BaseException:  # noqa: BLE001  # raised by the handler of a SIGINT that no longer met the code
                    continue
            if posix.getpid() != self.pid:  # a fork that fell through
                posix._exit(code)
            self.is_interrupted = False
            try:
                posix.write(self.control, b"done %s %d\n" % (token, code))
            except ConnectionError:
                posix._exit(0)

    # ---- between runs -----------------------------------------------------------------------------------------------

    def _on_sigint_while_idle(self, signum: int, frame: "FrameType | None") -> None:
        self.is_interrupted = True
        if self.is_waiting:
            self.is_waiting = False
            raise Stop

    def _next_header(self) -> bytes:
        """Wait for a run, which is interrupted from its start if SIGINT came after its header had been sent."""
        header = bytearray(512)  # filled in place: what was read stays read when the signal handler raises
        while not header[0]:
            try:
                self.is_waiting = True
                if self.is_interrupted:
                    raise Stop
                if not posix.readv(self.control, [header]):
                    posix._exit(0)
                self.is_waiting = False
            except ConnectionError:
                posix._exit(0)
            except Stop:
                self.is_waiting = False
                if not header[0]:
                    posix.set_blocking(self.control, False)
                    try:
                        posix.readv(self.control, [header])
                    except BlockingIOError:
                        self.is_interrupted = False  # there is no run that it could have been meant for
                    posix.set_blocking(self.control, True)
        return bytes(header)

    def _forget_host(self) -> None:
        """In a fork of the interpreter: nothing of it is for the host."""
        for fd in (self.control, self.code, self.stdin):
            posix.close(fd)
        if getsignal(SIGINT) == self.idle:  # forked by a thread, between runs
            signal(SIGINT, self.handler)

    # ---- before a run -----------------------------------------------------------------------------------------------

    def _keep(self, path: str, source: bytes, limit: int) -> None:
        """Put the source where tracebacks, `inspect` and warnings look for its lines."""
        if len(source) > limit:
            return
        try:
            fd = posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC, 0o644)
            try:
                posix.write(fd, source)
            finally:
                posix.close(fd)
            size = -(-len(source) // PAGE_BYTES) * PAGE_BYTES
            self.kept.append((path, size))
            self.kept_bytes += size
            while self.kept_bytes > SOURCES_BYTES:
                oldest, size = self.kept.pop(0)
                self.kept_bytes -= size
                posix.unlink(oldest)
        except OSError:
            pass  # no room, or user code removed the directory: then there are no lines to show

    def _is_stdin_empty(self) -> bool:
        """Whether the input is what a run without one gets, untouched since it was opened."""
        stdin: Any = self.empty_stdin
        names = sys.__dict__
        if stdin is None or names.get("stdin") is not stdin or names.get("__stdin__") is not stdin:
            return False
        try:
            return not self.empty_stdin.closed and posix.fstat(0).st_rdev == self.null_device
        except (OSError, ValueError):
            return False

    def _open_stdin(self, path: str) -> None:
        try:
            fd = posix.open(path, posix.O_RDONLY)
        except OSError:  # user code left no descriptor
            posix.close(0)
            fd = posix.open(path, posix.O_RDONLY)
        if fd == 0:
            posix.set_inheritable(0, True)  # noqa: FBT003
        else:
            posix.dup2(fd, 0)
            posix.close(fd)
        raw = FileIO(0, "r", closefd=False)
        raw.name = "<stdin>"
        stdin: Any = TextIOWrapper(BufferedReader(raw), self.encoding, self.errors, "\n")
        stdin.mode = "r"
        sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]
        self.empty_stdin = stdin if path == "/dev/null" else None

    def _become_script(self, path: str) -> None:
        from _frozen_importlib_external import SourceFileLoader

        sys.argv = [path]
        sys.path[0] = posix.getcwd()
        self.names.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))

    def _load_site(self) -> None:
        """What an ordinary start does before it puts the script's directory at the head of the path."""
        self.has_site = True
        head = sys.path.pop(0)
        try:
            import site

            site.main()
        finally:
            sys.path.insert(0, head)
        # As without -S, which multiprocessing would pass on to the interpreters that it starts.
        plain, text = sys.flags, repr(sys.flags).replace("no_site=1", "no_site=0")
        fields = {name: getattr(plain, name) for name in dir(plain) if not hasattr(tuple, name)}
        fields.update(no_site=0, __module__="sys", __repr__=lambda _: text)
        sys.flags = type("flags", (tuple,), fields)((*plain[:6], 0, *plain[7:]))

    # ---- the run ----------------------------------------------------------------------------------------------------

    def _run(self, source: bytes, path: str, *, is_once: bool, is_echo: bool) -> int:
        """Run code to the end and flush what it printed."""
        parts: list[CodeType] = []
        failure: BaseException | None = None
        try:
            compiled = self._compile(source, path, is_once=is_once, is_echo=is_echo)
            if any(part.co_flags & COROUTINE for part in compiled):
                self._open_loop()
            parts = compiled
        except BaseException as error:  # noqa: BLE001  # every kind of error can be in the source
            failure = error
        signal(SIGINT, self.handler)  # from here on it may raise anywhere
        try:
            if self.is_interrupted:
                raise_signal(SIGINT)
            try:
                if self.trace or self.profile:
                    setprofile(self.profile)
                    settrace(self.trace)
                for part in parts:
                    if part.co_flags & COROUTINE:
                        self._await(eval(part, self.names))
                    else:
                        exec(part, self.names)
            finally:
                self.trace, self.profile = gettrace(), getprofile()
                if self.trace or self.profile:
                    settrace(None)
                    setprofile(None)
        except BaseException as error:  # noqa: BLE001  # whatever it is, it ends the run and not the driver
            failure = error
        # Not where it was caught: what else goes wrong would be shown as its consequence.
        code = 0 if failure is None else self._report(failure, parts)
        was_interrupted = isinstance(failure, KeyboardInterrupt)
        del failure
        if is_once:
            code = self._end_script(code, was_interrupted=was_interrupted)
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            try:
                getattr(sys, name).flush()
            except Exception:  # noqa: BLE001  # closed, None, or anything else that user code put there
                pass
        ctypes = sys.modules.get("ctypes")
        if ctypes:
            try:
                ctypes.CDLL(None).fflush(None)  # what printf() and the like still hold
            except Exception:  # noqa: BLE001  # not the module that it should be
                pass
        return code

    def _compile(self, source: bytes, path: str, *, is_once: bool, is_echo: bool) -> "list[CodeType]":
        flags = self.futures if is_once else self.futures | TOP_LEVEL_AWAIT
        if not is_echo:
            first = None if self.has_compiled else self._compile_first(source, path)
            parts = [first or compile(source, path, "exec", flags, dont_inherit=True)]
        else:
            from _ast import Expr, Interactive

            tree: Any = compile(source, path, "exec", flags | ONLY_AST, dont_inherit=True)
            last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], Expr) else []
            parts = [compile(tree, path, "exec", flags, dont_inherit=True)]
            if last:
                flags |= parts[0].co_flags & FUTURES
                parts.append(compile(Interactive(last), path, "single", flags, dont_inherit=True))
        self.futures |= parts[0].co_flags & FUTURES
        return parts

    def _compile_first(self, source: bytes, path: str) -> "CodeType | None":
        """Code, in a tenth of the time that compile() takes when it is called for the first time.

        It then makes all the types of a syntax tree, in case it was given one; exec() does not. So exec() compiles,
        and is stopped before it runs anything. If there is something to say about the source, compile() shall say it.
        """
        self.has_compiled = True
        code: CodeType | None = None
        names: dict[str, Any] = {}

        def catch(frame: "FrameType", event: str, argument: object) -> None:
            nonlocal code
            if frame.f_globals is names:  # and not that of a codec
                code = frame.f_code
                raise Stop

        _warnings.filters.insert(0, ("error", None, Warning, None, 0))
        settrace(catch)
        try:
            exec(source, names)
        except (Exception, Stop):  # noqa: BLE001  # every kind of error can be in the source
            pass
        finally:
            settrace(None)
            del _warnings.filters[0]
        if code:
            _fix_co_filename(code, path)
        return code

    def _open_loop(self) -> None:
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)

    def _await(self, coroutine: "Coroutine[Any, Any, None]") -> None:
        task = self.loop.create_task(coroutine)
        try:
            self.loop.run_until_complete(task)
        except BaseException as error:
            if task.done():
                if not task.cancelled():
                    task.exception()  # or asyncio complains that nobody asked for it
                raise
            # The loop was interrupted, not the code in it, which now ends where it waits.
            task.cancel()
            try:
                self.loop.run_until_complete(task)
            except BaseException as other:
                if task.cancelled():
                    raise error.with_traceback(other.__traceback__) from None
                raise
            raise

    def _report(self, error: BaseException, parts: "list[CodeType]") -> int:
        """Show how code ended as the interpreter would at the end of a script, and return the exit code."""
        if isinstance(error, SystemExit):
            if error.code is None or isinstance(error.code, int):
                return (error.code or 0) & 0xFF
            complain(error.code)
            return 1
        each: BaseException | None = error
        seen: set[int] = set()
        while each is not None and id(each) not in seen:
            # From the first frame of the code itself on. Where it has none, as for SyntaxError, all frames but ours.
            trace: TracebackType | None = each.__traceback__
            while trace and not any(trace.tb_frame.f_code is part for part in parts):
                trace = trace.tb_next
            if trace is None:
                trace = each.__traceback__
                while trace and trace.tb_frame.f_globals is globals():
                    trace = trace.tb_next
            BaseException.with_traceback(each, trace)
            seen.add(id(each))
            each = each.__context__  # which got as far as this, too, if it was SIGINT that came in between
        trace = error.__traceback__
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        if not self.has_site:
            self._load_site()  # which may install a hook
        try:
            getattr(sys, "excepthook", show_error)(type(error), error, trace)
        except SystemExit as other:
            return self._report(other, [])
        except Exception as other:  # noqa: BLE001  # the hook is user code
            complain("Error in sys.excepthook:")
            show_error(type(other), other.with_traceback(other.__traceback__ and other.__traceback__.tb_next), None)
            complain("\nOriginal exception was:")
            show_error(type(error), error, trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1

    def _end_script(self, code: int, *, was_interrupted: bool) -> int:
        """Do what others can see of the interpreter's own end, and return the exit code."""
        try:
            if "threading" in sys.modules and not was_interrupted:  # which the threads may not have noticed
                sys.modules["threading"]._shutdown()
        except BaseException as error:  # noqa: BLE001  # as in the code itself
            code = self._report(error, [])
        try:
            if "atexit" in sys.modules:
                sys.modules["atexit"]._run_exitfuncs()
        except Exception:  # noqa: BLE001  # it has been shown
            pass
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            setattr(sys, name, None)
        if not count_threads():  # a daemon thread would stumble over what is missing
            for name in list(self.names):
                if not issubclass(type(self.names[name]), DEFINITIONS):  # which what goes now may need on its way
                    self.names[name] = None
        try:
            has_files = len(posix.listdir("/proc/self/fd")) > 3 + 3 + 1  # besides the streams, ours, and the listing's
        except OSError:  # so many that there is no room for one more
            has_files = True
        if has_files:
            import gc

            for file in [thing for thing in gc.get_objects() if type(thing) in WRITERS]:
                try:
                    file.flush()
                except Exception:  # noqa: BLE001  # closed, or the disk is full
                    pass
        return code


def complain(text: object) -> None:
    try:
        sys.stderr.write(f"{text}\n")
    except Exception:  # noqa: BLE001  # there is nobody left to tell
        pass


def main() -> None:
    """Serve the host that started this process."""
    sys.modules.pop("python", None)
    guest = __file__.rpartition("/")[0]
    if sys.path[0] == guest:
        del sys.path[0]
    if sys.path[0] != "":
        sys.path.insert(0, "")
    Driver(sys.argv[-1]).serve()


if __name__ == "__main__":
    main()

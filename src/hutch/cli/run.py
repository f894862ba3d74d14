"""`hutch run` and `hutch plan`."""

from __future__ import annotations

import os
import signal
import sys

from ..config import cache_directory, can_keep, find_settings
from ..engine import planning, state, supervisor
from ..errors import SpecError
from ..isolation import jail
from ..model import MIB, HostPath, Limits, Network, Outcome, Plan, Result, Source, Spec, Value
from ..process import join, quote
from ..spec import PRESETS, is_secret_name, parse, parse_size_mb, unknown_word, variable_name
from . import print_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

_EXAMPLES = """\
examples:
  hutch run 'print(6 * 7)'
  hutch run -e shell 'ls -la /usr/bin | wc -l'
  hutch run -e node 'console.log(process.version)'
  hutch run -f analyse.py --mount ./data:/data --memory 2G --timeout 120
  hutch run --workspace . 'open("report.txt", "w").write("done")'
  echo 'print("from stdin")' | hutch run -
  hutch run --json 'print(1)' | jq .outcome
  hutch run -s work 'x = 6 * 7'; hutch run -s work 'print(x)'

The program sees a fresh /workspace, /home/sandbox and /tmp, no network, and none of your files or variables unless you
name them. With -s the first run makes the sandbox, which keeps its options; later runs find its state and files.
Its exit code is hutch's own; 124 is the time limit, 137 another limit, 2 a wrong request, 125 hutch failed.
"""

_EXIT_CODES = {Outcome.TIMEOUT: 124, Outcome.MEMORY: 137, Outcome.DISK: 137, Outcome.OUTPUT: 137, Outcome.KILLED: 137}


def add_arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    """Declare the options of both verbs."""
    what = (
        "Run code in a fresh sandbox" if verb == "run" else "Show exactly what a run would execute, ready for a shell"
    )
    parser.description = f"{what}."
    parser.epilog = _EXAMPLES if verb == "run" else None
    add = parser.add_argument
    add("code", metavar="CODE", nargs="?", help="the program; - reads it from standard input")
    add("-e", "--environment", metavar="NAME", help="python (default), shell, node, or one of your configuration")
    add("-f", "--file", metavar="FILE", help="read the program from a file")
    if verb == "run":
        add("-s", "--session", metavar="NAME", help="run in a session: its state and files stay for the next run")
        add(
            "-i",
            "--interactive",
            action="store_true",
            help="read statements one by one, and run each as it is complete",
        )
    add("--timeout", metavar="S", help="seconds of wall time, or none (default 30)")
    add("--memory", metavar="SIZE", help="memory of the whole sandbox: 512, 512M, 2G (default 512M)")
    add("--pids", metavar="N", type=int, help="processes and threads (default 128)")
    add("--cpus", metavar="N", type=float, help="CPUs (default 1)")
    add("--tmp", metavar="SIZE", help="size of /tmp, the home and a /workspace that is no mount (default 256M)")
    add("--disk", metavar="SIZE", help="how much writable mounts may grow, all together (default 1G)")
    add("--max-output", metavar="SIZE", help="stop the run at this much output (default 16M)")
    add("--network", metavar="MODE", help="off (default), full: the internet, host: the host's own network, weaker")
    add("--mount", metavar="HOST:GUEST[:rw]", action="append", default=[], help="show a file or directory inside")
    add("--project", metavar="DIR", help="show a directory read-only at /project")
    add("--workspace", metavar="DIR", help="use a directory as /workspace, writable")
    add(
        "--env",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        help="set a variable; NAME alone passes yours on, unless it looks like a secret",
    )
    add("--strict-limits", action="store_true", help="refuse where a limit would not hold for the whole sandbox")
    add("--unsafe-writable-home", action="store_true", help="allow / or a home directory as a writable mount")
    add("--unsafe-unprotected-mounts", action="store_true", help="do not protect hooks and settings in writable mounts")
    add("--config", metavar="FILE", help="configuration (default ~/.config/hutch/hutch.toml)")
    add("--json", action="store_true", help="print the result as JSON" if verb == "run" else "print the plan as JSON")
    if verb == "run":
        add("--stdin", action="store_true", help="pass standard input on to the program")
        add(
            "--no-daemon",
            action="store_true",
            help="open a session in this process: its files stay, its state does not",
        )
    parser.set_defaults(verb=verb)


def main(options: argparse.Namespace) -> int:
    """Carry out either verb."""
    if options.verb == "run" and (options.session is not None or options.interactive):
        from . import lasting

        return lasting.main(options)
    code = _code(options)
    spec = _spec(options)
    if options.verb == "plan":
        return _show(planning.prepare(spec, code), as_json=options.json)
    prepared = planning.prepare(spec, code)
    for weaker in prepared.plan.unsafe:
        print(f"warning: weaker isolation: {weaker.replace('_', ' ')}", file=sys.stderr)
    _say_once(prepared.plan.source)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    streams = supervisor.Streams(
        stdin_fd=0 if options.stdin else None,
        stdout_fd=None if options.json else 1,
        stderr_fd=None if options.json else 2,
    )
    result = supervisor.run(prepared.plan, prepared.warden, streams, prepared.token)
    if options.json:
        print_json(result.to_json())
    _say_why(result, spec.policy.limits)
    _say_what_is_obeyed(result)
    if result.outcome is Outcome.FAILED and options.code and os.path.isfile(options.code):
        print(f"hint: {options.code} is a file here; to run it: hutch run -f {quote(options.code)}", file=sys.stderr)
    state.clear_stale()
    return exit_code(result)


def _say_what_is_obeyed(result: Result) -> None:
    for path in result.reported:
        print(f"warning: the program made or changed {path}, which tools on this machine obey", file=sys.stderr)


def _say_once(source: Source) -> None:
    """Tell a person, the first time, that this machine's own software is not the same everywhere."""
    told = f"{cache_directory()}/told-about-host"
    if source is not Source.HOST or not os.isatty(2) or os.path.exists(told) or not can_keep():
        return
    print(
        "note: this environment is made of this machine's own /usr; another machine has other versions", file=sys.stderr
    )
    try:
        os.makedirs(cache_directory(), 0o700, exist_ok=True)
        os.close(os.open(told, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError:
        return


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def exit_code(result: Result) -> int:
    """The exit code of hutch for a result."""
    if result.outcome in _EXIT_CODES:
        return _EXIT_CODES[result.outcome]
    if result.signal is not None:
        return 128 + getattr(signal.Signals, result.signal, signal.SIGKILL)
    return result.exit_code if result.exit_code is not None else 137


def _say_why(result: Result, limits: Limits) -> None:
    how = {
        Outcome.TIMEOUT: f"stopped after {limits.timeout_seconds:g} s; --timeout changes that"
        if limits.timeout_seconds
        else "",
        Outcome.MEMORY: f"stopped at {limits.memory_bytes // MIB} MiB of memory; --memory changes that",
        Outcome.PIDS: f"processes past the limit of {limits.pids} were refused; --pids changes that",
        Outcome.DISK: f"stopped: writable mounts grew by {limits.disk_bytes // MIB} MiB; --disk changes that",
        Outcome.OUTPUT: f"stopped after {limits.output_bytes // MIB} MiB of output; --max-output changes that",
        Outcome.KILLED: "the sandbox was killed from outside",
    }.get(result.outcome)
    if result.outcome is Outcome.FAILED and result.signal:
        how = f"the program was ended by {result.signal}"
    if how:
        print(f"hutch: {how}", file=sys.stderr)


# ---- the request ----------------------------------------------------------------------------------------------------


def _code(options: argparse.Namespace) -> str:
    code = _read_code(options)
    if not code.strip():
        raise SpecError("no code was given", code="cli.usage", hint="hutch run 'print(6 * 7)'")
    return code


def _read_code(options: argparse.Namespace) -> str:
    if options.code is not None and options.file is not None:
        raise SpecError("both CODE and --file were given", code="cli.usage", hint="give one of them")
    if options.file is not None and options.file != "-":
        try:
            with open(options.file, "rb") as file:
                return _decode(file.read(planning.CODE_BYTES + 1), options.file)
        except OSError as error:
            raise SpecError(
                f"{options.file} cannot be read ({error.strerror})", code="cli.file", hint="name a readable file"
            ) from error
    if options.code is not None and options.code != "-":
        return str(options.code)
    if options.verb == "run" and options.stdin:
        raise SpecError(
            "standard input cannot be both the program and its input", code="cli.usage", hint="give CODE or --file"
        )
    if options.code is None and options.file is None and os.isatty(0):
        raise SpecError("no code was given", code="cli.usage", hint="hutch run 'print(6 * 7)'")
    with open(0, "rb", closefd=False) as stream:
        return _decode(stream.read(planning.CODE_BYTES + 1), "standard input")


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{where} is not UTF-8 text ({error.reason})", code="cli.encoding", hint="save it as UTF-8"
        ) from error


class Asked(Value):
    """What the flags and the settings file ask for, as requests for `spec.parse`."""

    name: str
    """Of the environment."""
    settings: dict[str, Any]
    """What the file says of it."""
    named: dict[str, Any]
    """All that an environment named on the command line means."""
    flags: dict[str, Any]


def _asked(options: argparse.Namespace) -> Asked:
    settings = find_settings(options.config)
    name = options.environment or settings.defaults.get("environment", "python")
    known = {*PRESETS, *settings.environments}
    if name not in known:
        raise unknown_word("environment", "environment", name, known)
    request = settings.request(name)
    if settings.path is not None:
        parse(request, settings.path)  # what the file says must be right before flags are joined with it
    named = {"environment": name, **settings.environments.get(name, {})} if options.environment else {}
    return Asked(name=name, settings=request, named=named, flags=_flags(options))


def join_requests(request: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """A request with flags over it; mounts and variables are added to those that it has."""
    joined = {**request, **flags}
    if "mounts" in flags:
        joined["mounts"] = [*request.get("mounts", []), *flags["mounts"]]
    if "env" in flags:
        joined["env"] = {**request.get("env", {}), **flags["env"]}
    return joined


def _spec(options: argparse.Namespace) -> Spec:
    asked = _asked(options)
    spec = parse(join_requests(asked.settings, asked.flags))
    return spec.replace(environment=spec.environment.replace(name=asked.name))


def _flags(options: argparse.Namespace) -> dict[str, Any]:
    request: dict[str, Any] = {}
    for key, flag in (("memory_mb", "memory"), ("tmp_mb", "tmp"), ("disk_mb", "disk"), ("max_output_mb", "max_output")):
        text = getattr(options, flag)
        if text is not None:
            request[key] = parse_size_mb(text, f"--{flag.replace('_', '-')}")
    if options.timeout is not None:
        request["timeout_seconds"] = _timeout(options.timeout)
    for key in ("pids", "cpus", "network", "project", "workspace"):
        if getattr(options, key) is not None:
            request[key] = getattr(options, key)
    for key in ("strict_limits", "unsafe_writable_home", "unsafe_unprotected_mounts"):
        if getattr(options, key):
            request[key] = True
    if options.mount:
        request["mounts"] = options.mount
    if options.env:
        request["env"] = dict(_variable(text) for text in options.env)
    return request


def _timeout(text: str) -> float | None:
    if text == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise SpecError(
            f"--timeout: {text!r} is not a number of seconds", code="spec.value", hint="write 30, 0.5 or none"
        ) from None


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    variable_name(name, "--env")
    if equals:
        return name, value
    if is_secret_name(name):
        raise SpecError(
            f"--env {name}: looks like a secret or changes how programs load code, and is not passed on by name",
            code="spec.secret",
            hint=f'to pass it on purpose, write --env {name}="${name}"',
        )
    if name not in os.environ:
        raise SpecError(f"--env {name}: you have no such variable", code="spec.variable", hint=f"--env {name}=VALUE")
    return name, os.environ[name]


# ---- the plan -------------------------------------------------------------------------------------------------------


def _show(prepared: planning.Prepared, *, as_json: bool) -> int:
    plan = prepared.plan
    if as_json:
        print_json(
            {
                "operations": [list(operation) for operation in plan.operations],
                "bwrap": list(plan.bwrap),
                "command": list(plan.command),
                "cgroups": {directory: dict(files) for directory, files in plan.cgroups},
                "workDirectories": [path for path, _, _ in plan.work_directories],
                "argv": jail.to_argv(plan, prepared.warden),
                "environment": plan.environment,
                "source": plan.source.value,
                "network": plan.network.value,
                "enforced": dict(plan.enforced),
                "protected": plan.protected,
                "unsafe": list(plan.unsafe),
            }
        )
        return 0
    print(render(plan, prepared.warden))
    return 0


def render(plan: Plan, warden: HostPath) -> str:
    """A plan as a script for a POSIX shell."""
    lines = [f"# environment {plan.environment} from {plan.source.value}, network {plan.network.value}"]
    lines.append("# limits: " + ", ".join(f"{name} {how}" for name, how in plan.enforced))
    for directory, files in plan.cgroups:
        lines.append(f"mkdir {quote(directory)}")
        lines += [f"echo {quote(text)} > {quote(f'{directory}/{name}')}" for name, text in files]
    for path, uid, gid in plan.work_directories:
        inner = quote(f"{path}/{jail.WORK}")
        lines.append(f"mkdir -m 711 {quote(path)} && mkdir -m 700 {inner} && chown {uid}:{gid} {inner}")
    operations = plan.operations
    if plan.network is Network.FULL:
        lines.append("# without slirp4netns, which hutch starts at this point, the network is a loopback only")
        operations = tuple(operation for operation in operations if operation[0] != "hold")
    words = jail.to_argv(plan.replace(operations=operations), warden)
    lines.append("env -i " + quote(words[0]) + " \\")
    at = 1
    for operation in operations:
        lines.append(f"  {join(operation)} \\")
        at += len(operation)
    end = at + 2 + len(plan.bwrap)
    lines += [f"  {text} \\" for text in _option_lines(words[at:end])]
    lines.append(f"  {join(words[end:])}")
    return "\n".join(lines)


def _option_lines(words: list[str]) -> list[str]:
    lines: list[list[str]] = [words[:3]]
    for word in words[3:]:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return [join(line) for line in lines]

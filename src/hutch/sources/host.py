"""The `host` source: an environment made of the software that this machine already has.

/usr is shown read-only, with an /etc of our own making. It is at hand at once and not reproducible: another machine has
other versions. Nothing of the host's /etc is visible but what programs need to find libraries, fonts and certificates.
"""

from __future__ import annotations

import os
import sys

from ..errors import HostError
from ..model import Bind, Environment, File, GuestPath, HostPath, Rootfs, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOME = GuestPath("/home/sandbox")

_ROOT_DIRECTORIES = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")
"""On merged distributions links into /usr, elsewhere directories of their own."""

_ETC_DIRECTORIES = (
    "alternatives",  # cc, java and editors are links through here
    "ssl/certs",
    "pki/tls/certs",
    "pki/ca-trust/extracted",
    "ca-certificates/extracted",
    "fonts",
    "chromium.d",
)
_ETC_FILES = ("ld.so.cache", "localtime", "services", "protocols", "ssl/openssl.cnf", "os-release")
# Every mount and every file costs a sandbox a part of a millisecond, so only what programs were seen to need is here.

_TEXTS = {
    "passwd": (
        "root:x:0:0:root:/root:/usr/sbin/nologin\n"
        "sandbox:x:1000:1000:sandbox:/home/sandbox:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost hutch\n::1 localhost ip6-localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
}

_PROGRAMS = {
    # interpreter: (names to look for, code file, variables, Debian package, nixpkgs attribute)
    "python": (
        ("python3",),
        "main.py",
        (("PYTHONUNBUFFERED", "1"), ("PYTHONPATH", "/workspace")),
        "python3",
        "python3",
    ),
    "bash": (("bash",), "main.sh", (), "bash", "bash"),
    "node": (("node", "nodejs"), "main.js", (("NODE_PATH", "/workspace/node_modules"),), "nodejs", "nodejs"),
}
# PYTHONUNBUFFERED: what was printed before a kill is not lost, and output streams. The two search paths make imports
# find the workspace, since the code itself lies elsewhere.

_realised: dict[tuple[str, tuple[str, ...]], Rootfs] = {}


def realise(environment: Environment) -> Rootfs:
    """The root of a host environment.

    Kept in memory and handed out again as long as the files that it depends on are unchanged.

    Raises:
        HostError: a program is missing.
    """
    key = (environment.interpreter, environment.packages)
    kept = _realised.get(key)
    if kept is None or kept.stamp != _stamp(kept):
        kept = _realised[key] = _build(environment)
    return kept


def _stamp(rootfs: Rootfs) -> tuple[object, ...]:
    paths = [rootfs.interpreter[0], "/usr/bin", "/usr/local/bin", "/etc/ld.so.cache", "/etc/localtime"]
    return tuple((path, *_identity(path)) for path in paths)


def _identity(path: str) -> tuple[int, ...]:
    try:
        info = os.stat(path)
    except OSError:
        return ()
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)


def _build(environment: Environment) -> Rootfs:
    names, code_file, variables, _, _ = _PROGRAMS[environment.interpreter]
    binds = list(_system_binds())
    symlinks = tuple(
        (os.readlink(f"/{name}"), GuestPath(f"/{name}")) for name in _ROOT_DIRECTORIES if os.path.islink(f"/{name}")
    )
    program = find_program(names, [bind.host_path for bind in binds])
    if program is None and environment.interpreter == "python":
        own = _find_own_python()
        if own is not None:
            binds.append(own)
            program = f"{own.guest_path}/{_OWN_PROGRAM}"
            if str(own.guest_path) != str(own.host_path):
                # Its libpython was linked by its old path; the loader would take another one that lies in /usr.
                variables += (("LD_LIBRARY_PATH", f"{own.guest_path}/lib"),)
    if program is None:
        raise missing_program(environment)
    for package in environment.packages:
        if find_program((package,), [bind.host_path for bind in binds]) is None:
            raise HostError(
                f"package {package}: this machine has no program of that name in /usr",
                code="host.package",
                details=f"looked in {PATH}",
                hint=f"install it (Debian, Ubuntu: apt install {package}), or: nix profile install nixpkgs#{package}",
            )
    files = tuple(File(guest_path=GuestPath(f"/etc/{name}"), text=text) for name, text in _TEXTS.items())
    files += tuple(
        File(guest_path=GuestPath(f"/etc/{name}"), host_path=HostPath(f"/etc/{name}"))
        for name in _ETC_FILES
        if os.access(f"/etc/{name}", os.R_OK)
    )
    rootfs = Rootfs(
        source=Source.HOST,
        binds=tuple(binds),
        symlinks=symlinks,
        files=files,
        variables=(("PATH", PATH), *variables),
        interpreter=(program,),
        interpreters=_interpreters(environment.interpreter, program, [bind.host_path for bind in binds]),
        code_path=GuestPath(f"/run/hutch/{code_file}"),
    )
    return rootfs.replace(stamp=_stamp(rootfs))


def _interpreters(own: str, program: str, roots: list[HostPath]) -> tuple[tuple[str, str], ...]:
    """Every interpreter that is there, the environment's own first."""
    found = {own: program}
    for name, (names, *_) in _PROGRAMS.items():
        other = None if name == own else find_program(names, roots)
        if other is not None:
            found[name] = other
    return tuple(found.items())


def _system_binds() -> Iterator[Bind]:
    yield Bind(host_path=HostPath("/usr"), guest_path=GuestPath("/usr"))
    for name in _ROOT_DIRECTORIES:
        if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
            yield Bind(host_path=HostPath(f"/{name}"), guest_path=GuestPath(f"/{name}"))
    for name in (*_ETC_DIRECTORIES, *_java_directories()):
        if os.path.isdir(f"/etc/{name}") and not os.path.islink(f"/etc/{name}"):
            yield Bind(host_path=HostPath(f"/etc/{name}"), guest_path=GuestPath(f"/etc/{name}"))


def _java_directories() -> list[str]:
    try:
        return sorted(name for name in os.listdir("/etc") if name.startswith("java-"))
    except OSError:
        return []


def find_program(names: tuple[str, ...], roots: list[HostPath]) -> str | None:
    """The first of the names on the sandbox's PATH whose file is really visible inside."""
    for name in names:
        for directory in PATH.split(":"):
            candidate = f"{directory}/{name}"
            real = os.path.realpath(candidate)
            if os.access(real, os.X_OK) and any(real.startswith(root + "/") for root in roots):
                return candidate
    return None


_OWN_PROGRAM = f"bin/python{sys.version_info[0]}.{sys.version_info[1]}"


def _find_own_python() -> Bind | None:
    """The Python that runs hutch, for machines that have none in /usr.

    Below /opt it keeps its path. From a home it does not: whose home that is, is nobody's business inside.
    """
    prefix = os.path.realpath(sys.base_prefix)
    if prefix in ("/", "/usr") or not os.access(f"{prefix}/{_OWN_PROGRAM}", os.X_OK):
        return None
    guest = prefix if prefix.startswith("/opt/") else "/opt/python"
    return Bind(host_path=HostPath(prefix), guest_path=GuestPath(guest))


def missing_program(environment: Environment, interpreter: str | None = None) -> HostError:
    """The error for an interpreter that this machine does not have; by default, the environment's own."""
    names, _, _, package, attribute = _PROGRAMS[interpreter or environment.interpreter]
    return HostError(
        f"environment {environment.name} needs {names[0]}, and this machine has none in /usr",
        code="host.program",
        details=f"looked for {' or '.join(names)} in {PATH}",
        hint=f"install it (Debian, Ubuntu: apt install {package}), or use Nix: nix profile install nixpkgs#{attribute}",
    )

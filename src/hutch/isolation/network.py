"""A way out for a sandbox that has a network namespace of its own: `--network full`.

The namespace is made by the warden's child, which then waits. slirp4netns, outside, gives it an interface and speaks
to the internet on its behalf. The host's loopback is switched off in it, abstract sockets belong to a namespace, and
the host's other addresses and link-local ones get routes to nowhere.
"""

from __future__ import annotations

import os
import select
import time

from .. import process
from ..errors import HostError
from ..model import HostPath

NAMESERVER = "10.0.2.3"
"""slirp4netns's own forwarder."""

NEVER_REACHED = (("169.254.0.0", "16"), ("127.0.0.0", "8"))
"""Link-local addresses, where clouds keep the credentials of their machines, and loopback ones: a socket that is bound
to the interface would send these out, and the host would take them for its own."""

READY_SECONDS = 5.0

_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
BUNDLE_VARIABLES = (
    "SSL_CERT_FILE",
    "NIX_SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "PIP_CERT",
)


def find_bundle() -> HostPath | None:
    """The certificates that this host trusts, in one file."""
    for path in (os.environ.get("SSL_CERT_FILE"), *_BUNDLES):
        if path and os.path.isfile(path) and os.access(path, os.R_OK):
            return HostPath(os.path.realpath(path))
    return None


def host_addresses() -> tuple[str, ...]:
    """The IPv4 addresses of this host, on which its own services may listen."""
    found = set()
    last = ""
    try:
        with open("/proc/net/fib_trie", encoding="ascii", errors="replace") as file:
            for line in file:
                words = line.split()
                if words[:1] == ["|--"]:
                    last = words[1]
                elif words[:3] == ["/32", "host", "LOCAL"] and not last.startswith("127."):
                    found.add(last)
    except OSError:
        return ()
    return tuple(sorted(found))


def find_slirp() -> HostPath | None:
    """slirp4netns, where the system keeps programs."""
    for directory in ("/usr/bin", "/usr/local/bin", "/run/current-system/sw/bin", "/bin"):
        if os.access(f"{directory}/slirp4netns", os.X_OK):
            return HostPath(f"{directory}/slirp4netns")
    return None


def require_slirp() -> HostPath:
    """slirp4netns, usable.

    Raises:
        HostError: it is missing, or may not open the tunnel device.
    """
    path = find_slirp()
    if path is None:
        raise HostError(
            "network full needs slirp4netns, which is not installed",
            code="host.slirp4netns",
            hint="apt install slirp4netns (or use --network host, which is weaker)",
        )
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise HostError(
            "network full needs /dev/net/tun, which this user may not open",
            code="host.tun",
            hint="sudo modprobe tun; sudo chmod 0666 /dev/net/tun (or use --network host, which is weaker)",
        )
    return path


class Slirp:
    """One running slirp4netns. It ends by itself when the descriptor we hold is closed, also by our death."""

    def __init__(self, program: process.Process, exit_fd: int) -> None:
        self._program = program
        self._exit_fd = exit_fd

    def close(self) -> None:
        """End it and wait."""
        if self._exit_fd >= 0:
            os.close(self._exit_fd)
            self._exit_fd = -1
            deadline = time.monotonic() + 1.0
            while self._program.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
            self._program.kill()
            self._program.wait()


def start_slirp(pid: int) -> Slirp:
    """Connect the network namespace of a waiting process.

    Raises:
        HostError: slirp4netns did not become ready in time.
    """
    slirp = require_slirp()
    ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
    exit_r, exit_w = os.pipe2(os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    said = os.memfd_create("slirp4netns", os.MFD_CLOEXEC)
    argv = [
        slirp,
        "--configure",
        "--mtu=65520",
        "--disable-host-loopback",
        "--enable-seccomp",
        # Root's keeps next to no capabilities, and sees next to no files. A user's has none to give up.
        *(["--enable-sandbox"] if os.geteuid() == 0 else []),
        f"--ready-fd={ready_w}",
        f"--exit-fd={exit_r}",
        f"--userns-path=/proc/{pid}/ns/user",
        str(pid),
        "tap0",
    ]
    try:
        program = process.spawn(argv, stdin=null, stdout=said, stderr=said, fds=(ready_w, exit_r))
    except BaseException:
        os.close(exit_w)
        raise
    finally:
        for fd in (ready_w, exit_r, null):
            os.close(fd)
    running = Slirp(program, exit_w)
    try:
        poller = select.poll()
        poller.register(ready_r, select.POLLIN)
        if not poller.poll(READY_SECONDS * 1000) or os.read(ready_r, 1) != b"1":
            running.close()
            raise HostError(
                f"slirp4netns was not ready within {READY_SECONDS:g} s",
                code="host.slirp4netns",
                details=os.pread(said, 2000, 0).decode("utf-8", "replace").strip(),
                hint="run slirp4netns by hand to see what it lacks (or use --network host, which is weaker)",
            )
    finally:
        os.close(ready_r)
        os.close(said)
    return running

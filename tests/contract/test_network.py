"""What the program can reach, with each kind of network."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from .harness import IS_ROOT, WORKER, Hutch, Ran, descendants, end, index_host, living, need, wait_until

TRY = """
import socket
for family, address in {targets!r}:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(3)
        try:
            client.connect(tuple(address))
            print("CONNECTED", address)
        except OSError as error:
            print("refused", address, type(error).__name__)
"""
ASK = """
import socket, urllib.request
print("address", socket.getaddrinfo({host!r}, 443)[0][4][0])
with urllib.request.urlopen("https://{host}/simple/", timeout=20) as answer:
    print("status", answer.status)
"""
# A node of the device that exists in a mount namespace of this one process alone: the machine stays as it is.
PRIVATE_TUN = """
set -e
mount -t tmpfs -o mode=755 tmpfs "$1"
mknod -m 666 "$1/tun" c 10 200
mount --bind "$1/tun" /dev/net/tun
identity=$2
shift 2
exec setpriv --reuid "$identity" --regid "$identity" --clear-groups "$@"
"""


class Listener(NamedTuple):
    """A service of the host on its loopback, and on the address that the host has in the world."""

    targets: list[tuple[int, tuple[str, int]]]


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Services that are there, and can be reached from outside a sandbox."""
    server = socket.create_server(("127.0.0.1", 0))
    six = socket.create_server(("::1", 0), family=socket.AF_INET6) if socket.has_dualstack_ipv6() else None
    targets = [(int(socket.AF_INET), ("127.0.0.1", server.getsockname()[1]))]
    if six is not None:
        targets.append((int(socket.AF_INET6), ("::1", six.getsockname()[1])))
    for _, address in targets:
        socket.create_connection(address, timeout=5).close()
    yield Listener(targets)
    for made in (server, six):
        if made is not None:
            made.close()


@contextlib.contextmanager
def tunnel(hutch: Hutch) -> Iterator[dict[str, tuple[str, ...]]]:
    """How hutch must be started to have the device; where that is root's alone, with a private node of it."""
    need("slirp4netns", "tun")
    if hutch.is_root or not IS_ROOT or _everyone_may_open_tun():
        yield {}
        return
    directory = hutch.home / "tun"
    directory.mkdir()
    words = ("unshare", "-m", "--propagation", "private", "sh", "-c", PRIVATE_TUN, "sh", str(directory), str(hutch.uid))
    yield {"prefix": words}
    shutil.rmtree(directory)


def run_full(hutch: Hutch, code: str, *flags: str) -> Ran:
    """Run with a network of its own."""
    with tunnel(hutch) as options:
        return hutch.run(code, "--network", "full", *flags, **options)


def _everyone_may_open_tun() -> bool:
    return os.stat("/dev/net/tun").st_mode & 0o006 == 0o006


# ---- off ------------------------------------------------------------------------------------------------------------


def test_cannot_reach_host_loopback(hutch: Hutch, listener: Listener) -> None:
    ran = hutch.run(TRY.format(targets=listener.targets))
    assert ran.out.count("refused") == len(listener.targets)


def test_without_network_there_is_only_a_loopback(hutch: Hutch) -> None:
    ran = hutch.run("import socket; print(socket.if_nameindex()); print(open('/proc/net/route').read().count('\\n'))")
    assert ran.out == "[(1, 'lo')]\n1\n"


def test_without_network_nothing_is_reachable_and_nothing_resolves(hutch: Hutch) -> None:
    code = "import socket\ntry: print('RESOLVED', socket.getaddrinfo('example.com', 80))\n"
    code += "except OSError as error: print(type(error).__name__)\n"
    ran = hutch.run(code + TRY.format(targets=[(2, ("1.1.1.1", 443)), (2, ("169.254.169.254", 80))]))
    assert ran.out.splitlines()[0] == "gaierror"
    assert ran.out.count("refused") == 2


def test_ones_own_loopback_works(hutch: Hutch) -> None:
    code = "import socket\nserver = socket.create_server(('localhost', 0))\n"
    code += "client = socket.create_connection(server.getsockname())\n"
    code += "server.accept()[0].sendall(b'hello'); print(client.recv(9))"
    assert hutch.run(code).out == "b'hello'\n"


def test_raw_sockets_are_refused(hutch: Hutch) -> None:
    ran = hutch.run("import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)")
    assert "PermissionError" in ran.err


# ---- full -----------------------------------------------------------------------------------------------------------


def test_full_resolves_names_and_speaks_https(hutch: Hutch) -> None:
    need("internet")
    ran = run_full(hutch, ASK.format(host=index_host()))
    assert ran.outcome == "ok", ran.err
    assert "status 200" in ran.out
    assert ran.json["unsafe"] == []


def test_full_reaches_neither_host_loopback_nor_gateway(hutch: Hutch, listener: Listener) -> None:
    port = listener.targets[0][1][1]
    gateways = [(2, (address, port)) for address in ("10.0.2.2", "10.0.2.3", "10.0.2.100")]
    ran = run_full(hutch, TRY.format(targets=[*listener.targets, *gateways]), "--timeout", "25")
    assert ran.out.count("refused") == len(listener.targets) + 3, ran


BOUND = """
import socket
for address in ("127.0.0.1", "127.0.0.53"):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"tap0\\0")
        try:
            sender.sendto(b"x", (address, {port}))
        except OSError:
            pass
print("tried")
"""


def test_full_does_not_send_loopback_addresses_out_by_its_interface(hutch: Hutch) -> None:
    """A socket bound to the interface passes the loopback by; the host must not get to see what it sends."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(0.5)
        ran = run_full(hutch, BOUND.format(port=receiver.getsockname()[1]))
        with pytest.raises(TimeoutError):
            receiver.recv(10)
    assert ran.out == "tried\n", ran


def test_full_does_not_see_the_hosts_interfaces(hutch: Hutch) -> None:
    ran = run_full(hutch, "import socket; print(sorted(name for _, name in socket.if_nameindex()))")
    assert ran.out == "['lo', 'tap0']\n"


def test_full_does_not_reach_abstract_sockets(hutch: Hutch) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0hutch-contract-full-{WORKER}")
        server.listen()
        code = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0hutch-contract-full-{WORKER}')"
        ran = run_full(hutch, code)
    assert "ConnectionRefusedError" in ran.err


def test_full_keeps_the_filter_and_the_uid(hutch: Hutch) -> None:
    code = "import os; s = open('/proc/self/status').read()\n"
    code += "print(os.getuid(), 'Seccomp:\\t2' in s, 'CapEff:\\t0000000000000000' in s)"
    assert run_full(hutch, code).out == "1000 True True\n"


def test_full_brings_the_hosts_certificates(hutch: Hutch) -> None:
    code = "import os, ssl; print(len(ssl.create_default_context().get_ca_certs()) > 10, os.environ['SSL_CERT_FILE'])"
    ran = run_full(hutch, code)
    assert ran.out.split()[0] == "True"
    assert ran.out.split()[1].startswith("/run/hutch/")


def test_full_with_a_workspace_is_protected_too(hutch: Hutch, project: Path) -> None:
    ran = run_full(hutch, "open('file', 'w').write('x'); open('.envrc', 'w')", "--workspace", str(project))
    assert ran.json["protected"] == "prevented"
    assert "OSError" in ran.err or "IsADirectoryError" in ran.err


def test_full_without_access_to_the_device_is_an_error_with_a_hint(user: Hutch) -> None:
    need("slirp4netns")
    if _everyone_may_open_tun():
        pytest.skip("everyone may open /dev/net/tun here")
    ran = user.run("print(1)", "--network", "full")
    assert (ran.exit_code, ran.outcome) == (125, "host.tun")
    assert "/dev/net/tun" in ran.json["error"]["hint"]


def test_a_killed_hutch_takes_its_network_along(hutch: Hutch) -> None:
    code = "print('ready'); import time; time.sleep(60)"
    with tunnel(hutch) as options, hutch.running(code, "--network", "full", **options) as live:
        below = descendants(live.process.pid)
        assert any(b"slirp4netns" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below)
        end(live.process)
        assert wait_until(lambda: not living(below))


# ---- host -----------------------------------------------------------------------------------------------------------


def test_host_network_is_reported_as_weaker(hutch: Hutch, listener: Listener) -> None:
    ran = hutch.run(TRY.format(targets=listener.targets[:1]), "--network", "host")
    assert ran.out.startswith("CONNECTED")
    assert ran.json["unsafe"] == ["network_host"]
    assert "weaker isolation: network host" in ran.stderr


def test_a_list_of_domains_is_an_error_not_a_guess(hutch: Hutch) -> None:
    config = hutch.write(hutch.home / "list.toml", '[defaults]\nnetwork = ["example.com"]\n')
    ran = hutch.run("print(1)", "--config", config)
    assert (ran.exit_code, ran.outcome) == (2, "spec.network-list")

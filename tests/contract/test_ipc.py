"""Ways to talk to other processes of the host."""

from __future__ import annotations

import ctypes
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import WORKER, Hutch, need

CONNECT = """
import socket
address = {address!r}
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    pair = socket.socketpair(socket.AF_UNIX, kind)
    for end in (socket.socket(socket.AF_UNIX, kind), pair[0]):
        try:
            end.connect(address)
            end.send(b"hello")
            print("CONNECTED")
        except OSError as error:
            print("refused", error.strerror)
"""


@pytest.fixture
def listener(hutch: Hutch) -> Iterator[Path]:
    """A socket of a service of the host, in a directory of its own."""
    directory = hutch.home / "service"
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory / "socket"))
        server.listen(8)
        (directory / "socket").chmod(0o777)
        hutch.give(directory)
        yield directory / "socket"
    shutil.rmtree(directory)


def test_cannot_reach_abstract_socket(hutch: Hutch) -> None:
    name = f"\0hutch-contract-{WORKER}"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(name)
        server.listen(8)
        client.connect(name)
        ran = hutch.run(CONNECT.format(address=name))
    assert ran.out.count("Connection refused") == 6
    assert "CONNECTED" not in ran.out


def test_cannot_connect_host_unix_socket(hutch: Hutch, listener: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(listener))
    ran = hutch.run(CONNECT.format(address=str(listener)))
    assert ran.out.count("refused No such file") >= 4
    assert "CONNECTED" not in ran.out


def test_no_socket_of_the_host_is_visible(hutch: Hutch) -> None:
    ran = hutch.shell("find / -xdev -type s 2>/dev/null; find /run /tmp /var /dev -type s; true")
    assert (ran.outcome, ran.out) == ("ok", "")


def test_unix_sockets_work_inside(hutch: Hutch) -> None:
    code = """
import socket, threading
server = socket.socket(socket.AF_UNIX); server.bind("/tmp/s"); server.listen()
client = socket.socket(socket.AF_UNIX); client.connect("/tmp/s")
server.accept()[0].sendall(b"hello"); print(client.recv(9))
"""
    assert hutch.run(code).out == "b'hello'\n"


def test_system_v_ipc_of_the_host_is_invisible(hutch: Hutch) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    key = 0x68000000 + WORKER
    segment = libc.shmget(key, 4096, 0o1666)
    assert segment >= 0
    try:
        code = f"import ctypes; print(ctypes.CDLL(None).shmget({key}, 4096, 0o666))"
        ran = hutch.run(code)
        listing = hutch.run("print(len(open('/proc/sysvipc/shm').readlines()))")
    finally:
        libc.shmctl(segment, 0, None)
    assert ran.out == "-1\n"
    assert listing.out == "1\n", "the heading, and nothing else"


def test_two_sandboxes_share_nothing(hutch: Hutch) -> None:
    plant = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('\\0shared'); s.listen(); "
    plant += "[open(d + '/planted', 'w') for d in ('/tmp', '/dev/shm', '/home/sandbox', '/workspace')]; "
    code = "import os, socket\n"
    code += "print([d for d in ('/tmp', '/dev/shm', '/home/sandbox', '/workspace') if os.listdir(d)])\n"
    code += "print(len([p for p in os.listdir('/proc') if p.isdigit()]))\n"
    code += "socket.socket(socket.AF_UNIX).connect('\\0shared')"
    with hutch.running(plant + "print('ready'); time.sleep(60)"):
        ran = hutch.run(code)
    assert ran.out.splitlines() == ["[]", "2"]
    assert "ConnectionRefusedError" in ran.err


def test_perl_and_shell_cannot_connect_either(hutch: Hutch, listener: Path) -> None:
    need("perl")
    code = f'socket(S, AF_UNIX, SOCK_STREAM, 0); connect(S, pack_sockaddr_un("{listener}")) or die $!'
    ran = hutch.shell(f"perl -MSocket -e '{code}'")
    assert ran.outcome == "failed"
    assert "No such file" in ran.err

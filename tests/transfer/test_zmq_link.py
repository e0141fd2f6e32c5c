"""The ZeroMQ link: the contract over ipc and TCP, and what only sockets have."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq
from transfer_nodes import until

from cache_manager.errors import ConfigError
from transfer.curve import make_keys, read_keys
from transfer.errors import TransferError
from transfer.link import PeerFound, PeerLost
from transfer.testing.contract import PATIENCE_S, LinkContract, arrivals, poll_until
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings


class TestZmqIpc(LinkContract):
    def make_server(self, directory: Path) -> ZmqLink:
        return ZmqLink(ZmqSettings(bind=f"ipc://{directory}/p"))

    def make_client(self, directory: Path) -> ZmqLink:
        return ZmqLink()


class TestZmqTcp(LinkContract):
    def make_server(self, directory: Path) -> ZmqLink:
        return ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*"))

    def make_client(self, directory: Path) -> ZmqLink:
        return ZmqLink()


class TestZmqTcp6(LinkContract):
    def make_server(self, directory: Path) -> ZmqLink:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 loopback here")
        return ZmqLink(ZmqSettings(bind="tcp://[::1]:*"))

    def make_client(self, directory: Path) -> ZmqLink:
        return ZmqLink()


@pytest.mark.parametrize(
    "address",
    ["tcp://0.0.0.0:0", "tcp://*:5555", "tcp://eth0:5555", "tcp://[::]:*", "tcp://192.0.2.1:*", "tcp://example.org:80"],
)
def test_an_address_that_others_reach_needs_keys(address: str, tmp_path: Path) -> None:
    """Goal: off this machine nothing is said in the clear, by either side. Method: bind and connect without keys."""
    with pytest.raises(ConfigError, match="bind: wanted an address of this machine alone") as caught:
        ZmqSettings(bind=address)
    assert caught.value.field == "bind"
    link = ZmqLink()
    with pytest.raises(ConfigError, match="address: wanted an address of this machine alone"):
        link.connect(address)
    link.close()
    assert ZmqSettings(bind=address, keys=read_keys(make_keys(tmp_path, "p"))).bind == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "tcp://127.0.0.1",
        "ipc://relative",
        "ipc://@abstract",
        "inproc://x",
        "tcp://127.0.0.1:65536",
        "ipc:///" + "x" * 200,
    ],
)
def test_an_address_that_is_none_names_its_field(address: str) -> None:
    with pytest.raises(ConfigError, match="bind: wanted"):
        ZmqSettings(bind=address)
    link = ZmqLink()
    try:
        with pytest.raises(ConfigError, match="address: wanted"):
            link.connect(address)
    finally:
        link.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [("identity", b""), ("identity", b"\0x"), ("servers_max", 0), ("connections_max", True)],
)
def test_settings_that_cannot_be_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        ZmqSettings(**{name: value})  # type: ignore[arg-type]


def test_a_live_servers_path_is_not_taken_over(tmp_path: Path) -> None:
    """Goal: ZeroMQ would replace the other's socket; a dead server's path is reused, a file is left alone."""
    first = ZmqLink(ZmqSettings(bind=f"ipc://{tmp_path}/p"))
    with pytest.raises(ConfigError, match="no server uses"):
        ZmqLink(ZmqSettings(bind=f"ipc://{tmp_path}/p"))
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o600
    first.close()
    assert not (tmp_path / "p").exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "p"))
    ZmqLink(ZmqSettings(bind=f"ipc://{tmp_path}/p")).close()
    (tmp_path / "p").write_text("precious")
    with pytest.raises(ConfigError, match="nothing, or a socket"):
        ZmqLink(ZmqSettings(bind=f"ipc://{tmp_path}/p"))
    assert (tmp_path / "p").read_text() == "precious"


def test_a_taken_port_is_an_error() -> None:
    first = ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*"))
    with pytest.raises(ConfigError, match="bind: wanted an address that is free"):
        ZmqLink(ZmqSettings(bind=first.address))
    first.close()


def test_a_closed_link_says_so(tmp_path: Path) -> None:
    link = ZmqLink(ZmqSettings(bind=f"ipc://{tmp_path}/p"))
    link.close()
    for act in (lambda: link.poll(0), lambda: link.connect("tcp://127.0.0.1:9"), lambda: link.send(b"x", b"y")):  # type: ignore[arg-type]
        with pytest.raises(TransferError, match="closed"):
            act()
    link.wake()


def test_links_leave_no_descriptor_thread_or_file(tmp_path: Path) -> None:
    """Goal: close gives everything back. Method: count before and after twenty pairs."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def pair() -> None:
        contract = TestZmqIpc()
        server, client = contract.make_server(tmp_path), contract.make_client(tmp_path)
        _, here = contract.meet(server, client)
        assert server.send(here, b"x", [bytearray(300_000)])
        poll_until(client, lambda came: bool(arrivals(came)), server)
        client.close()
        server.close()

    pair()
    before = held()
    for _ in range(20):
        pair()
    until(held, lambda now: now[0] <= before[0] and now[1] <= before[1])  # a thread that was joined dies a moment later
    assert os.listdir(tmp_path) == []


def test_too_many_frames_end_the_connection_and_cost_nobody_else() -> None:
    """Goal: a message of too many frames is dropped and counted, and its sender cut off; a good one is served."""
    server = ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*"))
    contract, client = TestZmqTcp(), ZmqLink()
    there, _ = contract.meet(server, client)
    context = zmq.Context()
    hostile = context.socket(zmq.DEALER)
    hostile.linger = 0
    hostile.connect(server.address)
    hostile.send_multipart([b"x"] * 1030)
    give_up_s = time.monotonic() + PATIENCE_S
    while server.counters.dropped_messages < 1 or server.counters.cut_connections < 1:
        assert time.monotonic() < give_up_s
        assert server.poll(0.01) == []
    assert client.send(there, b"still here?")
    (arrival,) = arrivals(poll_until(server, lambda came: bool(arrivals(came))))
    assert bytes(arrival.control) == b"still here?"
    hostile.close()
    context.term()
    client.close()
    server.close()


def test_of_too_many_connections_the_idlest_makes_room() -> None:
    """Goal: connections are bounded, whoever speaks stays, and a newcomer is let in though idle peers fill the seats.

    Method: a speaker, seven peers that greeted once and are silent, forty that say nothing at all, then a newcomer.
    """
    server = ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*", connections_max=8))
    host, port = server.address.removeprefix("tcp://").split(":")
    contract, client = TestZmqTcp(), ZmqLink()
    idle = [ZmqLink() for _ in range(7)]
    for link in idle:
        contract.meet(server, link)
    there, _ = contract.meet(server, client)
    assert server.counters.evicted_connections == 0
    crowd = [socket.create_connection((host, int(port))) for _ in range(40)]
    give_up_s = time.monotonic() + PATIENCE_S
    while server.counters.evicted_connections < 40:
        assert time.monotonic() < give_up_s, server.counters
        server.poll(0.01)
        assert server.counters.connections <= 8
    late = ZmqLink()
    contract.meet(server, late)
    assert client.send(there, b"still here?")
    assert arrivals(poll_until(server, lambda came: bool(arrivals(came))))
    for one in crowd:
        one.close()
    for link in (*idle, late, client, server):
        link.close()


def test_a_restarted_client_takes_its_name_over(tmp_path: Path) -> None:
    """Goal: the same identity from a new process is heard at once, though the old connection is still open."""
    server = ZmqLink(ZmqSettings(bind=f"ipc://{tmp_path}/p"))
    contract = TestZmqIpc()
    old, new = ZmqLink(ZmqSettings(identity=b"decode-0")), ZmqLink(ZmqSettings(identity=b"decode-0"))
    _, before = contract.meet(server, old)
    _, after = contract.meet(server, new)
    assert before == after
    assert server.send(after, b"to the new one")
    (arrival,) = arrivals(poll_until(new, lambda came: bool(arrivals(came)), server))
    assert bytes(arrival.control) == b"to the new one"
    old.close()
    assert PeerLost(after) not in server.poll(0.2), "the old connection's end is not the new one's"
    assert server.send(after, b"still")
    new.close()
    server.close()


def test_a_server_that_returns_is_found_again(tmp_path: Path) -> None:
    """Goal: one connect serves for a server's whole life and the next one's. Method: close it, bind again."""
    contract, client = TestZmqIpc(), ZmqLink()
    server = contract.make_server(tmp_path)
    there, _ = contract.meet(server, client)
    server.close()
    poll_until(client, lambda came: PeerLost(there) in came)
    assert not client.send(there, b"nobody there")
    server = contract.make_server(tmp_path)
    again, _ = contract.meet(server, client)
    assert again == there
    client.close()
    server.close()


def test_nothing_is_taken_for_a_server_between_its_loss_and_its_return(tmp_path: Path) -> None:
    """Goal: who was told of a loss and then sends knows that it went nowhere, also where ZeroMQ would still take it.

    Method: the server is back, and ZeroMQ ready to send, before this end has been told so.
    """
    contract, client = TestZmqIpc(), ZmqLink()
    server = contract.make_server(tmp_path)
    there, _ = contract.meet(server, client)
    server.close()
    poll_until(client, lambda came: PeerLost(there) in came)
    server = contract.make_server(tmp_path)
    assert client._servers[there].socket.poll(PATIENCE_S * 1000, zmq.POLLOUT)
    assert not client.send(there, b"lost")
    assert PeerFound(there) in poll_until(client, lambda came: PeerFound(there) in came)
    assert client.send(there, b"taken")
    (arrival,) = arrivals(poll_until(server, lambda came: bool(arrivals(came))))
    assert bytes(arrival.control) == b"taken"
    client.close()
    server.close()


def test_idle_servers_make_room(tmp_path: Path) -> None:
    """Goal: addresses of servers that are gone do not pile up; connected ones are never dropped."""
    client = ZmqLink(ZmqSettings(servers_max=4))
    for n in range(20):
        client.connect(f"ipc://{tmp_path}/none{n}")
    servers = [ZmqLink(ZmqSettings(bind=f"ipc://{tmp_path}/{n}")) for n in range(4)]
    contract = TestZmqIpc()
    for server in servers:
        contract.meet(server, client)
    with pytest.raises(TransferError, match="servers_max"):
        client.connect(f"ipc://{tmp_path}/one-more")
    client.close()
    for server in servers:
        server.close()


def test_a_peer_that_dies_while_its_messages_wait_is_no_end_of_ours(tmp_path: Path) -> None:
    """Goal: libzmq aborts here when ZMTP heartbeats are on (4.3.5: !_io_error; zeromq/libzmq 3937, 4364, 4767).

    Method: fill a client's queue, close the server, wait as long as three heartbeats of 0.1 s would take, then read on.
    """
    script = f"""
import time
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings
server, client = ZmqLink(ZmqSettings(bind="ipc://{tmp_path}/p")), ZmqLink()
there = client.connect(server.address)
while not client.send(there, b"hello"):
    client.poll(0.01)
give_up_s = time.monotonic() + 20
while not (came := server.poll(0.1)):
    assert time.monotonic() < give_up_s
hello = came[0]
while server.send(hello.peer, b"x", [bytes(60_000)]):
    assert time.monotonic() < give_up_s
server.close(0)
time.sleep(0.3)
came = []
while not any(type(item).__name__ == "PeerLost" for item in came):
    assert time.monotonic() < give_up_s, came
    came += client.poll(0.1)
client.close()
"""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", script], timeout=PATIENCE_S * 4, check=False, env=_environment()
    )
    assert ended.returncode == 0


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

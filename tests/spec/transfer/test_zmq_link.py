"""The ZeroMQ link: the contract over ipc and TCP, and cases that only sockets have."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from transfer_nodes import PATIENCE_S, until

from cache_manager.errors import ConfigError
from transfer import zmq_sockets
from transfer.curve import make_keys, read_keys
from transfer.errors import TransferError
from transfer.messages import ENTRIES_MAX
from transfer.testing.contract import LinkContract, arrivals, poll_until
from transfer.zmq_link import FRAMES_MAX, ZmqLink
from transfer.zmq_settings import ZmqSettings


class TestZmqIpc(LinkContract):
    bind = "ipc://{}/p"

    def make_server(self, directory: Path) -> ZmqLink:
        return ZmqLink(ZmqSettings(bind=self.bind.format(directory)))

    def make_client(self, directory: Path) -> ZmqLink:
        return ZmqLink()


class TestZmqTcp(TestZmqIpc):
    bind = "tcp://127.0.0.1:*"


class TestZmqTcp6(TestZmqIpc):
    bind = "tcp://[::1]:*"

    @pytest.fixture(autouse=True)
    def there(self) -> None:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 loopback here")


meet = TestZmqIpc().meet


@pytest.fixture
def made() -> Iterator[Any]:
    """Makes links, which are closed in the end."""
    with contextlib.ExitStack() as ending:

        def make(**settings: Any) -> ZmqLink:
            link = ZmqLink(ZmqSettings(**settings))
            ending.callback(link.close)
            return link

        yield make


def hear(link: ZmqLink, *others: ZmqLink) -> bytes:
    (arrival,) = arrivals(poll_until(link, lambda came: bool(arrivals(came)), *others))
    return bytes(arrival.control)


OPEN = [
    "tcp://0.0.0.0:0",
    "tcp://*:5555",
    "tcp://eth0:5555",
    "tcp://[::]:*",
    "tcp://192.0.2.1:*",
    "tcp://example.org:80",
]
NONE = ["", "tcp://127.0.0.1", "ipc://relative", "ipc://@abstract", "inproc://x", "tcp://127.0.0.1:65536"]


@pytest.mark.parametrize("address", [*OPEN, *NONE, "ipc:///" + "x" * 200])
def test_an_address_that_cannot_be_is_named(address: str, tmp_path: Path, made: Any) -> None:
    """Goal: neither side sends anything unencrypted to another machine. Method: bind and connect without keys."""
    what = "wanted an address of this machine alone" if address in OPEN else "wanted"
    with pytest.raises(ConfigError, match=f"bind: {what}"):
        ZmqSettings(bind=address)
    with pytest.raises(ConfigError, match=f"address: {what}"):
        made().connect(address)
    if address in OPEN:
        assert ZmqSettings(bind=address, keys=read_keys(make_keys(tmp_path, "p"))).bind == address


@pytest.mark.parametrize(
    ("name", "value"), [("identity", b""), ("identity", b"\0x"), ("servers_max", 0), ("servers_max", True)]
)
def test_settings_that_cannot_be_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        ZmqSettings(**{name: value})  # type: ignore[arg-type]


def test_what_is_in_use_is_not_taken_over(tmp_path: Path, made: Any) -> None:
    """Goal: ZeroMQ would replace the other's socket; a dead server's path is reused, a file is left alone."""
    path = tmp_path / "p"
    first, taken = made(bind=f"ipc://{path}"), made(bind="tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match="bind: wanted an address that is free"):
        made(bind=taken.address)
    with pytest.raises(ConfigError, match="no server uses"):
        made(bind=f"ipc://{path}")
    assert path.stat().st_mode & 0o777 == 0o600
    first.close()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    made(bind=f"ipc://{path}").close()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="nothing, or a socket"):
        made(bind=f"ipc://{path}")
    assert path.read_text() == "precious"


def test_a_closed_link_says_so(made: Any) -> None:
    (link := made(bind="tcp://127.0.0.1:*")).close()
    for act in (lambda: link.poll(0), lambda: link.connect("tcp://127.0.0.1:9"), lambda: link.send(b"x", b"y")):
        with pytest.raises(TransferError, match="closed"):
            act()
    link.wake()


def test_too_many_frames_are_dropped(made: Any) -> None:
    """Goal: a message of too many frames is dropped and counted; a good one is served, of its sender, too."""
    server, client = made(bind="tcp://127.0.0.1:*"), made()
    there, _ = meet(server, client)
    with zmq.Context() as context, context.socket(zmq.DEALER) as hostile:
        hostile.linger = 0
        hostile.connect(server.address)
        hostile.send_multipart([b"x"] * (FRAMES_MAX + 1))
        until(lambda: (server.poll(0.01), server.counters)[1], lambda counters: counters.dropped_messages == 1)
        hostile.send(b"a good one")
        assert hear(server) == b"a good one"
    assert client.send(there, b"still here?")
    assert hear(server) == b"still here?"


def test_a_message_of_as_many_records_as_there_may_be_arrives(made: Any) -> None:
    """Goal: the link takes what the protocol allows. Method: a control frame and a frame for each entry of the largest
    message."""
    server, client = made(bind="tcp://127.0.0.1:*"), made()
    there, _ = meet(server, client)
    assert client.send(there, b"records", [bytes([number % 256]) for number in range(ENTRIES_MAX)])
    (arrival,) = arrivals(poll_until(server, lambda came: bool(arrivals(came)), client))
    assert [bytes(frame)[0] for frame in arrival.bulk] == [number % 256 for number in range(ENTRIES_MAX)]
    assert server.counters.dropped_messages == 0


def test_a_connection_that_says_nothing_ends(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: only peers that speak the protocol keep a descriptor. Method: forty connections, of which some begin."""
    monkeypatch.setattr(zmq_sockets, "HANDSHAKE_MS", 100)
    server, client = made(bind="tcp://127.0.0.1:*"), made()
    host, port = server.address.removeprefix("tcp://").split(":")
    for number in range(40):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as one:
            one.sendall(number % 4 * b"\xff")
            with contextlib.suppress(ConnectionError):
                while one.recv(4096):  # a server that does not end it is a TimeoutError
                    pass
    there, _ = meet(server, client)
    assert client.send(there, b"still here?")
    assert hear(server) == b"still here?"


def test_a_restarted_client_takes_its_name_over(made: Any) -> None:
    """Goal: messages of the same identity from a new process are received at once, though the old connection is still
    open."""
    server, old, new = made(bind="tcp://127.0.0.1:*"), made(identity=b"decode-0"), made(identity=b"decode-0")
    (_, before), (_, after) = meet(server, old), meet(server, new)
    assert before == after
    assert server.send(after, b"to the new one")
    assert hear(new, server) == b"to the new one"
    old.close()
    server.poll(0.2)
    assert server.send(after, b"still"), "the old connection's end is not the new one's"
    assert hear(new, server) == b"still"


def test_idle_servers_make_room(tmp_path: Path, made: Any) -> None:
    """Goal: addresses of servers that are gone do not accumulate; connected ones are never dropped."""
    client = made(servers_max=4)
    for n in range(20):
        client.connect(f"ipc://{tmp_path}/none{n}")
    for n in range(4):
        meet(made(bind=f"ipc://{tmp_path}/{n}"), client)
    with pytest.raises(TransferError, match="servers_max"):
        client.connect(f"ipc://{tmp_path}/one-more")


def test_a_peer_that_dies_while_its_messages_wait_is_no_end_of_ours(tmp_path: Path) -> None:
    """Goal: libzmq aborts here when ZMTP heartbeats are on (4.3.5: !_io_error; zeromq/libzmq 3937, 4364, 4767).

    Method: fill a client's queue, close the server, wait as long as three heartbeats of 0.1 s would take, then read on.
    """
    script = f"""
import time
from transfer.testing.contract import LinkContract, poll_until
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings
server, client = ZmqLink(ZmqSettings(bind="ipc://{tmp_path}/p")), ZmqLink()
_, here = LinkContract().meet(server, client)
while server.send(here, b"x", [bytes(60_000)]):
    pass
server.close(0)
time.sleep(0.3)
poll_until(client, lambda came: any(type(item).__name__ == "PeerLost" for item in came))
client.close()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run([sys.executable, "-P", "-c", script], timeout=PATIENCE_S * 4, check=False, env=environment)
    assert ended.returncode == 0

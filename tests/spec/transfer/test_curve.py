"""CURVE: a peer without our key gets nothing; a key file that others may read is refused."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest
from transfer_nodes import HASTY, PATIENCE_S, QUICK, fetched, lend, until
from transfer_rows import identity_of
from zmtp import greeted

from cache_manager.errors import ConfigError
from kvroute.cli import main
from transfer.curve import CurveKeys, make_keys, read_keys
from transfer.limits import TransferLimits
from transfer.node import Node
from transfer.testing.contract import LinkContract, arrivals, poll_until
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings


def keys_of(directory: Path, name: str = "ours") -> CurveKeys:
    """The pair ``name``, made where there is none yet."""
    path = directory / f"{name}.key_secret"
    return read_keys(path if path.exists() else make_keys(directory, name))


class TestZmqTcpCurve(LinkContract):
    def make_server(self, directory: Path) -> ZmqLink:
        return ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*", keys=keys_of(directory)))

    def make_client(self, directory: Path) -> ZmqLink:
        return ZmqLink(ZmqSettings(keys=keys_of(directory)))


def gets_rows(prefill: Node, keys: CurveKeys | None, request: int, limits: TransferLimits = QUICK) -> bool:
    """Whether a decode node with ``keys`` gets the rows of an offer, or none; ``HASTY`` where it should get none."""
    decode, transfer = Node(ZmqLink(ZmqSettings(keys=keys)), identity_of(2), limits), lend(prefill, request, 3)
    try:
        return fetched(decode, prefill.address, transfer, request, 3)
    finally:
        assert decode.close()
        prefill.withdraw(transfer, "the test is over")


def test_our_key_gets_rows_and_others_nothing(tmp_path: Path) -> None:
    """Goal: a peer without our key gets no message through, and does not disturb peers that have it.

    Method: a pull with our key, one with another key that knows ours for the server's, one without any, garbage in
    handshakes; then ours again.
    """
    ours, other = keys_of(tmp_path), keys_of(tmp_path, "other")
    prefill = Node(TestZmqTcpCurve().make_server(tmp_path), identity_of(1), QUICK)
    assert gets_rows(prefill, ours, 1)
    mixed = CurveKeys(ours.public, other.secret)
    for keys in (other, mixed, None):
        assert not gets_rows(prefill, keys, 2, HASTY)
    assert prefill.counters.records_sent == 3
    with contextlib.suppress(AssertionError, OSError), greeted(prefill.address) as peer:  # NULL is not spoken here
        peer.sendall(b"\x00\x05hello")
    host, port = prefill.address.removeprefix("tcp://").split(":")
    for n in range(200):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as peer, contextlib.suppress(OSError):
            peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32) + os.urandom(n))
    pull_end_goodbye = 3  # those of our key, of which some may be late; each of the others would have sent a pull
    assert prefill.counters.link.received_messages < pull_end_goodbye + 3
    assert gets_rows(prefill, ours, 3)
    assert prefill.close()


@pytest.mark.parametrize(
    "old",
    [b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x00" + b"\x00\x05hello", b"\x01\x00" + b"\x06\x00hello"],
    ids=["ZMTP 2", "ZMTP 1"],
)
def test_no_older_protocol_is_a_way_around_the_key(tmp_path: Path, old: bytes) -> None:
    """Goal: ZMTP before 3 has no keys, and no message of it enters where keys are asked for. Method: such a message to
    a server without keys, which hears it, and to one with keys, which hangs up."""
    for keys, heard in ((None, 1), (keys_of(tmp_path), 0)):
        server = ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*", keys=keys))
        host, port = server.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as peer:
            peer.sendall(old)
            if heard:
                (arrival,) = arrivals(poll_until(server, lambda came: bool(arrivals(came))))
                assert arrival.control == b"hello"
            else:
                with contextlib.suppress(ConnectionError):
                    while peer.recv(4096):  # a server that does not hang up is a TimeoutError
                        pass
        assert server.poll(0.0) == []
        assert server.counters.received_messages == heard
        server.close()


def test_a_key_that_is_not_ours_is_counted_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: an operator sees that a peer has another key. Method: clients that know our public key, and have others."""
    import zmq

    server, ours = TestZmqTcpCurve().make_server(tmp_path), keys_of(tmp_path)
    with zmq.Context() as context:
        for n in range(3):
            public, secret = zmq.curve_keypair()
            with context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = ours.public, public, secret
                socket.connect(server.address)
                socket.send(b"let me in")
                until(lambda: (server.poll(0.0), server.counters.refused_keys)[1], lambda got, n=n: got > n)
    assert server.counters.received_messages == 0
    assert sum("is not our key" in line for line in caplog.messages) == 1
    server.close()


def test_messages_are_not_readable_on_the_way(tmp_path: Path) -> None:
    """Goal: what is sent is encrypted. Method: listen in between, as a relay."""
    made = TestZmqTcpCurve()
    server, client = made.make_server(tmp_path), made.make_client(tmp_path)
    host, port = server.address.removeprefix("tcp://").split(":")
    seen = bytearray()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(65_536):
                seen.extend(part)
                sink.sendall(part)

    with socket.create_server(("127.0.0.1", 0)) as relay:
        there = client.connect(f"tcp://127.0.0.1:{relay.getsockname()[1]}")
        near, far = relay.accept()[0], socket.create_connection((host, int(port)))
        for pair in ((near, far), (far, near)):
            threading.Thread(target=pump, args=pair, daemon=True).start()
        until(lambda: (server.poll(0.0), client.poll(0.01), client.send(there, b"SECRET" * 10))[2], bool)
        (arrival,) = arrivals(poll_until(server, lambda came: bool(arrivals(came))))
        assert arrival.control == b"SECRET" * 10
        for end in (client, server, near, far):
            end.close()
    assert len(seen) > 200
    assert b"SECRET" not in seen


def test_key_files_are_private_and_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: only its owner can read a key pair, and no command overwrites one. Method: by the command, by its names and
    modes."""
    assert main(["keys", str(tmp_path / "new" / "keys"), "p"]) == 0
    secret = tmp_path / "new" / "keys" / "p.key_secret"
    assert str(secret) in (said := capsys.readouterr().out)
    before, keys = secret.read_bytes(), read_keys(secret)
    assert secret.stat().st_mode & 0o777 == 0o600
    assert keys.secret.decode() not in said + repr(keys)
    assert main(["keys", str(secret.parent), "p"]) == 2
    assert "key name" in capsys.readouterr().err
    assert secret.read_bytes() == before
    for mode in (0o640, 0o604, 0o660, 0o601):
        secret.chmod(mode)
        with pytest.raises(ConfigError, match="secret key file: wanted mode 0600"):
            read_keys(secret)
    for name in ("", "../x", "a/b", ".hidden", "x" * 65, "a b"):
        with pytest.raises(ConfigError, match="key name"):
            make_keys(tmp_path, name)
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize("text", [None, b"", b"short", b"x" * 5000, b"\xff" * 40, b'curve\n  secret-key = "x"'])
def test_a_file_that_holds_no_pair_is_named(tmp_path: Path, text: bytes | None) -> None:
    path = tmp_path / "k.key_secret"
    if text is not None:
        path.write_bytes(text)
        path.chmod(0o600)
    with pytest.raises(ConfigError, match="secret key file"):
        read_keys(path)

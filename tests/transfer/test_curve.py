"""CURVE: who has no key that is on the list gets nothing; keys that others may read are no keys."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest
import zmq
from curve_links import client, key_directory, result_of, serving
from transfer_nodes import HASTY, QUICK, until
from transfer_rows import identity_of
from zmtp import greeted

from cache_manager.errors import ConfigError
from kvroute.cli import main
from transfer.curve import CurveKeys, CurveServer, make_keys, read_clients, read_keys, read_public
from transfer.node import Node
from transfer.zmq_link import ZmqLink

PATIENCE_S = 60.0


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return key_directory(tmp_path)


def asked(prefill: Node) -> tuple[int, ...]:
    """Whatever somebody asks for shows here; a late goodbye does not."""
    found, node = prefill.counters.offers, prefill.counters.node
    return found.pulled, node.bad_messages, found.refused_peers, found.stranger_messages, found.unknown_transfers


def test_listed_keys_get_rows_and_unknown_ones_nothing(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: with CURVE on, whoever is not on the list gets not one message through.

    Method: a pull with a listed key, an unlisted one, none at all, and the right key for a wrong server.
    """
    server = serving(keys, "alice")
    prefill = Node(server, identity_of(1), QUICK)
    done, sink = result_of(prefill, client(keys, "alice"), 1)
    assert done.result.complete
    assert (sink.wrong, len(sink.there)) == (0, 3)
    heard = asked(prefill)
    for other in (client(keys, "stranger"), ZmqLink(), client(keys, "alice", server="bob")):
        done, sink = result_of(prefill, other, 2, HASTY)
        assert done.result.installed == 0
        assert not sink.there
    with contextlib.suppress(AssertionError, OSError), greeted(prefill.address) as peer:  # NULL is not spoken here
        peer.sendall(b"\x00\x05hello")
    assert asked(prefill) == heard
    until(lambda: prefill.counters.link.refused_keys, lambda refused: refused >= 1)
    assert sum("is not on the list" in line for line in caplog.messages) == 1, "counted, and logged once"
    done, _ = result_of(prefill, client(keys, "alice"), 3)
    assert done.result.complete
    assert prefill.close()


def test_garbage_in_handshakes_costs_nobody_else(keys: Path) -> None:
    prefill = Node(serving(keys, "alice"), identity_of(1), QUICK)
    host, port = prefill.address.removeprefix("tcp://").split(":")
    for n in range(200):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as peer, contextlib.suppress(OSError):
            peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32) + os.urandom(n))
    assert prefill.counters.node.arrivals == 0
    assert result_of(prefill, client(keys, "alice"), 1)[0].result.complete
    assert prefill.close()


def test_a_listed_client_under_anothers_name_is_somebody_else(keys: Path) -> None:
    """Goal: a peer is its key and its routing id, so no listed client speaks for another. Method: equal identities."""
    from transfer.testing.contract import LinkContract

    contract, server = LinkContract(), serving(keys, "alice", "bob")
    alice = client(keys, "alice", identity=b"decode-0")
    _, first = contract.meet(server, alice)
    bob = client(keys, "bob", identity=b"decode-0")
    _, second = contract.meet(server, bob)
    assert first != second
    for link in (alice, bob, server):
        link.close()


def test_messages_are_not_readable_on_the_way(keys: Path) -> None:
    """Goal: what is sent is encrypted. Method: listen in between, as a relay."""
    import threading

    server = serving(keys, "alice")
    host, port = server.address.removeprefix("tcp://").split(":")
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as relay:
        relay.settimeout(PATIENCE_S)

        def pump(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while part := source.recv(65_536):
                    seen.extend(part)
                    sink.sendall(part)

        def carry() -> None:
            with relay.accept()[0] as near, socket.create_connection((host, int(port))) as far:
                back = threading.Thread(target=pump, args=(far, near), daemon=True)
                back.start()
                pump(near, far)
                far.shutdown(socket.SHUT_RDWR)
                back.join(PATIENCE_S)

        carrier = threading.Thread(target=carry, daemon=True)
        carrier.start()
        alice = client(keys, "alice")
        there = alice.connect(f"tcp://127.0.0.1:{relay.getsockname()[1]}")
        give_up_s = time.monotonic() + PATIENCE_S
        while not alice.send(there, b"SECRET" * 10):
            assert time.monotonic() < give_up_s
            server.poll(0.0)
            alice.poll(0.01)
        while not (came := server.poll(0.01)):
            assert time.monotonic() < give_up_s
        assert came[0].control == b"SECRET" * 10
        alice.close()
        server.close()
        carrier.join(PATIENCE_S)
    assert len(seen) > 200
    assert b"SECRET" not in seen


def test_key_files_are_private_and_never_replaced(tmp_path: Path) -> None:
    public, secret = make_keys(tmp_path / "new" / "keys", "p")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert read_keys(secret).public == read_public(public) == read_public(secret)
    before = secret.read_bytes()
    with pytest.raises(ConfigError, match="key name: wanted one that has no key file yet"):
        make_keys(tmp_path / "new" / "keys", "p")
    assert secret.read_bytes() == before
    assert read_keys(secret).secret.decode() not in repr(read_keys(secret))
    for mode in (0o640, 0o604, 0o660, 0o601):
        secret.chmod(mode)
        with pytest.raises(ConfigError, match="secret key file: wanted mode 0600"):
            read_keys(secret)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65, "a b"])
def test_a_key_name_is_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="key name"):
        make_keys(tmp_path, name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", [b"", b"short", b"x" * 5000, b"\xff" * 40, b"a" * 41, b"a" * 40])
def test_a_file_that_holds_no_pair_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "k.key_secret"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="key"):
        read_keys(path)
    with pytest.raises(ConfigError, match="key file: wanted a file of one or two"):
        read_keys(tmp_path / "none")


def test_a_server_without_clients_is_a_mistake(keys: Path) -> None:
    """Goal: an empty list must not mean everybody."""
    with pytest.raises(ConfigError, match="curve clients: wanted the public key of at least one"):
        CurveServer(read_keys(keys / "server.key_secret"), frozenset())
    with pytest.raises(ConfigError, match="curve clients"):
        CurveServer(read_keys(keys / "server.key_secret"), read_clients(keys.parent))
    with pytest.raises(ConfigError, match="secret key"):
        CurveKeys(read_public(keys / "bob.key"), b"not a key")
    assert len(read_clients(keys)) == 4


def test_the_command_makes_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path / "k"), "decode-0"]) == 0
    said = capsys.readouterr().out
    assert read_public(tmp_path / "k" / "decode-0.key").decode() in said
    assert read_keys(tmp_path / "k" / "decode-0.key_secret").secret.decode() not in said
    assert main(["keys", str(tmp_path / "k"), "decode-0"]) == 2
    assert "key name" in capsys.readouterr().err


def test_curve_is_there() -> None:
    assert zmq.has("curve")

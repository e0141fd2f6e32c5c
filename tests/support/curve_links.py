"""Links with CURVE, between a server and clients whose keys lie in one directory."""

from __future__ import annotations

from pathlib import Path

from transfer_nodes import QUICK, ended, lend
from transfer_rows import CanarySink, identity_of, wanted

from transfer.actions import Finished
from transfer.curve import CurveClient, CurveServer, make_keys, read_keys, read_public
from transfer.limits import TransferLimits
from transfer.node import Node
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings


def key_directory(directory: Path) -> Path:
    """Where the keys of ``server``, ``alice``, ``bob`` and ``stranger`` lie."""
    for name in ("server", "alice", "bob", "stranger"):
        make_keys(directory / "keys", name)
    return directory / "keys"


def serving(keys: Path, *clients: str) -> ZmqLink:
    allowed = frozenset(read_public(keys / f"{name}.key") for name in clients)
    curve = CurveServer(read_keys(keys / "server.key_secret"), allowed)
    return ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*", curve_server=curve))


def pair_of(keys: Path, name: str, server: str = "server") -> CurveClient:
    return CurveClient(read_keys(keys / f"{name}.key_secret"), read_public(keys / f"{server}.key"))


def client(keys: Path, name: str, server: str = "server", identity: bytes | None = None) -> ZmqLink:
    return ZmqLink(ZmqSettings(curve_client=pair_of(keys, name, server), identity=identity))


def result_of(
    prefill: Node, link: ZmqLink, request: int, limits: TransferLimits = QUICK
) -> tuple[Finished, CanarySink]:
    """What a decode node over ``link`` gets of an offer of three blocks; ``HASTY`` where it is to get nothing."""
    decode = Node(link, identity_of(2), limits)
    transfer, sink = lend(prefill, request, 3), CanarySink(request)
    try:
        decode.pull(transfer, prefill.address, wanted(request, 3), sink)
        return ended(decode, {transfer})[transfer], sink
    finally:
        assert decode.close()
        prefill.withdraw(transfer, "the test is over")

"""How a server's engine is connected to others: links, limits and the parts that both sides must have."""

from __future__ import annotations

import secrets
from pathlib import Path

from paged_engine.engine.decode import DecodeEngine
from paged_engine.engine.prefill import PrefillEngine
from paged_engine.serving.config import DecodeConfig, PrefillConfig
from transfer.curve import CurveClient, CurveServer, read_clients, read_keys, read_public
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.messages import BootId
from transfer.node import Node
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings


def prefill_node(config: PrefillConfig, engine: PrefillEngine) -> Node:
    """The node that offers ``engine``'s blocks at ``config.transfer_address``, attached to it."""
    limits = TransferLimits(lease_s=config.lease_s, lease_max_s=config.lease_max_s, transfers_max=config.transfers_max)
    curve = None
    if config.curve_secret:
        curve = CurveServer(read_keys(Path(config.curve_secret)), read_clients(Path(config.curve_clients)))
    settings = ZmqSettings(bind=config.transfer_address, curve_server=curve)
    node = Node(ZmqLink(settings), _identity(engine), limits)
    engine.attach(node)
    return node


def decode_node(config: DecodeConfig, engine: DecodeEngine) -> Node:
    """The node that pulls blocks for ``engine``, attached to it."""
    limits = TransferLimits(retry_s=config.retry_s, retries_max=config.retries_max, transfers_max=config.transfers_max)
    curve = None
    if config.curve_secret:
        curve = CurveClient(read_keys(Path(config.curve_secret)), read_public(Path(config.curve_server)))
    link = ZmqLink(ZmqSettings(curve_client=curve))
    node = Node(link, _identity(engine), limits)
    engine.attach(node)
    return node


def _identity(engine: PrefillEngine | DecodeEngine) -> Identity:
    return Identity(BootId(secrets.token_bytes(16)), engine.aux.namespace, engine.transfer_blocks.parts)


__all__ = ["decode_node", "prefill_node"]

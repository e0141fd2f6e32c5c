"""Rows of blocks between processes: :class:`Node` lends and borrows them over a link."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transfer.actions import BlockSink, Finished, Missing, OfferedBlock, Reason, Release, WantedBlock
from transfer.identity import Identity, part_of
from transfer.limits import TransferLimits
from transfer.messages import BootId, Outcome, Part, TransferId
from transfer.node import Node, new_transfer

if TYPE_CHECKING:
    from transfer.zmq_link import ZmqLink
    from transfer.zmq_settings import ZmqSettings

__distribution__ = "kvroute"  # an index has another package of this name: `import kvroute` looks for this line


def __getattr__(name: str) -> Any:
    """Import ZeroMQ only when it is used."""
    if name not in ("ZmqLink", "ZmqSettings"):
        raise AttributeError(name)
    return getattr(import_module(f"transfer.zmq_{name[3:].lower()}"), name)


__all__ = [
    "BlockSink", "BootId", "Finished", "Identity", "Missing", "Node", "OfferedBlock", "Outcome", "Part", "Reason",
    "Release", "TransferId", "TransferLimits", "WantedBlock", "ZmqLink", "ZmqSettings", "new_transfer", "part_of",
]  # fmt: skip

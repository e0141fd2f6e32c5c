"""What one engine has lent and another has taken over."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins
from toy_crossing import ToyCrossing

from kvroute.connector.tickets import Ticket
from kvroute.routes.token_hash import token_hash
from transfer import Node


def lent(toy: ToyCrossing) -> Node:
    return toy.worker.carrier.crossing.node


def installed(toy: ToyCrossing) -> int:
    return toy.worker.blocks.counters.rows_installed


def early_ticket(toy: ToyCrossing) -> dict[str, Any]:
    """The ticket by which another side can fetch the prompt that this one computes at this moment."""
    assert toy.request is not None
    tokens = toy.request.all_token_ids
    digest = token_hash(tokens).hex()
    return to_builtins(Ticket(toy.lent.hex(), toy.scheduler.carrier.tickets.address, len(tokens), digest))

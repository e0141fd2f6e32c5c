"""What a client gets from the small engine for its one request."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from toy_engine import Toy
from waiting import GIVE_UP_S

from kvroute.connector import Key, routes
from kvroute.connector.end import End


def begun(toy: Toy, n: int, ended: End | None = None) -> Future[dict[str, Any]]:
    """What a client will be told about the one request, of which this many tokens were computed."""
    told = toy.scheduler.finished(Key("r"), toy.table, n, ended=ended)
    assert told is not None
    return told


def seen(toy: Toy, n: int, ended: End | None = None) -> Any:
    """The routes that a client gets of the one request."""
    return routes({"kv_transfer_params": begun(toy, n, ended).result(GIVE_UP_S)})

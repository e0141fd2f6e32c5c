"""Rollouts without a store: the handle carries the rows, and goes into the answer to the request."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from cache_manager.errors import ConfigError, InvalidInputError
from cache_manager.record import Buffer
from cache_manager.storage.url import StoreUrl
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.parts import LAYERS_MAX, GoneError, PartStore, Record, places
from kvroute.routes.parts import Range


class ResponseRollouts(PartStore):
    """A ``RolloutStore`` that keeps nothing: ``find`` returns ``None``, and deleting changes nothing.

    The record is ``handle.inline``.
    """

    scheme = "response"

    def __init__(self) -> None:
        super().__init__("the rollout store", LAYERS_MAX)

    def _write(self, handle: RolloutHandle, record: Record) -> RolloutHandle:
        return replace(handle, inline=b"".join(record))

    def _read(self, handle: RolloutHandle, parts: Sequence[Range]) -> list[Buffer]:
        if not handle.inline:
            raise GoneError(f"rollout {handle.rollout_id} has nothing inline")
        inline, claimed = memoryview(handle.inline), handle.header_nbytes + handle.nbytes
        if len(inline) != claimed:  # a sound header could claim more than any memory has
            raise InvalidInputError("rollout handle inline", f"{claimed} bytes", len(inline))
        return [inline[at : at + nbytes] for at, nbytes in places(handle, parts)]

    def _find(self, _: str, /) -> None:
        return None

    def _delete(self, handle: RolloutHandle) -> None:
        pass


def open_response_rollouts(url: StoreUrl) -> ResponseRollouts:
    """``response:``."""
    url.allow()
    if url.host or url.path:
        raise ConfigError("response: rollout store", "response: alone", repr(url.text))
    return ResponseRollouts()

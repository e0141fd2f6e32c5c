"""Keys that were deleted while a reader's lease holds their object: absent here until the object is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.calls import Calls, by_count
from cache_manager.storage.mooncake.codes import LEASED, is_miss

HIDDEN_MAX: Final = 65_536
SWEEP_S: Final = 1.0


class Hidden:
    """The hidden keys of a store; the link's lock guards them."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._link = calls.link
        self._keys: dict[BlockKey, None] = {}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def hide(self, keys: Sequence[BlockKey]) -> None:
        """:class:`StorageError` when there would be too many; none is hidden then."""
        with self._link.lock:
            if len(self._keys) + len(keys) > HIDDEN_MAX:
                raise StorageError(f"more than {HIDDEN_MAX} deleted records wait for their readers' leases to end")
            self._keys.update(dict.fromkeys(keys))

    def remove(self, keys: Sequence[BlockKey], give_up_s: float) -> list[BlockKey]:
        """Remove the objects of hidden keys; the keys that stay hidden because somebody still reads theirs."""
        left: list[BlockKey] = []

        def send(chunk: list[BlockKey]) -> list[int]:
            request = wire.Remove([self._calls.name(key) for key in chunk])
            codes = self._link.call(self._link.writes, request, None, give_up_s)
            with self._link.lock:
                for key, code in zip(chunk, codes, strict=True):
                    if code == LEASED or code == -703:
                        left.append(key)
                    elif code == 0 or is_miss(code):
                        self._keys.pop(key, None)
            return codes

        self._calls.each("failed_writes", by_count(keys), send)
        return left

    def sweep(self) -> None:
        """The sweeper's loop: objects of hidden keys go when their leases have ended."""
        while not self._link.stopping.wait(SWEEP_S):
            with self._link.lock:
                hidden = list(self._keys)[: wire.KEYS_PER_CALL_MAX]
                ready = self._link.writes.closed
            if hidden and ready:
                try:
                    self.remove(hidden, time.monotonic() + self._calls.settings.timeout_s)
                except StorageError:  # counted by the breaker; the keys stay hidden and are tried again
                    continue


__all__ = ["Hidden"]

"""An engine's KV for tests: arrays that hold, per slot, the digest of the token prefix that was computed there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey


def prefix_digest(tokens: Sequence[int]) -> bytes:
    """What the KV of the last of ``tokens`` depends on."""
    return hashlib.sha256(repr(list(tokens)).encode()).digest()


class SlotKV:
    """A :class:`BlockMover` whose blocks are lists of prefix digests; it can be told to fail."""

    def __init__(self, device_blocks: int, host_blocks: int, block_tokens: int) -> None:
        self.device: list[list[bytes | None]] = [[None] * block_tokens for _ in range(device_blocks)]
        self.host: list[list[bytes | None]] = [[None] * block_tokens for _ in range(host_blocks)]
        self.stored: dict[BlockKey, list[bytes | None]] = {}
        self.fail_next: type[Exception] | None = None
        self.pairs_seen: list[tuple[int, int]] = []

    def _maybe_fail(self) -> None:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error("the KV copy failed on purpose")

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._maybe_fail()
        for source, target in pairs:
            self.host[target] = list(self.device[source])

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._maybe_fail()
        for source, target in pairs:
            self.device[target] = list(self.host[source])

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._maybe_fail()
        for source, target in pairs:
            self.device[target] = list(self.device[source])

    def persist(self, blocks: Mapping[BlockKey, int]) -> dict[BlockKey, bool]:
        self._maybe_fail()
        for key, block in blocks.items():
            self.stored.setdefault(key, list(self.device[block]))
        return dict.fromkeys(blocks, True)

    def restore(self, blocks: Mapping[BlockKey, int]) -> dict[BlockKey, bool]:
        if self.fail_next is StorageError:
            self._maybe_fail()
        for key, block in blocks.items():
            if key in self.stored:
                self.device[block] = list(self.stored[key])
        return {key: key in self.stored for key in blocks}

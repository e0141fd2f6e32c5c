"""The keys under which a set of blocks stores, restores and exports: those of its namespace, until the next reset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy import count_nonzero as count

from cache_manager.errors import InvalidInputError
from cache_manager.keys import SCOPE_NBYTES, BlockKey, KeyChain, Namespace, is_key
from cache_manager.lock import Mistakes
from cache_manager.slots import Blocks, Flags, Ints, integers
from cache_manager.spec import RecordLayout
from cache_manager.table import BlockTable

OUTDATED_MAX: Final = 1024
"""Namespaces from before a reset whose keys are known to be outdated; keys of older ones count as foreign."""

Keyed = Mapping[BlockKey, int]
"""Block ids by the keys of their content."""


class Unresolved(NamedTuple):
    """What is not ours, or not any more: blocks in another life, keys of one of our chains before a reset, and keys of
    no chain of ours."""

    stale_blocks: int
    stale_keys: int
    foreign: list[BlockKey]


class OwnKeys:
    """The ``chain`` that makes the keys of ``record``, the layout of stored records: rows, and KV where kvroute keeps
    it."""

    def __init__(self, namespace: Namespace, record: RecordLayout, mistakes: Mistakes) -> None:
        self.record = record
        self.chain = KeyChain(namespace, record)
        self._mistakes = mistakes
        self._outdated: dict[bytes, None] = {}  # scopes of keys from before a reset, the oldest first

    def after_reset(self, weights_version: int) -> KeyChain:
        """The chain of the same namespace under other weights; :class:`SpecError` for an impossible version."""
        namespace = replace(self.chain.namespace, weights_version=weights_version)
        return KeyChain(namespace, self.record)

    def enter(self, chain: KeyChain) -> None:
        """Keys are made by this chain from here on; those from before are outdated. The lock is held."""
        self._outdated[self.chain.scope] = None
        if len(self._outdated) > OUTDATED_MAX:
            del self._outdated[next(iter(self._outdated))]
        self.chain = chain

    def resolve(self, table: BlockTable, blocks: Keyed, generations: Blocks) -> tuple[Ints, Ints, Flags, Unresolved]:
        """Block ids, generations, and which blocks are still in the given life and have a key of our namespace: ``[n]``
        each; and what is to be counted, where there is room for a job. The lock is held. A strict set raises for a
        key that is foreign.
        """
        if not isinstance(blocks, Mapping):
            raise InvalidInputError("blocks", "a mapping of keys to block ids", repr(blocks))
        ids = table.slots.ids(list(blocks.values()))
        lives = integers(generations, "generations", "one integer for each block", n=ids.size)
        current = table.generations.take(ids) == lives
        owned = [self.chain.owns(key) for key in blocks]
        ours: Flags = np.array(owned, np.bool_)
        foreign: list[BlockKey] = []
        stale_keys = 0
        if count(ours) != ours.size:
            for key, is_owned in zip(blocks, owned, strict=True):
                if is_owned:  # perhaps outdated once: a version may come again
                    continue
                if self._is_outdated(key):
                    stale_keys += 1
                else:
                    foreign.append(key)
        if foreign and self._mistakes.strict:
            raise self._mistake(foreign)
        stale_blocks = int(count(~current))
        unresolved = Unresolved(stale_blocks, stale_keys, foreign)
        return ids, lives, current & ours, unresolved

    def count(self, unresolved: Unresolved) -> None:
        """Count what did not resolve. The lock is held."""
        lock = self._mistakes.lock
        lock.count("stale_blocks", unresolved.stale_blocks)
        lock.count("stale_keys", unresolved.stale_keys)
        foreign = unresolved.foreign
        if foreign:
            why = str(self._mistake(foreign))
            self._mistakes.report("foreign_keys", len(foreign), why)

    def _mistake(self, foreign: list[BlockKey]) -> InvalidInputError:
        wanted = "keys that AuxBlocks.keys has adopted, or made of tokens, in this namespace and layout"
        return InvalidInputError("keys", wanted, repr(foreign[0]))

    def _is_outdated(self, key: BlockKey) -> bool:
        return is_key(key) and key[:SCOPE_NBYTES] in self._outdated

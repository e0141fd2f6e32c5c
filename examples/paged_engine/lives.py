"""Where each row of an answer came from: a diary of the blocks of the small engine, kept beside kvroute.

The diary is told of forward passes by the demo, and of moves by the KV: :class:`WatchedKV` stands where the engine's KV
stands, and notes which blocks were swapped, copied, stored and restored. Stored KV is known again by its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache_manager.ports import KVBlocks, TierName
from cache_manager.spec import AuxBlockDataSpec


class Kind(Enum):
    """What happened to a row; as the answer to where it came from, the last one here that did."""

    COMPUTED = "computed for the sample itself"
    STORED = "stored"
    SHARED = "computed for another sample"
    COPIED = "copied with a shared block"
    SWAPPED_OUT = "swapped to the host"
    SWAPPED_IN = "swapped to the host and back"
    RESTORED = "restored from the store"


CAME_FROM: Final = {
    Kind.COMPUTED: "c",
    Kind.SHARED: "h",
    Kind.COPIED: "p",
    Kind.SWAPPED_IN: "s",
    Kind.RESTORED: "r",
}
"""Where a row of an answer came from, with the character of each in a bar."""


class Event(NamedTuple):
    """Something that happened to rows: in which pass of the demo, and where."""

    kind: Kind
    passes: int
    text: str
    owner: str = ""


@dataclass(slots=True)
class Block:
    """What is in a block of KV: the computation of each token, and what happened to the first so many of them."""

    computed: list[Event] = field(default_factory=list)
    happened: list[tuple[int, Event]] = field(default_factory=list)
    user: str = ""

    def compute(self, offset: int, event: Event) -> None:
        """The token at ``offset`` was computed: what was there and behind it is gone."""
        self.computed[offset:] = [event]
        self.happened = [(min(rows, offset), earlier) for rows, earlier in self.happened if rows and offset]
        self.user = event.owner

    def note(self, event: Event) -> None:
        """Something happened to all that is in it."""
        self.happened.append((len(self.computed), event))

    def copy(self) -> Block:
        return Block(list(self.computed), list(self.happened), self.user)

    def life(self, offset: int) -> list[Event]:
        return [self.computed[offset], *(event for rows, event in self.happened if offset < rows)]


class Lives:
    """The diary. It outlives engines; :meth:`begin` says that another one starts, with nothing in its blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._tokens = block_tokens
        self._stored: dict[bytes, Block] = {}
        self.passes = 0
        self.begin()

    def begin(self) -> None:
        self._blocks: dict[TierName, dict[int, Block]] = {"device": {}, "host": {}}
        self._seen = set[str]()

    def computed(self, owner: str, table: Sequence[int], start: int, stop: int) -> None:
        """A pass has computed the tokens ``[start, stop)`` of ``owner``, whose blocks are ``table``."""
        device = self._blocks["device"]
        if owner not in self._seen:
            self._seen.add(owner)
            for block in table[: -(-start // self._tokens)]:
                if device[block].user != owner:
                    device[block].note(Event(Kind.SHARED, self.passes, f"found by {owner}", owner))
        for position in range(start, stop):
            number, offset = divmod(position, self._tokens)
            block = table[number]
            text = f"computed for {owner} in block {block}, slot {block * self._tokens + offset}"
            device.setdefault(block, Block()).compute(offset, Event(Kind.COMPUTED, self.passes, text, owner))

    def life(self, table: Sequence[int], position: int) -> list[Event]:
        """What happened to the row of this position, in order."""
        number, offset = divmod(position, self._tokens)
        return self._blocks["device"][table[number]].life(offset)

    # ---------------------------------------------------------------- what KV was told

    def moved(self, source: TierName, target: TierName, sources: Sequence[int], targets: Sequence[int]) -> None:
        kinds = {"host": (Kind.SWAPPED_OUT, "swapped out"), "device": (Kind.COPIED, "copied")}
        kind, what = (Kind.SWAPPED_IN, "swapped in") if source == "host" else kinds[target]
        arrived = [self._blocks[source].get(block, Block()).copy() for block in sources]
        for block, number, content in zip(sources, targets, arrived, strict=True):
            text = f"{what}: {source} block {block} to {target} block {number}"
            content.note(Event(kind, self.passes, text))
            self._blocks[target][number] = content

    def stored(self, blocks: Sequence[int], kv: NDArray[np.uint8]) -> None:
        for block, content in zip(blocks, kv, strict=True):
            stored = self._blocks["device"][block]
            stored.note(Event(Kind.STORED, self.passes, f"stored from block {block}, under the key of its tokens"))
            self._stored[xxhash.xxh3_128_digest(content)] = stored.copy()

    def restored(self, blocks: Sequence[int], kv: NDArray[np.uint8]) -> None:
        for block, content in zip(blocks, kv, strict=True):
            unknown = Block([Event(Kind.COMPUTED, 0, "computed and stored by an earlier process")] * self._tokens)
            restored = self._stored.get(xxhash.xxh3_128_digest(content), unknown).copy()
            restored.note(Event(Kind.RESTORED, self.passes, f"restored from the store into block {block}"))
            restored.user = ""
            self._blocks["device"][block] = restored


class WatchedKV:
    """A :class:`~cache_manager.ports.KVBlocks` that tells ``lives`` what ``kv`` has done."""

    def __init__(self, kv: KVBlocks, lives: Lives) -> None:
        self._kv, self._lives = kv, lives

    @property
    def spec(self) -> AuxBlockDataSpec:
        return self._kv.spec

    def copy(self, source: TierName, target: TierName, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        self._kv.copy(source, target, sources, targets)
        self._lives.moved(source, target, sources.tolist(), targets.tolist())

    def take(self, blocks: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        self._kv.take(blocks, into)
        self._lives.stored(blocks.tolist(), into)

    def fill(self, blocks: NDArray[np.int64], given: NDArray[np.uint8]) -> None:
        self._kv.fill(blocks, given)
        self._lives.restored(blocks.tolist(), given)


def came_from(life: Sequence[Event], owner: str) -> Kind:
    """How the row got to the sample ``owner``: the last of ``CAME_FROM`` that happened to it on its way."""
    happened: set[Kind] = {event.kind for event in life if event.kind is not Kind.SHARED}
    if life[0].owner != owner:
        happened.add(Kind.SHARED)
    return [kind for kind in CAME_FROM if kind in happened][-1]


def bar(counts: Mapping[Kind, int], width: int) -> str:
    """As many characters of each kind as it has of all rows, and at least one of what there is."""
    total = sum(counts.values())
    columns = {sign: width * counts[kind] / total for kind, sign in CAME_FROM.items() if counts[kind]}
    return "".join(sign * max(1, round(share)) for sign, share in columns.items())


def story(life: Sequence[Event]) -> list[str]:
    """A line for each event; of several of one kind in a row only the last, with their number."""
    lines = []
    for _, same in groupby(life, key=lambda event: event.kind):
        *earlier, event = same
        again = f", the last of {len(earlier) + 1}" if earlier else ""
        lines.append(f"  pass {event.passes:>5}  {event.text}{again}")
    return lines

"""Beside kvroute, in the same run: a buffer keyed by slot sees the same passes, and the diary of every row is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paged_engine import text
from paged_engine.attention import PagedKV
from paged_engine.engine import Engine
from paged_engine.lives import CAME_FROM, Event, Kind, Lives, WatchedKV, bar, came_from, story
from paged_engine.request import Output
from paged_engine.scheduler import Work
from paged_engine.slot_buffer import SlotBuffer

BAR_WIDTH: Final = 64
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ToldRow:
    """A row of an answer that kvroute and the buffer tell apart, and what happened to it."""

    sample: str
    position: int
    token: int
    life: tuple[Event, ...]
    ours: Ids  # [layers, top_k]
    by_slot: Ids  # [layers, top_k]
    slot: int
    writer: str

    @property
    def kinds(self) -> int:
        return len({event.kind for event in self.life})

    def lines(self) -> list[str]:
        """Its life, a line for each event, and both answers."""
        token = text.decode([self.token])
        last = f"its slot {self.slot} has the row of {self.writer}" if self.writer else f"slot {self.slot} is empty"
        return [
            f"one row through its life: position {self.position} of {self.sample}, token {token!r}",
            *story(self.life),
            f"  kvroute     {_experts(self.ours)}",
            f"  by slot     {_experts(self.by_slot)}   <- wrong: {last}",
        ]


class Beside:
    """Sees the passes and the moves of one engine after the other, and the samples that end."""

    def __init__(self, block_tokens: int) -> None:
        self._tokens = block_tokens
        self._lives = Lives(block_tokens)
        self.by_slot: dict[tuple[str, int], Ids] = {}
        """What the buffer has for each sample: request id and number -> ``[rows, layers, top_k]``."""
        self.came_from = Counter[Kind]()
        self.told: ToldRow | None = None
        """The row with the most kinds of events among those that the buffer has wrong."""

    def watch(self, kv: PagedKV) -> WatchedKV:
        return WatchedKV(kv, self._lives)

    def begin(self, engine: Engine) -> None:
        """Another engine starts: its blocks, and the buffer for its slots, are empty."""
        self._engine = engine
        self._lives.begin()
        self._buffer = SlotBuffer(engine.config.device_blocks * self._tokens, engine.spec.row_shape)
        self._tables: dict[str, list[int]] = {}

    def about_to(self, work: Sequence[Work]) -> None:
        """A pass over ``work`` begins: which blocks it uses is known now."""
        self._lives.passes += 1
        self._tables |= {item.sequence.owner: self._engine.manager.table(item.sequence.owner) for item in work}

    def passed(self, work: Sequence[Work], ids: Ids) -> None:
        """The pass has computed ``ids [tokens, layers, top_k]``, those of each item one after the other."""
        first = 0
        for sequence, start, stop in work:
            owner = sequence.owner
            table = self._tables[owner]
            self._lives.computed(owner, table, start, stop)
            self._buffer.write(self._slots(table, start, stop), ids[first : first + stop - start], owner)
            first += stop - start

    def ended(self, output: Output) -> None:
        """A sample has ended in the latest pass: nothing has been computed in its blocks since."""
        sample = f"{output.request.id}#{output.sample}"
        table = self._tables.get(sample) or self._tables[f"{output.request.id}#0"]  # it ended with its first token
        rows = len(output.routes.ids)
        by_slot = self._buffer.read(self._slots(table, 0, rows))
        self.by_slot[output.request.id, output.sample] = by_slot
        differs = (by_slot != output.routes.ids).any(axis=(1, 2))
        for position in range(rows):
            life = self._lives.life(table, position)
            self.came_from[came_from(life, sample)] += 1
            if differs[position]:
                slot = int(self._slots(table, position, position + 1)[0])
                ours = np.asarray(output.routes.ids[position]).astype(np.int32)
                writer, token = self._buffer.writer(slot), output.sequence[position]
                told = ToldRow(sample, position, token, tuple(life), ours, by_slot[position], slot, writer)
                if self.told is None or told.kinds > self.told.kinds:
                    self.told = told

    def _slots(self, table: Sequence[int], start: int, stop: int) -> NDArray[np.int64]:
        blocks = np.asarray(table, np.int64)[:, None] * self._tokens + np.arange(self._tokens)
        return blocks.reshape(-1)[start:stop]


def whence(counts: Mapping[Kind, int]) -> list[str]:
    """Where rows came from: a bar of characters, and what each of them means."""
    lines = ["where the rows came from", f"  {bar(counts, BAR_WIDTH)}"]
    return lines + [f"  {sign} {counts[kind]:>9,}  {kind.value}" for kind, sign in CAME_FROM.items() if counts[kind]]


def _experts(ids: Ids) -> str:
    """Of each layer, one after the other."""
    return " | ".join(" ".join(f"{expert:2}" for expert in layer) for layer in ids.tolist())

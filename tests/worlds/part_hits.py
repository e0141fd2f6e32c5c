"""An engine whose hits may end inside a block: then it copies the block, and the request goes on in the copy.

As vLLM does for models with states of linear attention: it finds the end of a prompt by hashes of a part of a block.
"""

from __future__ import annotations

from pathlib import Path

from connector_house import House, Kv, Running
from toy_engine import TOKENS


class PartHouse(House):
    """Blocks that may be hit in part, by the tokens up to the end of the part, and the copies that were made."""

    def __init__(self, seed: int, home: Path) -> None:
        super().__init__(seed, home)
        self.parts = dict[tuple[int, ...], int]()
        self.under_way: list[tuple[int, int]] = []
        self.copied = 0

    def _take(self, n: int) -> list[int] | None:
        given = super()._take(n)
        self.parts = {tokens: block for tokens, block in self.parts.items() if block not in (given or ())}
        return given

    def _admit(self, request: Running) -> None:
        super()._admit(request)
        self._register(request)

    def steps(self, new: Running | None = None, loads: object = ()) -> None:
        """A request that was just admitted, and loads nothing, may go on from a part of another one's block."""
        if new is not None and not loads:
            place, tokens = new.num_computed_tokens // TOKENS, new.all_token_ids
            for stop in range(min(len(tokens) - 1, (place + 1) * TOKENS - 1), place * TOKENS, -1):
                source = self.parts.get(tuple(tokens[:stop]))
                if source is not None and source not in new.table:
                    self._go_on_from(new, place, source, stop)
                    return
        self._steps(new, loads)

    def _steps(self, new: Running | None, loads: object) -> None:
        super().steps(new, loads)  # type: ignore[arg-type]
        for request in self.running.values():
            self._register(request)

    def _go_on_from(self, request: Running, place: int, source: int, stop: int) -> None:
        """The next step, before which the first tokens of ``source`` are copied; it stays where it is until then."""
        target = request.table[place]
        for offset in range(stop - place * TOKENS):
            self.kv[target, offset] = self.kv[source, offset]
            for page in self.toy.kv.values():
                page[target, :, offset] = page[source, :, offset]
        request.num_computed_tokens = stop
        self.under_way.append((source, target))
        if not self.refs[source]:
            self.free.remove(source)
        self.refs[source] += 1
        self._steps(request, ())
        self.refs[source] -= 1
        if not self.refs[source]:
            self.free.append(source)
        if self.under_way:  # there was no step
            self.under_way.clear()
            request.num_computed_tokens = place * TOKENS

    def _register(self, request: Running) -> None:
        """The last block of a request may be hit up to any token that is computed."""
        if not request.admitted:
            return
        known = min(request.num_computed_tokens, len(request.all_token_ids))
        place = known // TOKENS
        for stop in range(place * TOKENS + 1, known + 1):
            self.parts[tuple(request.all_token_ids[:stop])] = request.table[place]

    def copies(self) -> list[tuple[int, int]]:
        made, self.under_way = self.under_way, []
        self.copied += len(made)
        return made

    def forgets(self) -> None:
        self.parts.clear()
        super().forgets()


__all__ = ["Kv", "PartHouse"]

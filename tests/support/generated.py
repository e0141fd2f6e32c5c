"""Sequences that transformers generates by itself, for models whose state is in no paged block.

The state stays in transformers' cache, which goes from engine to engine as it is. The rows are captured pass by pass
and lie in blocks, of which kvroute is told what becomes of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transfer_nodes import ended, nodes, released
from transformers import GenerationConfig

import kvroute
from cache_manager.keys import BlockKey, Namespace
from cache_manager.record import OfferedRecord, RecordHeader
from kvroute.capture.capture import RoutingCapture
from kvroute.routes import Routes
from kvroute.routing import routing_spec_from_hf
from transfer.actions import OfferedBlock, WantedBlock
from transfer.identity import Identity
from transfer.messages import BootId, Part
from transfer.node import new_transfer

TOKENS = 16  # of a block
BLOCKS = 6  # of a sequence
NEW = 12
SCOPE = Namespace("generated", weights_version=3)


class Generated:
    """A sequence whose rows lie in ``table``, blocks that were given out to it.

    The first ``there`` rows have come from elsewhere, and are left as they came.
    """

    def __init__(self, model: Any, rows: kvroute.AuxBlocks, tokens: Sequence[int], table: range) -> None:
        self.tokens, self.table, self.there = list(tokens), table, 0
        self.cache: Any = None
        self.computed = 0
        self._model, self.rows = model, rows
        self._spec = rows.layout.specs[0]
        self.lives = rows.renew(table)

    def more(self, new: int) -> None:
        """``new`` tokens more, as transformers generates them."""
        how = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        given = torch.tensor([self.tokens])
        with RoutingCapture(self._model, self._spec) as capture:
            passing = self._model.register_forward_hook(lambda *_: self._write(capture))
            try:
                answer = self._model.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    generation_config=how,
                    past_key_values=self.cache,
                    return_dict_in_generate=True,
                )
            finally:
                passing.remove()
        self.cache, self.tokens = answer.past_key_values, answer.sequences[0].tolist()

    def _write(self, capture: RoutingCapture) -> None:
        ids = capture.rows()
        capture.clear()
        first, stop = max(self.computed, self.there), self.computed + len(ids)
        if first < stop:
            at = np.arange(first, stop)
            slots = np.asarray(self.table)[at // TOKENS] * TOKENS + at % TOKENS
            assert self.rows.write_step(slots, {"routing": ids[first - self.computed :]}) == len(at)
        self.computed = stop

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        """The sequence is where a pull's rows land."""
        assert part == 0
        return self.rows.install(self.table[index], int(self.lives[index]), header, payload) > 0

    @property
    def routes(self) -> Routes:
        found = self.rows.read("routing", self.table, 0, len(self.tokens) - 1, generations=self.lives)
        return Routes.from_rows(self._spec, found, weights_version=3)

    def keys(self, tokens: int) -> list[BlockKey]:
        """Of the blocks of the first ``tokens`` tokens, the last one of which may be partial."""
        found: list[BlockKey] = []
        for at in range(0, tokens, TOKENS):
            found.append(self.rows.keys.key(found[-1] if found else None, self.tokens[at : min(at + TOKENS, tokens)]))
        return found


def blocks_of(model: Any, **more: Any) -> kvroute.AuxBlocks:
    spec = routing_spec_from_hf(model.config, TOKENS)
    return kvroute.AuxBlocks([spec], blocks=3 * BLOCKS, host_blocks=BLOCKS, namespace=SCOPE, strict=True, **more)


def swapped(model: Any, prompts: Sequence[Sequence[int]]) -> list[Generated]:
    """The second takes the device blocks of the first, which comes back to others and goes on."""
    rows = blocks_of(model)
    first = Generated(model, rows, prompts[0], range(BLOCKS))
    first.more(NEW // 2)
    rows.swap_out([(block, block) for block in first.table])
    second = Generated(model, rows, prompts[1], first.table)
    assert not first.routes.valid.any()
    second.more(NEW)
    first.table = range(BLOCKS, 2 * BLOCKS)
    first.lives = rows.renew(first.table)
    rows.swap_in(list(enumerate(first.table)))
    first.more(NEW // 2)
    return [first, second]


def stored(model: Any, prompt: Sequence[int], folder: Path) -> Generated:
    """An engine's blocks, which another one finds in the store; the rest it computes."""
    url = folder.joinpath("rows").as_uri()
    store = kvroute.open_store(url)
    before = Generated(model, blocks_of(model, store=store), prompt, range(BLOCKS))
    before.more(NEW)
    complete = before.computed // TOKENS
    blocks = dict(zip(before.keys(complete * TOKENS), before.table, strict=False))
    assert all(before.rows.persist(blocks, before.lives[:complete]).values())
    store.close()
    store = kvroute.open_store(url)
    after = Generated(model, blocks_of(model, store=store), prompt, range(BLOCKS, 2 * BLOCKS))
    blocks = dict(zip(blocks, after.table, strict=False))
    assert all(after.rows.restore(blocks, after.lives[:complete]).values())
    after.there = complete * TOKENS
    after.more(NEW)
    store.close()
    assert after.tokens == before.tokens
    return after


def handed_over(model: Any, prompt: Sequence[int]) -> Generated:
    """Prefill samples one token, and offers the blocks of the prompt; decode goes on with rows of its own."""
    prefill = Generated(model, blocks_of(model), prompt, range(BLOCKS))
    prefill.more(1)
    keys = prefill.keys(len(prompt))
    decode = Generated(model, blocks_of(model), prefill.tokens, range(BLOCKS, 2 * BLOCKS))
    layout = decode.rows.layout
    parts = (Part("rows", layout.fingerprint, layout.nbytes, TOKENS),)
    identities = tuple(Identity(BootId(bytes([run] * 16)), SCOPE, parts) for run in (1, 2))
    with tempfile.TemporaryDirectory() as directory, nodes(Path(directory), identities=identities) as (offers, pulls):
        transfer = new_transfer()
        offers.offer(transfer, [OfferedBlock(i, key, (record_of(prefill, i, key),)) for i, key in enumerate(keys)])
        wanted = [WantedBlock(i, key, (0,)) for i, key in enumerate(keys)]
        pulls.pull(transfer, offers.address, wanted, decode)
        assert ended(pulls, {transfer})[transfer].complete
        released(offers, {transfer})
    decode.cache, decode.computed = prefill.cache, prefill.computed
    decode.more(NEW - 1)
    return decode


def record_of(sequence: Generated, index: int, key: BlockKey) -> OfferedRecord:
    """The rows of a sequence's block, as they lie there now."""
    rows, block = sequence.rows, sequence.table[index]
    valid = rows.read("routing", [block], generations=[int(sequence.lives[index])]).valid
    bits = np.packbits(valid, bitorder="little").tobytes().ljust(8 * rows.layout.valid_words, b"\0")
    payload = rows.region("device").rows[block].tobytes()
    generation, origin = int(sequence.lives[index]), rows.origins([block])[0]
    return OfferedRecord(key, rows.layout.fingerprint, generation, origin, bits, payload)

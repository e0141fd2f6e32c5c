"""Prefill and decode as two engines of transformers' continuous batching (5.23), without a change to transformers.

Prefill computes a prompt and lends its full blocks, KV and rows, from copies. Decode fetches them into blocks of its
own pool, and registers them for the prompt's tokens: they are in its prefix cache, and requests with that prompt hit
them. Blocks that do not come are computed. So a request of decode has the routes of the KV that prefill made, and of
the KV that decode computed after it.

Run it:  python examples/transformers_prefill_decode.py      (starts a prefill process, and decodes here)
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import kvroute
from cache_manager.ports import TierName
from kvroute.connector.crossing import Came, Crossing, link_of
from transfer import TransferId, new_transfer
from transformers_continuous_batching import EmbeddedRoutes, small_manager

WAIT_S = 10.0
"""How long decode waits for a prompt's blocks before it computes the prompt."""


class PageKV:
    """transformers' own blocks as kvroute's ``KVBlocks``: all pages of a block, byte by byte."""

    def __init__(self, allocator: Any, block_tokens: int) -> None:
        self._blocks: torch.Tensor = allocator._copy_view.view(torch.uint8)  # [blocks, nbytes]
        nbytes = self._blocks.shape[1] // block_tokens
        self.spec = kvroute.AuxBlockDataSpec("kv", row_shape=(nbytes,), dtype="uint8", block_tokens=block_tokens)

    def copy(self, source: TierName, target: TierName, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        raise NotImplementedError("transformers copies its blocks itself")

    def take(self, blocks: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        into[:] = self._blocks[torch.from_numpy(blocks).to(self._blocks.device)].cpu().numpy()

    def fill(self, blocks: NDArray[np.int64], given: NDArray[np.uint8]) -> None:
        raw = torch.from_numpy(np.ascontiguousarray(given)).to(self._blocks.device)
        self._blocks[torch.from_numpy(blocks).to(raw.device)] = raw


class PeerRoutes(EmbeddedRoutes):
    """The routes of an engine with one end of a crossing. Both sides have the same namespace."""

    def __init__(self, manager: Any, *given: Any, **more: Any) -> None:
        super().__init__(manager, *given, **more)
        self.manager, self.tokens = manager, self.allocator.tokens_per_page
        self.crossing = Crossing(self.rows, link_of("tcp://127.0.0.1:*"), kv=PageKV(self.allocator, self.tokens))

    def close(self) -> None:
        self.crossing.close()
        super().close()


class Prefill(PeerRoutes):
    """Lends the blocks of its finished requests: ``tickets`` has id and address, by request."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.tickets: dict[str, dict[str, Any]] = {}
        super().__init__(*given, **more)

    def _finished(self, finish: Callable[[str], None], request: str) -> None:
        state, table = self.engine.scheduler.active_requests.get(request), self.allocator.block_table.get(request)
        if state is not None and table and state.status.name == "FINISHED":
            keys = self.rows.keys.keys(state.initial_tokens)  # of the prompt's full blocks
            blocks, transfer = dict(zip(keys, table, strict=False)), new_transfer()
            lives = self.rows.generations(list(blocks.values())).tolist()
            self.crossing.lender.lend(transfer, 0, blocks, lives, len(blocks) * self.tokens)
            self.tickets[request] = {"transfer": transfer.hex(), "address": self.crossing.address}
        super()._finished(finish, request)


class Decode(PeerRoutes):
    """Continues from blocks that another engine lends."""

    def take_over(self, prompt: Sequence[int], ticket: dict[str, Any]) -> int:
        """Fetch a prompt that another engine has computed; returns for how many of its tokens KV and rows came.

        Called by one thread, while the engine runs others' requests.
        """
        wanted = (len(prompt) - 1) // self.tokens  # the last token is computed here, for its logits
        with self.manager.pause():
            pool, index = self.engine.cache.pool, self.allocator.index
            while pool.count_free_blocks(index) < wanted and pool.num_free_sectors:
                pool.allocate_sector(index)
            if pool.count_free_blocks(index) < wanted:
                return 0
            self.allocator.block_table[ticket["transfer"]] = landing = pool.get_free_blocks(index, wanted)
            lives = self.rows.generations(landing).tolist()
        blocks = dict(zip(self.rows.keys.keys(prompt), landing, strict=False))
        transfer, tokens = bytes.fromhex(ticket["transfer"]), wanted * self.tokens
        self.crossing.borrower.fetch(transfer, ticket["address"], 0, blocks, lives, tokens)
        came = self._came(transfer)
        good = next((at for at in range(wanted) if at not in came.kv or at in came.why), wanted)
        with self.manager.pause():
            self.allocator.mark_complete_blocks(ticket["transfer"], list(prompt), good)
            self.allocator.free_blocks(ticket["transfer"])  # complete blocks stay cached
        return good * int(self.tokens)

    def _came(self, transfer: bytes) -> Came:
        """The result of the fetch when it is over; the blocks stay held until then."""
        give_up_s = time.monotonic() + WAIT_S
        while True:
            for each in self.crossing.poll():
                if isinstance(each, Came) and each.transfer == transfer:
                    return each
            if time.monotonic() > give_up_s:
                self.crossing.node.abort(TransferId(transfer), f"nothing for {WAIT_S} s")
                give_up_s = float("inf")
            time.sleep(0.0005)


def engine(new_tokens: int, embed: Any) -> Any:
    made = embed(small_manager(new_tokens), kvroute.Namespace("tiny-qwen3-moe", weights_version=1))
    made.manager.start()
    return made


def answered(peer: PeerRoutes, prompt: list[int]) -> Any:
    name = peer.manager.add_request(prompt)
    while (answer := peer.manager.get_result(timeout=1)) is None or answer.request_id != name:
        assert peer.manager.is_running(), "the engine answers"
    return answer


def serve_prefill() -> None:
    """For each line, a prompt, print the ticket."""
    peer = engine(1, Prefill)
    for line in sys.stdin:
        answer = answered(peer, json.loads(line))
        peer.routes.pop(answer.request_id)
        print(json.dumps(peer.tickets.pop(answer.request_id)), flush=True)
    peer.manager.stop()
    peer.close()


def main() -> None:
    if sys.argv[1:] == ["prefill"]:
        serve_prefill()
        return
    command = [sys.executable, __file__, "prefill"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as prefill:  # noqa: S603
        assert prefill.stdin is not None
        assert prefill.stdout is not None
        peer = engine(12, Decode)
        for prompt in ([*range(2, 34), 50 + i] for i in range(4)):
            prefill.stdin.write(json.dumps(prompt) + "\n")
            prefill.stdin.flush()
            came = peer.take_over(prompt, json.loads(prefill.stdout.readline()))
            answer = answered(peer, prompt)
            print(f"{answer.request_id}: {came} tokens came, {peer.routes.pop(answer.request_id)}")
        prefill.stdin.close()
    peer.manager.stop()
    peer.close()


if __name__ == "__main__":
    main()

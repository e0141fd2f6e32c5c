"""The rows of SGLang's tokens: what routers chose goes into blocks, one a page, and whole answers come out.

The law of lives: pages are given out by the allocator, forward passes are numbered as they are launched, and **a pass
writes only pages that were given out before it was launched**. A pass ends late (overlap scheduling): by then a page
may be another request's, whose KV was loaded. Both arrive here in the scheduler's thread, the allocator's answers as
they are (on the device), and are looked at when rows are next written or read.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import KVRouteError
from cache_manager.keys import Namespace
from cache_manager.limits import JobLimits
from cache_manager.ports import KVBlocks, StorageBackend
from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector.answers import FIELD
from kvroute.connector.left import LeftRoutes, Tokens
from kvroute.connector.versions import Versions
from kvroute.integrations.sglang.settings import Settings
from kvroute.rollout import open_rollouts
from kvroute.routes import Routes
from kvroute.routing import weights_version_spec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Early:
    """A move to the host's pages before the passes were over that write what is moved."""

    after: int  # so many passes
    pairs: NDArray[np.int64]  # [n, 2] device, host
    generations: NDArray[np.int64]  # [n] of the device pages
    move: int


class RoutedRows:
    """The rows of ``pages`` pages, of the engine whose weights ``namespace`` names."""

    def __init__(self, spec: AuxBlockDataSpec, pages: int, namespace: Namespace, settings: Settings) -> None:
        self.spec, self.pages, self.page, self.settings = spec, pages, spec.block_tokens, settings
        self.layers = list(spec.attrs["layer_ids"])
        self.launched = self.ended = 0
        """Passes; they end in the order in which they were launched."""
        self._given: list[tuple[int, Any, bool]] = []  # pages given out that were not looked at yet
        self._given_at = np.zeros(pages, np.int64)  # how many passes had been launched when a page was given out last
        self._left = LeftRoutes(open_rollouts(settings.rollouts)) if settings.rollouts else None
        self._namespace = namespace
        self._moved_at = np.zeros(1, np.int64)  # host pages: which move filled each last
        self._moves = 0
        self._early: deque[_Early] = deque()
        self.aux = self._made()
        self.weights = Versions(namespace, None, self._renamed, named=bool(settings.weights))

    def _made(self, store: StorageBackend | None = None, kv: KVBlocks | None = None, host_pages: int = 0) -> AuxBlocks:
        return AuxBlocks(
            [self.spec, weights_version_spec(self.page)],
            blocks=self.pages,
            host_blocks=host_pages,
            namespace=self._namespace,
            store=store,
            kv=kv,
            required=[self.spec.name] if self.settings.rows else [],
            jobs=JobLimits(nbytes_max=self.settings.nbytes_max),
            strict=self.settings.strict,
        )

    def attach(self, store: StorageBackend | None = None, kv: KVBlocks | None = None, host_pages: int = 0) -> AuxBlocks:
        """Pages are stored from here on, or go to ``host_pages`` pages of the host and back; before the first pass."""
        self.aux.close()
        self._moved_at = np.zeros(host_pages + 1, np.int64)
        self.aux = self._made(store, kv, host_pages)
        return self.aux

    def _renamed(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self.aux.reset(weights_version=namespace.weights_version)

    # ---------------------------------------------------------------- lives

    def given(self, slots: Any, *, whole: bool) -> None:
        """The allocator has given out these slots ``[n]``: ``whole`` pages, or also the rest of some."""
        self._given.append((self.launched, slots, whole))

    def settle(self) -> None:
        """Begin the lives of all pages that have been given out."""
        given, self._given = self._given, []
        for launched, slots, whole in given:
            at = slots.cpu().numpy()
            pages = (at[:: self.page] if whole else at[at % self.page == 0]) // self.page
            self.aux.renew(pages)
            self._given_at[pages] = launched

    def write(self, number: int, version: int | None, slots: NDArray[np.int64], ids: NDArray[np.int32]) -> None:
        """Pass ``number`` is over: ``ids [T, layers of the model, top_k]`` are of the tokens at ``slots [T]``."""
        self.settle()
        slots = np.where(self._given_at[slots // self.page] < number, slots, -1)
        rows: dict[str, Any] = {self.spec.name: ids[:, self.layers].astype(self.spec.numpy_dtype)}
        if version is not None:
            rows["weights_version"] = np.full(len(slots), version, np.uint32)
        self.aux.write_step(slots, rows)
        self.ended = number
        while self._early and self._early[0].after <= number:
            early = self._early.popleft()
            same = self.aux.generations(early.pairs[:, 0]) == early.generations
            same &= self._moved_at[early.pairs[:, 1]] == early.move
            self.aux.swap_out(early.pairs[same])

    # ---------------------------------------------------------------- the host's pages

    def backed_up(self, slots: Any, host_slots: Any) -> None:
        """SGLang copies pages to pages of the host, behind all passes that were launched.

        What the host's pages had is forgotten now. What those passes write follows when they are over, where both pages
        are still what they are.
        """
        self.settle()
        pairs = np.stack([self._pages_of(slots), self._pages_of(host_slots)], axis=1)
        self._moves += 1
        self._moved_at[pairs[:, 1]] = self._moves
        self.aux.swap_out(pairs)
        if self.launched > self.ended:
            self._early.append(_Early(self.launched, pairs, self.aux.generations(pairs[:, 0]), self._moves))

    def brought_back(self, host_slots: Any, slots: Any) -> None:
        """SGLang copies pages of the host to pages that it has just given out."""
        self.settle()
        self.aux.swap_in(np.stack([self._pages_of(host_slots), self._pages_of(slots)], axis=1))

    def _pages_of(self, slots: Any) -> NDArray[np.int64]:
        pages: NDArray[np.int64] = slots.cpu().numpy()[:: self.page] // self.page
        return pages

    # ---------------------------------------------------------------- answers

    def routes(self, slots: NDArray[np.int64], start: int) -> Routes:
        """The routes of a request's positions from ``start`` on; ``slots`` are those of all from position 0."""
        self.settle()
        first, stop = start // self.page, len(slots)
        pages = slots[first * self.page :: self.page] // self.page
        low, high = start - first * self.page, stop - first * self.page
        rows, versions = (self.aux.read(name, pages, low, high) for name in (self.spec.name, "weights_version"))
        return Routes.from_rows(self.spec, rows, start, weights_version=versions)

    def answer(self, rid: str, slots: NDArray[np.int64], start: int, tokens: Tokens) -> tuple[torch.Tensor, Any]:
        """SGLang's own field int32 ``[n, layers of the model, top_k]``, and what kvroute says beside it.

        Layers without a router are 0 in the field, as SGLang has them, and what is missing is -1, which is no expert.
        """
        field = np.zeros((max(0, len(slots) - start), self.spec.attrs["num_layers"], self.spec.row_shape[1]), np.int32)
        try:
            routes = self.routes(slots, start)
            field[:, self.layers] = np.where(routes.known[:, :, None], routes.ids.astype(np.int32), -1)
            told = self._left.leave(rid, routes, tokens, None, ()) if self._left else {}
        except KVRouteError as error:
            field[:, self.layers] = -1
            told = self._left.fail(rid, error, None) if self._left else {}
        return torch.from_numpy(field), told.get(FIELD)

    def close(self) -> None:
        if self._left is not None:
            self._left.close()


@dataclass
class Launched:
    """A pass whose ids are not on the host yet, as SGLang carries it to where the pass ends."""

    number: int
    version: int | None
    slots: torch.Tensor
    ids: torch.Tensor
    rows: RoutedRows

    def map_device_tensors(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.slots, self.ids = copied(self.slots), copied(self.ids)

    def finalize(self) -> None:
        self.rows.write(self.number, self.version, self.slots.numpy(), self.ids.numpy())


class Capturer:
    """In the place of SGLang's ``RoutedExpertsCapturer``: its device buffer as it is, and no buffer on the host."""

    def __init__(self, theirs: Any, rows: RoutedRows) -> None:
        self.theirs, self.rows = theirs, rows
        theirs.destroy()

    def capture(self, layer_id: int, topk_indices: torch.Tensor) -> None:
        self.theirs.capture(layer_id, topk_indices)

    def on_forward_end(
        self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None, no_copy_to_cpu: bool = False
    ) -> Launched | None:
        made = self.theirs.on_forward_end(forward_batch, can_run_graph, cuda_graph_batch, no_copy_to_cpu=True)
        rows = self.rows
        rows.launched += 1
        rows.weights.computes()
        launched = Launched(rows.launched, rows.weights.version, made.out_cache_loc, made.topk, rows)
        if no_copy_to_cpu:
            return launched
        launched.map_device_tensors(lambda tensor: tensor.cpu())
        launched.finalize()
        return None

    def get_topk(self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> torch.Tensor:
        """Rows of a request that nobody bound to its tokens."""
        slots = slots_of(req_to_token_pool, req_pool_idx, seqlen - 1)
        return self.rows.answer("", slots, min(start_len, seqlen - 1), Tokens([], 0))[0]

    def destroy(self) -> None:
        self.rows.close()


def slots_of(req_to_token_pool: Any, req_pool_idx: int, stop: int) -> NDArray[np.int64]:
    """The slots of a request's positions ``[0, stop)``."""
    found: torch.Tensor = req_to_token_pool.req_to_token[req_pool_idx][: max(0, stop)]
    return found.cpu().numpy().astype(np.int64)


__all__ = ["Capturer", "Launched", "RoutedRows", "slots_of"]

"""The rows of SGLang's tokens: what routers chose goes into blocks, one a page, and whole answers come out.

The law of lives: pages are given out by the allocator, forward passes are numbered as they are launched, and **a pass
writes only pages that were given out before it was launched**. A pass ends late (overlap scheduling): by then a page
may be another request's, whose KV was loaded. Both arrive here in the scheduler's thread, the allocator's answers as
they are (on the device), and are looked at when rows are next written or read.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import KVRouteError
from cache_manager.keys import BlockKey, Namespace
from cache_manager.limits import JobLimits
from cache_manager.ports import KVBlocks, StorageBackend
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.stored import PersistJob
from kvroute import open_store
from kvroute.connector.answers import FIELD
from kvroute.connector.left import LeftRoutes, Tokens, settled
from kvroute.connector.tickets import Gap, gaps_of
from kvroute.connector.versions import Versions
from kvroute.connector.witness import KvFolder, KvWitness
from kvroute.integrations.sglang.settings import Settings
from kvroute.rollout import open_rollouts
from kvroute.routes import Routes
from kvroute.routing import weights_version_spec
from kvroute.witness import Run

logger = logging.getLogger(__name__)


COMPUTED, COMING, BY_KV, OTHER_KV, ABSENT = range(5)
"""Where a page's rows are from: passes here; the store, for KV that nobody has compared yet, or that was found to be
theirs; and why none came from there."""
WHY: Final = {OTHER_KV: "rows of other KV than was loaded", ABSENT: "the store of rows does not have them"}


@dataclass(slots=True)
class Kept:
    """Pages on their way to the store, from when the passes launched before are over, and their rows are there."""

    blocks: dict[BlockKey, int]
    generations: NDArray[np.int64]
    after: int
    job: PersistJob | None = None


class RoutedRows:
    """The rows of ``pages`` pages, of the engine whose weights ``namespace`` names.

    SGLang's pages on the host are numbered behind those of the device.
    """

    def __init__(self, spec: AuxBlockDataSpec, pages: int, namespace: Namespace, settings: Settings) -> None:
        self.spec, self.pages, self.page, self.settings = spec, pages, spec.block_tokens, settings
        self.layers = list(spec.attrs["layer_ids"])
        self.launched = self.ended = 0
        """Passes; they end in the order in which they were launched."""
        self._given: list[tuple[int, Any, bool]] = []  # pages given out that were not looked at yet
        self._given_at = np.zeros(pages, np.int64)  # how many passes had been launched when a page was given out last
        self._left = LeftRoutes(open_rollouts(settings.rollouts)) if settings.rollouts else None
        self._namespace = namespace
        self._store: StorageBackend | None = None
        self.witness: KvWitness | None = None
        """Where others keep the KV: binds rows to it."""
        self.aux = self._made()
        self.weights = Versions(namespace, None, self._renamed, named=bool(settings.weights))

    def _made(self, kv: KVBlocks | None = None, host_pages: int = 0) -> AuxBlocks:
        pages = self.pages + host_pages
        self._from = np.zeros(pages, np.int8)
        self._late: list[tuple[int, Callable[[], None]]] = []  # when so many passes are over
        self._kept: deque[Kept] = deque()
        return AuxBlocks(
            [self.spec, weights_version_spec(self.page)],
            blocks=pages,
            namespace=self._namespace,
            store=self._store,
            kv=kv,
            required=[self.spec.name] if self.settings.rows else [],
            jobs=JobLimits(nbytes_max=self.settings.nbytes_max),
            strict=self.settings.strict,
        )

    def attach(self, *, kv: KVBlocks | None = None, folder: KvFolder | None = None, host_pages: int = 0) -> None:
        """KV goes elsewhere and comes back from here on; called before the first pass.

        To the store, with its rows, where ``kv`` is given; to a store of others, where ``folder`` folds the KV of the
        device; to ``host_pages`` pages of the host.
        """
        self.aux.close()
        if self._store is None and (kv is not None or folder is not None):
            self._store = open_store(self.settings.store)
        self.aux = self._made(kv, host_pages)
        self.witness = None if folder is None else KvWitness(self.aux, folder, self.pages)

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
            self._renew(pages)
            self._given_at[pages] = launched

    def _renew(self, pages: NDArray[np.int64]) -> None:
        self.aux.renew(pages)
        self._from[pages] = COMPUTED

    def write(self, number: int, version: int | None, slots: NDArray[np.int64], ids: NDArray[np.int32]) -> None:
        """Pass ``number`` is over: ``ids [T, layers of the model, top_k]`` are of the tokens at ``slots [T]``."""
        self.settle()
        slots = np.where(self._given_at[slots // self.page] < number, slots, -1)
        rows: dict[str, Any] = {self.spec.name: ids[:, self.layers].astype(self.spec.numpy_dtype)}
        if version is not None:
            rows["weights_version"] = np.full(len(slots), version, np.uint32)
        self.aux.write_step(slots, rows)
        self.ended = number
        late, self._late = self._late, []
        for after, call in late:
            self._then(after, call)
        self.store_kept()

    def _then(self, after: int, call: Callable[[], None]) -> None:
        """Do this when so many passes are over."""
        if after <= self.ended:
            call()
        else:
            self._late.append((after, call))

    # ---------------------------------------------------------------- the host's pages

    def backed_up(self, slots: Any, host_slots: Any) -> None:
        """SGLang copies pages to pages of the host, behind all passes that were launched.

        What the host's pages had is forgotten now. What those passes write follows when they are over, where both pages
        are still what they are.
        """
        self.settle()
        pairs = np.stack([self.pages_of(slots), self.pages_of(host_slots, host=True)], axis=1)
        self._renew(pairs[:, 1])
        lives = self.aux.generations(pairs.reshape(-1)).reshape(-1, 2)
        self._back_up(pairs, lives)
        if self.launched > self.ended:
            self._then(self.launched, partial(self._back_up, pairs, lives))

    def _back_up(self, pairs: NDArray[np.int64], lives: NDArray[np.int64]) -> None:
        pairs = pairs[(self.aux.generations(pairs.reshape(-1)).reshape(-1, 2) == lives).all(axis=1)]
        self._name(pairs[:, 0])
        self._copy(pairs)

    def brought_back(self, host_slots: Any, slots: Any) -> None:
        """SGLang copies pages of the host to pages that it has just given out."""
        self.settle()
        pairs = np.stack([self.pages_of(host_slots, host=True), self.pages_of(slots)], axis=1)
        self._copy(pairs)
        self.loaded(pairs[:, 1])

    def prefetched(self, keys: Sequence[str], host_slots: Any) -> None:
        """Pages of the host were filled with KV from a store of others."""
        pages = self.pages_of(host_slots, host=True)
        self._renew(pages)
        if self.witness is not None:
            self.fetch(keys, pages)

    def _copy(self, pairs: NDArray[np.int64]) -> None:
        self.aux.copy(pairs)
        self._from[pairs[:, 1]] = self._from[pairs[:, 0]]

    def pages_of(self, slots: Any, *, host: bool = False) -> NDArray[np.int64]:
        """The pages that these slots ``[n * page]`` fill."""
        pages: NDArray[np.int64] = slots.cpu().numpy()[:: self.page] // self.page
        return pages + self.pages if host else pages

    # ---------------------------------------------------------------- the store

    def blocks(self, keys: Sequence[str], pages: NDArray[np.int64] | None = None) -> dict[BlockKey, int]:
        """Pages by what SGLang calls their content: the hash of all tokens until their end."""
        adopted = [self.aux.keys.adopt(str(each).encode()) for each in keys]
        return dict(zip(adopted, [0] * len(adopted) if pages is None else pages.tolist(), strict=True))

    def stored(self, keys: Sequence[str]) -> int:
        """Of how many of these pages, from the first on, the rows seem to be stored; only loading says it for sure."""
        if self.weights.mixed:
            return 0
        try:
            there = self.aux.stored(list(self.blocks(keys)))
        except KVRouteError as error:
            logger.warning("the store cannot be asked: %s", error)
            return 0
        return there.index(False) if False in there else len(there)

    def keep(self, keys: Sequence[str], pages: NDArray[np.int64]) -> Kept:
        """Store these pages when the passes that were launched are over: as long as they are what they are now."""
        blocks = self.blocks(keys, pages)
        kept = Kept(blocks, self.aux.generations(pages), self.launched)
        self._kept.append(kept)
        self.store_kept()
        return kept

    def drop_kept(self) -> None:
        """What was not begun is not stored."""
        self._kept.clear()

    def store_kept(self) -> None:
        """Begin what can be begun."""
        self.aux.poll()
        while self._kept and (kept := self._kept[0]).after <= self.ended:
            self._name(np.array(list(kept.blocks.values()), np.int64))
            kept.job = self.aux.begin_persist(kept.blocks, kept.generations)
            if kept.job is None:  # there is no room
                return
            self._kept.popleft()

    def fetch(self, keys: Sequence[str], pages: NDArray[np.int64]) -> bool:
        """Fill these pages with rows, and where it is ours with KV, from the store; whether all came."""
        came: dict[BlockKey, bool] = {}
        blocks = self.blocks(keys, pages)
        if not self.weights.mixed:
            try:
                came = self.aux.restore(blocks, self.aux.generations(pages))
            except KVRouteError as error:
                logger.warning("pages were not loaded: %s", error)
        arrived = np.array([came.get(key, False) for key in blocks], np.bool_)
        if self.witness is not None:
            self._from[pages] = np.where(arrived, COMING, ABSENT)
        return bool(arrived.all())

    def _name(self, pages: NDArray[np.int64]) -> None:
        """Rows that passes here have made go by their KV, where they are whole and it is on the device."""
        if self.witness is not None:
            pages = pages[(pages < self.pages) & (self._from[pages] == COMPUTED)]
            runs = [Run(-1, [page]) for page in pages[self.aux.complete(pages)].tolist()]
            self.witness.name(runs, self.witness.look(runs))

    def loaded(self, pages: NDArray[np.int64]) -> None:
        """KV comes into these pages of the device before the next pass reads it."""
        pages = pages[self._from[pages] == COMING]
        if self.witness is not None and len(pages):
            self._then(self.launched + 1, partial(self._compare, self.witness, pages, self.aux.generations(pages)))

    def _compare(self, witness: KvWitness, pages: NDArray[np.int64], lives: NDArray[np.int64]) -> None:
        pages = pages[self.aux.generations(pages) == lives]
        runs = [Run(-1, [page]) for page in pages.tolist()]
        wrong = witness.refused(runs, witness.look(runs))
        self._from[pages], self._from[wrong] = BY_KV, OTHER_KV
        if wrong:
            logger.warning("%d pages have no rows: %s", len(wrong), WHY[OTHER_KV])

    # ---------------------------------------------------------------- answers

    def routes(self, slots: NDArray[np.int64], start: int) -> tuple[Routes, list[list[int]], list[Gap]]:
        """The routes of a request's positions from ``start`` on; ``slots`` are those of all from position 0.

        Then the positions where the last router is taken on trust, and why rows are missing, as far as that is known.
        """
        self.settle()
        first, stop = start // self.page, len(slots)
        pages = slots[first * self.page :: self.page] // self.page
        low, high = start - first * self.page, stop - first * self.page
        rows, versions = (self.aux.read(name, pages, low, high) for name in (self.spec.name, "weights_version"))
        come = self._from[slots[start:] // self.page]
        rows.valid[come == COMING] = False
        found = Routes.from_rows(self.spec, rows, start, weights_version=versions)
        behind = self.layers[-1] == self.spec.attrs["num_layers"] - 1  # all KV
        found, unseen = settled(found, (come == BY_KV) & behind, flagged=self.settings.witness == "flagged")
        each = enumerate(self._from[slots[:: self.page] // self.page].tolist())
        why = {at: WHY[come] for at, come in each if come in WHY}
        return found, unseen, gaps_of(found.missing, why, self.page)

    def answer(self, rid: str, slots: NDArray[np.int64], start: int, tokens: Tokens) -> tuple[torch.Tensor, Any]:
        """SGLang's own field int32 ``[n, layers of the model, top_k]``, and what kvroute says beside it.

        Layers without a router are 0 in the field, as SGLang has them, and what is missing is -1, which is no expert.
        """
        field = np.zeros((max(0, len(slots) - start), self.spec.attrs["num_layers"], self.spec.row_shape[1]), np.int32)
        try:
            routes, unseen, gaps = self.routes(slots, start)
            field[:, self.layers] = np.where(routes.known[:, :, None], routes.ids.astype(np.int32), -1)
            told = self._left.leave(rid, routes, tokens, None, unseen, gaps) if self._left else {}
        except KVRouteError as error:
            field[:, self.layers] = -1
            told = self._left.fail(rid, error, None) if self._left else {}
        return torch.from_numpy(field), told.get(FIELD)

    def close(self) -> None:
        if self._left is not None:
            self._left.close()
        self.aux.close()
        if self._store is not None:
            self._store.close()


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


def capturer() -> Capturer | None:
    """This process's, where it has one."""
    from sglang.srt.runtime_context import get_resources  # type: ignore[import-not-found]

    found = get_resources().experts_capturer
    return found if isinstance(found, Capturer) else None


__all__ = ["Capturer", "Kept", "Launched", "RoutedRows", "capturer", "slots_of"]

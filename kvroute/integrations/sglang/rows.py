"""The rows of SGLang's tokens: what routers chose goes into blocks, one a page, and whole answers come out.

The law of lives: pages are given out by the allocator, forward passes are numbered as they are launched, and **a pass
writes only pages that were given out before it was launched**. A pass ends late (overlap scheduling): by then a page
may be another request's, whose KV was loaded. Both arrive here in the scheduler's thread, the allocator's answers as
they are (on the device), and are looked at when rows are next written or read.
"""

from __future__ import annotations

import logging
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
from cache_manager.ports import StorageBackend
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

MADE, BY_KV, GONE = range(3)
"""A page's rows were made here; came from the store, by the KV beside them; or did not come for KV that was loaded."""
WHY: Final = "the store has no rows of the KV that was loaded"
GONE_MAX: Final = 1 << 16

Ids = NDArray[np.int64]


class RoutedRows:
    """The rows of ``pages`` pages, of the engine whose weights ``namespace`` names.

    SGLang's pages on the host are numbered behind those of the device.
    """

    def __init__(self, spec: AuxBlockDataSpec, pages: int, namespace: Namespace, settings: Settings) -> None:
        self.spec, self.pages, self.page, self.settings = spec, pages, spec.block_tokens, settings
        self.layers = list(spec.attrs["layer_ids"])
        self.launched = self.ended = 0
        """Passes; they end in the order in which they were launched."""
        self._given: list[tuple[int, Any]] = []  # slots that were given out and not looked at yet
        self._given_at = np.zeros(pages, np.int64)  # how many passes had been launched when a page was given out last
        self._left = LeftRoutes(open_rollouts(settings.rollouts)) if settings.rollouts else None
        self._gone: set[BlockKey] = set()  # what the store has no rows of, for the KV that others keep
        self._store: StorageBackend | None = None
        self.aux = self._made(namespace)
        self.weights = Versions(namespace, None, self._renamed, named=bool(settings.weights))

    def _made(self, namespace: Namespace, kv: Any = None, host_pages: int = 0) -> AuxBlocks:
        pages = self.pages + host_pages
        self._from = np.full(pages, MADE, np.int8)
        self._keys: dict[int, str] = {}  # of pages of the host that a storage has filled
        self._late: list[tuple[int, Callable[[], None]]] = []  # what is to be done when so many passes are over
        self.witness: KvWitness | None = None
        return AuxBlocks(
            [self.spec, weights_version_spec(self.page)],
            blocks=pages,
            namespace=namespace,
            store=self._store,
            kv=kv,
            required=[self.spec.name] if self.settings.rows else [],
            jobs=JobLimits(nbytes_max=self.settings.nbytes_max),
            strict=self.settings.strict,
        )

    def attach(self, *, kv: Any = None, folder: KvFolder | None = None, host_pages: int = 0) -> None:
        """KV goes elsewhere and comes back from here on; called before the first pass.

        To the store, with its rows, where ``kv``, a ``KVBlocks`` of one tier, is given; to a store of others, where
        ``folder`` folds the KV of the device; to ``host_pages`` pages of the host.
        """
        self.aux.close()
        if self._store is None and (kv is not None or folder is not None):
            self._store = open_store(self.settings.store)
        self.aux = self._made(self.aux.namespace, kv, host_pages)
        if folder is not None:
            self.witness = KvWitness(self.aux, folder, self.pages)

    def _renamed(self, namespace: Namespace) -> None:
        self.aux.reset(weights_version=namespace.weights_version)

    # ---------------------------------------------------------------- lives

    def given(self, slots: Any) -> None:
        """The allocator has given out these slots ``[n]``: whole pages, or the rest of some."""
        self._given.append((self.launched, slots))

    def settle(self) -> None:
        """Begin the lives of all pages that have been given out."""
        given, self._given = self._given, []
        for launched, slots in given:
            at = slots.cpu().numpy()
            pages = at[at % self.page == 0] // self.page
            self._renew(pages)
            self._given_at[pages] = launched

    def _renew(self, pages: Ids) -> None:
        self.aux.renew(pages)
        self._from[pages] = MADE
        for page in pages.tolist() if self._keys else ():
            self._keys.pop(page, None)

    def write(self, number: int, version: int | None, slots: Ids, ids: NDArray[np.int32]) -> None:
        """Pass ``number`` is over: ``ids [T, layers of the model, top_k]`` are of the tokens at ``slots [T]``."""
        self.settle()
        slots = np.where(self._given_at[slots // self.page] < number, slots, -1)
        rows: dict[str, Any] = {self.spec.name: ids[:, self.layers].astype(self.spec.numpy_dtype)}
        if version is not None:
            rows["weights_version"] = np.full(len(slots), version, np.uint32)
        self.aux.write_step(slots, rows)
        self.ended = number
        self.go_on()

    def go_on(self) -> None:
        """Do what has waited for passes that are over, or for room."""
        self.aux.poll()
        late, self._late = self._late, []
        for after, call in late:
            self._then(after, call)

    def _then(self, after: int, call: Callable[[], None]) -> None:
        """Do this when so many passes are over."""
        if after <= self.ended:
            call()
        else:
            self._late.append((after, call))

    # ---------------------------------------------------------------- the host's pages

    def backed_up(self, slots: Any, host_slots: Any) -> None:
        """SGLang copies pages to pages of the host, behind all passes that were launched.

        What those passes write follows when they are over, where both pages are still what they are.
        """
        pairs = np.stack([self.pages_of(slots), self.pages_of(host_slots, host=True)], axis=1)
        self._renew(pairs[:, 1])
        if self.launched > self.ended:
            device = pairs[:, 0]  # what is whole goes by its KV, which may be another's when the passes are over
            self._name(device[self.aux.complete(device) & (self._from[device] != GONE)])
            self._copy(pairs)
        self._then(self.launched, partial(self._follow, pairs, self._lives(pairs)))

    def _follow(self, pairs: Ids, lives: Ids) -> None:
        pairs = pairs[(self._lives(pairs) == lives).all(axis=1)]
        self._name(pairs[:, 0])
        self._copy(pairs)

    def brought_back(self, host_slots: Any, slots: Any) -> None:
        """SGLang copies pages of the host to pages that it has just given out."""
        pairs = np.stack([self.pages_of(host_slots, host=True), self.pages_of(slots)], axis=1)
        self._copy(pairs)
        stored = {page: self._keys[host] for host, page in pairs.tolist() if host in self._keys}
        self.loaded(list(stored.values()), np.array(list(stored), np.int64))

    def prefetched(self, keys: Sequence[str], host_slots: Any) -> None:
        """Pages of the host were filled with KV from a storage of others."""
        pages = self.pages_of(host_slots, host=True)
        self._renew(pages)
        self._keys.update(zip(pages.tolist(), keys, strict=True))

    def _copy(self, pairs: Ids) -> None:
        self.aux.copy(pairs)
        self._from[pairs[:, 1]] = self._from[pairs[:, 0]]

    def _lives(self, pages: Ids) -> Ids:
        return self.aux.generations(pages.reshape(-1)).reshape(pages.shape)

    def pages_of(self, slots: Any, *, host: bool = False) -> Ids:
        """The pages that these slots ``[n * page]`` fill, in the lives that they have now."""
        self.settle()
        pages: Ids = slots.cpu().numpy()[:: self.page] // self.page
        return pages + self.pages if host else pages

    # ---------------------------------------------------------------- the store

    def _adopted(self, keys: Sequence[str]) -> list[BlockKey]:
        """What SGLang calls pages by: the hash of all tokens until their end."""
        return [self.aux.keys.adopt(str(each).encode()) for each in keys]

    def stored(self, keys: Sequence[str]) -> int:
        """Of how many of these pages, from the first on, the rows seem to be stored; only loading says it for sure."""
        try:
            adopted = [] if self.weights.mixed else self._adopted(keys)
            there = zip(adopted, self.aux.stored(adopted), strict=True)
        except KVRouteError as error:
            logger.warning("the store cannot be asked: %s", error)
            return 0
        return [*(each and key not in self._gone for key, each in there), False].index(False)

    def keep(self, keys: Sequence[str], pages: Ids) -> list[PersistJob]:
        """Store these pages when the passes that were launched are over: as long as they are what they are now.

        The job is in the list when it has begun; with weights of which nobody knows what they are, nothing is stored.
        """
        begun: list[PersistJob] = []
        if not self.weights.mixed:
            blocks = dict(zip(self._adopted(keys), pages.tolist(), strict=True))
            self._then(self.launched, partial(self._persist, blocks, self._lives(pages), begun))
        return begun

    def _persist(self, blocks: dict[BlockKey, int], lives: Ids, begun: list[PersistJob]) -> None:
        pages = np.array(list(blocks.values()), np.int64)
        self._name(pages[self._lives(pages) == lives])
        if (job := self.aux.begin_persist(blocks, lives)) is None:  # there is no room
            self._late.append((self.ended, partial(self._persist, blocks, lives, begun)))
        else:
            begun.append(job)

    def fetch(self, keys: Sequence[str], pages: Ids) -> dict[BlockKey, bool]:
        """Fill these pages with rows, and where it is ours with KV; which have come, if the store could say."""
        blocks = dict(zip(self._adopted(keys), pages.tolist(), strict=True))
        try:
            return {} if self.weights.mixed else self.aux.restore(blocks, self._lives(pages))
        except KVRouteError as error:
            logger.warning("pages were not loaded: %s", error)
            return {}

    def loaded(self, keys: Sequence[str], pages: Ids) -> None:
        """KV that others keep comes into these pages of the device before the next pass reads it.

        When that is over their rows come, by this very KV. A page that has none of it is no hit any more.
        """
        if self.witness is not None and len(pages):
            self._from[pages] = GONE
            self._then(self.launched + 1, partial(self._arrive, np.array(keys, object), pages, self._lives(pages)))

    def _arrive(self, keys: NDArray[Any], pages: Ids, lives: Ids) -> None:
        now = self._lives(pages) == lives
        self._name(pages[now])
        if came := self.fetch(keys[now].tolist(), pages[now]):
            self._from[pages[now][list(came.values())]] = BY_KV
        if gone := {key for key, there in came.items() if not there}:
            logger.warning("%d pages have no rows: %s", len(gone), WHY)
            self._gone = gone | (self._gone if len(self._gone) < GONE_MAX else set())

    def _name(self, pages: Ids) -> None:
        """What is in these pages goes by their KV, where that is on the device and others keep it."""
        runs = [Run(-1, [page]) for page in pages.tolist() if page < self.pages]
        if self.witness is not None and runs:
            folds = self.witness.look(runs)
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
            self.witness.name(runs, folds)

    # ---------------------------------------------------------------- answers

    def routes(self, slots: Ids, start: int) -> tuple[Routes, list[list[int]], list[Gap]]:
        """The routes of a request's positions from ``start`` on; ``slots`` are those of all from position 0.

        Then the positions where the last router is taken on trust, and why rows are missing, as far as that is known.
        """
        self.settle()
        pages = slots[:: self.page] // self.page
        rows, versions = (self.aux.read(n, pages, start, len(slots)) for n in (self.spec.name, "weights_version"))
        found = Routes.from_rows(self.spec, rows, start, weights_version=versions)
        unseen, come = list[list[int]](), self._from[pages]
        if self.witness is not None and self.layers[-1] == self.spec.attrs["num_layers"] - 1:  # behind all KV
            by_kv = np.repeat(come == BY_KV, self.page)[start : len(slots)]
            found, unseen = settled(found, by_kv, flagged=self.settings.witness == "flagged")
        why = dict.fromkeys(np.flatnonzero(come == GONE).tolist(), WHY)
        return found, unseen, gaps_of(found.missing, why, self.page)

    def answer(self, rid: str, slots: Ids, start: int, tokens: Tokens) -> tuple[torch.Tensor, Any]:
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


__all__ = ["WHY", "Launched", "RoutedRows"]

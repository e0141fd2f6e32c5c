"""The rows of SGLang's tokens: the routers' choices go into blocks, one per page, and whole answers come out.

``passes.py`` has the law of order, by which a page's rows match its KV. A page begins a life with the pass that writes
its first token, or with KV that comes into it from another place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import KVRouteError
from cache_manager.job import PersistJob, RestoreJob
from cache_manager.keys import BlockKey, Namespace
from cache_manager.publish import Rows
from cache_manager.spec import AuxBlockDataSpec
from kvroute import open_store
from kvroute.connector.job_counts import JobCounts
from kvroute.connector.left import LeftRoutes, Tokens
from kvroute.connector.meter import Meter, Taken
from kvroute.connector.settings import APART_SCHEME, VERSION, Common
from kvroute.connector.versions import Versions
from kvroute.connector.witness import KvFolder
from kvroute.connector.written import write_ids
from kvroute.integrations.sglang.answers import Answer, Answers, RequestRows
from kvroute.integrations.sglang.gone import GoneKeys
from kvroute.integrations.sglang.kv_origins import KvOrigins, PageOrigins
from kvroute.integrations.sglang.passes import UNREPORTED, UNVERIFIED, Ids, Launched, LaunchedPasses
from kvroute.integrations.sglang.pools import PagedBytes
from kvroute.integrations.sglang.ranks import ABSENT, Digests, Ranks, digests_of
from kvroute.integrations.sglang.sides import Side
from kvroute.integrations.sglang.weights import weights_of
from kvroute.routing import ROUTING_WEIGHTS, routing_weights_spec, weights_version_spec

logger = logging.getLogger(__name__)

MADE, BY_KV, GONE = range(3)
"""A page's rows were made here; or came from the store, matched by the KV; or did not come for KV that was loaded."""
WHY: Final = "the store has no rows of the KV that was loaded"
OTHER_WEIGHTS: Final = "KV that was loaded may be of other weights"
NOTHING: Final[Mapping[int, str]] = MappingProxyType({})
NO_SIDES: Final[Mapping[str, PagedBytes]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SidePages:
    """Blocks of a side, under the names of the pages beside which they are."""

    side: Side
    keys: Sequence[str]
    blocks: Ids

    def origins(self, keys: Sequence[str], of_pages: PageOrigins) -> PageOrigins:
        """Those of the pages of the same names, of all pages' ``keys [n]``."""
        place = {key: i for i, key in enumerate(keys)}
        return of_pages[[place[key] for key in self.keys]]


def left_answers(
    settings: Common,
    spec: AuxBlockDataSpec,
    meter: Meter,
    counters: dict[str, Callable[[], Any]],
) -> Answers:
    """Where ``settings`` leave the routes of answers; a process of their own has ``counters`` among these."""
    rollouts = settings.rollouts
    if not rollouts.startswith(APART_SCHEME):
        return Answers(spec, LeftRoutes.by(rollouts) if rollouts else None, meter)
    from kvroute.integrations.sglang.apart import AnswersApart

    apart = AnswersApart(rollouts, spec, flagged=settings.witness == "flagged")
    counters["rollouts"] = lambda: apart.counters
    return Answers(spec, LeftRoutes(), meter, apart=apart)


class RoutedRows:
    """The rows of ``pages`` pages, of the engine whose weights ``namespace`` names; page 0 is for padding.

    SGLang's pages on the host are numbered after those of the device. The scheduler's thread calls it.
    With ``weights`` a page has the routing weights of its ids in the same record.
    """

    def __init__(
        self, spec: AuxBlockDataSpec, pages: int, namespace: Namespace, settings: Common, *, weights: bool = False
    ) -> None:
        self.spec, self.pages, self.page, self.settings = spec, pages, spec.block_tokens, settings
        self._weights_specs = [routing_weights_spec(spec)] if weights else []
        self._of_a_row = [spec.name, *(of_weights.name for of_weights in self._weights_specs)]
        """The specs of which a page has a row of each, or a row of none."""
        self.layers = list(spec.attrs["layer_ids"])
        self.passes = LaunchedPasses()
        self._filled_behind = np.zeros(pages, np.int64)  # passes launched when a page was filled ahead of its turn
        self.meter = Meter(self._counters)
        self.exports: Callable[[Taken], None] | None = None  # to the engine's metrics, if it has any
        self.followers: list[Callable[[], None]] = []  # called when the weights have another name
        self.counters: dict[str, Callable[[], Any]] = {}  # of further tiers, by name
        self._job_counts = JobCounts(self.meter, spec.block_tokens)
        self.answers = left_answers(settings, spec, self.meter, self.counters)
        self._gone = GoneKeys()  # KV that others keep without rows, or rows of ranks that differ
        self._ranks: Ranks | None = None
        self.sides: dict[str, Side] = {}  # windows and states in our store, by the names of their pools
        self._store = open_store(settings.store) if settings.store else None
        self.aux = self._made(namespace)
        self.weights = Versions(namespace, None, self._renamed, named=bool(settings.weights))

    def _made(self, namespace: Namespace, kv: Any = None, host_pages: int = 0) -> AuxBlocks:
        self._valid_after = np.zeros(self.pages + host_pages, np.int64)  # passes, then a page has its new content
        self.kv_origins: KvOrigins | None = None  # of KV that others keep
        self._sources = np.full(self.pages + host_pages, MADE, np.int8)  # of the pages' rows
        return AuxBlocks(
            [self.spec, weights_version_spec(self.page), *self._weights_specs],
            blocks=len(self._sources),
            namespace=namespace,
            store=self._store,
            kv=kv,
            required=self._of_a_row,
            strict=self.settings.strict,
        )

    def attach(
        self,
        *,
        kv: Any = None,
        sides: Mapping[str, PagedBytes] = NO_SIDES,
        ranks: Ranks | None = None,
        folder: KvFolder | None = None,
        host_pages: int = 0,
    ) -> None:
        """From here on KV goes to other places and comes back; called before the first pass.

        With ``kv``, a ``KVBlocks`` of one tier, it goes to the store with its rows, and ``sides`` with the last of its
        pages; each of several ``ranks`` has a part of it. With ``folder``, which folds the KV, it goes to another
        store: from pages of the host if there are ``host_pages``, else from those of the device.
        """
        self.aux.close()
        self.aux = self._made(self.aux.namespace, kv, host_pages)
        self._ranks = ranks
        if folder is not None:
            self.kv_origins = KvOrigins(folder, self.pages if host_pages else 0)
        namespace, strict = self.aux.namespace, self.settings.strict
        self.sides = {name: Side(each, namespace, self._store, strict=strict) for name, each in sides.items()}
        if ranks is not None:
            self.counters["ranks"] = lambda: ranks.counters

    def _counters(self) -> dict[str, Any]:
        """The present counters of each tier."""
        store = self.aux.store
        of_store: Any = {} if store is None else store.counters
        own = {"blocks": self.aux.counters, "store": of_store, "answers": self.answers.counters}
        return own | {name: counters() for name, counters in self.counters.items()}

    def _renamed(self, namespace: Namespace) -> None:
        """Called when there is no KV, or none that may be used again."""
        self.passes.forget()
        self.aux.reset(weights_version=namespace.weights_version)
        for side in self.sides.values():
            side.follow(namespace.weights_version)
        for follow in self.followers:
            follow()

    # ---------------------------------------------------------------- passes

    def launch(
        self,
        slots: torch.Tensor,
        ids: torch.Tensor | str,
        slots_before_launch: torch.Tensor | None = None,
        *,
        drafts: bool = False,
        given: torch.Tensor | None = None,
    ) -> Launched:
        """A pass is launched: ``ids`` int32 ``[T, layers of the model, top_k]`` are of the tokens at ``slots [T]``.

        ``ids`` may be the reason why there are none. ``given`` int32 ``[T, 2 * routed layers, top_k]`` is what experts
        were given of them, where weights are wanted: see :meth:`Given.take`. Ids without weights have no rows. With
        ``drafts`` nobody knows yet which of the tokens count: :meth:`Launched.accept` says so.
        """
        self.weights.computes()
        version = self.weights.version
        launched = self.passes.launch(version, slots, ids, self.page, self.end, slots_before_launch)
        launched.given = given
        if drafts:
            launched.of_drafts, launched.ids = ids, UNVERIFIED
        return launched

    def end(self, over: Launched) -> None:
        """This pass is over, and with it earlier ones whose end was not reported: those have no rows."""
        for launched in self.passes.ending(over):
            slots = launched.slots.cpu().numpy()
            pages = slots // self.page  # -1 of a token that does not count
            slots = np.where((pages > 0) & (self._filled_behind[pages] < launched.number), slots, -1)
            self._renew(pages[(slots >= 0) & (slots % self.page == 0)])
            ids = launched.ids if launched is over else UNREPORTED
            numbers = ids if isinstance(ids, str) else ids.cpu().numpy()[:, self.layers]
            weights: NDArray[np.float32] | None = None
            if self._weights_specs and not isinstance(numbers, str):
                given = None if launched.given is None else launched.given.cpu().numpy()
                weights_or_why = weights_of(numbers, given)
                if isinstance(weights_or_why, str):
                    numbers = weights_or_why
                else:
                    weights = weights_or_why
            write_ids(self.aux, self.meter, self.spec, slots, numbers, launched.version, weights=weights)
            self.passes.ended = launched.number
            self.go_on()
        if self.exports is not None and (taken := self.meter.take()) is not None:
            self.exports(taken)

    def go_on(self) -> None:
        """What waited for passes that are over now, or for room: see :meth:`LaunchedPasses.go_on`."""
        for job in self.aux.jobs.poll():
            self._job_counts.count(job)
        for side in self.sides.values():
            side.aux.jobs.poll()
        self.passes.go_on()

    def _renew(self, pages: Ids) -> None:
        self.aux.renew(pages)
        self._sources[pages] = MADE

    def pages_of(self, slots: torch.Tensor, *, host: bool = False) -> Ids:
        """The pages that these slots ``[n * page]`` fill."""
        pages: Ids = slots.cpu().numpy()[:: self.page] // self.page
        return pages + self.pages if host else pages

    def copied(self, sources: Ids, targets: Ids) -> None:
        """SGLang copies the KV of pages to pages that it has just given out, here or on the host."""

        def copy() -> None:
            self._renew(targets)
            self.aux.copy(np.stack([sources, targets], axis=1))
            self._sources[targets] = self._sources[sources]

        self._valid_after[targets] = self.passes.launched
        self.passes.then(copy)

    def came(self, pages: Ids, then: Callable[[], None]) -> None:
        """Another engine's KV has come into these pages, which SGLang has given out for it: they begin their lives, and
        then their rows may come. Every pass of their request is launched later."""

        def begin_lives() -> None:
            self._renew(pages)
            then()

        self.weights.computes()
        self._valid_after[pages] = self.passes.launched
        self.passes.then(begin_lives)

    # ---------------------------------------------------------------- the store

    def _adopted(self, keys: Sequence[str]) -> list[BlockKey]:
        """Keys from SGLang's names of pages, which are hashes of all tokens up to a page's end."""
        return [self.aux.keys.adopt(str(key).encode()) for key in keys]

    def stored(self, keys: Sequence[str]) -> int:
        """How many of these pages, from the first on, seem to have stored rows; only loading verifies that.

        Any thread may ask.
        """
        try:
            adopted = [] if self.weights.mixed else self._adopted(keys)
            stored = self.aux.jobs.records().contains(adopted)
        except KVRouteError as error:
            logger.warning("the store cannot be asked: %s", error)
            return 0
        hits = [is_stored and key not in self._gone for key, is_stored in zip(adopted, stored, strict=True)]
        return [*hits, False].index(False)

    def stored_sides(self, name: str, keys: Sequence[str]) -> list[bool]:
        """Beside which of these pages this side seems to be stored; only loading verifies that."""
        try:
            return self.sides[name].stored(keys)
        except KVRouteError as error:
            logger.warning("the store cannot be asked: %s", error)
            return [False] * len(keys)

    def keep(self, keys: Sequence[str], pages: Ids, sides: Sequence[SidePages] = ()) -> list[PersistJob] | None:
        """Store these pages with their present content, when the passes launched so far are over, and ``sides``.

        SGLang holds pages of the device until the jobs have copied them; they are in the list when they have begun.
        With unknown weights nothing is stored: ``None``.
        """
        if self.weights.mixed:
            return None
        begun: list[PersistJob] = []
        blocks = dict(zip(self._adopted(keys), pages.tolist(), strict=True))

        def persist_sides(lives: Ids) -> list[PersistJob]:
            origins = np.array(self.aux.exchange.origins(pages), np.uint64)
            origins[self.aux.generations(pages) != lives] = 0  # of another page by now: it is beside no record
            jobs = [each.side.begin_persist(each.keys, each.blocks, each.origins(keys, origins)) for each in sides]
            return [job for job in jobs if job is not None]  # without room there is no hit later

        origins = None if self.kv_origins is None else self.kv_origins.now(pages)
        self.passes.then(partial(self._persist, blocks, origins, begun, persist_sides))
        return begun

    def _persist(
        self,
        blocks: dict[BlockKey, int],
        origins: PageOrigins | None,
        begun: list[PersistJob],
        persist_sides: Callable[[Ids], list[PersistJob]],
        lives: Ids | None = None,
    ) -> None:
        if lives is None:
            lives = self._named(np.array(list(blocks.values()), np.int64), origins)
        if (job := self.aux.begin_persist(blocks, lives)) is None:  # there is no room
            self.passes.again(partial(self._persist, blocks, origins, begun, persist_sides, lives))
        else:
            begun.extend([job, *persist_sides(lives)])

    def fill(self, keys: Sequence[str], pages: Ids, sides: Sequence[SidePages] = ()) -> bool:
        """Fill these pages, which were just given out, with KV and rows now, and ``sides``; whether all have come, on
        all ranks.

        Each of the ranks calls it with the same keys, and hears the same.
        """
        self.weights.computes()  # SGLang keeps this KV, whatever weights compute next
        self._renew(pages)
        self._filled_behind[pages] = self.passes.launched
        if self._ranks is None:
            return bool(self._filled(keys, pages, sides).all())
        digests: Digests = np.full(len(pages), ABSENT)
        try:
            came = self._filled(keys, pages, sides)
            tokens = int(came.sum()) * self.page
            kinds = [self.aux.read(name, pages[came], 0, tokens) for name in (*self._of_a_row, VERSION)]
            digests[came] = digests_of(kinds, self.page)
        finally:  # the other ranks wait for this one, whatever has happened to it
            verdict = self._ranks.agreed(digests)
        others = verdict.there & ~verdict.same
        self._gone.add({key for key, other in zip(self._adopted(keys), others.tolist(), strict=True) if other})
        return bool(verdict.same.all())

    def _filled(self, keys: Sequence[str], pages: Ids, sides: Sequence[SidePages]) -> NDArray[np.bool_]:
        """Which of these pages ``[n]`` have come from this rank's store; the last one has not without all ``sides``."""
        none = np.zeros(len(pages), np.bool_)
        job = self._restored(keys, pages)
        if job is None:
            return none
        self._job_counts.count_time(job)
        if job.failure is not None or len(job.answers) < len(keys):
            return none
        came = np.array([job.answers[key] for key in self._adopted(keys)], np.bool_)
        if came.all() and sides:
            origins = np.array(self.aux.exchange.origins(pages), np.uint64)
            came[-1] = all(each.side.fill(each.keys, each.blocks, each.origins(keys, origins)) for each in sides)
        return came

    def loaded(self, keys: Sequence[str], pages: Ids) -> None:
        """KV kept by others has come to pages of the host, or comes to the device before the next pass reads it.

        After that their rows come, matched by this KV. A page without rows is no hit any more. Without ``kv_origins``,
        as with a storage that was attached later, nothing comes.
        """
        self.weights.computes()  # as in :meth:`fill`

        def begin() -> None:
            self._renew(pages)
            self._sources[pages] = GONE

        self._valid_after[pages] = self.passes.launched
        self.passes.then(begin)
        if self.kv_origins is not None:
            arrive = partial(self._arrive, keys, pages, self.kv_origins.now(pages))
            self.passes.then(arrive, self.passes.launched + (not self.kv_origins.of_host))

    def _arrive(self, keys: Sequence[str], pages: Ids, origins: PageOrigins | None) -> None:
        self._named(pages, origins)
        job = self._restored(keys, pages)
        if job is None:
            self.meter.miss(OTHER_WEIGHTS, len(pages) * self.page)
            return
        self._job_counts.count(job)
        if job.failure is not None:
            return
        self._sources[pages[list(job.answers.values())]] = BY_KV
        self._gone.add({key for key, has_come in job.answers.items() if not has_come})

    def _restored(self, keys: Sequence[str], pages: Ids) -> RestoreJob | None:
        """The job that has brought what the store has, for which this thread has waited; ``None``: present passes may
        use KV of other weights."""
        if self.weights.mixed:
            return None
        blocks = dict(zip(self._adopted(keys), pages.tolist(), strict=True))
        return self.aux.jobs.run(RestoreJob, blocks, self.aux.generations(pages))

    def _named(self, pages: Ids, origins: PageOrigins | None) -> Ids:
        """Name the pages' origins by their KV, if others keep it. Returns the lives of the pages."""
        lives = self.aux.generations(pages)
        if self.kv_origins is not None:
            self.aux.exchange.name_origins(pages, lives, self.kv_origins.of(pages) if origins is None else origins)
        return lives

    # ---------------------------------------------------------------- answers

    def answer(
        self,
        rid: str,
        slots: Ids,
        start: int,
        tokens: Tokens | None,
        kept: RequestRows | KVRouteError | None = None,
        why: Mapping[int, str] = NOTHING,
    ) -> Answer:
        """The answer of a request that is over: its rows of the positions from ``start`` on, for which it has
        ``slots`` from position 0 on; ``kept`` are those of KV that it gave up, and ``why`` rows of its pages may be
        missing. See :meth:`Answers.begin`."""
        return self.answers.begin(rid, self.kept(slots, start, kept, why), max(0, len(slots) - start), tokens)

    def kept(
        self,
        slots: Ids,
        start: int = 0,
        earlier: RequestRows | KVRouteError | None = None,
        why: Mapping[int, str] = NOTHING,
    ) -> RequestRows | KVRouteError:
        """What :meth:`read` gives or raises, with the rows of ``earlier``, the request's KV that was given up."""
        if isinstance(earlier, KVRouteError):
            return earlier
        try:
            rows = self.read(slots, start, why)
        except KVRouteError as error:
            return error
        return rows if earlier is None else rows.behind(earlier)

    def read(self, slots: Ids, start: int, why: Mapping[int, str] = NOTHING) -> RequestRows:
        """A copy of the rows of a request's positions from ``start`` on; ``slots`` are those of all from position 0."""
        pages = slots[:: self.page] // self.page
        self.settled(pages)
        rows = self.aux.read(self.spec.name, pages, start, len(slots))
        labels = self.aux.read(VERSION, pages, start, len(slots))
        weights = self.read_weights(rows, pages, start, len(slots))
        sources = self._sources[pages]
        by_kv: NDArray[np.bool_] | None = None
        if self.kv_origins is not None and self.layers[-1] == self.spec.attrs["num_layers"] - 1:  # behind all KV
            by_kv = np.repeat(sources == BY_KV, self.page)[start : len(slots)]
        reasons = {**why, **dict.fromkeys(np.flatnonzero(sources == GONE).tolist(), WHY)}
        return RequestRows(
            self.spec,
            rows,
            labels,
            start,
            by_kv,
            reasons,
            flagged=self.settings.witness == "flagged",
            weights=self.weights.changes,
            mixed=self.weights.mixed,
            routing_weights=weights,
        )

    def read_weights(self, rows: Rows, pages: Ids, start: int, stop: int) -> Rows | None:
        """The routing weights of these positions, where they are wanted: ``rows``, their ids, that lack them are
        missing from here on."""
        if not self._weights_specs:
            return None
        weights = self.aux.read(ROUTING_WEIGHTS, pages, start, stop)
        rows.valid[~weights.valid] = False
        return weights

    def settled(self, pages: Ids) -> Ids:
        """The lives of a request's pages, when SGLang says that the passes that wrote them are over."""
        self._renew(pages[self._unsure(pages)])
        return self.aux.generations(pages)

    def _unsure(self, pages: Ids) -> NDArray[np.bool_]:
        """Which of these pages may have old rows: SGLang asks when passes are over, but some never came to an end."""
        unsure: NDArray[np.bool_] = self._valid_after[pages] > self.passes.ended
        for launched in self.passes:
            begins = np.isin(pages, launched.first_written_pages)
            unsure |= begins & (self._filled_behind[pages] < launched.number)
        return unsure

    def close(self) -> None:
        self.answers.close()
        for side in self.sides.values():
            side.close()
        self.aux.close()
        if self._store is not None:
            self._store.close()


__all__ = ["WHY", "RoutedRows", "SidePages"]

"""The rows of SGLang's tokens: the routers' choices go into blocks, one per page, and whole answers come out.

The law of order: forward passes are numbered as they are launched, and end in that order, but late (overlap
scheduling). Whatever SGLang does with pages meanwhile happens to their rows **when all passes launched before are
over**, in SGLang's order. So a page's rows match its KV of that moment. A page begins a life with the pass that writes
its first token, or with KV that comes into it from another place.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import KVRouteError
from cache_manager.jobs import PersistJob
from cache_manager.keys import BlockKey, Namespace
from cache_manager.spec import AuxBlockDataSpec
from kvroute import open_store
from kvroute.checks import unsound
from kvroute.connector.answers import FIELD
from kvroute.connector.key import Key
from kvroute.connector.left import LeftRoutes, Tokens, settled
from kvroute.connector.settings import Common
from kvroute.connector.tickets import Gap, gaps_of
from kvroute.connector.versions import Versions
from kvroute.connector.witness import KvFolder
from kvroute.integrations.sglang import versions
from kvroute.routes import Layout, Routes
from kvroute.routing import weights_version_spec
from kvroute.witness import ROOT, chained

logger = logging.getLogger(__name__)

MADE, BY_KV, GONE = range(3)
"""A page's rows were made here; or came from the store, matched by the KV; or did not come for KV that was loaded."""
WHY: Final = "the store has no rows of the KV that was loaded"
PART: Final = "layer %d has no rows of this pass: its router was called with %s tokens, of %d"
GONE_MAX: Final = 1 << 16

Ids = NDArray[np.int64]
Origins = NDArray[np.uint64]


@dataclass(eq=False)
class Launched:
    """A pass whose ids are not on the host yet; SGLang carries it to the pass's end."""

    number: int
    version: int | None
    slots: torch.Tensor
    ids: torch.Tensor
    rows: RoutedRows
    early: torch.Tensor | None = None  # the slots before the launch

    @cached_property
    def begun(self) -> Ids:
        """The pages that begin a life with this pass, for callers before its end."""
        slots = (self.slots if self.early is None else self.early).cpu().numpy()
        begun: Ids = slots[slots % self.rows.page == 0] // self.rows.page
        return begun

    def map_device_tensors(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.slots, self.ids = copied(self.slots), copied(self.ids)

    def copy_to_cpu(self) -> None:
        """SGLang's older call, up to 0.5.12."""
        self.map_device_tensors(lambda tensor: tensor.to("cpu", non_blocking=True))

    def finalize(self) -> None:
        self.rows.end(self)


class RoutedRows:
    """The rows of ``pages`` pages, of the engine whose weights ``namespace`` names; page 0 is for padding.

    SGLang's pages on the host are numbered after those of the device. The scheduler's thread calls it.
    """

    def __init__(self, spec: AuxBlockDataSpec, pages: int, namespace: Namespace, settings: Common) -> None:
        self.spec, self.pages, self.page, self.settings = spec, pages, spec.block_tokens, settings
        self.layers = list(spec.attrs["layer_ids"])
        self.launched = self.ended = 0  # passes
        self._flight: deque[Launched] = deque()
        self._late: list[tuple[int, Callable[[], None]]] = []  # calls to do when so many passes are over
        self._filled = np.zeros(pages, np.int64)  # passes launched when a page was filled ahead of its turn
        self._left = LeftRoutes.by(settings.rollouts) if settings.rollouts else None
        self._gone: set[BlockKey] = set()  # keys without rows in the store, for KV that others keep
        self._store = open_store(settings.store) if settings.store else None
        self.aux = self._made(namespace)
        self.weights = Versions(namespace, None, self._renamed, named=bool(settings.weights))

    def _made(self, namespace: Namespace, kv: Any = None, host_pages: int = 0) -> AuxBlocks:
        self._due = np.zeros(self.pages + host_pages, np.int64)  # passes after which a page has its new content
        self.folder: KvFolder | None = None
        self._folds_host = host_pages > 0
        self._come = np.full(self.pages + host_pages, MADE, np.int8)
        return AuxBlocks(
            [self.spec, weights_version_spec(self.page)],
            blocks=len(self._come),
            namespace=namespace,
            store=self._store,
            kv=kv,
            required=[self.spec.name],
            strict=self.settings.strict,
        )

    def attach(self, *, kv: Any = None, folder: KvFolder | None = None, host_pages: int = 0) -> None:
        """From here on KV goes to other places and comes back; called before the first pass.

        With ``kv``, a ``KVBlocks`` of one tier, it goes to the store with its rows. With ``folder``, which folds the
        KV, it goes to another store: from pages of the host if there are ``host_pages``, else from those of the device.
        """
        self.aux.close()
        self.aux = self._made(self.aux.namespace, kv, host_pages)
        self.folder = folder

    def _renamed(self, namespace: Namespace) -> None:
        """Called when there is no KV, or none that may be used again."""
        self._late.clear()
        self.aux.reset(weights_version=namespace.weights_version)

    # ---------------------------------------------------------------- passes

    def launch(self, slots: torch.Tensor, ids: torch.Tensor, early: torch.Tensor | None = None) -> Launched:
        """A pass is launched: ``ids`` int32 ``[T, layers of the model, top_k]`` are of the tokens at ``slots [T]``."""
        self.weights.computes()
        self.launched += 1
        self._flight.append(Launched(self.launched, self.weights.version, slots, ids, self, early))
        return self._flight[-1]

    def end(self, over: Launched) -> None:
        """This pass is over, and with it earlier ones whose end was not reported: those have no rows."""
        while self._flight and self._flight[0].number <= over.number:
            each = self._flight.popleft()
            slots = each.slots.cpu().numpy()
            pages = slots // self.page
            slots = np.where((pages > 0) & (self._filled[pages] < each.number), slots, -1)
            self._renew(pages[(slots >= 0) & (slots % self.page == 0)])
            if each is over:
                ids = each.ids.cpu().numpy()[:, self.layers]
                wrong = unsound(ids, self.spec.attrs["num_experts"])  # before the cast, which would wrap
                rows: dict[str, Any] = {self.spec.name: ids.astype(self.spec.numpy_dtype)}
                if each.version is not None:
                    rows["weights_version"] = np.full(len(slots), each.version, np.uint32)
                self.aux.write_step(slots, rows, None if wrong is None else ~wrong)
            self.ended = each.number
            self.go_on()

    def go_on(self) -> None:
        """Do the calls that waited for passes that are over now, or for room.

        One that raises costs no other, because a page whose call was lost would keep the rows that it had before. The
        first error is raised behind the last call.
        """
        self.aux.jobs.poll()
        late, self._late = self._late, []
        errors: list[Exception] = []
        for after, call in late:
            try:
                self._then(call, after)
            except Exception as error:  # noqa: BLE001 - it is raised below
                errors.append(error)
        if errors:
            raise errors[0]

    def _then(self, call: Callable[[], None], after: int | None = None) -> None:
        """Do this when ``after`` passes are over, by default all that were launched."""
        after = self.launched if after is None else after
        if after <= self.ended:
            call()
        else:
            self._late.append((after, call))

    def _renew(self, pages: Ids) -> None:
        self.aux.renew(pages)
        self._come[pages] = MADE

    def pages_of(self, slots: torch.Tensor, *, host: bool = False) -> Ids:
        """The pages that these slots ``[n * page]`` fill."""
        pages: Ids = slots.cpu().numpy()[:: self.page] // self.page
        return pages + self.pages if host else pages

    def copied(self, sources: Ids, targets: Ids) -> None:
        """SGLang copies the KV of pages to pages that it has just given out, here or on the host."""

        def copy() -> None:
            self._renew(targets)
            self.aux.copy(np.stack([sources, targets], axis=1))
            self._come[targets] = self._come[sources]

        self._due[targets] = self.launched
        self._then(copy)

    # ---------------------------------------------------------------- the store

    def _adopted(self, keys: Sequence[str]) -> list[BlockKey]:
        """Keys from SGLang's names of pages, which are hashes of all tokens up to a page's end."""
        return [self.aux.keys.adopt(str(each).encode()) for each in keys]

    def stored(self, keys: Sequence[str]) -> int:
        """How many of these pages, from the first on, seem to have stored rows; only loading verifies that.

        Any thread may ask.
        """
        try:
            adopted = [] if self.weights.mixed else self._adopted(keys)
            there = zip(adopted, self.aux.stored(adopted), strict=True)
        except KVRouteError as error:
            logger.warning("the store cannot be asked: %s", error)
            return 0
        return [*(each and key not in self._gone for key, each in there), False].index(False)

    def keep(self, keys: Sequence[str], pages: Ids) -> list[PersistJob] | None:
        """Store these pages with their present content, when the passes launched so far are over.

        SGLang holds pages of the device until the job has copied them; the job is in the list when it has begun. With
        unknown weights nothing is stored: ``None``.
        """
        if self.weights.mixed:
            return None
        begun: list[PersistJob] = []
        blocks = dict(zip(self._adopted(keys), pages.tolist(), strict=True))
        self._then(partial(self._persist, blocks, self._origins_now(pages), begun))
        return begun

    def _persist(
        self, blocks: dict[BlockKey, int], origins: Origins | None, begun: list[PersistJob], lives: Ids | None = None
    ) -> None:
        if lives is None:
            lives = self._named(np.array(list(blocks.values()), np.int64), origins)
        if (job := self.aux.begin_persist(blocks, lives)) is None:  # there is no room
            self._late.append((self.ended, partial(self._persist, blocks, origins, begun, lives)))
        else:
            begun.append(job)

    def fill(self, keys: Sequence[str], pages: Ids) -> bool:
        """Fill these pages, which were just given out, with KV and rows now; whether all have come."""
        self._renew(pages)
        self._filled[pages] = self.launched
        came = self._restored(keys, pages)
        return len(came) == len(keys) and all(came.values())

    def loaded(self, keys: Sequence[str], pages: Ids) -> None:
        """KV kept by others has come to pages of the host, or comes to the device before the next pass reads it.

        After that their rows come, matched by this KV. A page without rows is no longer a hit.
        """

        def begin() -> None:
            self._renew(pages)
            self._come[pages] = GONE

        self._due[pages] = self.launched
        self._then(begin)
        self._then(partial(self._arrive, keys, pages, self._origins_now(pages)), self.launched + (not self._folds_host))

    def _arrive(self, keys: Sequence[str], pages: Ids, origins: Origins | None) -> None:
        self._named(pages, origins)
        if came := self._restored(keys, pages):
            self._come[pages[list(came.values())]] = BY_KV
        if gone := {key for key, there in came.items() if not there}:
            logger.warning("%d pages have no rows: %s", len(gone), WHY)
            self._gone = gone | (self._gone if len(self._gone) < GONE_MAX else set())

    def _restored(self, keys: Sequence[str], pages: Ids) -> dict[BlockKey, bool]:
        """Which keys have come, if the store could answer."""
        blocks = dict(zip(self._adopted(keys), pages.tolist(), strict=True))
        try:
            return {} if self.weights.mixed else self.aux.restore(blocks, self.aux.generations(pages))
        except KVRouteError as error:
            logger.warning("pages were not loaded: %s", error)
            return {}

    def _named(self, pages: Ids, origins: Origins | None) -> Ids:
        """Name the pages' origins by their KV, if others keep it. Returns the lives of the pages."""
        lives = self.aux.generations(pages)
        if self.folder is not None:
            self.aux.name_origins(pages, lives, self._origins(pages) if origins is None else origins)
        return lives

    def _origins_now(self, pages: Ids) -> Origins | None:
        """The origins of pages of the host, whose KV is there; the device's is there when the passes are over."""
        return self._origins(pages) if self._folds_host else None

    def _origins(self, pages: Ids) -> Origins:
        assert self.folder is not None, "others keep the KV"
        folds = self.folder.folds((pages - self.pages * self._folds_host).tolist())
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return np.array([chained(ROOT, fold) for fold in folds.numpy().view(np.uint64).tolist()], np.uint64)

    # ---------------------------------------------------------------- answers

    def routes(self, slots: Ids, start: int) -> tuple[Routes, list[list[int]], list[Gap]]:
        """The routes of a request's positions from ``start`` on; ``slots`` are those of all from position 0.

        Also the positions at which the last router's choice is not proved, and the known reasons for missing rows.
        """
        pages = slots[:: self.page] // self.page
        self._renew(pages[self._unsure(pages)])
        rows, versions = (self.aux.read(n, pages, start, len(slots)) for n in (self.spec.name, "weights_version"))
        found = Routes.from_rows(self.spec, rows, start, weights_version=versions)
        unseen, come = list[list[int]](), self._come[pages]
        if self.folder is not None and self.layers[-1] == self.spec.attrs["num_layers"] - 1:  # behind all KV
            by_kv = np.repeat(come == BY_KV, self.page)[start : len(slots)]
            found, unseen = settled(found, by_kv, flagged=self.settings.witness == "flagged")
        why = dict.fromkeys(np.flatnonzero(come == GONE).tolist(), WHY)
        return found, unseen, gaps_of(found.missing, why, self.page)

    def _unsure(self, pages: Ids) -> NDArray[np.bool_]:
        """Which of these pages may have old rows: SGLang asks when passes are over, but some never came to an end."""
        unsure: NDArray[np.bool_] = self._due[pages] > self.ended
        for each in self._flight:
            unsure |= np.isin(pages, each.begun) & (self._filled[pages] < each.number)
        return unsure

    def answer(self, rid: str, slots: Ids, start: int, tokens: Tokens | None) -> tuple[torch.Tensor, Any]:
        """SGLang's own field int32 ``[n, layers of the model, top_k]``, and kvroute's data beside it.

        Layers without a router are 0 in the field, as in SGLang; missing cells are -1, which is no expert. The key of
        the routes in a rollout store is SGLang's ``rid``.
        """
        key = Key(rid, of_client=True)
        field = np.zeros((max(0, len(slots) - start), self.spec.attrs["num_layers"], self.spec.row_shape[1]), np.int32)
        try:
            routes, unseen, gaps = self.routes(slots, start)
            field[:, self.layers] = np.where(routes.known[:, :, None], routes.ids.astype(np.int32), -1)
            told = self._left.leave(key, routes, tokens, unseen, gaps) if self._left else {}
        except KVRouteError as error:
            field[:, self.layers] = -1
            told = {}
            if self._left:
                self._left.void(key, tokens, Layout.of(self.spec))
                told = self._left.fail(key, error)
        return torch.from_numpy(field), told.get(FIELD)

    def close(self) -> None:
        if self._left is not None:
            self._left.close()
        self.aux.close()
        if self._store is not None:
            self._store.close()


class Uncut(list[Any]):
    """What an answer without a token has: SGLang cuts a request's list of entries, one a token, to its tokens."""

    def __getitem__(self, at: Any) -> Any:
        return list(self) if isinstance(at, slice) else super().__getitem__(at)


class Capturer:
    """Replaces SGLang's ``RoutedExpertsCapturer``: keeps its device buffer, without its buffer on the host.

    SGLang's buffer keeps the last call of a router, from row 0 on. So a layer whose router was called twice in a pass,
    or with fewer tokens than the pass has, has no rows of that pass. A pass that replays a CUDA graph calls no router.
    The buffer is emptied behind each pass: what a pass did not write is missing, and never of an earlier one.
    """

    def __init__(self, theirs: Any, rows: RoutedRows) -> None:
        self.theirs, self.rows, self.destroy = theirs, rows, rows.close
        self.req: Any = None
        """The request whose rows SGLang asks for next."""
        self._tokens: dict[int, list[int]] = {}  # of each call of a layer's router in this pass
        self._buffer: torch.Tensor = theirs.device_cache.buffer  # int32 [tokens, layers, top_k]
        self._buffer.fill_(-1)

    def begin(self) -> None:
        """A pass begins: earlier calls of routers, to warm up or to record a graph, are not its own."""
        self._empty(0)

    def _empty(self, rows: int) -> None:
        """Nobody reads what is in the buffer any more; at least so many of its rows were written."""
        rows = max([rows, *(max(tokens) for tokens in self._tokens.values())])
        if rows:
            self._buffer[:rows].fill_(-1)
        self._tokens.clear()

    def capture(self, layer_id: int, topk_indices: torch.Tensor) -> None:
        """The choice int32 ``[tokens, top_k]`` of a layer's router."""
        if not torch.compiler.is_compiling():
            self._tokens.setdefault(layer_id, []).append(len(topk_indices))
        self.theirs.capture(layer_id=layer_id, topk_indices=topk_indices)

    def on_forward_end(
        self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None, no_copy_to_cpu: bool = False
    ) -> Launched | None:
        slots = versions.slots_of(forward_batch)
        ids = self.theirs._get_local_slice(forward_batch, can_run_graph, cuda_graph_batch)[: len(slots)].clone()
        for layer, tokens in self._tokens.items():
            if len(tokens) > 1 or tokens[0] < len(ids):
                logger.warning(PART, layer, tokens, len(ids))
                ids[:, layer] = -1
        self._empty(max(len(ids), cuda_graph_batch or 0))  # behind the copy, on the same stream
        launched = self.rows.launch(slots.clone(), ids, slots)
        if no_copy_to_cpu:
            return launched
        launched.finalize()
        return None

    def get_topk(self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> torch.Tensor:
        """SGLang's field of :attr:`req`, which is over; kvroute's data goes into SGLang's per-token information."""
        slots = req_to_token_pool.req_to_token[req_pool_idx][: seqlen - 1].cpu().numpy().astype(np.int64)
        req, said = self.req, list(self.req.output_ids_through_stop)
        tokens: Tokens | None = Tokens([*req.origin_input_ids, *said], len(req.origin_input_ids))
        if req.input_embeds is not None or req.positional_embed_overrides is not None:
            tokens = None  # SGLang gives such a prompt the same ids whatever it says
        field, told = self.rows.answer(req.rid, slots, min(start_len, len(slots)), tokens)
        if told is not None:
            entries = [*(None for _ in said[1:]), told] if said else Uncut([told])
            req.customized_info = (req.customized_info or {}) | {FIELD: entries}
        return field


def capturer() -> Capturer | None:
    """This process's capturer, or ``None``."""
    found = versions.experts_capturer()
    return found if isinstance(found, Capturer) else None


__all__ = ["WHY", "Capturer", "Launched", "RoutedRows", "capturer"]

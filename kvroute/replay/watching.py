"""Looks at what the routers of a model really used, whoever replays, and writes a receipt of it.

A watch sits behind the replay. It sees what leaves a router (Megatron-core: its map of tokens and experts;
NeMo-Automodel: its ids) or what enters the experts (transformers, VeOmni), and compares that with the rows that were
due, token by token and by content. It asks no replay whether it ran, so that one that does nothing is seen.

    with watch(model) as replayed:                         # a training step
        for batch in micro_batches:
            replayed.packed(routes, tokens, split)         # the rows that are due, on this rank
            loss = forward_and_backward(batch)             # the trainer's own
    replayed.receipt().check()

Rows that ``megatron.install``, ``transformers.replay`` and ``nemo_rl.automodel`` put into watched routers are due
without that line. What is due by :meth:`Watch.packed`, :meth:`Watch.padded` or :meth:`Watch.due` is not: it is what the
rollout's routes say, so that an installation of other rows is a gap, too.

Comparisons run on the routers' device and wait for nothing; :meth:`Watch.receipt` fetches their results.

**Not seen**: routers inside ``torch.compile`` or a CUDA graph, which run no hooks (their rows count as not used); a
recomputation that ends inside the router (it is not counted). What :mod:`kvroute.replay.passes` cannot tell apart, a
watch cannot either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from kvroute.replay.passes import Model, Pass, Passes
from kvroute.replay.receipts import Gap, Receipt, Use
from kvroute.replay.rows import MISSING, ReplayError, check_stage
from kvroute.replay.seen import SeenRouter, routers_ahead, watched_routers
from kvroute.replay.uses import NO_SAMPLE, DueRows, fetched_flags, on_host, router_use
from kvroute.routes import Routes, Split, shard_packed, shard_padded
from kvroute.routes.fill import Order, PaddedSide
from kvroute.routes.split import TAIL, Shard

_ALONE: Final = Split()


@dataclass(slots=True, eq=False)
class _Layer:
    """One watched router: its micro-batches in order, and passes that belong to none of them."""

    seen: SeenRouter
    due: list[DueRows] = field(default_factory=list)
    of_pass: dict[Pass, DueRows] = field(default_factory=dict)
    passes: Passes = field(default_factory=Passes)
    without_rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)


_WATCHES: WeakKeyDictionary[nn.Module, Watch] = WeakKeyDictionary()
"""The watch of each watched router."""


class Watch:
    """The routers of one model, or of this rank's part of it, under watch. Made by :func:`watch`."""

    def __init__(
        self,
        seen: Mapping[int, SeenRouter],
        ahead: Mapping[int, tuple[str, nn.Module]],
    ) -> None:
        self.layers: tuple[int, ...] = tuple(sorted(seen))
        """The watched layers, counted from 0 over the whole model; increasing."""
        self._of = {layer: _Layer(seen[layer]) for layer in self.layers}
        self._ahead = {layer: ahead[layer] for layer in self.layers if layer in ahead}

    # ---------------------------------------------------------------- what is due

    def packed(
        self,
        routes: Sequence[Routes],
        tokens: Sequence[int],
        split: Split = _ALONE,
        *,
        layers: Sequence[int] | None = None,
    ) -> None:
        """The next forward passes are of a packed micro-batch of these samples, whose rows are due.

        ``tokens[i]`` is how many tokens sample ``i`` has. Due are its first ``tokens[i] - 1`` rows, without those that
        are missing; padding is not. ``split`` is this rank's place in the token-wise groups. ``layers`` are those that
        run next, where that is not all of them but one chunk of a virtual pipeline.

        Raises :class:`ReplayError` for a layer that is not watched or that is dense in the routes, ``RowError`` for
        unlike samples.
        """
        chosen = self._chosen(layers)
        self._check_routes(chosen, routes, split)
        how: dict[str, Any] = {"layers": chosen, "dtype": _dtype(routes), "missing": "minus1", "pad": "minus1"}
        rows = shard_packed(routes, tokens, split, **how)
        samples, positions = _shard_places(split.packed(tokens))
        self._routes_due(chosen, rows, samples, positions, tokens)

    def padded(
        self,
        routes: Sequence[Routes],
        tokens: Sequence[int],
        width: int,
        split: Split = _ALONE,
        *,
        side: PaddedSide,
        order: Order,
        layers: Sequence[int] | None = None,
    ) -> None:
        """As :meth:`packed`, for a batch that is padded to ``width`` on its ``side``.

        ``order`` is how the routers flatten it: ``"sequence"`` in Megatron (``[sequence, batch]``), ``"batch"`` in
        transformers.
        """
        chosen = self._chosen(layers)
        self._check_routes(chosen, routes, split)
        how: dict[str, Any] = {"layers": chosen, "dtype": _dtype(routes), "missing": "minus1", "pad": "minus1"}
        rows = shard_padded(routes, tokens, split, width=width, side=side, order=order, **how)
        _, columns = _shard_places(split.columns(width))
        left = np.array([width - count if side == "left" else 0 for count in tokens], np.int64)
        positions = columns[None] - left[:, None]  # [batch, local width]
        samples = np.broadcast_to(np.arange(len(tokens))[:, None], positions.shape)
        if order == "sequence":
            samples = samples.T
            positions = positions.T
        self._routes_due(chosen, rows.reshape(-1, *rows.shape[2:]), samples.ravel(), positions.ravel(), tokens)

    def due(
        self,
        rows: torch.Tensor | NDArray[Any],  # [local tokens, layers, top_k]  any integer dtype; -1 = nothing is due
        samples: Sequence[int] | NDArray[Any] | None = None,  # [local tokens]  -1 = of no sample
        *,
        layers: Sequence[int] | None = None,
    ) -> None:
        """The next forward passes are of a micro-batch of which these rows are due, in the routers' order of tokens.

        ``layers`` are :attr:`layers`, unless they are given, as in :meth:`packed`. ``samples`` are the numbers by which
        the receipt names the samples. Each layer's micro-batches are numbered in the order of these calls; each lasts
        until the next, and its recomputations longer.

        Raises :class:`ReplayError`, with nothing changed, for rows of another shape, a row of which only a part is -1,
        an id outside the experts, and other than one sample a token.
        """
        chosen = self._chosen(layers)
        given = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
        integers = not given.is_floating_point() and given.dtype != torch.bool
        if given.dim() != 3 or given.shape[1] != len(chosen) or not integers:
            wanted = f"integers [tokens, {len(chosen)} layers, top_k]"
            raise ReplayError("rows", wanted, f"{given.dtype} of shape {tuple(given.shape)}")
        dtype = torch.int64 if given.dtype == torch.int64 else torch.int32
        signed = given.to(dtype)
        missing = signed == MISSING
        partly = missing.any(dim=-1) & ~missing.all(dim=-1)
        partly |= (signed < MISSING).any(dim=-1)
        experts = self._experts
        wrong = partly if experts is None else partly | (signed >= experts).any(dim=-1)
        if bool(wrong.any()):
            token, layer = wrong.nonzero()[0].tolist()
            wanted = f"ids in [0, {experts})" if experts is not None else "ids of 0 or more"
            got = signed[token, layer].tolist()
            raise ReplayError(f"rows token {token} layer {chosen[layer]}", f"{wanted}, or -1 throughout", got)
        names = np.full(len(given), NO_SAMPLE, np.int64)
        if samples is not None:
            names = np.asarray(samples)
            if names.shape != (len(given),) or names.dtype.kind not in "iu":
                wanted = f"one number for each of {len(given)} tokens"
                raise ReplayError("samples", wanted, f"{names.dtype} of shape {names.shape}")
        self._begin(chosen, signed, names.astype(np.int64), by_hand=True)

    @property
    def _experts(self) -> int | None:
        return next((of.seen.experts for of in self._of.values()), None)

    def _chosen(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        chosen = self.layers if layers is None else tuple(layers)
        strange = [layer for layer in chosen if layer not in self._of]
        if strange:
            raise ReplayError("layers", f"some of {list(self.layers)}", strange[0])
        return chosen

    def _check_routes(
        self,
        layers: Sequence[int],
        routes: Sequence[Routes],
        split: Split,
    ) -> None:
        check_stage(layers, routes, split)
        for sample, part in enumerate(routes):
            if self._experts not in (None, part.num_experts):
                wanted = f"{self._experts}, as the routers have"
                raise ReplayError(f"experts of sample {sample}", wanted, part.num_experts)

    def _routes_due(
        self,
        layers: Sequence[int],
        rows: NDArray[Any],
        samples: NDArray[Any],
        positions: NDArray[Any],
        tokens: Sequence[int],
    ) -> None:
        """``rows`` of places, whose ``samples`` and ``positions`` these are: only those that a sample's tokens read."""
        read = np.array([*(count - 1 for count in tokens), 0], np.int64)  # the last one is TAIL's
        rows[(positions < 0) | (positions >= read[samples])] = MISSING
        self._begin(layers, torch.from_numpy(rows), samples, by_hand=True)

    def _begin(
        self,
        layers: Sequence[int],
        rows: torch.Tensor,
        samples: NDArray[np.int64],
        *,
        by_hand: bool,
    ) -> None:
        """``rows`` ``[tokens, layers, top_k]`` of ``layers`` are due from here on, -1 where nothing is."""
        experts = [self._of[layer].seen.router for layer in layers]
        device = next((each.device for router in experts for each in router.parameters()), rows.device)
        narrow = rows.to(torch.int32) if rows.dtype == torch.int64 else rows
        by_layer = narrow.transpose(0, 1).contiguous()
        there = (by_layer >= 0).all(dim=-1).to(device, non_blocking=True)
        ids = by_layer.clamp(min=0).to(device, non_blocking=True)
        for index, layer in enumerate(layers):
            of = self._of[layer]
            if of.due and not of.due[-1].passes and of.passes.current is not None:
                if not by_hand and of.due[-1].by_hand:
                    continue  # a trainer's own word on these rows: what is installed has to agree with it
                if by_hand and not of.due[-1].by_hand:
                    of.due.pop()
            due = DueRows(ids[index], there[index], samples, by_hand)
            of.passes.begin()
            assert of.passes.current is not None
            of.of_pass[of.passes.current] = due
            of.due.append(due)

    def _over(self, layer: int) -> None:
        """What was due has had its forward passes, if there were any."""
        of = self._of[layer]
        if of.due and (of.due[-1].passes or not of.due[-1].by_hand):
            of.passes.end()

    # ---------------------------------------------------------------- what is used

    def _look(self, layer: int, used: Any) -> None:
        """Compare what a router ``used`` with what is due there; nothing is waited for, and nothing raised."""
        of = self._of[layer]
        try:
            again = of.passes.recomputed(f"layer {layer}")
        except ReplayError as error:
            of.refused[f"{error.wanted}, got {error.got}"] += 1
            return
        current = again or of.passes.current
        if current is None:
            of.without_rows += 1
            return
        due = of.of_pass[current]
        if again is None:
            due.passes += 1
        else:
            due.recomputations += 1
        modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
        with modes, torch.no_grad():
            if len(used) != len(due.ids):
                due.other_tokens = len(used)
                return
            same = of.seen.matches(used, due.ids.to(used.device))
            if again is None:
                due.taken = same if due.taken is None else due.taken & same
            else:
                due.repeated = same if due.repeated is None else due.repeated & same

    def _look_ahead(self, layer: int, used: torch.Tensor) -> None:
        """Whether multi-token prediction's router of the number of ``layer`` takes that layer's rows: it must not."""
        of = self._of[layer]
        if of.passes.current is None or torch._C._current_autograd_node() is not None:
            return
        due = of.of_pass[of.passes.current]
        if used.shape[0] == len(due.ids):
            with torch.no_grad():
                due.ahead = of.seen.matches(used, due.ids.to(used.device))

    def _hooks(self) -> Iterator[Any]:
        """Adds the hooks, one at a time."""
        for layer in self.layers:
            yield self._hook(layer)
        for layer, (_, router) in self._ahead.items():
            yield router.register_forward_hook(partial(self._ahead_left, layer))

    def _ahead_left(
        self,
        layer: int,
        _router: nn.Module,
        _inputs: tuple[Any, ...],
        answer: tuple[Any, ...],
    ) -> None:
        if not torch.compiler.is_compiling():
            self._look_ahead(layer, answer[1])

    def _hook(self, layer: int) -> Any:
        place = self._of[layer].seen.place

        def entered(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if not torch.compiler.is_compiling() and len(inputs) > place:
                self._look(layer, inputs[place])

        def left(
            _module: nn.Module,
            _inputs: tuple[Any, ...],
            answer: tuple[Any, ...],
        ) -> None:
            if not torch.compiler.is_compiling():
                self._look(layer, answer[place])

        seen = self._of[layer].seen
        return (
            seen.module.register_forward_pre_hook(entered) if seen.enters else seen.module.register_forward_hook(left)
        )

    # ---------------------------------------------------------------- the receipt

    def receipt(self) -> Receipt:
        """What was used until now; on an accelerator this waits for it. Changes nothing."""
        dues = [due for of in self._of.values() for due in of.due]
        flags = fetched_flags(dues) if dues else {}
        uses: list[Use] = []
        gaps: list[Gap] = []
        for number in range(max((len(of.due) for of in self._of.values()), default=0)):
            here = {layer: of.due[number] for layer, of in self._of.items() if number < len(of.due)}
            most = max(due.passes for due in here.values())
            for layer, due in here.items():
                use, gap = router_use(number, layer, due, flags[due], most)
                uses.append(use)
                gaps += gap
                there = flags[due][0]
                if due.ahead is not None and there.any() and on_host([due.ahead])[there].all():
                    wanted = f"its own choice in {self._ahead[layer][0]}, of multi-token prediction"
                    gaps.append(Gap(layer, number, None, wanted, "the experts of this layer's rows"))
        if self.layers and not any(any(use.due) for use in uses):
            got = f"none in {max((use.micro_batch + 1 for use in uses), default=0)} micro-batches"
            gaps.insert(0, Gap(None, None, None, "a row that is due", got))
        for layer, of in self._of.items():
            if of.without_rows:
                wanted = "rows that are due before each forward pass"
                gaps.append(Gap(layer, None, None, wanted, f"{of.without_rows} passes without"))
            gaps += [Gap(layer, None, None, text, f"{count} such passes") for text, count in of.refused.items()]
        return Receipt(self.layers, tuple(uses), tuple(gaps))


@contextmanager
def watch(model: Model) -> Iterator[Watch]:
    """Within the block, look at what each router of ``model`` uses. One hook a router is added and removed again.

    For models of Megatron-core (with any trainer's replay: Megatron's own, verl's, SkyRL's, NeMo-RL's, slime's,
    miles'), NeMo-Automodel, VeOmni and transformers. Routers of multi-token prediction choose for themselves: one
    that takes the rows of the decoder's layer of its number is a gap. Passes that replay nothing, as those of a
    reference model, belong outside the block if they run through the same model.

    The rows of a step are kept on the routers' device until the block ends: ``tokens * layers * top_k`` times two bytes
    from routes, four from an installation.

    Raises :class:`ReplayError` for a model without routers that are known here, and inside another watch of them.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    replayed = Watch(watched_routers(chunks), routers_ahead(chunks))
    routers = [of.seen.router for of in replayed._of.values()]
    if any(router in _WATCHES for router in routers):
        wanted = "one watch of a router at a time"
        raise ReplayError("watch", wanted, "another that is not over")
    hooks: list[Any] = []
    try:
        _WATCHES.update(dict.fromkeys(routers, replayed))
        hooks += replayed._hooks()
        yield replayed
    finally:
        for hook in hooks:
            hook.remove()
        for router in routers:
            _WATCHES.pop(router, None)
        for of in replayed._of.values():
            of.of_pass.clear()
            for due in of.due:
                due.ids = due.ids[:0]


def note_installed(
    routers: Mapping[int, nn.Module],
    ids: torch.Tensor,
    samples: NDArray[np.int64] | None = None,
) -> None:
    """A replay has put ``ids`` ``[tokens, layers, top_k]`` into ``routers``, by layer: in watched ones they are due."""
    if not _WATCHES:
        return
    by_watch: dict[int, list[tuple[int, int]]] = {}
    watches: dict[int, Watch] = {}
    for index, (layer, router) in enumerate(routers.items()):
        watching = _WATCHES.get(router)
        if watching is not None:
            watches[id(watching)] = watching
            by_watch.setdefault(id(watching), []).append((index, layer))
    names = np.full(len(ids), NO_SAMPLE, np.int64) if samples is None else samples
    for key, places in by_watch.items():
        chosen = ids if len(places) == ids.shape[1] else ids[:, [index for index, _ in places]]
        watches[key]._begin([layer for _, layer in places], chosen, names, by_hand=False)


def note_over(routers: Mapping[int, nn.Module]) -> None:
    """What was put into ``routers``, by layer, has had its forward passes. What is due otherwise stays due."""
    for layer, router in routers.items() if _WATCHES else ():
        watching = _WATCHES.get(router)
        if watching is not None:
            watching._over(layer)


def _dtype(routes: Sequence[Routes]) -> str:
    return "int16" if all(part.num_experts <= 1 << 15 for part in routes if part is not None) else "int32"


def _shard_places(shards: Sequence[Shard]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sample and the position of each place of ``shards``; the sample of a buffer's padding is -1."""
    assert TAIL == NO_SAMPLE
    samples = [np.full(stop - start, sequence, np.int64) for sequence, start, stop in shards]
    positions = [np.arange(start, stop) for _, start, stop in shards]
    empty = [np.zeros(0, np.int64)]
    return np.concatenate(empty + samples), np.concatenate(empty + positions)

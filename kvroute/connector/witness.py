"""Binds rows to KV that an inner connector keeps: folds of paged KV on its device, and the rows matched by them.

A layer's KV is ``[blocks, ...]`` as its engine has it, ``[blocks, heads, tokens, K and V]`` or, for latent attention,
``[blocks, 1, tokens, latent and rope]``; it is folded in that logical order, whatever the strides are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import ConfigError
from kvroute.connector.limits import LIMITS, Limits
from kvroute.connector.messages import StepMeta
from kvroute.witness import ROOT, UNKNOWN_WITNESS, WORD_NBYTES, Run, chained, fold_keys, folded

Join = Callable[[torch.Tensor], object]
"""Turns the ranks' folds, int64 ``[n]``, into those of the whole KV, in place; all ranks call it together."""


def keys_on(device: torch.device, first: int, words: int) -> torch.Tensor:
    """The keys int64 ``[2, words]`` of the words number ``first`` and on."""
    return torch.from_numpy(fold_keys(first, words).view(np.int64)).to(device)


def folded_on_device(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The folds int64 ``[n]`` of ``words`` int64 ``[n, words]``, as :func:`folded` makes them; waits for nothing."""
    mixed = words * keys[0]
    halves = mixed.view(torch.int32)  # the lower one first, as every device of torch has it
    halves[:, ::2].bitwise_xor_(halves[:, 1::2])
    return mixed.mul_(keys[1]).sum(1)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, pinned if it comes from a device: complete when the device has done the launched work."""
    return values.to("cpu", non_blocking=True, copy=True)


class KvFolder:
    """Folds blocks of ``layers``, the KV of the layers that witness: usually the last one alone.

    If ranks divide the heads of a layer, ``first_head`` is this rank's first head: then ``join`` adds the ranks' folds,
    modulo 2^64, to the fold of the whole layer, and all ranks ask for the folds of the same blocks in the same order.
    The layers' memory stays the engine's. Raises :class:`ConfigError` for KV whose blocks are not whole 8-byte words.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        first_head: int = 0,
        join: Join | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self._join = join
        self._limits = limits
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._host: list[tuple[NDArray[np.uint64], NDArray[np.uint64]]] = []  # words and keys of layers on a CPU
        first = 0
        for kv in layers:
            nbytes = kv[:1].numel() * kv.element_size()
            if kv.dim() < 2 or not nbytes or nbytes % WORD_NBYTES:
                wanted = "blocks of whole 8-byte words"
                got = f"{kv.dtype} of shape {tuple(kv.shape)}"
                raise ConfigError("KV layer", wanted, got)
            words = nbytes // WORD_NBYTES
            first_word = first + first_head * (words // kv.shape[1])
            self._layers.append((kv, keys_on(kv.device, first_word, words)))
            host = words_of(kv)
            if host is not None:
                self._host.append((host, fold_keys(first_word, words)))
            first += 1 << 40  # more words than any layer of a block has

    @property
    def block_nbytes(self) -> int:
        """Bytes of KV that are read to fold one block."""
        return sum(keys.shape[1] * WORD_NBYTES for _, keys in self._layers)

    def folds(self, blocks: Sequence[int]) -> torch.Tensor:
        """The folds int64 ``[n]`` of these blocks, with their KV after all work launched before.

        In host memory, and complete when the device has done the launched work; does not wait.
        """
        if not len(blocks):
            return torch.zeros(0, dtype=torch.int64)
        ids = np.asarray(blocks, np.int64)
        step = max(1, self._limits.gather_nbytes_max // self.block_nbytes)
        parts = [self._folded(ids[start : start + step]) for start in range(0, len(ids), step)]
        folds = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._join is not None:
            self._join(folds)
        return folds if folds.device.type == "cpu" else to_host(folds)

    def _folded(self, blocks: NDArray[np.int64]) -> torch.Tensor:
        n = len(blocks)
        if len(self._host) == len(self._layers):  # one call of numpy takes a third of what one of torch does
            layer_folds = [folded(words[blocks].reshape(n, -1), keys) for words, keys in self._host]
            sums = np.sum(layer_folds, 0, np.uint64)
            return torch.from_numpy(sums.view(np.int64))
        ids = torch.from_numpy(blocks).to(self._layers[0][0].device, non_blocking=True)
        total = None
        for kv, keys in self._layers:
            raw = kv
            if kv.element_size() == 1:  # float8 cannot be gathered everywhere
                raw = kv.view(torch.uint8)
            gathered = raw.index_select(0, ids).reshape(n, -1)
            part = folded_on_device(gathered.view(torch.int64), keys)
            total = part if total is None else total.add_(part)
        assert total is not None, "some layer witnesses"
        return total


def words_of(kv: torch.Tensor) -> NDArray[np.uint64] | None:
    """KV ``[blocks, ...]`` on a CPU as words ``[blocks, ...]`` in its logical order, not copied, or ``None``."""
    if kv.device.type != "cpu":
        return None
    try:
        words = kv.view(torch.int64).numpy()
    except RuntimeError:  # words are not whole in it
        return None
    return words.view(np.uint64)


class KvWitness:
    """Names rows by the KV beside them when they are stored, and compares when both have come back.

    ``rows`` are the engine's; ``folder`` folds its KV. The thread that runs the steps calls :meth:`look` when the
    device's writes into the blocks have been launched; its result is for :meth:`name` or :meth:`refused`, when the
    device is done, in the order of the looks. A block's witness is known until the block is given out again in another
    generation.
    """

    def __init__(self, rows: AuxBlocks, folder: KvFolder, blocks: int) -> None:
        self._rows = rows
        self._folder = folder
        self._of: NDArray[np.uint64] = np.zeros(blocks, np.uint64)  # the witness of each block,
        self._lives: NDArray[np.int64] = np.full(blocks, -1, np.int64)  # in this life

    def look(self, runs: Sequence[Run]) -> torch.Tensor:
        """The folds of all blocks of ``runs``; see :meth:`KvFolder.folds`."""
        blocks = [block for run in runs for block in run.blocks]
        return self._folder.folds(blocks)

    def name(self, runs: Sequence[Run], folds: torch.Tensor) -> None:
        """These blocks have just been filled: their rows get the origins that their KV's folds give."""
        blocks, lives, witnesses = self._take(runs, folds)
        if blocks:
            origins = np.array(witnesses, np.uint64)
            self._rows.exchange.name_origins(blocks, lives, origins)

    def refused(self, runs: Sequence[Run], folds: torch.Tensor) -> list[int]:
        """The KV of these blocks was loaded, and rows may have come: returns the blocks whose rows are of other KV.

        Their rows are forgotten. A block whose rows did not come is not among them.
        """
        blocks, _, witnesses = self._take(runs, folds)
        complete = self._rows.complete(blocks).tolist()  # a forgotten block has an origin, too
        origins = self._rows.exchange.origins(blocks)
        wrong = dict[int, bool]()
        for block, origin, witness, has_rows in zip(blocks, origins, witnesses, complete, strict=True):
            if origin and origin != witness:
                wrong[block] = has_rows
        if wrong:
            self._rows.forget(list(wrong))
        return [block for block, has_rows in wrong.items() if has_rows]

    def _take(
        self,
        runs: Sequence[Run],
        folds: torch.Tensor,
    ) -> tuple[list[int], list[int], list[int]]:
        """All blocks of ``runs``, their lives and their witnesses."""
        blocks = [block for run in runs for block in run.blocks]
        before_runs = [max(0, run.before) for run in runs]
        lives = self._rows.generations([*blocks, *before_runs]).tolist()
        block_folds = folds.numpy().view(np.uint64).tolist()
        witnesses = list[int]()
        for run, life in zip(runs, lives[len(blocks) :], strict=True):
            before = ROOT
            if run.before >= 0:
                before = UNKNOWN_WITNESS
                if self._lives[run.before] == life:
                    before = int(self._of[run.before])
            for block in run.blocks:
                place = len(witnesses)
                before = chained(before, block_folds[place])
                self._of[block] = before
                self._lives[block] = lives[place]
                witnesses.append(before)
        return blocks, lives[: len(blocks)], witnesses


class OtherRank:
    """A tensor-parallel rank without rows: it adds its heads' part to every fold of the first rank."""

    def __init__(self, folder: KvFolder) -> None:
        self._folder = folder
        self._step: StepMeta | None = None

    def begin(self, step: StepMeta) -> None:
        self._step = step
        self._fold(step.loads.landed)

    def end(self) -> None:
        step = self._step
        self._step = None
        if step is not None:
            self._fold(step.loads.runs)
            self._fold(step.carrier.runs)

    def _fold(self, runs: Sequence[Run]) -> None:
        blocks = [block for run in runs for block in run.blocks]
        self._folder.folds(blocks)


def by_block(kv: torch.Tensor, blocks: int) -> torch.Tensor:
    """A layer's KV as ``blocks`` whole blocks, not copied: kernels may have it in smaller ones, ``[blocks * n, heads,
    tokens / n, ...]``. The heads stay in front, ``[blocks, heads, n, tokens / n, ...]``, so that ranks divide them."""
    split, remainder = divmod(kv.shape[0], blocks)
    if remainder or split < 2:
        return kv
    by_kernel: torch.Tensor = kv.unflatten(0, (blocks, split))
    return by_kernel.movedim(1, 2)


def by_layer(kv_caches: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """The name of each layer's KV by the number in it, in order: the largest, where a layer has several caches.

    Sparse attention keeps a small cache of its indexer beside the KV, which it does not compute with. Raises
    :class:`ConfigError` if no name has a number.
    """
    largest = dict[int, str]()
    for name, kv in kv_caches.items():
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if len(numbers) != 1:
            continue
        before = largest.get(numbers[0])
        if before is None or kv[:1].nbytes > kv_caches[before][:1].nbytes:
            largest[numbers[0]] = name
    if not largest:
        wanted = "names with the number of their layer"
        raise ConfigError("KV layers", wanted, sorted(kv_caches)[:3])
    return dict(sorted(largest.items()))


def witnesses(layers: Sequence[Sequence[torch.Tensor]], value_nbytes: int) -> list[torch.Tensor]:
    """The KV to fold, of layers in order that have one tensor or several each: the last layer's.

    All layers' if KV has 8 bits a value, because one layer then proves too little.
    """
    return [kv for layer in layers[0 if value_nbytes == 1 else -1 :] for kv in layer]


def witnessing(kv_caches: Mapping[str, torch.Tensor], moe_layers: Sequence[int]) -> list[torch.Tensor]:
    """The layers that are :func:`witnesses`, of ``kv_caches`` by names with the layer's number.

    Raises :class:`ConfigError` if more than the last of ``moe_layers`` comes after the last KV: such layers share an
    earlier layer's KV.
    """
    names = by_layer(kv_caches)
    layers = {number: kv_caches[name] for number, name in names.items()}
    last = max(layers)
    blind = [layer for layer in sorted(moe_layers)[:-1] if layer >= last]
    if blind:
        wanted = f"one behind layer {blind[-1]}, or no store"
        raise ConfigError("KV layers", wanted, f"the last is {last}")
    tensors = [[kv] for kv in layers.values()]
    return witnesses(tensors, layers[last].element_size())


__all__ = ["Join", "KvFolder", "KvWitness", "OtherRank", "by_block", "by_layer", "witnesses", "witnessing"]

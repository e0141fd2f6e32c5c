"""The routers' values of one pass: one call each, and memory of its own for each. The law of every capture.

A hook keeps a reference and launches nothing. A router that is not called, or is called twice, or writes to another
router's memory, fails the pass: its rows are not handed out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvroute.capture.errors import CaptureError

WEIGHTS_PLACE: Final = 1
IDS_PLACE: Final = 2
"""Where weights and ids are in the answer of a transformers router."""
MISSED: Final = "a call in each pass"
ONCE: Final = "one call a pass"
OWN: Final = "values in memory of their own"
"""The ``wanted`` of a :class:`CaptureError`."""

Looks = tuple[list[torch.Size], list[torch.dtype], list[tuple[int, ...]]]
"""The shape, dtype and strides of each layer's values, which are compared at each pass."""


class Values(NamedTuple):
    """The values of some layers' routers: ``[tokens, width]`` each, all in one of these dtypes."""

    name: str
    layer_ids: tuple[int, ...]
    width: int
    dtypes: Collection[torch.dtype]


class Form(NamedTuple):
    """The checked looks of a pass's values, without their addresses."""

    looks: Looks
    tokens: int  # of the layer with the fewest
    strides: NDArray[np.int64]  # [layers, 2]: elements from token to token, from value to value
    extents: list[int]  # [layers]: bytes from the first value to the end of the last, for ``tokens``
    dtypes: tuple[torch.dtype, ...]  # of each spec's values


class Hooks:
    """Callbacks for routers, and the values that they kept since :meth:`clear`. Not thread-safe."""

    def __init__(
        self,
        values: Sequence[Values],
        whole: Callable[[], None] | None = None,
    ) -> None:
        """``whole`` is called after the last router of a pass."""
        self._values = tuple(values)
        self._whole = whole
        self._names = [(value.name, layer) for value in self._values for layer in value.layer_ids]
        self._index = {name: i for i, name in enumerate(self._names)}
        self._widths = np.array([value.width for value in self._values for _ in value.layer_ids])
        self._once = [1] * len(self._names)
        self._kept: list[torch.Tensor | None] = [None] * len(self._names)
        self.calls = [0] * len(self._names)
        self._form: Form | None = None
        self._seen: tuple[Form, NDArray[np.int64]] | None = None
        self._places: list[int] = []  # addresses of the values
        self._apart = 0  # tokens up to which these are known not to overlap

    def hook(
        self,
        layer_id: int,
        name: str | None = None,
        part: int = IDS_PLACE,
    ) -> Callable[..., None]:
        """A callback for the router of a layer that keeps its last argument, ``[tokens, width]``.

        Of a tuple ``(logits, weights, ids, ...)``, the answer of transformers' routers, it keeps the ``part``, by
        default the ids: so it also works as a forward hook. ``name`` is the name of the values, by default of the
        first.
        """
        place = (self._names[0][0] if name is None else name, layer_id)
        if place not in self._index:
            raise CaptureError("layer", f"one of {sorted(self._index)}", place)
        index = self._index[place]
        kept = self._kept
        calls = self.calls
        whole = self._whole

        def keep(*arguments: Any) -> None:
            value = arguments[-1]
            if isinstance(value, tuple):
                value = value[part] if len(value) > IDS_PLACE else None
            if not isinstance(value, torch.Tensor):
                wanted = "an answer (logits, weights, ids)"
                raise CaptureError(type(arguments[0]).__name__, wanted, type(arguments[-1]).__name__)
            kept[index] = value
            calls[index] += 1
            if whole is not None and 0 not in calls:
                whole()

        return keep

    def clear(self) -> None:
        """Forget the kept values, for example after a failed pass."""
        self._kept[:] = [None] * len(self._kept)
        self.calls[:] = [0] * len(self.calls)

    def most_tokens(self) -> int:
        """Of the values that are kept, how many tokens the longest has."""
        return max((len(value) for value in self._kept if value is not None), default=0)

    def once(self) -> list[torch.Tensor] | None:
        """What the routers said, as they said it; ``None`` unless each was called once."""
        kept: Any = self._kept  # called once each: none is None
        return kept if self.calls == self._once else None

    def taken(self, tokens: int | None = None) -> tuple[list[torch.Tensor], Form, NDArray[np.int64]]:
        """The values of a pass, ``[tokens or more, width]`` each, not copied; ``None``: all of the same number.

        With their looks and their addresses ``[layers]``: the same two objects as long as neither changes. Raises
        :class:`CaptureError`, naming the layer, unless every router was called once and its values fit, and no two
        layers' values of these tokens share bytes.
        """
        sources, form = self._checked(tokens)
        tokens = form.tokens if tokens is None else tokens
        places = [source.data_ptr() for source in sources]
        if self._seen is None or form is not self._seen[0] or places != self._places:
            self._seen = (form, np.array(places, np.int64))
            self._places = places
            self._apart = 0
        if tokens > self._apart:
            self._check_apart(sources, tokens)
            self._apart = tokens
        return sources, *self._seen

    def _checked(self, tokens: int | None) -> tuple[list[torch.Tensor], Form]:
        """The kept values, each ``[tokens, width]``, and their looks, which repeat from pass to pass."""
        if self.calls != self._once:
            routers = zip(self._names, self.calls, strict=True)
            (_, layer), calls = next((router, n) for router, n in routers if n != 1)
            got = f"{calls} calls"
            raise CaptureError(f"router of layer {layer}", ONCE if calls else MISSED, got)
        kept: Any = self._kept  # every router was called: no entry is None
        sources: list[torch.Tensor] = list(kept)
        before = self._form
        looks = _looks(sources)
        if before is None or looks != before.looks:
            sources = [k if k.dim() == 2 else k.reshape(-1, k.shape[-1]) for k in kept]
            looks = _looks(sources)
        wanted = len(sources[0]) if tokens is None else tokens
        if before is not None and looks == before.looks and wanted <= before.tokens:
            return sources, before
        firsts = []
        index = 0
        for values in self._values:
            firsts.append(dtype := sources[index].dtype)
            if dtype not in values.dtypes:
                raise CaptureError(f"router of layer {values.layer_ids[0]}", f"a dtype that fits {values.name}", dtype)
            for layer, source in zip(values.layer_ids, sources[index:], strict=False):
                many = len(source) == wanted if tokens is None else len(source) >= wanted
                if source.shape[1:] != (values.width,) or not many or source.dtype != dtype:
                    wanted_shape = f"{dtype} [{wanted}{' or more' * (tokens is not None)}, {values.width}]"
                    got = f"{source.dtype} {tuple(source.shape)}"
                    raise CaptureError(f"router of layer {layer}", wanted_shape, got)
            index += len(values.layer_ids)
        sizes = np.array([source.element_size() for source in sources])
        strides = np.array([source.stride() for source in sources])
        fewest = min(map(len, sources))
        reach = (fewest - 1) * strides[:, 0] + (self._widths - 1) * strides[:, 1] + 1
        self._form = Form(looks, fewest, strides, (reach * sizes * (fewest > 0)).tolist(), tuple(firsts))
        return sources, self._form

    def _check_apart(self, sources: list[torch.Tensor], tokens: int) -> None:
        """Raise :class:`CaptureError` if the first ``tokens`` values of two layers overlap."""
        assert self._seen is not None
        ends = 0  # of the sources so far: an allocator lays one after the other
        for place, extent in sorted(zip(self._places, self._seen[0].extents, strict=True)):
            if place < ends:
                break
            ends = place + extent
        else:
            return
        pair = overlapping([source[:tokens] for source in sources])
        if pair is not None:
            first, second = (self._names[i][1] for i in pair)
            got = f"the buffer of layer {first}, used again"
            raise CaptureError(f"router of layer {second}", OWN, got)


def _looks(sources: list[torch.Tensor]) -> Looks:
    return [s.shape for s in sources], [s.dtype for s in sources], [s.stride() for s in sources]


def overlapping(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """The indices of two ``tensors`` ``[tokens, width]`` that share bytes; layers of one interleaved tensor do not."""
    before: list[tuple[int, int]] = []  # the end of each one's memory, and its index
    addresses = [(tensor.data_ptr(), i) for i, tensor in enumerate(tensors) if tensor.numel()]
    for address, i in sorted(addresses):
        before = [(end, j) for end, j in before if end > address]
        for _, j in before:
            if not _interleaved(tensors[j], tensors[i]):
                return min(i, j), max(i, j)
        tensor = tensors[i]
        reach = 1
        for n, step in zip(tensor.shape, tensor.stride(), strict=True):
            reach += (n - 1) * step
        before.append((address + reach * tensor.element_size(), i))
    return None


def _interleaved(low: torch.Tensor, high: torch.Tensor) -> bool:
    """Whether two layers of one ``[tokens, layers, width]`` lie between each other without touching."""
    if low.stride() != high.stride() or low.stride(-1) != 1 or low.element_size() != high.element_size():
        return False
    between, uneven = divmod(high.data_ptr() - low.data_ptr(), low.element_size())
    step = math.gcd(*low.stride()[:-1])
    width = low.shape[-1]
    return not uneven and step > 0 and width <= between % step <= step - width


__all__ = ["IDS_PLACE", "MISSED", "ONCE", "OWN", "WEIGHTS_PLACE", "Form", "Hooks", "Values", "overlapping"]

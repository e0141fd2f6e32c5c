"""Rows whose layers are divided among the stages of a pipeline: a region each, and one view of them all.

The law. Every stage applies the same feed and writes the same steps, each in their order but at a time of its own. With
each part of a row a stage writes the number of its step. A row is there if all stages have their part in the life that
the reader names, from one step; a step computes one token at a slot, with one version of the weights. Whatever a stage
has not written yet, or has already written anew, makes the row missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import ConfigError, RegionMissingError
from cache_manager.publish import MISSING_BYTE, Rows
from cache_manager.regions import RegionView
from cache_manager.spec import AuxBlockDataSpec

STEP: Final = "step"
"""The spec of the number of the step that wrote a stage's part of a row."""


def step_spec(block_tokens: int) -> AuxBlockDataSpec:
    """One ``uint64`` per token: the number of the step that wrote its row."""
    return AuxBlockDataSpec(STEP, row_shape=(), dtype="uint64", block_tokens=block_tokens)


def stage_spec(spec: AuxBlockDataSpec, layers: range) -> AuxBlockDataSpec | None:
    """The part of ``spec`` in a stage with these of the model's ``layers``; ``None``: no router is among them."""
    layer_ids = [layer for layer in spec.attrs["layer_ids"] if layer in layers]
    if not layer_ids:
        return None
    attrs = {**spec.attrs, "layer_ids": layer_ids}
    return AuxBlockDataSpec(spec.name, (len(layer_ids), *spec.row_shape[1:]), spec.dtype, spec.block_tokens, attrs)


class StageViews:
    """The rows of ``spec`` in the regions of several stages: ``(name, layer_ids)`` each.

    Raises :class:`ConfigError` unless each layer of ``spec`` is in one stage, and as :class:`RegionView` does.
    """

    def __init__(
        self,
        spec: AuxBlockDataSpec,
        stages: Sequence[tuple[str, Sequence[int]]],
        *,
        namespace: bytes,
    ) -> None:
        layers = [layer for _, layer_ids in stages for layer in layer_ids]
        if sorted(layers) != list(spec.attrs["layer_ids"]):
            wanted = f"each of the layers {list(spec.attrs['layer_ids'])} in one of them"
            raise ConfigError("stages", wanted, layers)
        self._spec = spec
        self.regions = [(name, list(layer_ids)) for name, layer_ids in stages]
        """By what another process finds the same rows: name and layers of each region."""
        self._order = np.argsort(layers)
        self._views = list[RegionView]()
        try:
            for name, _ in stages:
                self._views.append(RegionView(name, namespace=namespace))
        except BaseException:
            self.close()
            raise

    def read(
        self,
        name: str,
        blocks: Sequence[int] | NDArray[Any],
        start: int = 0,
        stop: int | None = None,
        *,
        generations: Sequence[int] | NDArray[Any],
    ) -> Rows:
        """As :meth:`RegionView.read`, of all stages."""
        return self._joined(name, lambda view, of: view.read(of, blocks, start, stop, generations=generations))

    def read_slots(
        self,
        name: str,
        slots: Sequence[int] | NDArray[Any],
        *,
        generations: Sequence[int] | NDArray[Any],
    ) -> Rows:
        """As :meth:`RegionView.read_slots`, of all stages."""
        return self._joined(name, lambda view, of: view.read_slots(of, slots, generations=generations))

    def generation(self, block: int) -> int:
        """The smallest of all stages': of a progress counter, the step that the last of them has finished."""
        return min(view.generation(block) for view in self._views)

    @property
    def namespace(self) -> bytes:
        """As :attr:`RegionView.namespace`."""
        return self._views[0].namespace

    def follow(self, namespace: bytes) -> None:
        """As :meth:`RegionView.follow`."""
        for view in self._views:
            view.follow(namespace)

    def close(self) -> None:
        """As :meth:`RegionView.close`."""
        for view in self._views:
            view.close()

    def _joined(self, name: str, read: Callable[[RegionView, str], Rows]) -> Rows:
        """The rows of a spec that ``read`` copies from each view. A part that is read between two equal numbers of
        steps was written by that step: no other one with this number writes the slot."""
        before = [read(view, STEP) for view in self._views]
        parts = [read(view, name) for view in self._views]
        after = [read(view, STEP) for view in self._views]
        steps = [*before, *after]
        valid = np.logical_and.reduce([rows.valid for rows in (*parts, *steps)])
        for other in steps[1:]:
            valid &= other.values == steps[0].values
        values = parts[0].values
        if name == self._spec.name:
            values = np.take(np.concatenate([part.values for part in parts], axis=1), self._order, axis=1)
        else:  # all stages say the same, in one step
            for part in parts[1:]:
                valid &= (part.values == values).all(axis=tuple(range(1, values.ndim)))
        values[~valid] = np.frombuffer(bytes([MISSING_BYTE]) * values.itemsize, values.dtype)[0]
        return Rows(values, valid)


class NoView:
    """The view of a scheduler's end that no worker has said its regions to: there is nothing to read."""

    def read(self, name: str, *_: Any, **__: Any) -> Rows:
        """Raises :class:`RegionMissingError`."""
        raise RegionMissingError(f"rows of {name}: no worker has said where they are")

    def follow(self, namespace: bytes) -> None:
        """Nothing has a namespace here."""

    def close(self) -> None:
        """Nothing is open."""


RowsView = RegionView | StageViews
"""What a scheduler's end reads: one region, or those of all stages."""


class RowsReader(Protocol):
    """Who reads rows of a view later than their blocks may be given out anew. The scheduling thread makes all calls."""

    def attach(self, view: RowsView, *, late: bool) -> None:
        """Rows are in ``view`` from here on; if ``late``, the worker may write them when their request is done."""

    def given(self, blocks: Sequence[int], step: int) -> None:
        """These blocks begin new lives. The worker learns of that, and of the copies, with this ``step``."""

    def forgotten(self) -> None:
        """All rows are about to be forgotten: what is written is read, the others become missing."""


__all__ = ["STEP", "NoView", "RowsReader", "RowsView", "StageViews", "stage_spec", "step_spec"]

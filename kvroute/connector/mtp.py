"""What the router of a layer for multi-token prediction (MTP) chose: rows of a spec of its own, never of the model's.

An MTP layer reads the hidden state of one token and the embedding of the token behind it. So a row at a position is of
two tokens, and a block knows one of them: behind its last token another request may go on otherwise, and behind a
draft that is rejected every request does.

The law: with each row stands the token that its router read with it, and the row is handed out beside that token
alone. An engine's draft pass visits each token of a step once, at the step's own slots; passes that follow in the same
step visit drafts, and leave no rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache_manager.publish import Rows
from cache_manager.spec import AuxBlockDataSpec
from kvroute.checks import unsound
from kvroute.connector.settings import VERSION
from kvroute.connector.stages import NoView, RowsView
from kvroute.connector.tickets import MissingSpan
from kvroute.routes import Routes
from kvroute.routes.spans import runs
from kvroute.routing import routing_spec

if TYPE_CHECKING:
    import torch

MTP: Final = "mtp_routing"
"""The spec of an MTP router's ids."""
NEXT_TOKEN: Final = "mtp_next_token"  # noqa: S105 (no password)
"""The spec of the token that the router read beside its own."""
NOT_DRAFTED: Final = "no draft pass has read this token, or its block is another one's by now"
READ_OTHERWISE: Final = "the MTP layer has read another token behind this one"

RowsBeside = Mapping[str, tuple[NDArray[Any], NDArray[np.bool_]]]
"""By spec: values ``[n, *row_shape]`` for each slot of a step, and which of them count ``[n]``."""
NOTHING_BESIDE: Final[RowsBeside] = MappingProxyType({})


def mtp_spec(routing: AuxBlockDataSpec) -> AuxBlockDataSpec:
    """The spec of the first MTP layer behind a model with this spec of ``routing``: ``[1, top_k]``, as layer 0 of 1.

    >>> from kvroute.routing import routing_spec
    >>> mtp_spec(routing_spec(256, 8, range(3, 61), num_layers=61, block_tokens=16)).row_shape
    (1, 8)
    """
    plain = routing_spec(routing.attrs["num_experts"], routing.row_shape[1], [0], 1, routing.block_tokens)
    return AuxBlockDataSpec(MTP, plain.row_shape, plain.dtype, plain.block_tokens, plain.attrs)


def next_token_spec(block_tokens: int) -> AuxBlockDataSpec:
    """One ``uint32`` per token: the id of the token that the MTP router has read beside it."""
    return AuxBlockDataSpec(NEXT_TOKEN, row_shape=(), dtype="uint32", block_tokens=block_tokens)


class MtpIds:
    """The choices of the MTP router of ``spec`` in the current step."""

    def __init__(self, spec: AuxBlockDataSpec) -> None:
        self.spec = spec
        self._pass: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None = None

    def begin(self) -> None:
        """A step begins."""
        self._pass = None

    def keep(
        self,
        ids: torch.Tensor,
        slots: torch.Tensor,
        next_tokens: torch.Tensor,
    ) -> None:
        """A step's first draft pass: the router's ``ids [n, top_k]`` for the tokens at ``slots [n]``, each read with
        one of ``next_tokens [n]``. Arrays that do not fit leave no rows."""
        if ids.shape == (len(slots), self.spec.row_shape[1]) and slots.shape == next_tokens.shape:
            self._pass = (
                ids.numpy().astype(np.int64),
                slots.numpy().astype(np.int64),
                next_tokens.numpy().astype(np.int64),
            )

    def take(self, slots: NDArray[np.int64]) -> RowsBeside:
        """Rows for the step's tokens at ``slots [n]``; those that the pass has not visited do not count."""
        found = self._pass
        self._pass = None
        count = np.zeros(slots.size, np.bool_)
        rows = np.zeros((slots.size, *self.spec.row_shape), self.spec.dtype)
        read = np.zeros(slots.size, np.uint32)
        if found is not None:
            ids, visited, next_tokens = found
            good = visited >= 0
            wrong = unsound(ids[:, None], self.spec.attrs["num_experts"])
            if wrong is not None:
                good &= ~wrong
            good &= (next_tokens >= 0) & (next_tokens <= np.iinfo(np.uint32).max)
            places = {int(visited[i]): i for i in np.flatnonzero(good)}
            at = np.array([places.get(int(slot), -1) for slot in slots], np.int64)
            count = at >= 0
            rows[count] = ids[at[count], None]
            read[count] = next_tokens[at[count]]
        return {MTP: (rows, count), NEXT_TOKEN: (read, count)}


class NoMtpIds:
    """The MTP router's choices for an engine that keeps none: nothing stands beside the rows of a step."""

    def begin(self) -> None:
        """A step begins."""

    def take(self, slots: NDArray[np.int64]) -> RowsBeside:  # noqa: ARG002 (as MtpIds)
        """No rows."""
        return NOTHING_BESIDE


class MtpRows(NamedTuple):
    """Rows of one request, and why others of its positions have none."""

    routes: Routes
    missing: list[MissingSpan]


def mtp_rows(
    view: RowsView | NoView,
    spec: AuxBlockDataSpec,
    blocks: Sequence[int],
    lives: Sequence[int] | NDArray[np.int64],
    tokens: Sequence[int],
    start: int,
    stop: int,
) -> MtpRows:
    """The rows of ``spec`` at the positions ``[start, stop)`` of a request with these ``tokens``, more than ``stop``,
    in ``blocks`` in these ``lives``.

    The token is read before the row and after it, because a step may write both anew meanwhile.
    """

    def read(name: str) -> Rows:
        return view.read(name, blocks, start, stop, generations=lives)

    before, rows, labels, after = read(NEXT_TOKEN), read(MTP), read(VERSION), read(NEXT_TOKEN)
    follow = np.asarray(tokens[start + 1 : stop + 1])
    there = before.valid & rows.valid & after.valid
    same = (before.values == follow) & (after.values == follow)
    valid = there & same
    routes = Routes.from_rows(spec, Rows(rows.values, valid), start, weights_version=labels)
    gaps = [(first, last, NOT_DRAFTED) for first, last in runs(~there)]
    gaps += [(first, last, READ_OTHERWISE) for first, last in runs(there & ~same)]
    return MtpRows(routes, [(start + first, start + last, why) for first, last, why in sorted(gaps)])


__all__ = [
    "MTP",
    "NEXT_TOKEN",
    "NOTHING_BESIDE",
    "MtpIds",
    "MtpRows",
    "NoMtpIds",
    "mtp_rows",
    "mtp_spec",
    "next_token_spec",
]

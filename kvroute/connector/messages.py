"""The messages between the scheduler's end and the worker's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvroute.witness import Run


class Loads(NamedTuple):
    """KV that comes from outside, as far as a step is concerned."""

    joined: Sequence[Sequence[int]] = ()  # blocks of each request that joins a step with loads
    runs: Sequence[Run] = ()  # blocks whose KV is loaded in this step
    landed: Sequence[Run] = ()  # blocks whose KV has come between steps


@dataclass(slots=True)
class StepMeta:
    """The scheduler's message with a step."""

    inner: Any  # the message of the connector that moves the KV
    before: bytes  # a batch of the feed: what has become of blocks
    number: int = 0  # of the step, from 1
    tokens: int = 0  # that the step computes
    version: int | None = None  # of the weights that it computes with
    loads: Loads = field(default_factory=Loads)
    carrier: Any = None  # the message of the carrier's side in the scheduler


@dataclass(frozen=True, slots=True)
class Handshake:
    """A worker's first message: that of the inner connector, and the region of the rows if this worker has them."""

    inner: Any
    region: str | None = None
    late: bool = False  # rows are written behind a device, perhaps after the scheduler has the answers
    carrier: Any = None  # the message of the carrier's side in the worker
    layer_ids: Sequence[int] = ()  # whose rows are in the region


@dataclass(frozen=True, slots=True)
class WorkerMeta:
    """A worker's message after a step, beside the inner connector's."""

    inner: Any
    carrier: Any  # the message of the carrier's side in the worker

    def aggregate(self, message: Any) -> WorkerMeta:
        """Merged with the message of another rank, which has no rows."""
        return WorkerMeta(message if self.inner is None else self.inner.aggregate(message), self.carrier)


__all__ = ["Handshake", "Loads", "StepMeta", "WorkerMeta"]

"""Rollouts whose handles are a column of a TransferQueue, beside the other columns of a sample.

The rows stay in another rollout store; a cell of the column is a handle's JSON. A rank that takes a batch from the
queue finds its handles there (:func:`handles_of`) and fetches its share by them. The key of a row is the rollout's id.
A row's other columns belong to others: deleting a rollout empties its cell, and the trainer clears the row itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from typing import Any, Final

import ray
import transfer_queue
from omegaconf import OmegaConf

from cache_manager.errors import ConfigError, StorageError, StoreClosedError
from cache_manager.ports import Absence
from cache_manager.storage.url import StoreUrl
from kvroute.rollout import open_rollouts
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.ids import checked_id
from kvroute.rollout.port import RolloutCounters, RolloutStore
from kvroute.routes import Routes, SamplingSupport
from kvroute.routes.parts import Range

COLUMN: Final = "routed_experts_handle"
PARTITION: Final = "rollouts"
FREE_S: Final = 30.0
"""How long to wait for free CPUs for a queue."""
FREE_POLL_S: Final = 0.5


class QueueRollouts:
    """A ``RolloutStore`` that keeps rows in the store ``rows``, which it owns and closes, and finds them by the queue.

    It connects the process to the queue of its Ray cluster (``transfer_queue.init()``) if need be. A cluster without a
    queue must have room for one: a CPU for its controller and for each unit of storage. One process at a
    time deletes rollouts of an id: another process's put at that moment may not be found by that id.
    """

    def __init__(
        self,
        rows: RolloutStore,
        partition: str = PARTITION,
        column: str = COLUMN,
    ) -> None:
        self.rows = rows
        self._partition = partition
        self._column = column
        self._deleting = threading.Lock()
        self._closed = False
        with _queue_errors():
            _wait_for_room()
            transfer_queue.init()

    @property
    def counters(self) -> RolloutCounters:
        return self.rows.counters

    def put(
        self,
        rollout_id: str,
        routes: Routes,
        support: SamplingSupport | None = None,
    ) -> RolloutHandle:
        handle = self.rows.put(rollout_id, routes, support)
        try:
            with self._deleting:
                self._tell(rollout_id, handle.to_json())
        except StorageError:
            with suppress(StorageError):
                self.rows.delete(handle)
            raise
        return handle

    def find(self, rollout_id: str) -> RolloutHandle | None:
        if self._closed:
            raise StoreClosedError(f"the rollouts of {self._partition} are closed")
        key = checked_id(rollout_id)
        with _queue_errors():
            try:
                row = transfer_queue.kv_batch_get([key], self._partition, [self._column])
            except ValueError:  # no such row
                return None
        return handles_of(row, self._column)[0] if self._column in row.keys() else None  # noqa: SIM118

    def get(
        self,
        handle: RolloutHandle,
        layers: Sequence[int] | None = None,
        spans: Sequence[Range] | None = None,
    ) -> list[Routes] | Absence:
        return self.rows.get(handle, layers, spans)

    def support(self, handle: RolloutHandle) -> SamplingSupport | Absence | None:
        return self.rows.support(handle)

    def delete(self, handle: RolloutHandle) -> None:
        with self._deleting:
            if self.find(handle.rollout_id) == handle:
                self._tell(handle.rollout_id, "")
        self.rows.delete(handle)

    def close(self) -> None:
        """Close the store of the rows; the queue is its cluster's."""
        self._closed = True
        self.rows.close()

    def _tell(self, rollout_id: str, text: str) -> None:
        with _queue_errors():
            transfer_queue.kv_put(rollout_id, self._partition, {self._column: text})


def handles_of(batch: Mapping[str, Any], column: str = COLUMN) -> list[RolloutHandle | None]:
    """The handles of a batch's samples, in order, from a queue's ``TensorDict``; ``None`` for a sample without one.

    Raises :class:`InvalidInputError` for a cell that is not a handle.
    """
    cells = batch[column]
    cells = cells.tolist() if hasattr(cells, "tolist") else list(cells)
    return [RolloutHandle.from_json(text) if text else None for text in cells]


def _wait_for_room() -> None:
    """Raise ``TimeoutError`` if this cluster has no queue and no CPUs for one: TransferQueue would wait without end."""
    try:
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
        return
    except ValueError:  # no such actor
        storage = OmegaConf.load(resources.files(transfer_queue) / "config.yaml").backend.SimpleStorage
    needed = 1 + storage.num_data_storage_units
    give_up_s = time.monotonic() + FREE_S
    while (free := ray.available_resources().get("CPU", 0.0)) < needed:
        has = ray.cluster_resources().get("CPU", 0.0)
        if has < needed or time.monotonic() > give_up_s:
            raise TimeoutError(f"a queue takes {needed} CPUs; the cluster has {has:g}, of which {free:g} are free")
        time.sleep(FREE_POLL_S)


@contextmanager
def _queue_errors() -> Iterator[None]:
    """Any exception of a queue becomes ``StorageError``."""
    try:
        yield
    except Exception as error:
        raise StorageError(f"TransferQueue: {type(error).__name__}: {error}") from error


def open_queue_rollouts(url: StoreUrl) -> QueueRollouts:
    """``tq:?partition=rollouts&column=routed_experts_handle,URL``: ``URL`` is the store of the rows."""
    url.allow("partition", "column")
    if len(url.tiers) != 1:
        wanted = "tq:URL or tq:?column=...,URL, with one store for the rows"
        raise ConfigError("tq: rollout store", wanted, url.text)
    names = (url.parameters.get("partition", PARTITION), url.parameters.get("column", COLUMN))
    rows = open_rollouts(url.tiers[0])
    try:
        return QueueRollouts(rows, *names)
    except BaseException:
        rows.close()
        raise

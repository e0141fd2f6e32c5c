"""Rollouts as Ray objects, one per record, owned by a named actor.

The actor's ownership keeps objects alive, even if the process that put them ends; deleting a rollout, putting it again,
or ending the actor (``ray.kill(ray.get_actor(NAME, namespace="kvroute"))``) gives their memory back. A rank asks the
owner for the parts that it needs; only these cross between nodes, as an object that the rank reads from its own node's
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectLostError, RayTaskError

from cache_manager.errors import StorageError
from cache_manager.record import Buffer
from cache_manager.storage.url import StoreUrl
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.parts import GoneError, PartStore, Record, file_places, layers_option
from kvroute.routes.parts import Range

RAY_NAMESPACE: Final = "kvroute"


class Owner:
    """The actor: it owns the objects of every rollout's last put. One call runs at a time."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, Any]] = {}  # a handle's JSON, and the reference to the record

    def put(self, rollout_id: str, handle: str, record: NDArray[np.uint8]) -> None:
        # The caller of ray.put owns the object: one made by the client would be gone with it.
        self._last[rollout_id] = handle, ray.put(record)

    def find(self, rollout_id: str) -> str | None:
        return self._last.get(rollout_id, (None,))[0]

    def read(
        self,
        rollout_id: str,
        handle: str,
        ranges: list[Range],
    ) -> list[NDArray[np.uint8]] | None:
        """The bytes of each range (offset, nbytes); ``None`` if that put is not there."""
        last_handle, reference = self._last.get(rollout_id, (None, None))
        if last_handle != handle:
            return None
        record = ray.get(reference)
        return [record[first : first + nbytes] for first, nbytes in ranges]

    def delete(self, rollout_id: str, handle: str) -> None:
        if self.find(rollout_id) == handle:
            del self._last[rollout_id]


class RayRollouts(PartStore):
    """A ``RolloutStore`` in the Ray cluster that this process is connected to, or else in this machine's.

    ``name`` is that of the owner, which is started if there is none, and outlives this store. A call that takes longer
    than ``timeout_s`` is a ``StorageError``. Rollouts whose owner has ended are misses. So are those of a
    cluster that has ended, after one ``StorageError``: a store goes on in the cluster to which the process is connected
    then.
    """

    scheme = "ray"

    def __init__(
        self,
        name: str = "rollouts",
        layers: int = 1,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(f"the rollout store ray:{name}", layers)
        self._owner_name = name
        self._timeout_s = timeout_s
        with self._translated():
            self._owner = self._started()

    def _started(self) -> Any:
        if not ray.is_initialized():
            ray.init(address="auto", namespace=RAY_NAMESPACE)
        options = {"name": self._owner_name, "namespace": RAY_NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        return ray.remote(num_cpus=0)(Owner).options(**options).remote()

    def _write(self, handle: RolloutHandle, record: Record) -> RolloutHandle:
        self._ask("put", handle.rollout_id, handle.to_json(), np.frombuffer(b"".join(record), np.uint8))
        return handle

    def _read(self, handle: RolloutHandle, parts: Sequence[Range]) -> list[Buffer]:
        buffers = self._ask("read", handle.rollout_id, handle.to_json(), file_places(handle, parts))
        if buffers is None:
            raise GoneError(f"rollout {handle.rollout_id} is not at its owner")
        return [buffer.data for buffer in buffers]

    def _find(self, rollout_id: str, /) -> RolloutHandle | None:
        encoded = self._ask("find", rollout_id)
        return None if encoded is None else RolloutHandle.from_json(encoded)

    def _delete(self, handle: RolloutHandle) -> None:
        with suppress(GoneError):
            self._ask("delete", handle.rollout_id, handle.to_json())

    def _ask(self, method: str, *values: Any) -> Any:
        with self._translated():
            try:
                return ray.get(getattr(self._owner, method).remote(*values), timeout=self._timeout_s)
            except (GetTimeoutError, RayTaskError):
                raise
            except Exception:  # Ray has no class of its own for an owner in a cluster that has ended
                self._owner = self._started()  # for the next call; the old one's rollouts are gone
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Ray's errors become ``StorageError``, or :class:`GoneError` if the owner, or an object, is gone.

        There is nothing but Ray's code within: it raises a bare ``Exception`` for an owner of an ended cluster.
        """
        try:
            yield
        except Exception as error:
            gone = isinstance(error, (ActorDiedError, ObjectLostError))
            first = (str(error).splitlines() or [""])[0]
            raise (GoneError if gone else StorageError)(f"{self._name}: {type(error).__name__}: {first}") from error


def open_ray_rollouts(url: StoreUrl) -> RayRollouts:
    """``ray:NAME?layers=1&timeout=60s``."""
    url.allow("timeout", "layers")
    timeout_s = url.seconds("timeout", 60.0)
    assert timeout_s is not None
    return RayRollouts(url.path or "rollouts", layers_option(url), timeout_s=timeout_s)

"""Rollouts as Ray objects: one for the header and one a part, owned by a named actor.

The owner is the lease. Objects live as long as the actor has them, whatever becomes of the process that put them;
deleting a rollout, putting it again, or ending the actor (``ray.kill(ray.get_actor(NAME, namespace="kvroute"))``) gives
their memory back. A rank asks the owner for references to the parts that it needs and reads those from the object store
of its own node, without a copy; only they cross between nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ActorDiedError, ObjectLostError, RayError

from cache_manager.errors import StorageError
from cache_manager.record import Buffer
from cache_manager.storage.batch import chunks
from cache_manager.storage.url import StoreUrl
from kvroute.rollout.cut import CutSettings
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.parts import GoneError, PartStore, Reader

NAMESPACE: Final = "kvroute"
BATCH_NBYTES: Final = 64 << 20
"""Of the parts that are asked for at once."""
HEADER: Final = 0
"""The number of the object that is no part; part ``n`` is number ``n + 1``."""


class Owner:
    """The actor: it owns the objects of every rollout's last put. One call runs at a time."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, list[Any]]] = {}  # a handle's JSON, references to header and parts

    def put(self, rollout_id: str, handle: str, record: list[NDArray[np.uint8]]) -> None:
        # Whoever calls ray.put owns the object: the caller's arrays are its own, and gone with it.
        self._last[rollout_id] = handle, [ray.put(each) for each in record]

    def find(self, rollout_id: str) -> str | None:
        return self._last.get(rollout_id, (None,))[0]

    def objects(self, rollout_id: str, handle: str, numbers: list[int]) -> list[Any] | None:
        """References, inside a list, so that Ray does not resolve them; ``None`` where that put is not there."""
        found, objects = self._last.get(rollout_id, (None, []))
        return [objects[number] for number in numbers] if found == handle else None

    def delete(self, rollout_id: str, handle: str) -> None:
        if self.find(rollout_id) == handle:
            del self._last[rollout_id]


class RayRollouts(PartStore):
    """A ``RolloutStore`` in the cluster that this process is connected to; else it connects to the one of this machine.

    ``name`` is that of the owner, which is started where there is none, and outlives this store. A call that takes
    longer than ``timeout_s`` is a ``StorageError``. Rollouts whose owner has ended are misses.
    """

    scheme = "ray"

    def __init__(self, name: str = "rollouts", cut: CutSettings | None = None, *, timeout_s: float = 60.0) -> None:
        super().__init__(f"the rollout store ray:{name}", cut)
        self._owner_name, self._timeout_s = name, timeout_s
        with self._translated():
            if not ray.is_initialized():
                ray.init(address="auto", namespace=NAMESPACE)
            self._owner = self._started()

    def _started(self) -> Any:
        options = {"name": self._owner_name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        return ray.remote(num_cpus=0)(Owner).options(**options).remote()

    def _write(self, handle: RolloutHandle, record: Sequence[Buffer]) -> RolloutHandle:
        self._ask("put", handle.rollout_id, handle.to_json(), [np.frombuffer(each, np.uint8) for each in record])
        return handle

    @contextmanager
    def _opened(self, handle: RolloutHandle) -> Iterator[Reader]:
        ((_, header),) = self._objects(handle, [HEADER])

        def parts(numbers: Sequence[int]) -> Iterator[tuple[int, Buffer]]:
            for batch in chunks(numbers, handle.grid.nbytes_of, BATCH_NBYTES):
                for number, content in self._objects(handle, [number + 1 for number in batch]):
                    yield number - 1, content

        yield Reader(lambda at, nbytes: header[at : at + nbytes], parts)

    def _objects(self, handle: RolloutHandle, numbers: list[int]) -> list[tuple[int, memoryview]]:
        """Numbered objects where they lie in this node's memory."""
        references = self._ask("objects", handle.rollout_id, handle.to_json(), numbers)
        if references is None:
            raise GoneError(f"rollout {handle.rollout_id} is not at its owner")
        with self._translated():
            found = ray.get(references, timeout=self._timeout_s)
        return [(number, each.data) for number, each in zip(numbers, found, strict=True)]

    def _find(self, rollout_id: str, /) -> RolloutHandle | None:
        found = self._ask("find", rollout_id)
        return None if found is None else RolloutHandle.from_json(found)

    def _delete(self, handle: RolloutHandle) -> None:
        with suppress(GoneError):
            self._ask("delete", handle.rollout_id, handle.to_json())

    def _ask(self, what: str, *values: Any) -> Any:
        with self._translated():
            try:
                return ray.get(getattr(self._owner, what).remote(*values), timeout=self._timeout_s)
            except ActorDiedError:
                self._owner = self._started()  # for the next call; what the old one had is gone
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Ray's errors become ``StorageError``, and :class:`GoneError` where the owner, or an object, is no more."""
        try:
            yield
        except (RayError, ConnectionError, RuntimeError) as error:
            gone = isinstance(error, (ActorDiedError, ObjectLostError))
            first = (str(error).splitlines() or [""])[0]
            raise (GoneError if gone else StorageError)(f"{self._name}: {type(error).__name__}: {first}") from error


def open_ray_rollouts(url: StoreUrl) -> RayRollouts:
    """``ray:NAME?fused=true&part=64KiB&timeout=60s``."""
    url.allow("timeout", *CutSettings.PARAMETERS)
    timeout_s = url.seconds("timeout", 60.0)
    assert timeout_s is not None
    return RayRollouts(url.path or "rollouts", CutSettings.from_url(url), timeout_s=timeout_s)


__all__ = ["RayRollouts", "open_ray_rollouts"]

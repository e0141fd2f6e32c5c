"""Routes by reference for NeMo-RL's policy workers: ``nemo_rl.routed_experts_ref.v1``.

A reference is a few hundred bytes of JSON. It names an actor, which returns the rows of a sample, or ranges of them, as
int16 ``[tokens, layers, top_k]``, -1 for an unknown row. This actor does that for routes of kvroute: it keeps the rows
of :meth:`References.put` until NeMo-RL retires the weights version that they are for.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import ray
from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError
from kvroute.routes import Routes

SCHEMA: Final = "nemo_rl.routed_experts_ref.v1"
NAMESPACE: Final = "nemo_rl_routed_experts"
REGISTRY: Final = "nrl_routed_experts_registry_"

ReferenceKey = tuple[int, int, int, int, str]


class Source:
    """The actor. Its methods are those that NeMo-RL's workers and its registry call."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._retired = -1
        self._objects: dict[ReferenceKey, tuple[Any, list[int], int]] = {}  # a reference, a shape, a number of bytes

    def put(self, ref: Mapping[str, Any], rows: NDArray[np.int16]) -> None:
        key = _key(ref)
        if key in self._objects or key[0] <= self._retired:
            raise ValueError(f"wanted a new one for weights after version {self._retired}, got {key}")
        self._objects[key] = ray.put(rows), list(rows.shape), rows.nbytes  # the actor owns it, even if the caller ends

    def get_ref(self, ref: Mapping[str, Any]) -> dict[str, Any]:
        """The object's reference; the worker reads the object from the store of its own node."""
        found, shape, nbytes = self._found(ref)
        return {"object_ref": found, "shape": shape, "dtype": "int16", "nbytes": nbytes}

    def get_ranges(self, refs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Only the rows of these references, end to end."""
        rows = [ray.get(self._found(ref)[0])[ref["offset"] : ref["offset"] + ref["length"]] for ref in refs]
        values = np.concatenate(rows)
        return {"values": values, "shape": list(values.shape), "dtype": "int16", "nbytes": values.nbytes}

    def retire_through(self, target_weight_version: int) -> dict[str, int]:
        """Forget the rows for weights up to this version; refuse further ones."""
        self._retired = max(self._retired, target_weight_version)
        old = [key for key in self._objects if key[0] <= self._retired]
        nbytes = sum(self._objects.pop(key)[2] for key in old)
        left = {"retired_bytes": nbytes, "remaining_objects": len(self._objects)}
        return {"retired_through": self._retired, "retired_objects": len(old), **left}

    def _found(self, ref: Mapping[str, Any]) -> tuple[Any, list[int], int]:
        found = self._objects.get(_key(ref)) if ref["store_instance_id"] == self._instance else None
        if found is None or found[1] != list(ref["shape"]):
            raise ValueError(f"reference: wanted one of rows that are here, got {dict(ref)}")
        if not 0 <= ref["offset"] <= ref["offset"] + ref["length"] <= found[1][0]:
            raise ValueError(f"reference: wanted a range of its {found[1][0]} rows, got {dict(ref)}")
        return found


class References:
    """Makes references; their actor lives as long as this object, and is registered with the ``run``."""

    def __init__(self, run: str | None = None) -> None:
        self.instance = uuid.uuid4().hex
        self.name = f"kvroute_routed_experts_{self.instance}"
        options = {"name": self.name, "namespace": NAMESPACE, "num_cpus": 0}
        self.source = ray.remote(Source).options(**options).remote(self.instance)
        if run is not None:
            registry = ray.get_actor(REGISTRY + run, namespace=NAMESPACE)
            ray.get(registry.register_store.remote(self.instance, self.source))

    def put(
        self,
        routes: Routes,
        tokens: int,
        *,
        request_id: str,
        task: int,
        rollout: int,
        weights_version: int,
        attempt: int = 0,
    ) -> dict[str, Any]:
        """The reference of a sample of ``tokens`` tokens; missing rows are -1, as mostly that of the last token.

        ``weights_version`` is that of the training step that uses the rows; ``attempt`` counts repetitions of the
        request, which NeMo-RL tells apart. :class:`InvalidInputError` for more experts than int16 can name, and for an
        existing reference.
        """
        if routes.layout.num_experts > 1 << 15:
            wanted = f"at most {1 << 15}"
            raise InvalidInputError("num_experts", wanted, routes.layout.num_experts)
        rows = routes.materialize(tokens, "moe", "int16", missing="minus1")
        ref = {
            "schema": SCHEMA,
            "store": self.name,
            "store_instance_id": self.instance,
            "request_id": request_id,
            "key": "routed_experts",
            "task_index": task,
            "rollout_index": rollout,
            "attempt_index": attempt,
            "target_weight_version": weights_version,
            "offset": 0,
            "length": len(rows),
            "shape": list(rows.shape),
            "dtype": "int16",
        }
        try:
            ray.get(self.source.put.remote(ref, rows))
        except ValueError as error:  # an actor's error crosses by pickle, which ours do not support
            wanted = "one that can be put"
            raise InvalidInputError("reference", wanted, error) from error
        return ref


def _key(ref: Mapping[str, Any]) -> ReferenceKey:
    version, task, rollout = (int(ref[name]) for name in ("target_weight_version", "task_index", "rollout_index"))
    return version, task, rollout, int(ref.get("attempt_index", 0)), str(ref["request_id"])

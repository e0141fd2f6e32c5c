"""KV connectors that the experiments with vLLM need beside its own; loaded inside vLLM, by module path."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata


class NothingConnector(KVConnectorBase_V1):
    """A connector that does nothing: what having one costs vLLM."""

    def start_load_kv(self, forward_context: Any, **_: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, *_: Any) -> KVConnectorMetadata:
        return ExampleConnectorMetadata()


class FailingConnector(ExampleConnector):
    """vLLM's shared storage, whose next load fails in its third block once the file ``fail`` lies beside its KV."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self._failed: set[int] = set()
        loads = [request for request in self._get_connector_metadata().requests if not request.is_store]
        order = Path(self._storage_path) / "fail"
        if loads and order.exists():
            order.unlink()
            self._failed = {int(loads[0].slot_mapping[2 * self._block_size]) // self._block_size}

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = getattr(self, "_failed", set()), set()
        return failed


class Clock:
    """The calling thread's own time in each part of a step, in microseconds, written to a file now and then."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._parts: dict[str, list[float]] = defaultdict(list)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        spent = self._parts[part]

        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                spent.append((time.thread_time_ns() - start) / 1000)

        return run

    def write(self) -> None:
        """For each part, the steps in which something was done, and the microseconds of all."""
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({part: spent for part, spent in self._parts.items() if spent}))
        new.replace(self._file)


class Timed:
    """Before a connector of kvroute in a class's bases: takes the time of what it does for a step."""

    _SCHEDULER = ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "request_finished")
    _WORKER = ("bind_connector_metadata", "start_load_kv", "save_kv_layer", "wait_for_save", "get_transfer_results")

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        name = role.name.lower()
        file = Path(vllm_config.kv_transfer_config.kv_connector_extra_config["times"]) / f"{name}.json"
        self._clock, self._steps = Clock(file), 0
        for call in self._SCHEDULER if name == "scheduler" else self._WORKER:
            setattr(self, call, self._clock.timed(call, getattr(self, call)))
        last = "build_connector_meta" if name == "scheduler" else "wait_for_save"
        setattr(self, last, self._writing(getattr(self, last)))

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)  # type: ignore[misc]
        rows = self._worker_rows  # type: ignore[attr-defined]
        rows.ids.take = self._clock.timed("  ids of the step", rows.ids.take)
        rows.blocks.write_step = self._clock.timed("  write_step", rows.blocks.write_step)
        rows.blocks.apply = self._clock.timed("  apply (feed)", rows.blocks.apply)
        if rows.witness:
            rows.witness.name = self._clock.timed("  witness of full blocks", rows.witness.name)

    def _writing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            answer = call(*args)
            self._steps += 1
            if self._steps % 8 == 0:
                self._clock.write()
            return answer

        return run


def __getattr__(name: str) -> Any:
    """``TimedX`` is kvroute's connector around the connector ``X`` of this module, timed."""
    if not name.startswith("Timed"):
        raise AttributeError(name)
    from kvroute.integrations.vllm.connector import connector_class

    base = connector_class(f"{__name__}:{name.removeprefix('Timed')}")
    return type(name, (Timed, base), {})


__all__ = ["FailingConnector", "NothingConnector", "Timed"]

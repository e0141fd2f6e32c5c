"""More KV connectors for the experiments with vLLM; loaded inside vLLM, by module path."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnectorMetadata


class NothingConnector(KVConnectorBase_V1):
    """A connector that does nothing, to measure what any connector costs vLLM."""

    def start_load_kv(self, forward_context: Any, **_: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, *_: Any) -> KVConnectorMetadata:
        return ExampleConnectorMetadata()


class Clock:
    """The calling thread's own time in each part of a step, in microseconds; a line of a file for each step."""

    def __init__(self, file: Path) -> None:
        self._lines = file.open("a")
        self._parts: dict[str, list[float]] = defaultdict(list)

    def timed(self, part: str, call: Callable[..., Any], *, last: bool = False) -> Callable[..., Any]:
        spent = self._parts[part]

        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                spent.append((time.thread_time_ns() - start) / 1000)
                if last:
                    self._write()

        return run

    def _write(self) -> None:
        """Write, for each part, the microseconds of its calls since the last line."""
        print(json.dumps({part: spent for part, spent in self._parts.items() if spent}), file=self._lines, flush=True)
        for spent in self._parts.values():
            spent.clear()


class Timed:
    """A mixin before kvroute's connector in a class's bases: times the connector's calls in a step."""

    _SCHEDULER = ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "request_finished")
    _WORKER = ("bind_connector_metadata", "start_load_kv", "save_kv_layer", "wait_for_save", "get_transfer_results")
    _LAST = ("build_connector_meta", "request_finished", "get_transfer_results")

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        name = role.name.lower()
        self._clock = Clock(Path(vllm_config.kv_transfer_config.kv_connector_extra_config["times"]) / f"{name}.jsonl")
        for call in self._SCHEDULER if name == "scheduler" else self._WORKER:
            setattr(self, call, self._clock.timed(call, getattr(self, call), last=call in self._LAST))

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)  # type: ignore[misc]
        rows = self.worker_rows  # type: ignore[attr-defined]
        rows.ids.take = self._clock.timed("  ids of the step", rows.ids.take)
        rows.blocks.write_step = self._clock.timed("  write_step", rows.blocks.write_step)
        rows.blocks.apply = self._clock.timed("  apply (feed)", rows.blocks.apply)
        if witness := getattr(rows.carrier, "witness", None):
            witness.name = self._clock.timed("  witness of full blocks", witness.name)


def __getattr__(name: str) -> Any:
    """``TimedX`` is kvroute's connector around the connector ``X`` of this module, timed."""
    if not name.startswith("Timed"):
        raise AttributeError(name)
    from kvroute.integrations.vllm.connector import connector_class

    base = connector_class(f"{__name__}:{name.removeprefix('Timed')}")
    return type(name, (Timed, base), {})

"""The connector that vLLM makes twice: in the scheduler's process, and in every worker's."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cache_manager.errors import ConfigError
from kvroute.integrations.vllm.config import Engine
from kvroute.integrations.vllm.pages import page_name
from kvroute.integrations.vllm.scheduler import SchedulerRows, StepMeta

if TYPE_CHECKING:
    from kvroute.integrations.vllm.worker import WorkerRows

    Base = Any
else:
    Base = object


@dataclass
class Handshake:
    """A worker's first message: where its rows are, and what the inner connector has to say."""

    inner: Any
    region: str | None


class RowsWithKV(Base):  # type: ignore[misc]  # vLLM's classes, of which there are none here
    """Before a connector of vLLM in a class's bases: every call goes to that connector too, and its answers stand."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine = Engine.of(vllm_config, kv_cache_config, type(self).inner)
        self._scheduler_rows: SchedulerRows | None = None
        self._worker_rows: WorkerRows | None = None
        self._failed_now: set[int] = set()
        self._failed_step: set[int] = set()
        if role.name == "SCHEDULER":
            self._scheduler_rows = SchedulerRows(engine)
        else:
            self._engine, self._modules = engine, vllm_config.compilation_config.static_forward_context

    # ---------------------------------------------------------------- in the worker's process

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # type: ignore[import-not-found]

        from kvroute.integrations.vllm.worker import WorkerRows

        if get_tensor_model_parallel_rank() == 0:  # routers of all ranks choose the same
            self._worker_rows = WorkerRows(self._engine, kv_caches)
            self._bind(self._worker_rows.ids)

    def _bind(self, ids: Any) -> None:
        """Hook the router of each layer; a draft model's are others."""
        wanted: tuple[int, ...] = self._engine.spec.attrs["layer_ids"]
        bound: dict[int, str] = {}
        for name, module in self._modules.items():
            layer, router = getattr(module, "layer_id", None), getattr(module, "router", None)
            if layer not in wanted or not hasattr(router, "set_capture_fn") or "draft" in name:
                continue
            if layer in bound:
                raise ConfigError("routers", f"one of layer {layer}", f"{bound[layer]} and {name}")
            bound[layer] = name
            router.set_capture_fn(ids.hook(layer))  # type: ignore[union-attr]
        if len(bound) != len(wanted):
            raise ConfigError("routers with a hook", f"layers {list(wanted)}", sorted(bound))

    def get_handshake_metadata(self) -> Any:
        inner = super().get_handshake_metadata()
        rows = self._worker_rows
        return Handshake(inner, rows.region if rows else None) if rows or inner is not None else None

    def bind_connector_metadata(self, connector_metadata: StepMeta) -> None:
        inner = connector_metadata.inner
        super().bind_connector_metadata(connector_metadata if inner is None else inner)
        if self._worker_rows:
            self._worker_rows.begin(connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: StepMeta) -> None:
        super().handle_preemptions(kv_connector_metadata.inner)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        slots = forward_context.slot_mapping
        if self._worker_rows and isinstance(slots, dict) and slots:
            self._worker_rows.slots = next(iter(slots.values()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        if self._worker_rows and self._worker_rows.slots is None:  # Model Runner V2 loads in an empty context
            self._worker_rows.slots = getattr(attn_metadata, "slot_mapping", None)

    def wait_for_save(self) -> None:
        rows = self._worker_rows
        if rows is None or rows.pages is None:
            super().wait_for_save()
        if rows:
            self._end(rows)
        if rows and rows.pages:  # written by now, so that they are saved like any layer
            from vllm.model_executor.models.extract_hidden_states import (  # type: ignore[import-not-found]
                CacheOnlyAttentionMetadata,
            )

            if rows.slots is not None and self.has_connector_metadata():
                given = CacheOnlyAttentionMetadata(rows.slots)
                super().save_kv_layer(page_name(self._engine.spec), rows.pages.cache, given)
            super().wait_for_save()

    def _end(self, rows: WorkerRows) -> None:
        self._collect_failures()
        rows.end(self._failed_step)
        self._failed_step = set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._collect_failures()
        failed, self._failed_now = self._failed_now, set()
        return failed

    def _collect_failures(self) -> None:
        """A connector names failed blocks once; they are needed here and by the scheduler."""
        failed = super().get_block_ids_with_load_errors()
        self._failed_now |= failed
        self._failed_step |= failed

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if self._worker_rows:
            for request in results.finished_recving:
                self._worker_rows.loaded(request)
        return results

    # ---------------------------------------------------------------- in the scheduler's process

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Handshake]) -> None:
        region = next(each.region for each in metadata.values() if each.region)
        assert self._scheduler_rows is not None
        self._scheduler_rows.attach(region)
        if inner := {rank: each.inner for rank, each in metadata.items() if each.inner is not None}:
            super().set_xfer_handshake_metadata_pp_aware(inner)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        assert self._scheduler_rows is not None
        self._scheduler_rows.watch(kv_cache_manager)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens) or (0, False)
        if found is None:  # to be asked again
            return None, asynchronous
        assert self._scheduler_rows is not None
        # vLLM's example connector answers less than nothing for a request that has more blocks already
        found = self._scheduler_rows.matched(request, num_computed_tokens, max(0, found), asynchronous)
        return found, asynchronous and found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        assert self._scheduler_rows is not None
        self._scheduler_rows.admitted(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        assert self._scheduler_rows is not None
        return self._scheduler_rows.step(scheduler_output, super().build_connector_meta(scheduler_output))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request, block_ids, super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request, block_ids[0], super().request_finished_all_groups(request, block_ids))

    def _finished(self, request: Any, blocks: list[int], inner: Any) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler_rows is not None
        keep, params = inner
        routes = self._scheduler_rows.finished(request, blocks)
        return keep, {**(params or {}), **routes} if routes else params

    def reset_cache(self) -> bool | None:
        assert self._scheduler_rows is not None
        self._scheduler_rows.reset()
        answer: bool | None = super().reset_cache()
        return answer

    def shutdown(self) -> None:
        super().shutdown()
        for rows in (self._scheduler_rows, self._worker_rows):
            if rows is not None:
                rows.close()
        self._scheduler_rows = self._worker_rows = None


def connector_class(inner: str) -> type:
    """The connector around ``inner``: ``Connector`` for none, a name that vLLM knows, or ``module:class``."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # type: ignore[import-not-found]
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # type: ignore[import-not-found]

    module, _, name = inner.rpartition(":")
    if inner == "Connector":
        base = KVConnectorBase_V1
    elif module:
        base = getattr(import_module(module), name)
    else:
        base = KVConnectorFactory.get_connector_class_by_name(inner)
    return type(f"Kvroute{name}", (RowsWithKV, base), {"inner": name, "__module__": __name__})


__all__ = ["Handshake", "RowsWithKV", "connector_class"]

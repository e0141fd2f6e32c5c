"""The connector that vLLM makes twice: in the scheduler's process, and in every worker's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from cache_manager.errors import ConfigError, RowError
from kvroute.connector import Handshake, SchedulerRows, StepMeta, Tokens
from kvroute.connector.fields import FIELD, MTP_FIELD, Options, options_of
from kvroute.connector.key import Key
from kvroute.connector.messages import WorkerMeta
from kvroute.connector.settings import RESPONSE
from kvroute.connector.started import started
from kvroute.connector.tickets import TRANSFER
from kvroute.integrations.vllm import blocks, core, log, offloading, versions
from kvroute.integrations.vllm.config import check_children, engine_of, kv_names, stage_of
from kvroute.integrations.vllm.field import Field
from kvroute.integrations.vllm.layers import own_layers
from kvroute.integrations.vllm.layouts import join_of
from kvroute.integrations.vllm.mtp import follow_drafts, mtp_hook
from kvroute.integrations.vllm.routers import bind, bind_mtp, model_place
from kvroute.integrations.vllm.weights import bind_weights

logger = logging.getLogger(__name__)
Base: Any = object  # vLLM's classes, unknown here


class RowsWithKV(Base):  # type: ignore[misc]
    """The base before one of vLLM's connectors: every call goes to that connector too, and its answers stand."""

    scheduler_rows: SchedulerRows
    worker_rows: Any = None  # only the first rank has any
    _computed = False  # the model has computed the current step, and a draft model may be at work
    _rank: Any = None
    _shards: Any = None  # ids of a rank whose routers choose for a shard of the first one's tokens

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_children(vllm_config, type(self))
        log.join_logging()
        super().__init__(vllm_config, role, kv_cache_config)
        self._engine = engine_of(vllm_config, kv_cache_config, type(self).inner, offloading.places_of(self))
        self._layers = tuple(kv_cache_config.kv_cache_groups[self._engine.group].layer_names)
        self._layer_count: int = vllm_config.model_config.get_total_num_hidden_layers()
        if role.name == "SCHEDULER":
            core.check_alone(vllm_config)
            store = self._engine.settings.store
            if store and versions.names_blocks_at_random(vllm_config.cache_config.prefix_caching_hash_algo):
                logger.warning(
                    "rows in %s are found by this process alone, for vLLM gives blocks random hashes here: set "
                    "PYTHONHASHSEED to one value in all engines",
                    store,
                )
            self.scheduler_rows = SchedulerRows(self._engine)
            core.follow_cores()
            core.hears(vllm_config, self.scheduler_rows)
            if self._engine.settings.field:
                self.scheduler_rows.field = Field(self.scheduler_rows, self._layer_count)

    # ---------------------------------------------------------------- in the worker's process

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        from vllm.distributed.parallel_state import get_tp_group  # type: ignore[import-not-found]

        from kvroute.capture.step_ids import StepIds
        from kvroute.capture.step_weights import StepWeights
        from kvroute.connector.mtp import MtpIds
        from kvroute.connector.witness import by_block
        from kvroute.connector.worker import rank_part

        engine = stage_of(self._vllm_config, self._engine)
        if engine is None:  # a stage of dense layers
            return
        self._engine = engine
        kv_caches = {name: kv_caches[name] for name in self._layers if name in kv_caches}
        group, divided = get_tp_group(), not self._vllm_config.model_config.use_mla
        modules, spec = self._vllm_config.compilation_config.static_forward_context, self._engine.spec
        self._layers = tuple(own_layers([name for name in modules if name in kv_caches], self._layer_count))
        kv_caches = {name: by_block(kv_caches[name], self._engine.blocks) for name in self._layers}
        first = self._layers[0]
        place = model_place(self._vllm_config.parallel_config, modules, spec, first, group.rank_in_group)
        join_shards = join_of(place, group)
        self._rank = rank_part(self._engine, kv_caches, group.device_group, divided=divided, join_shards=join_shards)
        if group.rank_in_group == 0:
            self.worker_rows = self._rank
            self._say_started(bind(modules, spec, self._rank.ids.hook, first, place))
            if isinstance(self._rank.weights, StepWeights):
                bind_weights(modules, spec, first, self._rank.weights.hook)
            if isinstance(self._rank.mtp, MtpIds):
                follow_drafts()
                bind_mtp(modules, spec, first, partial(mtp_hook, self._rank.mtp))
        elif join_shards is not None:  # the first rank has rows of this one's tokens
            device = next(iter(kv_caches.values())).device
            self._shards = StepIds(spec, self._engine.max_tokens, device, join_shards)
            bind(modules, spec, self._shards.hook, first, place)
        if not getattr(self._vllm_config, "use_v2_model_runner", True):  # only V2 has no slots before its layers
            setattr(self, "save_kv_layer", super().save_kv_layer)  # noqa: B010 - saves a call per layer

    def _say_started(self, captured: int) -> None:
        """One line, of the rank that has the rows."""
        import vllm  # type: ignore[import-not-found]

        engine = self._engine
        line = started(
            f"vLLM {vllm.__version__}",
            engine.spec,
            engine.settings,
            captured=captured,
            blocks=engine.blocks,
            carrier=engine.carrier.word,
            version=engine.namespace.weights_version,
        )
        logger.info("%s", line)

    def get_handshake_metadata(self) -> Any:
        inner = super().get_handshake_metadata()
        return self.worker_rows.handshake(inner) if self.worker_rows else inner and Handshake(inner)

    def bind_connector_metadata(self, connector_metadata: StepMeta) -> None:
        inner = connector_metadata.inner
        super().bind_connector_metadata(connector_metadata if inner is None else inner)
        self._computed = False
        if self._rank:
            self._rank.begin(connector_metadata)
        if self._shards:
            self._shards.begin()

    def handle_preemptions(self, kv_connector_metadata: StepMeta) -> None:
        super().handle_preemptions(kv_connector_metadata.inner)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        slots, rows = forward_context.slot_mapping, self.worker_rows
        if rows and slots and isinstance(slots, dict):
            rows.slots = self._of_group(slots)
            return
        layers = kwargs.get("attn_metadata")  # of a pass that is one CUDA graph
        if rows and isinstance(layers, dict) and not (self._computed and self._engine.drafts):
            rows.slots = getattr(self._of_group(layers), "slot_mapping", None)

    def finish_forward(self) -> None:
        super().finish_forward()
        self._computed = True

    def _of_group(self, by_layer: Mapping[str, Any]) -> Any:
        """What is said of the model's first layer whose blocks the rows go with: those of other groups, and those of a
        draft model, have other slots."""
        return next((by_layer[name] for name in self._layers if name in by_layer), None)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        rows = self.worker_rows
        if rows and rows.slots is None and layer_name in self._layers:  # Model Runner V2 loads in an empty context
            rows.slots = getattr(attn_metadata, "slot_mapping", None)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if rows := self.worker_rows:
            rows.fail(super().get_block_ids_with_load_errors())
        if self._rank:
            self._rank.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        rows = self.worker_rows
        if rows:  # a request whose KV has come waits a little for its rows, where they come later
            results.finished_recving = rows.arrived(results.finished_recving, results.failed_recving)
        return results

    def build_connector_worker_meta(self) -> Any:
        inner = super().build_connector_worker_meta()
        return self.worker_rows.told(inner) if self.worker_rows else inner

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed: set[int] = super().get_block_ids_with_load_errors()
        if rows := self.worker_rows:
            rows.fail(failed)
            failed = rows.failures()
        return failed

    # ---------------------------------------------------------------- in the scheduler's process

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Handshake]) -> None:
        stages = [metadata[rank] for rank in sorted(metadata) if metadata[rank].region]
        if not stages:
            raise ConfigError("workers", "a first rank beside this scheduler, with rows", f"{len(metadata)} without")
        self.scheduler_rows.attach(*stages)
        if inner := {rank: handshake.inner for rank, handshake in metadata.items() if handshake.inner is not None}:
            super().set_xfer_handshake_metadata_pp_aware(inner)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        blocks.follow_pool(self.scheduler_rows, kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self.scheduler_rows.begins(Key.of(request.request_id))
        if self.scheduler_rows.field is not None:
            self.scheduler_rows.field.begins(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        external, later = super().get_num_new_matched_tokens(request, num_computed_tokens) or (0, False)
        if getattr(request, "skip_reading_prefix_cache", False):  # vLLM then takes any answer for (0, False)
            external, later = 0, False
        if external is None:  # vLLM asks again
            return None, later
        # vLLM's example connector answers a negative number for a request that already has more blocks
        external = self.scheduler_rows.matched(request, num_computed_tokens, max(0, external), later=later)
        return external, later and external > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        parameters: Mapping[str, Any] = request.kv_transfer_params or {}
        lends, handed_over = (
            bool(parameters.get("do_remote_decode")),
            parameters.get(FIELD) if parameters.get("do_remote_prefill") else None,
        )
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # this marks the KV as fetched
        ticket = handed_over.get(TRANSFER) if isinstance(handed_over, Mapping) else handed_over
        ids = list(blocks.get_block_ids()[self._engine.group])
        kv = kv_names(request)
        self.scheduler_rows.admitted(request, ids, num_external_tokens, lends=lends, ticket=ticket, kv=kv)

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(message := connector_output.kv_connector_worker_meta, WorkerMeta):
            connector_output.kv_connector_worker_meta = message.inner
            self.scheduler_rows.told(message.carrier)
        super().update_connector_output(connector_output)
        for request in connector_output.finished_recving or ():
            self.scheduler_rows.loaded(request)

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        core.check_followed(self.scheduler_rows)
        inner = super().build_connector_meta(scheduler_output)
        if self._engine.drafts:  # the worker says the slots before its draft model has used their memory
            scheduler_output.has_sync_kv_loads = True
        copies = getattr(scheduler_output, "kv_cache_block_copies", None) or ()
        moves = None
        if self._engine.places:
            moves = offloading.moves_of(self.connector_scheduler, inner, self._engine.group)
        return self.scheduler_rows.step(scheduler_output.num_scheduled_tokens, inner, copies, moves)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return self._finished(request, block_ids, super().request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        inner = super().request_finished_all_groups(request, block_ids)
        return self._finished(request, block_ids[self._engine.group], inner)

    def _finished(self, request: Any, blocks: list[int], inner: Any) -> tuple[bool, dict[str, Any] | None]:
        keep, params = inner
        rows, name, status = self.scheduler_rows, request.request_id, request.status.name
        if rows.field is not None:
            rows.field.ended(request, blocks)
        lent = keep and not status.endswith("ABORTED")
        ticket = rows.ticket(request, kv_names(request, params or {})) if lent else None
        ended, tokens = rows.forget(name), min(request.num_tokens - 1, request.num_computed_tokens)
        refusal = None
        try:
            options = options_of((request.kv_transfer_params or {}).get(FIELD))
        except RowError as error:
            options, refusal = Options(), error
        key = Key.of(name, options.key)
        if ticket is not None:  # who goes on has the rows
            rows.unanswered(ended, key)
            return keep, {**(params or {}), FIELD: ticket}
        reached = key.of_client or key.group is not None  # by a key, or with the last of several completions
        if status.endswith("ABORTED") and (rows.engine.settings.rollouts == RESPONSE or not reached):
            rows.unanswered(ended, key)
            return keep, params
        stops = request.sampling_params is not None and bool(request.sampling_params.stop)
        cut = stops or status.endswith(("ABORTED", "ERROR"))
        request_tokens = Tokens(list(request.all_token_ids), request.num_prompt_tokens, cut)
        if refusal is None and isinstance(options.start, int) and 0 <= options.start <= request.num_prompt_tokens:
            mtp = rows.mtp_rows(key, blocks, tokens, request_tokens, options.start)
            params = params if mtp is None else {**(params or {}), MTP_FIELD: mtp}
        if refusal is not None:
            answer = rows.refused(key, refusal, ended)
        else:
            answer = rows.finished(key, blocks, tokens, request_tokens, ended=ended, start=options.start)
        return keep, {**(params or {}), FIELD: answer} if answer else params  # the answer waits for it: core

    # ---------------------------------------------------------------- in both, and in the front end

    def get_kv_connector_stats(self) -> Any:
        from kvroute.integrations.vllm.metrics import Stats

        inside, rows = super().get_kv_connector_stats(), self.worker_rows or getattr(self, "scheduler_rows", None)
        taken = rows and rows.meter.take()
        return Stats(taken or {}, inside) if taken or inside else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        from kvroute.integrations.vllm.metrics import INNER, OURS, Stats

        data = data or {}
        return Stats(data.get(OURS, {}), super().build_kv_connector_stats(data[INNER]) if data.get(INNER) else None)

    @classmethod
    def build_prom_metrics(cls, config: Any, types: Any, labels: list[str], engines: Any) -> Any:
        from kvroute.integrations.vllm.metrics import PromMetrics

        return PromMetrics(super().build_prom_metrics(config, types, labels, engines), config, types, labels, engines)

    def shutdown(self) -> None:
        super().shutdown()
        for name in ("scheduler_rows", "worker_rows"):
            if (rows := self.__dict__.pop(name, None)) is not None:
                core.hears_no_more(rows)
                field = getattr(rows, "field", None)
                if field is not None and field.sending is not None:
                    field.sending.close()
                rows.close()


def connector_class(inner: str) -> type:
    """The connector around ``inner``: ``Connector`` for none, a name that vLLM knows, or ``module:class``.

    Raises :class:`ConfigError` that lists what this release of vLLM lacks, before anything of it is hooked.
    """
    versions.resolve()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # type: ignore[import-not-found]
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
        KVConnectorBase_V1,
        SupportsHMA,
    )

    module, _, name = inner.rpartition(":")
    attributes: dict[str, Any] = {"inner": name, "__module__": __name__}
    if inner == "Connector":
        nothing = {"wait_for_layer_load": lambda *_: None, "request_finished_all_groups": lambda *_: (False, None)}
        base = type("NoKv", (KVConnectorBase_V1, SupportsHMA), nothing)  # the calls without a default above
    elif module:
        base = getattr(import_module(module), name)
    elif inner in KVConnectorFactory._registry:
        base = KVConnectorFactory.get_connector_class_by_name(inner)
    else:
        known = ", ".join(f"Kvroute{connector}" for connector in ("Connector", *KVConnectorFactory._registry))
        raise ConfigError("kv_connector", f"{known}, or Kvroute<module>:<class>", f"Kvroute{inner}")
    return type(f"Kvroute{name}", (RowsWithKV, base), {**attributes, **versions.older_calls(base)})


__all__ = ["RowsWithKV", "connector_class"]

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
        places = offloading.places_of(self)
        engine = engine_of(vllm_config, kv_cache_config, type(self).inner, places)
        self._engine = engine
        group = kv_cache_config.kv_cache_groups[engine.group]
        self._layers = tuple(group.layer_names)
        model_config = vllm_config.model_config
        self._layer_count: int = model_config.get_total_num_hidden_layers()
        if role.name != "SCHEDULER":
            return
        core.check_alone(vllm_config)
        store = engine.settings.store
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        if store and versions.names_blocks_at_random(algorithm):
            logger.warning(
                "rows in %s are found by this process alone, for vLLM gives blocks random hashes here: set "
                "PYTHONHASHSEED to one value in all engines",
                store,
            )
        rows = SchedulerRows(engine)
        self.scheduler_rows = rows
        core.follow_cores()
        core.hears(vllm_config, rows)
        if engine.settings.field:
            rows.field = Field(rows, self._layer_count)

    # ---------------------------------------------------------------- in the worker's process

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        from vllm.distributed.parallel_state import get_tp_group  # type: ignore[import-not-found]

        from kvroute.capture.step_ids import StepIds
        from kvroute.connector.mtp import MtpIds
        from kvroute.connector.witness import by_block
        from kvroute.connector.worker import rank_part

        vllm_config = self._vllm_config
        engine = stage_of(vllm_config, self._engine)
        if engine is None:  # a stage of dense layers
            return
        self._engine = engine
        spec = engine.spec
        group = get_tp_group()
        divided = not vllm_config.model_config.use_mla
        modules = vllm_config.compilation_config.static_forward_context
        grouped = {name: kv_caches[name] for name in self._layers if name in kv_caches}
        attending = [name for name in modules if name in grouped]
        self._layers = tuple(own_layers(attending, self._layer_count))
        own = {name: by_block(grouped[name], engine.blocks) for name in self._layers}
        first = self._layers[0]
        parallel_config = vllm_config.parallel_config
        place = model_place(parallel_config, modules, spec, first, group.rank_in_group)
        join_shards = join_of(place, group)
        rank: Any = rank_part(engine, own, group.device_group, divided=divided, join_shards=join_shards)
        self._rank = rank
        if group.rank_in_group == 0:
            self.worker_rows = rank
            captured = bind(modules, spec, rank.ids.hook, first, place)
            self._say_started(captured)
            if rank.hook_weights is not None:
                bind_weights(modules, spec, first, rank.hook_weights)
            if isinstance(rank.mtp, MtpIds):
                follow_drafts()
                bind_mtp(modules, spec, first, partial(mtp_hook, rank.mtp))
        elif join_shards is not None:  # the first rank has rows of this one's tokens
            device = own[first].device
            self._shards = StepIds(spec, engine.max_tokens, device, join_shards)
            bind(modules, spec, self._shards.hook, first, place)
        if not getattr(vllm_config, "use_v2_model_runner", True):  # only V2 has no slots before its layers
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
        if self.worker_rows:
            return self.worker_rows.handshake(inner)
        return inner and Handshake(inner)

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
        rows = self.worker_rows
        slots = forward_context.slot_mapping
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
            wanted = "a first rank beside this scheduler, with rows"
            raise ConfigError("workers", wanted, f"{len(metadata)} without")
        self.scheduler_rows.attach(*stages)
        handshakes = {rank: handshake.inner for rank, handshake in metadata.items()}
        inner = {rank: handshake for rank, handshake in handshakes.items() if handshake is not None}
        if inner:
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
        matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
        external, later = matched or (0, False)
        if getattr(request, "skip_reading_prefix_cache", False):  # vLLM then takes any answer for (0, False)
            external, later = 0, False
        if external is None:  # vLLM asks again
            return None, later
        # vLLM's example connector answers a negative number for a request that already has more blocks
        external = max(0, external)
        external = self.scheduler_rows.matched(request, num_computed_tokens, external, later=later)
        return external, later and external > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        parameters: Mapping[str, Any] = request.kv_transfer_params or {}
        lends = bool(parameters.get("do_remote_decode"))
        handed_over = None
        if parameters.get("do_remote_prefill"):
            handed_over = parameters.get(FIELD)
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # this marks the KV as fetched
        ticket = handed_over
        if isinstance(handed_over, Mapping):
            ticket = handed_over.get(TRANSFER)
        by_group = blocks.get_block_ids()
        ids = list(by_group[self._engine.group])
        kv = kv_names(request)
        rows = self.scheduler_rows
        rows.admitted(request, ids, num_external_tokens, lends=lends, ticket=ticket, kv=kv)

    def update_connector_output(self, connector_output: Any) -> None:
        message = connector_output.kv_connector_worker_meta
        if isinstance(message, WorkerMeta):
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
        tokens = scheduler_output.num_scheduled_tokens
        return self.scheduler_rows.step(tokens, inner, copies, moves)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        inner = super().request_finished(request, block_ids)
        return self._finished(request, block_ids, inner)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        inner = super().request_finished_all_groups(request, block_ids)
        own = block_ids[self._engine.group]
        return self._finished(request, own, inner)

    def _finished(self, request: Any, blocks: list[int], inner: Any) -> tuple[bool, dict[str, Any] | None]:
        keep, params = inner
        rows = self.scheduler_rows
        name = request.request_id
        aborted = request.status.name.endswith("ABORTED")
        if rows.field is not None:
            rows.field.ended(request, blocks)
        ticket = None
        if keep and not aborted:
            ticket = rows.ticket(request, kv_names(request, params or {}))
        ended = rows.forget(name)
        refusal = None
        wanted = (request.kv_transfer_params or {}).get(FIELD)
        try:
            options = options_of(wanted)
        except RowError as error:
            options = Options()
            refusal = error
        key = Key.of(name, options.key)
        if ticket is not None:  # who goes on has the rows
            rows.unanswered(ended, key)
            return keep, {**(params or {}), FIELD: ticket}
        reached = key.of_client or key.group is not None  # by a key, or with the last of several completions
        in_response = rows.engine.settings.rollouts == RESPONSE
        if aborted and (in_response or not reached):
            rows.unanswered(ended, key)
            return keep, params
        if refusal is not None:
            answer = rows.refused(key, refusal, ended)
        else:
            start = options.start
            computed = min(request.num_tokens - 1, request.num_computed_tokens)
            tokens = _ended_tokens(request)
            if isinstance(start, int) and 0 <= start <= tokens.prompt:
                mtp = rows.mtp_rows(key, blocks, computed, tokens, start)
                if mtp is not None:
                    params = {**(params or {}), MTP_FIELD: mtp}
            answer = rows.finished(key, blocks, computed, tokens, ended=ended, start=start)
        if answer:  # vLLM's own answer waits for it: core
            params = {**(params or {}), FIELD: answer}
        return keep, params

    # ---------------------------------------------------------------- in both, and in the front end

    def get_kv_connector_stats(self) -> Any:
        from kvroute.integrations.vllm.metrics import Stats

        inner = super().get_kv_connector_stats()
        rows = self.worker_rows or getattr(self, "scheduler_rows", None)
        taken = rows and rows.meter.take()
        return Stats(taken or {}, inner) if taken or inner else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        from kvroute.integrations.vllm.metrics import INNER, OURS, Stats

        data = data or {}
        inner = None
        if data.get(INNER):
            inner = super().build_kv_connector_stats(data[INNER])
        return Stats(data.get(OURS, {}), inner)

    @classmethod
    def build_prom_metrics(cls, config: Any, types: Any, labels: list[str], engines: Any) -> Any:
        from kvroute.integrations.vllm.metrics import PromMetrics

        inner = super().build_prom_metrics(config, types, labels, engines)
        return PromMetrics(inner, config, types, labels, engines)

    def shutdown(self) -> None:
        super().shutdown()
        for name in ("scheduler_rows", "worker_rows"):
            rows = self.__dict__.pop(name, None)
            if rows is None:
                continue
            core.hears_no_more(rows)
            field = getattr(rows, "field", None)
            if field is not None and field.sending is not None:
                field.sending.close()
            rows.close()


def _ended_tokens(request: Any) -> Tokens:
    """Those of a request that has ended. Its client may see fewer: a stop string cuts the last ones off, and nobody
    knows how many tokens of an aborted one were sent."""
    stops = request.sampling_params is not None and bool(request.sampling_params.stop)
    cut = stops or request.status.name.endswith(("ABORTED", "ERROR"))
    return Tokens(list(request.all_token_ids), request.num_prompt_tokens, cut)


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
    known = KVConnectorFactory._registry
    if inner == "Connector":
        nothing = {
            "wait_for_layer_load": lambda *_: None,
            "request_finished_all_groups": lambda *_: (False, None),
        }
        base = type("NoKv", (KVConnectorBase_V1, SupportsHMA), nothing)  # the calls without a default above
    elif module:
        base = getattr(import_module(module), name)
    elif inner in known:
        base = KVConnectorFactory.get_connector_class_by_name(inner)
    else:
        names = ", ".join(f"Kvroute{connector}" for connector in ("Connector", *known))
        raise ConfigError("kv_connector", f"{names}, or Kvroute<module>:<class>", f"Kvroute{inner}")
    attributes |= versions.older_calls(base)
    return type(f"Kvroute{name}", (RowsWithKV, base), attributes)


__all__ = ["RowsWithKV", "connector_class"]

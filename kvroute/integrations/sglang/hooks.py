"""kvroute's hooks in SGLang: on routers, caches, answers and weights. ``plugin.py`` puts them in place, all or none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from kvroute.connector.settings import Common
from kvroute.connector.started import started
from kvroute.connector.versions import AS_LOADED, version_of
from kvroute.integrations.sglang import radix, versions
from kvroute.integrations.sglang.capturer import Capturer, capturer
from kvroute.integrations.sglang.handover import Handover, PrefillTickets
from kvroute.integrations.sglang.host_pages import attached
from kvroute.integrations.sglang.pools import is_last_full
from kvroute.integrations.sglang.ranks import least_of
from kvroute.integrations.sglang.refusals import supported
from kvroute.integrations.sglang.routers import routed_layers
from kvroute.integrations.sglang.rows import RoutedRows
from kvroute.integrations.sglang.settings import settings_of_arguments, uses_our_linker
from kvroute.integrations.sglang.weights import Given, bind_weights, given_of
from kvroute.routing import routing_spec_from_hf
from kvroute.weights import configuration_digest, weights_digest

logger = logging.getLogger(__name__)

Hook = Callable[..., Any]

COMPUTES: Final = (
    "load_format",
    "model_loader_extra_config",
    "custom_weight_loader",
    "model_impl",
    "quantization_param_path",
    "modelopt_quant",
    "rl_quant_profile",
    "enable_tf32_matmul",
    "is_embedding",
)
"""SGLang's arguments that change the weights or what is computed with them, beside the model's configuration."""
JUDGED_POOLS: Final = frozenset({"kv", "swa", "mamba"})
"""SGLang's pages on the host: of layers that attend to all tokens, by whose numbers rows go; beside them windows and
states."""
TICKETS: Final = "kvroute_tickets"
"""The attribute of prefill's scheduler with the first rank's :class:`PrefillTickets`, on a rank that has no rows."""


def _after(hook: Hook) -> Hook:
    """SGLang's function, then the hook with the capturer, the result and the arguments, if this process has rows.

    The hook's result is the function's, unless it is ``None``.
    """

    def wrapper(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        rows = capturer()
        changed = None if rows is None else hook(rows, result, *args, **named)
        return result if changed is None else changed

    return wrapper


def _before(hook: Hook) -> Hook:
    """The hook with the capturer and the arguments, if this process has rows; then SGLang's function."""

    def wrapper(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        rows = capturer()
        if rows is not None:
            hook(rows, *args, **named)
        return function(*args, **named)

    return wrapper


def _created(create: Callable[..., Any], runner: Any, *args: Any, **named: Any) -> None:
    """``ModelRunner.init_routed_experts_capturer``: ours, if SGLang returns routed experts.

    It is on the first of the ranks that share their requests, which answers; with our linker, which keeps the KV of
    each rank with its rows, on all of them.
    """
    import sglang  # type: ignore[import-not-found]

    create(runner, *args, **named)
    theirs = versions.experts_capturer()
    arguments, shard = versions.arguments(), versions.AttentionRank(0, 1)
    answers = versions.first_rank()
    if theirs is None or isinstance(theirs, Capturer):
        return
    if uses_our_linker(arguments):
        shard = versions.shard()
    elif not answers:
        return
    page, settings = versions.page_size(), settings_of_arguments(arguments)
    supported(arguments, settings)
    settings = settings.of_rank(versions.data_rank() * shard.world + shard.rank)
    spec = routing_spec_from_hf(runner.model_config.hf_text_config, page)
    captured = routed_layers(runner.model, spec.attrs["layer_ids"])
    given: Given | None = None
    if settings.routing_weights:
        buffer = theirs.device_cache.buffer
        given = given_of(spec, buffer)
        config = runner.model_config.hf_text_config
        on_device = buffer.device.type != "cpu"
        bind_weights(runner.model, config, spec.attrs["layer_ids"], given.hook, on_device=on_device)
    name = namespace_name(runner.model_config, arguments, settings)
    pages = -(-versions.host_tokens(theirs) // page) + 1
    versions.without_host_buffer(theirs)
    leaves = settings if answers else replace(settings, rollouts="")  # of a rank that does not, nobody asks for routes
    namespace = Namespace(name, AS_LOADED, rank=shard.rank, world=shard.world)
    rows = RoutedRows(spec, pages, namespace, leaves, weights=settings.routing_weights)
    versions.set_experts_capturer(Capturer(theirs, rows, answers=answers, weights=given))
    line = started(
        f"SGLang {sglang.__version__}",
        spec,
        settings,
        captured=captured,
        blocks=pages,
        carrier=carrier_name(arguments),
        version=AS_LOADED,
    )
    logger.info("%s", line)


def carrier_name(arguments: Any) -> str:
    """What brings KV from outside, and rows beside it."""
    if versions.is_on(arguments, versions.APART):
        return f"transfer ({arguments.disaggregation_mode})"
    if getattr(arguments, "enable_unified_cache_external_linker", False):
        return "linker"
    return "hierarchical cache" if getattr(arguments, "enable_hierarchical_cache", False) else "none"


def namespace_name(model_config: Any, arguments: Any, settings: Common) -> str:
    """Names the weights and the effective configuration: engines that differ in either never share a key.

    Adapters are not in it: with a store they are refused.
    """
    revision = getattr(model_config.hf_config, "_commit_hash", None) or model_config.revision or ""
    weights = settings.weights or weights_digest(model_config.model_path, str(revision))
    chosen = {name: getattr(arguments, name, None) for name in COMPUTES}
    computed = configuration_digest(
        model_config.hf_config.to_dict(),
        dtype=model_config.dtype,
        quantization=model_config.quantization,
        kv_cache_dtype=versions.kv_cache_dtype(),
        **chosen,
    )
    return f"{weights}/{computed}"


def _begins(current: Capturer, runner: Any, *_: Any, **__: Any) -> None:
    current.begin(drafting=runner.is_draft_worker)


def _accepted(current: Capturer, sampled: Any, *_: Any, **__: Any) -> None:
    """Drafts were verified: ``sampled`` has the tokens, how many of each request were accepted, and which."""
    _, lengths, index = sampled
    if index.ndim == 2:  # else the batch is empty
        current.accepted(index, lengths)


def _carried(current: Capturer, result: Any, *_: Any, **__: Any) -> None:
    current.carry(result)


def _hosted(current: Capturer, _: Any, controller: Any, *__: Any, **___: Any) -> None:
    """SGLang has pages on the host, and maybe a storage behind them."""
    pools = [
        str(getattr(entry.name, "value", entry.name)) for entry in getattr(controller.mem_pool_host, "entries", ())
    ]
    if unjudged := sorted(set(pools) - JUDGED_POOLS):
        raise ConfigError(
            "SGLang with kvroute: enable_hierarchical_cache",
            "a model whose layers attend to all tokens, to windows, or keep states: other pages were not judged",
            ", ".join(unjudged),
        )
    if len(pools) > 1 and controller.enable_storage:
        device = controller.mem_pool_device
        if len(pools) > 2 or not is_last_full(device, getattr(device, "mamba_pool", None)):
            raise ConfigError(
                "SGLang with kvroute: hicache_storage_backend",
                "a model whose last layer attends to all tokens: rows are matched by its KV, behind which none chooses",
                f"{', '.join(pools)}, with layers that forget behind it",
            )
    pool = getattr(controller.mem_pool_host, "anchor_entry", None)
    attached(current.rows, controller, controller.mem_pool_host if pool is None else pool.host_pool)


def _backed_up(current: Capturer, host_slots: Any, _: Any, device_indices: Any, *__: Any, **___: Any) -> None:
    if host_slots is not None:
        rows = current.rows
        rows.copied(rows.pages_of(device_indices), rows.pages_of(host_slots, host=True))


def _brought_back(current: Capturer, slots: Any, _: Any, host_indices: Any, *__: Any, **___: Any) -> None:
    if slots is not None and len(slots):
        rows = current.rows
        rows.copied(rows.pages_of(host_indices, host=True), rows.pages_of(slots))


def _stored(current: Capturer, *arguments: Any, **_: Any) -> None:
    """Pages of the host go to the storage."""
    if current.rows.kv_origins is not None:
        _id, _controller, host_slots, _tokens, keys, *_more = arguments
        current.rows.keep(keys, current.rows.pages_of(host_slots, host=True))


def _found(current: Capturer, hit: Any, controller: Any, operation: Any, *_: Any) -> Any:
    """The storage has KV: cut off the part without rows. The controller's thread calls it.

    Windows and states are those of some ends of a prefix. SGLang goes back to the last such end in what is left, if its
    storage has named the ends; else nothing is left.
    """
    if current.rows.kv_origins is None:
        return hit
    keys, tokens = hit
    n = current.rows.stored(keys)
    if n < len(keys) and operation.pool_transfers and operation.pool_storage_result.restorable_prefix_pages is None:
        n = 0
    return keys[:n], min(tokens, n * controller.page_size)


def _prefetched(current: Capturer, tree: Any, operation: Any) -> None:
    """Pages have come to the host from the storage, also from one that was attached later."""
    pages = operation.completed_tokens // tree.page_size
    if pages:
        slots = tree.ongoing_prefetch[operation.handle].host_indices[: pages * tree.page_size]
        current.rows.loaded(operation.hash_value[:pages], current.rows.pages_of(slots, host=True))


def _linked(_: Capturer, linker: Any, __: Any, params: Any, *, components: Any, **___: Any) -> Any:
    """Give a linker that keeps KV only rows beside it."""
    from kvroute.integrations.sglang.linker import Beside, KvrouteLinker

    return linker if isinstance(linker, KvrouteLinker) else Beside(linker, params, components)


def _collects(current: Capturer, _: Any, req: Any) -> None:
    """A request is over, and SGLang is about to ask for its rows."""
    current.req = req


def _retracted(current: Capturer, *, req: Any, req_to_token_pool: Any, **_: Any) -> None:
    current.retracted(req, req_to_token_pool)


def _retracted_of_batch(current: Capturer, batch: Any, idx: int, *_: Any, **__: Any) -> None:
    """The same up to 0.5.14."""
    current.retracted(batch.reqs[idx], batch.req_to_token_pool)


def _streamed(stream: Callable[..., Any], streamer: Any, reqs: list[Any], *args: Any, **named: Any) -> None:
    """What is new of requests goes out: see :meth:`Capturer.stream`."""
    current = capturer()
    if current is None or not reqs:
        stream(streamer, reqs, *args, **named)
        return
    current.stream(lambda some: stream(streamer, some, *args, **named), streamer.send_to_detokenizer, reqs)


def _updated(current: Capturer, output: Any, _: Any, request: Any, *__: Any, **___: Any) -> None:
    """Weights were updated, perhaps partly: later rows are of other weights."""
    version = request.weight_version if getattr(output, "success", False) else None
    current.rows.weights.changed(None if version is None else version_of(version))


def _named(current: Capturer, _: Any, __: Any, request: Any, *___: Any) -> None:
    current.rows.weights.changed(version_of(request.new_version))


def _flushed(current: Capturer, done: Any, *_: Any, **__: Any) -> None:
    if done:
        current.rows.weights.forgotten()


def _handed(
    send: Callable[..., Any], scheduler: Any, req: Any, last_chunk: bool = False, *args: Any, **named: Any
) -> Any:
    """Prefill sends KV of a prompt: with the last of it goes the ticket for its rows, from each rank."""
    lender: Capturer | PrefillTickets | None = capturer() or getattr(scheduler, TICKETS, None)
    if last_chunk and lender is not None:
        lender.lend(req, scheduler.disagg_metadata_buffers)
    return send(scheduler, req, last_chunk, *args, **named)


def _gated(current: Capturer, _: Any, polls: list[int], decode_reqs: list[Any], metadata_buffers: Any) -> None:
    """Decode asks whose KV has come: SGLang keeps those that have not from running, and we those without their rows.

    SGLang takes the least of what its ranks say, so all wait for the one that has rows.
    """
    for i, decode_req in enumerate(decode_reqs):
        if polls[i] == versions.TRANSFERRED and not current.goes_on(decode_req, metadata_buffers):
            polls[i] = versions.TRANSFERRING


def _prebuilt(_: Capturer, processor: Any, batch: Any) -> None:
    """Requests begin with prefill's token. SGLang gives no routed experts to those that end with it."""
    for req in batch.reqs:
        req.update_finish_state()
        if req.finished():
            processor._maybe_collect_routed_experts(req)


def _put_aside(current: Capturer, kept: bool, req: Any, *_: Any, **__: Any) -> None:
    """Without a copy, SGLang computes the request's KV again, or has none: nothing would bring its rows back."""
    if kept and req.kv.retraction_backup is not None:
        current.put_aside(req)


def _resumed(current: Capturer, _: Any, req: Any, *__: Any, **___: Any) -> None:
    current.bring_back(req)


def handover(scheduler: Any) -> None:
    """A scheduler is there: if it computes prompts for others, or goes on from theirs, rows cross with them.

    The first of the ranks that share their requests has them. The others of prefill learn its tickets here.
    """
    current, arguments = capturer(), versions.arguments()
    if versions.experts_capturer() is None or not versions.is_on(arguments, versions.APART):
        return
    own: PrefillTickets | None = None
    if current is not None:
        made = Handover(current.rows, settings_of_arguments(arguments), rank=versions.data_rank())
        own = made.tickets
        current.hand_over(made, scheduler.req_to_token_pool)
        current.rows.followers.append(made.crossing.follow)
        current.rows.counters["transfer"] = lambda: made.crossing.node.counters
        logger.info("kvroute lends and fetches rows of prompts at %s", made.crossing.address)
    least = least_of(scheduler.attn_tp_cpu_group)
    if least is not None and arguments.disaggregation_mode == "prefill":
        tickets = PrefillTickets.agreed(own, least)
        if current is None:
            setattr(scheduler, TICKETS, tickets)


HOOKS: Final[Mapping[str, Hook]] = {
    "created": _created,
    "hosted": _after(_hosted),
    "backed_up": _after(_backed_up),
    "brought_back": _after(_brought_back),
    "stored": _after(_stored),
    "found": _after(_found),
    "radix_hosted": _after(radix.hosted),
    "radix_backed_up": _after(_backed_up),
    "radix_brought_back": _after(_brought_back),
    "radix_stored": _after(_stored),
    "radix_found": _after(radix.found),
    "linked": _after(_linked),
    "flushed": _after(_flushed),
    "named": _after(_named),
    "updated_disk": _after(_updated),
    "updated_distributed": _after(_updated),
    "updated_tensor": _after(_updated),
    "updated_ipc": _after(_updated),
    "prefetched": _before(_prefetched),
    "radix_prefetched": _before(radix.prefetched),
    "collects": _before(_collects),
    "begins": _before(_begins),
    "accepted": _after(_accepted),
    "accepted_ngram": _after(_accepted),
    "carried": _after(_carried),
    "retracted": _before(_retracted),
    "retracted_of_batch": _before(_retracted_of_batch),
    "handed": _handed,
    "gated": _after(_gated),
    "prebuilt": _before(_prebuilt),
    "put_aside": _after(_put_aside),
    "resumed": _after(_resumed),
    "streamed": _streamed,
}
"""By the names of :data:`versions.PLACES`."""

__all__ = ["HOOKS", "handover"]

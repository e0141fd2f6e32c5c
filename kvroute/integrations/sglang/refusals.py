"""SGLang's server arguments that change how often, in which order or with how many tokens a router is called, or where
KV comes from: which are refused, and which were judged, and how. The page ``docs/sglang.md`` shows this table.

``tests/real/sglang/server_args.txt`` holds the names of all of SGLang's arguments. A new one fails a test, until
somebody has decided about it: here, or that it matters to no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from cache_manager.errors import ConfigError
from kvroute.connector.settings import RANK, Lending
from kvroute.integrations.sglang import versions
from kvroute.integrations.sglang.handover import lend_of_rank
from kvroute.integrations.sglang.settings import LINKER_NAME, VARIABLE, uses_our_linker


class Refused(NamedTuple):
    """An argument with which the server does not start, unless its value is one of ``accepted``."""

    argument: str
    why: str
    accepted: tuple[Any, ...] = (None, False, 0, "")


_ONE: Final = (None, 1)
_NONE: Final = (None, "", "none", "null")
_TWICE: Final = "a router is called more than once in a pass, and SGLang's buffer keeps the last call's tokens"
_SCATTERED: Final = "a router has a part of the tokens only"
_KERNEL: Final = "experts are chosen inside a kernel, which nothing has judged"
_PHYSICAL: Final = "experts have other numbers than in the checkpoint, which nothing has judged"
_ELSEWHERE: Final = "KV comes from places that no hook follows"

REFUSED: Final = (
    Refused("enable_two_batch_overlap", _TWICE),
    Refused("enable_single_batch_overlap", "it needs moe_a2a_backend"),
    Refused("enable_pdmux", "a prefill pass is cut by layers, and its end is not reported"),
    Refused("dllm_algorithm", "a diffusion model computes a token many times"),
    Refused("decoupled_spec_role", "drafts come from another engine", _NONE),
    Refused("enable_dp_attention", "0.5.23 takes it as attn_dp_size; earlier releases were not judged with it"),
    Refused("pp_size", "a rank has a part of the layers", _ONE),
    Refused("attn_cp_size", _SCATTERED, _ONE),
    Refused("dcp_size", "a rank has a part of the KV", _ONE),
    Refused("moe_dp_size", _SCATTERED, _ONE),
    Refused("dwdp_size", "a rank has requests of its own", _ONE),
    Refused("enable_prefill_cp", _SCATTERED),
    Refused("enable_kv_cache_sharding", "a rank has a part of the KV"),
    Refused("enable_dsa_cache_layer_split", "a rank has a part of the KV"),
    Refused("enable_attn_tp_input_scattered", _SCATTERED),
    Refused("enable_layernorm_sp", _SCATTERED),
    Refused("enable_scattered_sconv", _SCATTERED),
    Refused("moe_a2a_backend", _SCATTERED, _NONE),
    Refused("ep_num_redundant_experts", _PHYSICAL),
    Refused("enable_eplb", _PHYSICAL),
    Refused("init_expert_location", _PHYSICAL, (None, "", "trivial")),
    Refused("ep_dispatch_algorithm", "experts may be chosen by chance or by load", (None, "", "static", "dynamic")),
    Refused("enable_waterfill", _PHYSICAL),
    Refused("elastic_ep_backend", "a pass may be computed twice"),
    Refused("kt_weight_path", "experts may be computed a step later, or not at all"),
    Refused("enable_paged_experts", _KERNEL),
    Refused("enable_w4a4_mxfp4_megamoe", _KERNEL),
    Refused("enable_megamoe_for_layernorm_sp", _KERNEL),
    Refused("enable_nvidia_megakernel", _KERNEL),
    Refused("enable_amd_monokernel", _KERNEL),
    Refused("enable_torch_compile", "the router is compiled, which nothing has judged"),
    Refused("enable_pd_role_switch", "an engine lends rows, or fetches them, from its start on"),
    Refused("disaggregation_decode_enable_radix_cache", "one part of a prompt's KV is decode's own"),
    Refused("disaggregation_decode_enable_offload_kvcache", _ELSEWHERE),
    Refused("disaggregation_decode_host_receive_threshold", "KV comes to pages on the host first", (None, 1, 1.0)),
    Refused("disaggregation_decode_allocation_policy", "a prompt's slots are given out later", (None, "", "early")),
    Refused("encoder_only", "there is no router"),
    Refused("prefill_only_disable_kv_cache", "tokens have no slots"),
    Refused("enable_hisparse", _ELSEWHERE),
    Refused("enable_lmcache", _ELSEWHERE),
    Refused("enable_flexkv", _ELSEWHERE),
    Refused("radix_cache_backend", _ELSEWHERE),
    Refused("enable_unified_memory", _ELSEWHERE),
    Refused("hicache_host_memory_mode", "pages on the host have no life of their own", (None, "cache")),
)

OLDER: Final = (
    Refused("enable_prefill_context_parallel", _SCATTERED),
    Refused("enable_nsa_prefill_context_parallel", _SCATTERED),
    Refused("enable_dsa_prefill_context_parallel", _SCATTERED),
    Refused("enable_deepep_waterfill", _PHYSICAL),
)
"""Arguments that 0.5.16 or earlier releases have, and later ones have not."""

ELSEWHERE: Final = ("remote", "remote_instance", "dummy")
"""Formats of loading whose weights do not come from the files of the model: no digest of files names them."""

ARGUMENTS: Final = {
    "tp_size": "tests with 2 ranks, with KvrouteLinker and apart; refused with other linkers and storages",
    "dp_size": "tests with 2 replicas, with KvrouteLinker and apart; before 0.5.23 refused",
    "attn_dp_size": "tests with 2 ranks, and pages on the host; KvrouteLinker by hand; "
    "with CUDA graphs and before 0.5.23 refused",
    "ep_size": "by reading: without an a2a backend every rank's router has every token",
    "chunked_prefill_size": "tests",
    "page_size": "tests",
    "disable_overlap_schedule": "tests, both values",
    "enable_mixed_chunk": "by reading: decode tokens follow the prompt's in one pass and one list of slots",
    "num_continuous_decode_steps": "by reading: each step is a pass of its own",
    "disable_radix_cache": "by reading: every page begins its life in a pass",
    "enable_hierarchical_cache": "tests",
    "hicache_storage_backend": "tests ('file')",
    "enable_unified_cache_external_linker": "tests",
    "enable_streaming_session": "by hand",
    "enable_lora": "tests: an adapter has keys of its own; refused with a store",
    "disable_cuda_graph": "tests; CUDA graphs on one H100",
    "disable_shared_experts_fusion": "by reading: SGLang cuts the shared experts' columns",
    "moe_runner_backend": "its effect on each router is looked up at the start: see the table of routers",
    "disaggregation_mode": "tests, both roles on a CPU, over Mooncake (TCP) and NIXL",
    "skip_tokenizer_init": "tests, both values",
    "speculative_algorithm": "tests with NGRAM (trees), STANDALONE, EAGLE3 and MTP (EAGLE) in chains",
}
"""Accepted arguments that change passes, pages or routers, and how each was judged."""


_PART: Final = (
    "rows are matched by the first rank's part of the KV, and another rank may load that of another computation"
)
BACKENDS: Final = ("mooncake", "nixl")
"""What moves KV between prefill and decode, as it was judged."""
RELEASES: Final = ("0.5.23",)
"""The releases whose prefill and decode were judged apart, and whose drafts and routing weights were judged."""
DRAFT_KINDS: Final = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
"""Kinds of speculative decoding, as SGLang names them. NEXTN is its older name of EAGLE."""


def _apart(server_args: Any, settings: Lending, version: str) -> Iterator[tuple[str, str, Any]]:
    """:func:`refusals` of an engine that computes prompts for others, or goes on from theirs."""
    mode, backend = server_args.disaggregation_mode, server_args.disaggregation_transfer_backend
    if version not in RELEASES:
        yield versions.APART, f"'null' in SGLang {version}: it was judged in {' or '.join(RELEASES)}", mode
    if backend not in BACKENDS:
        yield "disaggregation_transfer_backend", f"{' or '.join(map(repr, BACKENDS))} with {mode!r}", backend
    if getattr(server_args, "attn_dp_size", 1) > 1:
        yield "attn_dp_size", f"1 with disaggregation_mode={mode!r}, which nothing has judged", server_args.attn_dp_size
    for part in versions.HOST, versions.LINKER:
        if versions.is_on(server_args, part):
            yield part, f"False with disaggregation_mode={mode!r}, which nothing has judged", True
    try:
        lend_of_rank(settings.lend, server_args.dp_size - 1)
    except ConfigError as error:
        yield error.field, str(error.wanted), error.got


def _drafted(server_args: Any, version: str) -> Iterator[tuple[str, str, Any]]:
    """:func:`refusals` of an engine that verifies drafts."""
    kind = server_args.speculative_algorithm
    beside = f"with {versions.DRAFTS}={kind!r}, which nothing has judged"
    if version not in RELEASES:
        yield versions.DRAFTS, f"None in SGLang {version}: it was judged in {' or '.join(RELEASES)}", kind
    if kind not in DRAFT_KINDS:
        yield versions.DRAFTS, f"None or {' or '.join(map(repr, DRAFT_KINDS))}: others were not judged", kind
    if not server_args.disable_cuda_graph:
        yield "disable_cuda_graph", f"True {beside}: a graph of a pass with drafts", False
    if kind != "NGRAM" and (server_args.speculative_eagle_topk or 1) > 1:
        yield "speculative_eagle_topk", f"1 {beside}: trees of a draft model", server_args.speculative_eagle_topk
    for argument in ("enable_multi_layer_eagle", "speculative_adaptive", "enable_mixed_chunk"):
        if getattr(server_args, argument, False):
            yield argument, f"False {beside}", True
    for ranks in ("tp_size", "dp_size", "attn_dp_size"):
        if getattr(server_args, ranks, 1) > 1:
            yield ranks, f"1 {beside}", getattr(server_args, ranks)
    for part in (versions.APART, versions.LINKER, *([versions.HOST] if kind != "NGRAM" else [])):
        if versions.is_on(server_args, part):
            yield part, f"no {part} {beside}", getattr(server_args, part)


def _weighted(server_args: Any, version: str) -> Iterator[tuple[str, str, Any]]:
    """:func:`refusals` of an engine whose answers have routing weights beside their ids."""
    beside = f"with {versions.WEIGHTS_SETTING}, which nothing has judged"
    if version not in RELEASES:
        yield versions.WEIGHTS_SETTING, f"false in SGLang {version}: it was judged in {' or '.join(RELEASES)}", True
    elif lacking := versions.absent(version, versions.WEIGHTS_SETTING):
        yield versions.WEIGHTS_SETTING, f"false in an SGLang without {lacking[0]}, where weights are taken", True
    if server_args.device != "cpu":
        yield "device", f"'cpu' {beside}: passes in a device's graphs", server_args.device
    for ranks in ("tp_size", "dp_size", "attn_dp_size", "ep_size"):
        if getattr(server_args, ranks, 1) > 1:
            yield ranks, f"1 {beside}", getattr(server_args, ranks)
    for part in (versions.APART, versions.DRAFTS):
        if versions.is_on(server_args, part):
            yield part, f"none {beside}", getattr(server_args, part)
    if getattr(server_args, "enable_lora", False):
        yield "enable_lora", f"False {beside}: an adapter's experts are others", True


def refusals(server_args: Any, settings: Lending) -> Iterator[tuple[str, str, Any]]:
    """For each refused argument: it, what is wanted, and its value. ``server_args`` are the resolved ones."""
    import sglang  # type: ignore[import-not-found]

    for argument, why, accepted in (*REFUSED, *OLDER):
        value = getattr(server_args, argument, None)  # an older SGLang has no such argument
        if value not in accepted:
            yield argument, f"{' or '.join(repr(option) for option in accepted if option is not None)}: {why}", value
    linked = getattr(server_args, versions.LINKER, False)
    for part in versions.PARTS:
        if versions.is_on(server_args, part) and (lacking := versions.absent(sglang.__version__, part)):
            yield part, f"False: SGLang {sglang.__version__} has not {lacking[0]}, where its pages are followed", True
    replicas = getattr(server_args, "dp_size", 1)
    attention_ranks = getattr(server_args, "attn_dp_size", 1)
    for argument, ranks in (("dp_size", replicas), ("attn_dp_size", attention_ranks)):
        if ranks > 1 and versions.release(sglang.__version__) < versions.DATA_PARALLEL:
            yield argument, f"1: SGLang {sglang.__version__} was not judged with it", ranks
    if attention_ranks > 1 and not server_args.disable_cuda_graph:
        yield "disable_cuda_graph", "True with attn_dp_size: no graph of its ranks was judged", False
    stores = server_args.tp_size if uses_our_linker(server_args) else attention_ranks
    if replicas * stores > 1 and settings.shares_files:
        yield "store", f"a directory for each rank, such as file:///var/lib/kvroute/{RANK}", settings.store
    if versions.is_on(server_args, versions.APART):
        yield from _apart(server_args, settings, sglang.__version__)
    if versions.is_on(server_args, versions.DRAFTS):
        yield from _drafted(server_args, sglang.__version__)
    if settings.routing_weights:
        yield from _weighted(server_args, sglang.__version__)
    if settings.store and server_args.enable_lora:
        yield "enable_lora", "no adapters with a store: SGLang's keys name an adapter, not its weights", True
    if settings.store and not settings.weights and server_args.load_format in ELSEWHERE:
        yield "load_format", f"a name of the weights (weights) with {server_args.load_format!r}", "none"
    loads = "an external linker" if linked else server_args.hicache_storage_backend
    if loads and not settings.store:
        yield (
            "store",
            f"a store for the rows of KV that is loaded, in {VARIABLE} or for {LINKER_NAME}",
            f"none, beside {loads}",
        )
    ranks = getattr(server_args, "tp_size", 1)
    if loads and ranks > attention_ranks and not uses_our_linker(server_args):
        yield "tp_size", f"{attention_ranks} with {loads}, or {LINKER_NAME}: {_PART}", ranks


def supported(server_args: Any, settings: Lending) -> None:
    """:class:`ConfigError` names the first unsupported feature of an engine with these published arguments."""
    for argument, wanted, got in refusals(server_args, settings):
        raise ConfigError(f"SGLang with kvroute: {argument}", wanted, got)


__all__ = ["ARGUMENTS", "OLDER", "REFUSED", "Refused", "refusals", "supported"]

"""Where there is no CUDA: SGLang's buffers on the host are memory as it is, and pages are copied by torch."""

from __future__ import annotations

import os
import sys
from typing import Any


def transfer_kv_direct(
    src_layers: list[Any], dst_layers: list[Any], src_indices: Any, dst_indices: Any, **_: Any
) -> None:
    """In the place of the function of this name in ``sgl_kernel``."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: list[Any], dst_ptrs: list[Any], src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """The same, from pages of all layers on the host to a layer's slots."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: list[Any], dst_ptrs: list[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """The reverse, of all layers: those of the first target come first."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, source in enumerate(src_ptrs):
        target = dst_ptrs[i // layers]
        target[dst_indices // page_size, i % layers, dst_indices % page_size] = source[src_indices]


class Event:
    """What is done on a CPU is over when the call returns."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _as_on_cuda() -> None:
    """What prefill takes of CUDA for the pages that it sends, and adapters for their tables."""
    import torch

    def pageable(make: Any) -> Any:
        return lambda *given, **more: make(*given, **{**more, "pin_memory": False})

    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, pageable(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    torch.cuda.Event = Event
    torch.cuda.current_stream = lambda *_: None
    torch.cuda.synchronize = lambda *_: None


def _in_host_memory(*_: Any, **__: Any) -> None:
    """NIXL is to move KV that is in no GPU's memory."""
    from nixl._api import nixl_agent

    def wrapped(method: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            here = ["DRAM" if isinstance(value, str) and value == "VRAM" else value for value in args]
            return method(*here, **{name: "DRAM" if value == "VRAM" else value for name, value in named.items()})

        return call

    for name in ("register_memory", "get_xfer_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, wrapped(getattr(nixl_agent, name)))


def _attends_to_drafts() -> None:
    """SGLang's torch attention has no pass that verifies drafts, and no draft model: here it has both, of chains."""
    import copy

    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.managers import overlap_utils
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    extend = TorchNativeAttnBackend.forward_extend

    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Any:
        if not batch.forward_mode.is_target_verify():
            return extend(self, q, k, v, layer, batch, save_kv_cache, **more)
        pool = self.token_to_kv_pool
        pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        width, count = batch.spec_info.draft_token_num, len(batch.seq_lens)
        queries = q.view(count, width, layer.tp_q_head_num, layer.qk_head_dim)
        masks = batch.spec_info.custom_mask[: count * width * width].view(count, width, width).bool()
        outs = []
        for query, mask, length, request in zip(
            queries, masks, batch.seq_lens.tolist(), batch.req_pool_indices.tolist(), strict=True
        ):
            slots = self.req_to_token_pool.req_to_token[request, : length + width].long()
            seen = torch.cat([torch.ones(width, length, dtype=torch.bool), mask], 1)
            out = torch.nn.functional.scaled_dot_product_attention(
                query.movedim(1, 0)[None],
                keys[slots].movedim(1, 0)[None],
                values[slots].movedim(1, 0)[None],
                attn_mask=seen,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            outs.append(out[0].movedim(0, 1).reshape(width, -1))
        return torch.cat(outs)

    class Step(TorchNativeAttnBackend):  # type: ignore[misc]
        """Of a draft model: its token is behind ``ahead`` others that it has drafted."""

        ahead = 0

        def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Any:
            behind = copy.copy(batch)
            behind.seq_lens = batch.seq_lens + self.ahead + 1
            return super().forward_decode(q, k, v, layer, behind, save_kv_cache)

    class Steps:
        def __init__(self, factory: Any) -> None:
            self.attn_backends = [Step(factory.draft_model_runner) for _ in range(factory.speculative_num_steps - 1)]
            for ahead, step in enumerate(self.attn_backends):
                step.ahead = ahead

        def init_forward_metadata(self, batch: Any) -> None: ...

    if os.environ.get("OVERLAP_WITH_DRAFTS"):  # SGLang schedules without overlap on a CPU, where there are drafts
        hook = "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu"
        HookRegistry.register(hook, lambda *_: None, HookType.REPLACE)
    overlap_utils.gather_spec_extras = lambda at, *some: tuple(None if each is None else each[at] for each in some)
    TorchNativeAttnBackend.forward_extend = forward_extend
    DraftBackendFactory.create_decode_backend = lambda factory: Steps(factory)
    DraftBackendFactory.create_draft_extend_backend = lambda factory: TorchNativeAttnBackend(factory.draft_model_runner)


def _attends_in_windows() -> None:
    """SGLang's torch attention writes the KV of layers with a window at slots of their own, and reads it at others."""
    from types import SimpleNamespace

    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def translated(function: Any) -> Any:
        def forward(self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **named: Any) -> Any:
            pool, requests = self.token_to_kv_pool, self.req_to_token_pool
            if not getattr(self, "use_sliding_window_kv_pool", False) or not pool.layers_mapping[layer.layer_id][1]:
                return function(self, q, k, v, layer, *args, **named)
            slots = requests.req_to_token
            of_windows = pool.translate_loc_from_full_to_swa(slots.flatten().long()).view(slots.shape)
            self.req_to_token_pool = SimpleNamespace(req_to_token=of_windows.to(slots.dtype))
            try:
                return function(self, q, k, v, layer, *args, **named)
            finally:
                self.req_to_token_pool = requests

        return forward

    for name in ("forward_extend", "forward_decode"):
        setattr(TorchNativeAttnBackend, name, translated(getattr(TorchNativeAttnBackend, name)))


def _convolves() -> None:
    """Convolutions of a few tokens, whose states are pages of their own: SGLang has kernels for them on a GPU alone."""
    import torch

    for name in ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu"):  # looked up, and never called
        torch.library.define(f"sgl_kernel::{name}", "() -> ()")
    from sglang.srt.layers.attention.mamba import causal_conv1d as place
    from sglang.srt.mem_cache.pool_host import mamba

    def convolved(x: Any, weight: Any, bias: Any, state: Any) -> Any:
        """Of one request's new tokens ``x [channels, T]`` behind its ``state [channels, width - 1]``."""
        seen = torch.cat([state, x], 1)
        state.copy_(seen[:, seen.shape[1] - state.shape[1] :])
        out = (seen.unfold(1, weight.shape[1], 1) * weight[:, None]).sum(-1)
        return out if bias is None else out + bias[:, None]

    def causal_conv1d_fn(
        x: Any,
        weight: Any,
        bias: Any = None,
        query_start_loc: Any = None,
        cache_indices: Any = None,
        has_initial_state: Any = None,
        conv_states: Any = None,
        activation: Any = None,
        **_: Any,
    ) -> Any:
        assert activation is None
        bounds, outs = query_start_loc.tolist(), []
        for i, index in enumerate(cache_indices.tolist()):
            state = conv_states[index]
            if not has_initial_state[i]:
                state.zero_()
            outs.append(convolved(x[:, bounds[i] : bounds[i + 1]], weight, bias, state))
        return torch.cat(outs, 1)

    def causal_conv1d_update(
        x: Any,
        conv_state: Any,
        weight: Any,
        bias: Any = None,
        activation: Any = None,
        conv_state_indices: Any = None,
        **_: Any,
    ) -> Any:
        assert activation is None
        states = (conv_state[index] for index in conv_state_indices.tolist())
        return torch.cat([convolved(row[:, None], weight, bias, at).T for row, at in zip(x, states, strict=True)])

    place.causal_conv1d_fn, place.causal_conv1d_update = causal_conv1d_fn, causal_conv1d_update
    mamba.transfer_kv_direct = transfer_kv_direct
    mamba.transfer_kv_per_layer_direct_pf_lf = transfer_kv_per_layer_direct_pf_lf
    mamba.transfer_kv_all_layer_direct_lf_pf = transfer_kv_all_layer_direct_lf_pf


def _padded_where_it_must_be(adjust: Any, model_config: Any, load_config: Any, tp_size: int) -> Any:
    """On a CPU alone SGLang pads a model for the kernels of several ranks, and changes its configuration: there engines
    of unequal sizes would be of other models. These kernels are not here."""
    if model_config.num_attention_heads % tp_size == model_config.get_total_num_kv_heads() % tp_size == 0:
        return model_config
    return adjust(model_config, load_config, tp_size)


def _host_pool() -> Any:
    """SGLang's module of pages on the host, whose memory is as it is."""
    try:
        import sglang.srt.mem_cache.pool_host.mha as host_pool
    except ModuleNotFoundError:  # up to 0.5.15
        import sglang.srt.mem_cache.memory_pool_host as host_pool

        try:
            import sglang.srt.mem_cache.pool_host.common as memory
        except ModuleNotFoundError:  # up to 0.5.12
            host_pool.alloc_with_host_register = _allocated
        else:
            memory._cuda_host_register = lambda *_: None
        base = sys.modules[host_pool.HostKVCache.__module__]
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # of 10 GB that would stay free
    return host_pool


def _allocated(dims: Any, *, allocator: Any, **named: Any) -> Any:
    return allocator.allocate(dims, dtype=named["dtype"], device=named["device"])


def register() -> None:
    _as_on_cuda()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if not hasattr(TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value"):  # of padding among ranks
        TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1
    host_pool = _host_pool()
    host_pool.transfer_kv_direct = transfer_kv_direct
    host_pool.transfer_kv_per_layer_direct_pf_lf = transfer_kv_per_layer_direct_pf_lf
    host_pool.transfer_kv_all_layer_direct_lf_pf = transfer_kv_all_layer_direct_lf_pf
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if host_pool.__name__.endswith("memory_pool_host"):  # what is below is of later releases
        return
    manager = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"
    HookRegistry.register(f"{manager}.__init__", _in_host_memory, HookType.BEFORE)
    place = "sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp"
    HookRegistry.register(place, _padded_where_it_must_be, HookType.AROUND)
    place = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
    HookRegistry.register(place, lambda *_, **__: None, HookType.REPLACE)
    HookRegistry.register("sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__", _pageable, HookType.AFTER)
    _attends_to_drafts()
    _attends_in_windows()
    _convolves()


def _pageable(_: None, pool: Any, *__: Any, **___: Any) -> None:
    """Pages that storages fill are memory as it is, too."""
    pool.pin_memory = False

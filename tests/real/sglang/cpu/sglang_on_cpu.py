"""Where there is no CUDA: SGLang's buffers on the host are memory as it is, and pages are copied by torch."""

from __future__ import annotations

import os
from typing import Any


def transfer_kv_direct(
    src_layers: list[Any], dst_layers: list[Any], src_indices: Any, dst_indices: Any, **_: Any
) -> None:
    """In the place of the function of this name in ``sgl_kernel``."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


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

    def forward_extend(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Any:
        if not batch.forward_mode.is_target_verify():
            return extend(self, q, k, v, layer, batch, save_kv_cache)
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


def register() -> None:
    _as_on_cuda()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if not hasattr(TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value"):  # of padding among ranks
        TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1
    try:
        import sglang.srt.mem_cache.pool_host.mha as host_pool
    except ModuleNotFoundError:  # releases whose pages on the host no hook of kvroute follows
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"
    HookRegistry.register(f"{manager}.__init__", _in_host_memory, HookType.BEFORE)
    place = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
    HookRegistry.register(place, lambda *_, **__: None, HookType.REPLACE)
    HookRegistry.register("sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__", _pageable, HookType.AFTER)
    host_pool.transfer_kv_direct = transfer_kv_direct
    _attends_to_drafts()


def _pageable(_: None, pool: Any, *__: Any, **___: Any) -> None:
    """Pages that storages fill are memory as it is, too."""
    pool.pin_memory = False

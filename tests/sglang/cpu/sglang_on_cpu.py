"""Where there is no CUDA: SGLang's buffers on the host are memory as it is, and pages are copied by torch."""

from __future__ import annotations

from typing import Any


def transfer_kv_direct(
    src_layers: list[Any], dst_layers: list[Any], src_indices: Any, dst_indices: Any, **_: Any
) -> None:
    """In the place of the function of this name in ``sgl_kernel``."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def register() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if not hasattr(TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value"):  # of padding among ranks
        TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1
    try:
        import sglang.srt.mem_cache.pool_host.mha as host_pool
    except ModuleNotFoundError:  # releases whose pages on the host no hook of kvroute follows
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    place = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
    HookRegistry.register(place, lambda *_, **__: None, HookType.REPLACE)
    HookRegistry.register("sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__", _pageable, HookType.AFTER)
    host_pool.transfer_kv_direct = transfer_kv_direct


def _pageable(_: None, pool: Any, *__: Any, **___: Any) -> None:
    """Pages that storages fill are memory as it is, too."""
    pool.pin_memory = False

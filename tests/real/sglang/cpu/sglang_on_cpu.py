"""Where there is no CUDA: SGLang's buffers on the host are memory as it is, and pages are copied by torch."""

from __future__ import annotations

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
    """What prefill takes of CUDA for the pages that it sends."""
    import torch

    empty = torch.empty
    torch.empty = lambda *sizes, **more: empty(*sizes, **{**more, "pin_memory": False})
    torch.cuda.Event = Event
    torch.cuda.current_stream = lambda *_: None


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


def _pageable(_: None, pool: Any, *__: Any, **___: Any) -> None:
    """Pages that storages fill are memory as it is, too."""
    pool.pin_memory = False

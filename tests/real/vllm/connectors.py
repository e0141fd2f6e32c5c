"""Inner connectors with a fault or a habit, on top of vLLM's own connector that keeps KV in files."""

from __future__ import annotations

from typing import Any, ClassVar

import safetensors.torch
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata


class FailingConnector(ExampleConnector):
    """Loads rubbish into the third block of its first load, and reports it."""

    failures: ClassVar[int] = 0
    failed_loads: set[int] = set()  # noqa: RUF012 - none before the first step, and never changed

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self.failed_loads: set[int] = set()
        loads = [each for each in self._get_connector_metadata().requests if not each.is_store]
        if loads and not FailingConnector.failures:
            FailingConnector.failures += 1
            block = int(loads[0].slot_mapping[2 * self._block_size]) // self._block_size
            for layer in forward_context.no_compile_layers.values():
                if getattr(layer, "kv_cache", None) is not None:
                    layer.kv_cache[block] = torch.randn_like(layer.kv_cache[block])
            self.failed_loads = {block}

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed_loads = self.failed_loads, set()
        return failed


class ResumingConnector(ExampleConnector):
    """Loads for a request that was preempted by its prompt, the name under which KV was stored.

    vLLM's own looks for a file by the name of prompt and answer, which nobody has written, and the engine dies.
    """

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        cached, resumed = scheduler_output.scheduled_cached_reqs, []
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids and name in self._requests_need_load:
                resumed.append((list(self._requests_need_load.pop(name).prompt_token_ids), blocks[0]))
        meta = super().build_connector_meta(scheduler_output)
        for tokens, blocks in resumed:
            meta.add_request(tokens, blocks, self._block_size, is_store=False, mm_hashes=[])
        return meta


class LateConnector(ExampleConnector):
    """Loads beside the steps of other requests: it is there two steps after it was asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asked: list[tuple[str, Any]] = []
        self._under_way: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            meta = ExampleConnectorMetadata()
            meta.add_request(
                list(request.prompt_token_ids),
                blocks.get_block_ids()[0],
                self._block_size,
                is_store=False,
                mm_hashes=[],
            )
            self._asked.append((request.request_id, meta.requests[0]))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        meta.later, self._asked = self._asked, []
        return meta

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for name, load in self._get_connector_metadata().later:
            for layer_name, layer in forward_context.no_compile_layers.items():
                if getattr(layer, "kv_cache", None) is None:
                    continue
                file = self._generate_filename_debug(layer_name, load.token_ids, load.mm_hashes)
                blocks, offsets = load.slot_mapping // self._block_size, load.slot_mapping % self._block_size
                layer.kv_cache[blocks, :, offsets] = safetensors.torch.load_file(file)["kv_cache"]
            self._under_way[name] = 2

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._under_way = {name: left - 1 for name, left in self._under_way.items()}
        done = {name for name, left in self._under_way.items() if not left}
        for name in done:
            del self._under_way[name]
        return None, done

"""What SGLang asks for the experts of a pass and of a request, and where a process finds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt import runtime_context as context  # type: ignore[import-not-found]

from kvroute.connector.answers import FIELD
from kvroute.connector.left import Tokens
from kvroute.integrations.sglang.rows import Launched, RoutedRows


class Capturer:
    """In the place of SGLang's ``RoutedExpertsCapturer``: its device buffer as it is, and no buffer on the host."""

    def __init__(self, theirs: Any, rows: RoutedRows) -> None:
        self.theirs, self.rows, self.capture = theirs, rows, theirs.capture
        self.req: Any = None
        """The request that is asked for next."""
        theirs.destroy()

    def on_forward_end(
        self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None, no_copy_to_cpu: bool = False
    ) -> Launched | None:
        made = self.theirs.on_forward_end(forward_batch, can_run_graph, cuda_graph_batch, no_copy_to_cpu=True)
        rows = self.rows
        rows.launched += 1
        rows.weights.computes()
        launched = Launched(rows.launched, rows.weights.version, made.out_cache_loc, made.topk, rows)
        if no_copy_to_cpu:
            return launched
        launched.map_device_tensors(torch.Tensor.cpu)
        launched.finalize()
        return None

    def get_topk(self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> torch.Tensor:
        """SGLang's field of :attr:`req`, which is over; kvroute's answer goes where SGLang has one a token."""
        slots = req_to_token_pool.req_to_token[req_pool_idx][: seqlen - 1].cpu().numpy().astype(np.int64)
        req, said = self.req, list(self.req.output_ids_through_stop)
        tokens = Tokens([*req.origin_input_ids, *said], len(req.origin_input_ids))
        field, told = self.rows.answer(req.rid, slots, min(start_len, len(slots)), tokens)
        if told is not None and said:
            req.customized_info = (req.customized_info or {}) | {FIELD: [*(None for _ in said[1:]), told]}
        return field

    def destroy(self) -> None:
        self.rows.close()


def capturer() -> Capturer | None:
    """This process's, where it has one."""
    found = context.get_resources().experts_capturer
    return found if isinstance(found, Capturer) else None


__all__ = ["Capturer", "capturer"]

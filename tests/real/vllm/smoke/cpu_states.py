"""vLLM 0.24 to 0.26 over the native code of 0.32: linear attention on a CPU.

That code is told which states are whose, and changes them where they are. The Python of these releases has gathered
them, and puts back what it is given.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops


def _chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,  # [sequences, heads, ...]
    output_final_state: bool,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    eps: float = 1e-5,
) -> tuple[Any, torch.Tensor]:
    which = torch.arange(len(initial_state), dtype=torch.int32)
    said = (output_final_state, cu_seqlens, head_first, use_qk_l2norm_in_kernel)
    output, _ = torch.ops._C.chunk_gated_delta_rule_cpu(query, key, value, g, beta, initial_state, *said, which, eps)
    return output, initial_state


_custom_ops.chunk_gated_delta_rule_cpu = _chunk_gated_delta_rule

"""The figures of the R3 paper, for scale: other models, other engines, other hardware; nothing here was measured by us.

W. Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370:
Qwen3-30B-A3B (48 routed layers, top 8 of 128) between SGLang and Megatron. Quoted from public summaries of the paper.
"""

from __future__ import annotations

from typing import Final

SOURCE: Final = "arXiv 2510.11370, Qwen3-30B-A3B; the paper's figures, not ours"

PAPER: Final[dict[tuple[str, str], tuple[float, str]]] = {
    ("kl", "none"): (1.535e-3, "1.5e-03"),
    ("kl", "r3"): (7.5e-4, "7.5e-04"),
    ("routers_differing", "none"): (0.10, "about 10 %"),
    ("tokens_differing", "none"): (0.94, "94 %"),
}
"""By figure and mode: the value, and as it is printed."""

REMARKS: Final = (
    "a dense model of the paper, Qwen3-8B, has a KL of 6.4e-04 without any router",
    "with R3 the paper finds F(2), here |d| > ln 2, smaller by an order of magnitude",
)

__all__ = ["PAPER", "REMARKS", "SOURCE"]

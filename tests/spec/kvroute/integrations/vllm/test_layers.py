"""Whose layers are whose: by the names that vLLM's models give to their layers."""

from __future__ import annotations

import pytest

from kvroute.integrations.vllm.layers import own_layers

DENSE = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
SEEN = ["language_model.model.layers.0.self_attn.attn", "language_model.model.layers.1.linear_attn"]


@pytest.mark.parametrize(
    ("own", "draft"),
    [
        (DENSE, []),
        (DENSE, ["model.layers.2.self_attn.attn"]),  # DeepSeek's and GLM's MTP, and heads of EAGLE
        (DENSE, ["model.layers.2.mtp_block.self_attn.attn"]),
        (DENSE, ["mtp.layers.0.self_attn.attn"]),  # Qwen3-Next's and EXAONE's MTP
        (DENSE, ["model.mtp.layers.0.self_attn"]),  # MiMo-V2's
        (DENSE, ["draft_model.model.layers.0.self_attn.attn", "draft_model.model.layers.1.self_attn.attn"]),
        (DENSE, ["model.eagle_layers.2.self_attn.attn"]),  # MiniCPM's
        (SEEN, ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]),  # a text model drafts
        (SEEN, ["kvroute"]),
        ([], []),
    ],
)
def test_a_drafts_layers_are_not_the_models(own: list[str], draft: list[str]) -> None:
    """Goal: a draft's layer is never taken for one of the model's two. Method: names of each kind of draft, in the
    order in which vLLM makes layers."""
    assert own_layers([*own, *draft], 2) == own

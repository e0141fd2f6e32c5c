"""Speculative decoding, apart: its proposer brings numba, after which vLLM makes no engine in the same process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import prompts

Start = Any  # conftest's Engines
Model = Callable[..., Path]


def test_rejected_drafts_leave_no_rows(engine: Start, model: Model) -> None:
    """Goal: speculative decoding. Method: drafts from the prompt's own repetitions, some are rejected; the rows
    of the tokens that took their places, and of requests that hit their blocks.
    """
    made = engine(
        model("qwen3_moe"),
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
    )
    asked = [prompt * 6 for prompt in prompts(45, 9, 12, 15)]
    outputs = made.ask(asked, max_tokens=60)
    made.assert_right(outputs)
    drafted, accepted = made.metric("spec_decode_num_draft_tokens"), made.metric("spec_decode_num_accepted_tokens")
    assert drafted > accepted
    made.assert_right(made.ask([[*p, *o.outputs[0].token_ids, 7] for p, o in zip(asked, outputs, strict=True)]))

"""Supports beside rows that have crossed from prefill to decode."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from toy_engine import judge
from toy_pair import PROMPT, SAID, handed_over, makers, two

from cache_manager.errors import RowError
from kvroute import SamplingSupport, open_rollouts
from kvroute.connector import routes
from kvroute.integrations import sglang


def test_decodes_rows_and_supports_go_into_one_put(tmp_path: Path) -> None:
    """Goal: with prefill and decode apart a trainer gets both, bound to one sequence. Method: rows that crossed to
    decode, beside its answer's supports. The first token is drawn by decode, as in vLLM, or by prefill, whose support
    SGLang sends with the KV; an answer without that is refused."""
    tokens = [*PROMPT, *SAID, 6]
    drawn = [[token, token + 20] for token in tokens[len(PROMPT) :]]
    with two() as (first, second), closing(open_rollouts(f"file://{tmp_path}")) as store:
        ticket = handed_over(first, PROMPT)
        answer = second.ask("d", PROMPT, brought=len(PROMPT), ticket=ticket, more=SAID)
        rows = routes(answer)
        told = {"meta_info": {"id": "d", "output_token_sampling_mask": drawn}, "output_ids": tokens[len(PROMPT) :]}
        lacks = {**told, "meta_info": {"id": "d", "output_token_sampling_mask": drawn[1:]}}
        with pytest.raises(RowError, match="wanted one for each of its 4 tokens, got 3"):
            sglang.support(lacks, prompt=PROMPT)
        support = sglang.support(told, prompt=PROMPT)
        handle = store.put("d", rows, support)
        assert store.get(handle) == [rows]
        back = store.support(handle)
        assert isinstance(back, SamplingSupport)
        back.validate(tokens, loss_mask=[0] * len(PROMPT) + [1] * len(drawn))
        assert back == support
        with pytest.raises(RowError):
            store.put("d", rows, sglang.support(told, prompt=[7, *PROMPT[1:]]))
    assert judge(rows, tokens[:-1], makers(len(PROMPT), len(SAID))) == {"right": len(tokens) - 1}

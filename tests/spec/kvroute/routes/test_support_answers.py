"""Sampling supports out of engines' answers, without an engine: objects and JSON of vLLM, and SGLang's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cache_manager.errors import RowError
from kvroute import RequestJournal, SamplingSupport, routing_spec
from kvroute.integrations import sglang, vllm

PROMPT, ANSWER = [5, 6, 7], [8, 9, 10]
MASK = [[2, 8], [9], [31, 10, 7]]
WANTED = SamplingSupport.of(MASK, [*PROMPT, *ANSWER], 3)


def of_vllm(mask: Any = MASK, tokens: Any = ANSWER) -> SimpleNamespace:
    """A ``RequestOutput``, whose second completion is another."""
    one = SimpleNamespace(index=0, token_ids=tokens, finish_reason="stop", sampling_mask=None)
    if mask is not None:
        one.sampling_mask = SimpleNamespace(token_ids=mask)
    other = SimpleNamespace(
        index=1, token_ids=[3], finish_reason="length", sampling_mask=SimpleNamespace(token_ids=[[3]])
    )
    return SimpleNamespace(request_id="r", prompt_token_ids=PROMPT, outputs=[other, one], kv_transfer_params=None)


def as_json(**changes: Any) -> dict[str, Any]:
    """The answer of ``/inference/v1/generate``, which does not have the prompt."""
    choice = {"index": 0, "token_ids": ANSWER, "finish_reason": "stop", "sampling_mask": MASK, **changes}
    return {"request_id": "r", "choices": [choice], "kv_transfer_params": None}


def of_sglang(**meta: Any) -> dict[str, Any]:
    told = {"id": "r", "output_token_sampling_mask": MASK, **meta}
    return {"meta_info": told, "prompt_token_ids": PROMPT, "output_ids": ANSWER}


def test_every_form_of_an_answer_has_the_same_supports() -> None:
    """Goal: what the sampler left is what a client gets, and a prompt has none. Method: one answer in each form."""
    assert vllm.support(of_vllm()) == WANTED
    assert vllm.support(as_json(), prompt=PROMPT) == WANTED
    assert sglang.support(of_sglang()) == WANTED
    assert sglang.support(of_sglang(), prompt=PROMPT) == WANTED
    assert (WANTED.start, WANTED.row(5).tolist()) == (3, [7, 10, 31])
    other = vllm.support(of_vllm(), 1)
    assert other == SamplingSupport.of([[3]], [*PROMPT, 3], 3)


@pytest.mark.parametrize(
    ("output", "given", "message"),
    [
        (of_vllm(None), {}, "completion 0 of r: wanted vLLM 0.30 or later with return_sampling_mask"),
        ({**as_json(), "choices": [{"index": 0, "token_ids": ANSWER}]}, {"prompt": PROMPT}, "wanted vLLM 0.30"),
        (of_sglang(output_token_sampling_mask=None), {}, "SGLang for a request with return_sampling_mask"),
        (of_vllm(MASK[1:]), {}, "wanted one for each of its 3 tokens, got 2"),
        (of_vllm([*MASK, [4]]), {}, "wanted one for each of its 3 tokens, got 4"),
        (of_vllm([MASK[1], MASK[0], MASK[2]]), {}, "position 3: wanted ids with its token 8"),
        (as_json(), {}, "in the answer or prompt=, got those of the completion alone"),
        (as_json(token_ids=None), {"prompt": PROMPT}, "got no token ids"),
        (as_json(sampling_mask=7), {"prompt": PROMPT}, "answer: wanted one in the form of an engine's"),
        (of_vllm(), {"index": 2}, r"index: wanted one of \[0, 1\]"),
        ({"object": "chat.completion.chunk"}, {}, "wanted a whole answer"),
    ],
)
def test_an_answer_without_supports_of_its_tokens_is_refused(output: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        vllm.support(output, **given)


def test_a_rollout_in_two_turns_keeps_what_its_tokens_were_drawn_from() -> None:
    """Goal: a partial rollout that goes on, whose second prompt is all prefix hits, has each token's own draw. Method:
    a tool's tokens between two answers; the second answer knows nothing of the first."""
    journal = RequestJournal(routing_spec(8, 2, [0], 1, block_tokens=4))
    journal.settle([*PROMPT, *ANSWER])
    journal.record_support(vllm.support(of_vllm()))
    tool, second = (
        [40, 41],
        SimpleNamespace(index=0, token_ids=[12], sampling_mask=SimpleNamespace(token_ids=[[1, 12]])),
    )
    prompt = [*PROMPT, *ANSWER, *tool]
    later = SimpleNamespace(request_id="s", prompt_token_ids=prompt, outputs=[second], kv_transfer_params=None)
    journal.settle([*prompt, 12])
    journal.discard_unsettled()
    journal.record_support(vllm.support(later))
    support = journal.support(start=3)
    assert support.counts.tolist() == [2, 1, 3, 0, 0, 2]
    assert support.missing == ((6, 8),)
    support.validate([*prompt, 12], loss_mask=[0, 0, 0, 1, 1, 1, 0, 0, 1])

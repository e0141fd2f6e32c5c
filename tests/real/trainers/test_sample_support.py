"""Sampling supports in SkyRL: its checks, wire and trace of turns, and the log probability that its trainer scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from skyrl.backends.skyrl_train.inference_servers import generate_wire
from skyrl.backends.skyrl_train.utils import sample_support, sample_support_replay
from skyrl.train.dataset import preprocess

from kvroute import SamplingSupport
from kvroute.replay import skyrl

TOP_K, VOCABULARY = 6, 40
PROMPTS, RESPONSES = [4, 3], [9, 5]


def drawn(seed: int, prompt: int, response: int) -> tuple[list[int], list[int], SamplingSupport]:
    """Tokens, their loss mask from the response on, and what they were drawn from; two tokens in the middle are a
    tool's."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCABULARY, prompt + response).tolist()
    mask = [int(i not in (2, 3)) for i in range(response)]
    rows: list[Any] = [None] * response
    for i, trains in enumerate(mask):
        if trains:
            others = random.integers(0, VOCABULARY, random.integers(0, TOP_K)).tolist()
            rows[i] = list({tokens[prompt + i], *others})
    return tokens, mask, SamplingSupport.of(rows, tokens, prompt)


SAMPLES = [drawn(i, p, r) for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True))]


def arrays() -> list[Any]:
    supports, masks = [support for *_, support in SAMPLES], [mask for _, mask, _ in SAMPLES]
    return skyrl.rollout_sample_support(supports, PROMPTS, masks, top_k=TOP_K)


def test_the_arrays_are_its_own_form() -> None:
    """Goal: nothing for SkyRL to refuse, and nothing lost on its wire. Method: its check, and its wire and back."""
    for rows in arrays():
        assert sample_support.validate_sample_support(rows) is rows
        back = generate_wire.decode_packed_sample_support(generate_wire.pack_sample_support(rows))
        assert np.array_equal(back, rows)


def test_its_trace_of_turns_makes_the_same_rows() -> None:
    """Goal: supports by kvroute are those of SkyRL's own loop. Method: its trace over a first answer, a tool's tokens,
    and a second answer, from the engine's rows of each."""
    for (_, _, support), rows, response in zip(SAMPLES, arrays(), RESPONSES, strict=True):
        trace = sample_support.SampleSupportTrace()
        trace.append(support.padded(TOP_K, support.start, support.start + 2), expected_rows=2)
        trace.append_padding(2)
        trace.append(support.padded(TOP_K, support.start + 4, support.stop), expected_rows=response - 4)
        assert np.array_equal(trace.finalize(token_count=response, extra_rows=0), rows)


def test_its_trainer_scores_each_token_over_its_own_support() -> None:
    """Goal: the log probability that is trained is the one over what the sampler drew from. Method: SkyRL packs the
    batch and scores its rows; beside the definition, token by token. A tool's tokens are no valid ones to it."""
    torch.manual_seed(0)
    packed = preprocess.build_sample_support(arrays(), np.array(RESPONSES))
    first = 0
    for (tokens, mask, support), prompt, response in zip(SAMPLES, PROMPTS, RESPONSES, strict=True):
        logits = torch.randn(response, VOCABULARY)
        scores = sample_support_replay.sample_support_scores(
            logits,
            torch.tensor(tokens[prompt:]),
            packed.values[first : first + response],
            vocab_start_index=0,
            vocab_end_index=VOCABULARY,
            tp_group=None,
        )
        first += response
        assert scores.valid_mask.int().tolist() == mask
        for i, trains in enumerate(mask):
            ids = support.row(prompt + i).tolist()
            expected = (
                torch.log_softmax(logits[i, ids], 0)[ids.index(tokens[prompt + i])] if trains else torch.zeros(())
            )
            assert torch.allclose(scores.logprobs[i], expected, atol=1e-5)

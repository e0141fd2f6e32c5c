"""Routes in SkyRL: its canonical arrays, its wire, its trace of turns, its token order."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from routes_of import expert_rows, made_routes
from skyrl.backends.skyrl_train.inference_servers import generate_wire
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from skyrl.backends.skyrl_train.utils.routed_experts import RoutedExpertTrace, compact_routed_expert_indices
from skyrl.backends.skyrl_train.workers.worker_utils import BatchIterator
from skyrl.train.dataset import preprocess
from skyrl.train.generators.utils import concatenate_generator_outputs

from kvroute.replay import skyrl


@pytest.mark.parametrize("experts", [16, 256, 300, 40000])
def test_the_arrays_are_canonical(experts: int) -> None:
    """Goal: SkyRL has nothing to narrow and nothing to refuse. Method: its own canonicaliser."""
    for seed in range(3):
        (rows,) = skyrl.rollout_expert_indices([made_routes(seed, 6, experts=experts)], [7])
        assert compact_routed_expert_indices(rows) is rows


def test_turns_are_recorded_as_deltas() -> None:
    """Goal: each turn hands over the rows that the trace does not have. Method: SkyRL's trace over three turns, the
    last of which computes the last token of the one before."""
    whole = made_routes(4, 19)
    trace = RoutedExpertTrace()
    for prompt, generated in [(5, 3), (11, 2), (16, 4)]:  # prompts hold the turns before, and observations
        rows = skyrl.delta(whole, trace.prompt_start, prompt + generated)
        trace.record_generation(prompt_token_count=prompt, generated_token_count=generated, routed_experts=rows)
    kept = trace.finalize(token_count=20, loss_mask=[0] * 5 + [1] * 15)
    assert np.array_equal(kept[:, 1:], expert_rows(4, np.arange(19), (1, 2, 3), 16, 4))


def test_its_wire_carries_them() -> None:
    """Goal: a server of SkyRL sends the rows that it is given. Method: it packs our arrays and reads them back."""
    for experts in (16, 300, 40000):
        (rows,) = skyrl.rollout_expert_indices([made_routes(4, 19, experts=experts)], [20])
        back = generate_wire.decode_packed_routed_experts(generate_wire.pack_routed_experts(rows))
        assert back.dtype == rows.dtype
        assert np.array_equal(back, rows)


def test_its_trainer_carries_them_to_micro_batches() -> None:
    """Goal: a worker's micro-batch has the rows of the generator's output. Method: two generators' outputs are joined
    and checked, made a batch, padded by a sample, pickled as to a worker, and cut there; each sample's rows beside the
    rollout's, and where its mask says that there are none."""
    tokens = [9, 6, 12]
    indices = skyrl.rollout_expert_indices([made_routes(i, n - 1) for i, n in enumerate(tokens)], tokens)
    outputs: list[Any] = [
        {
            "prompt_token_ids": [[1] * (n - 3) for n in tokens[a:b]],
            "response_ids": [[2, 3, 4]] * (b - a),
            "rewards": [1.0] * (b - a),
            "loss_masks": [[1, 1, 1]] * (b - a),
            "rollout_logprobs": [[0.0] * 3] * (b - a),
            "rollout_expert_indices": indices[a:b],
            "stop_reasons": None,
        }
        for a, b in ((0, 2), (2, 3))
    ]
    joined = concatenate_generator_outputs(outputs, routes_expected=True)
    made = preprocess.convert_prompts_responses_to_batch_tensors(
        0,
        *(joined[name] for name in ("prompt_token_ids", "response_ids")),
        [[0.0, 0.0, 1.0]] * 3,
        joined["loss_masks"],
        rollout_expert_indices=joined["rollout_expert_indices"],
    )
    mask = preprocess.make_router_padding_mask(made[1], [len(rows) for rows in joined["rollout_expert_indices"]])
    names = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask")
    batch = TrainingInputBatch({**dict(zip(names, made, strict=False)), "rollout_expert_indices": made[6]})
    batch["router_padding_mask"] = mask
    batch.metadata = {"response_length": 3}
    sent = pickle.loads(pickle.dumps(pad_training_input_batch(batch, 1), protocol=5))  # noqa: S301 - our own
    cells = 0
    for number, micro in enumerate(BatchIterator(sent, 2, drop_last=False)):
        for row in range(2):
            if (sample := 2 * number + row) == len(tokens):  # the padded one
                assert bool(micro.router_padding_mask[row].all())
                continue
            rows = micro.rollout_expert_indices.segment(row).numpy()
            known = ~micro.router_padding_mask[row][micro.attention_mask[row].bool()].numpy()
            assert np.array_equal(known, np.arange(tokens[sample]) < tokens[sample] - 1)
            expected = expert_rows(sample, np.arange(tokens[sample] - 1), (1, 2, 3), 16, 4)
            assert np.array_equal(rows[known][:, 1:], expected)
            cells += known.sum()
    assert cells == sum(tokens) - len(tokens)

"""What SkyRL makes of the routes it is given: its canonical arrays, its wire, its trace of turns, its token order."""

from __future__ import annotations

import numpy as np
import pytest
from routes_of import expert_rows, made_routes
from skyrl.backends.skyrl_train.utils.routed_experts import RoutedExpertTrace, compact_routed_expert_indices

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

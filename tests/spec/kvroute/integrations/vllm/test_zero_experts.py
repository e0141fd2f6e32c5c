"""What a router with experts that compute nothing chose, kept while it writes over its ids."""

from __future__ import annotations

from typing import Any

import torch

from kvroute.integrations.vllm.zero_experts import Chosen


def test_what_is_kept_is_not_written_over_and_is_taken_once() -> None:
    """Goal: neither what the router writes over its ids nor an earlier question is taken for its choice. Method: both
    happen."""
    asked = list[Any]()

    def choose(*arguments: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append((arguments, more))
        return torch.ones(2, 2), torch.tensor([[1, 7], [6, 2]])

    chosen = Chosen(choose)
    assert chosen.taken() is None
    _, ids = chosen(3, topk=2)
    assert asked == [((3,), {"topk": 2})]
    ids[ids > 5] = 0
    assert ids.tolist() == [[1, 0], [0, 2]]
    assert chosen.taken().tolist() == [[1, 7], [6, 2]]
    assert chosen.taken() is None

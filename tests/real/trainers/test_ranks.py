"""The experts that real routers use are the rollout's, for every sharding: TP x CP x SP x PP, packed and padded."""

from __future__ import annotations

from collections.abc import Iterator

import mcore
import pytest
import ranks

ROWS = sum(tokens - 1 for tokens in ranks.TOKENS) * len(ranks.LAYERS)


def compared(trainer: ranks.Trainer, case: ranks.Case) -> int:
    """The rows that all ranks of one replica have compared."""
    world, total = case.tp * case.cp * case.pp, 0
    for rank in range(world):
        with mcore.rank_of(rank, world, case.tp, case.pp, case.cp):
            total += trainer(case)
    return total


@pytest.fixture(scope="module")
def verl() -> Iterator[None]:
    with ranks.verl_patched():
        yield


@pytest.mark.parametrize(("trainer", "case"), ranks.MEGATRON)
def test_every_rank_uses_the_rollouts_experts(trainer: ranks.Trainer, case: ranks.Case) -> None:
    """Goal: the right row at the right router of the right rank. Method: this process is each rank in turn; each row's
    token is named by the trainer's own layout of token numbers, and all ranks together compare every row and layer."""
    assert compared(trainer, case) == ROWS


@pytest.mark.usefixtures("verl")
@pytest.mark.parametrize(("trainer", "case"), ranks.VERL)
def test_every_rank_of_verl_uses_the_rollouts_experts(trainer: ranks.Trainer, case: ranks.Case) -> None:
    """Goal and method as above, with verl's own replay class in Megatron's place."""
    assert compared(trainer, case) == ROWS

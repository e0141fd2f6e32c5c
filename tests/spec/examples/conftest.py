"""What the tests of transformers' continuous batching have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from salted_moe import SaltedMoe
from transformers.generation.continuous_batching import offloading_manager


@pytest.fixture(autouse=True)
def _no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The swap pool is pinned memory, which torch has only where there is an accelerator."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return torch.empty(*sizes, **options)

    monkeypatch.setattr(offloading_manager, "torch", Torch())


@pytest.fixture
def moe() -> SaltedMoe:
    """A model for which only the rows of the very pass that made the KV in use are right."""
    return SaltedMoe(salted=True)

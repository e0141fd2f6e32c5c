"""Small real Mixture-of-Experts models."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_moe import FAMILIES, TinyMoE, build


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def tiny_moe(request: pytest.FixtureRequest) -> TinyMoE:
    """A model of each family in turn."""
    return build(request.param)


@pytest.fixture(scope="session")
def qwen() -> TinyMoE:
    """One model for tests whose subject is not the family; experts in layers 1 and 3."""
    return build("qwen3_moe")


@pytest.fixture(scope="session")
def build_moe() -> Any:
    """Builds a model of a family, with changes to its configuration."""
    return build

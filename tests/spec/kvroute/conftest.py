"""Small real Mixture-of-Experts models, one of each family, with seeded weights built on the spot; small engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_moe import FAMILIES, TinyMoE, build
from toy_engine import Toy

torch.set_num_threads(1)  # the models are so small that threads would only wait for each other


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Toy]]:
    """Starts small engines with both ends of a connector, which are closed when the test is over."""
    assert tmp_path.exists(), "until all are closed"
    made: list[Toy] = []
    yield lambda **said: made.append(Toy(**said)) or made[-1]  # type: ignore[func-returns-value]
    for toy in made:
        toy.close()


Outside = tuple[dict[bytes, Any], str]


@pytest.fixture
def outside(tmp_path: Path) -> Callable[..., Outside]:
    """KV and a store of rows as an engine leaves them that has computed some prompts: what others are started with."""

    def left(*prompts: list[int], **said: Any) -> Outside:
        kept, store = dict[bytes, Any](), f"file://{tmp_path}/rows"
        with closing(Toy(kept=kept, store=store, witness="flagged", **said)) as first:
            for i, tokens in enumerate(prompts):
                first.ask(str(i), tokens)
            first.settle()
        return kept, store + "?mode=read"

    return left


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

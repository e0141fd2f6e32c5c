"""Small engines with both ends of a connector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from toy_engine import Toy
from toy_takers import Takers, watched

from kvroute.rollout import RolloutStore, open_rollouts


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


@pytest.fixture
def taker(monkeypatch: pytest.MonkeyPatch) -> Takers:
    return watched(monkeypatch)


@pytest.fixture
def start_apart(start: Callable[..., Toy], tmp_path: Path, taker: Takers) -> Callable[..., Toy]:
    """Starts an engine whose rollouts are in a directory, apart."""
    assert not taker.made, "before any"
    return lambda **said: start(**{"rollouts": f"apart:file://{tmp_path}/rollouts"} | said)


@pytest.fixture
def left_apart(tmp_path: Path) -> Iterator[RolloutStore]:
    """What those engines leave."""
    with closing(open_rollouts(f"file://{tmp_path}/rollouts")) as opened:
        yield opened

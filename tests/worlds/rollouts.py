"""Rollouts of each family after every way a row can travel, beside what transformers alone routes.

The small engine makes them. It refuses models whose tokens depend on each other by more than paged attention.

    python rollouts.py FOLDER FAMILY ...

writes ``FAMILY.npz`` for each, for processes that have no engine: see :func:`load`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny_moe
from numpy.typing import NDArray
from waiting import GIVE_UP_S

from kvroute.routes import Routes

FAMILIES = tuple(sorted(tiny_moe.FAMILIES))
REFUSED = ("gemma4_text", "jamba", "lfm2_moe", "nemotron_h", "qwen3_5_moe_text")
"""What the engine refuses: keys and values of several shapes, and recurrent states."""
DEADLINE_S = GIVE_UP_S


@dataclass(frozen=True)
class Rollout:
    """A finished sequence: its tokens, its routes, and the experts that transformers routes it to by itself."""

    way: str
    tokens: tuple[int, ...]
    routes: Routes
    native: NDArray[Any]  # [tokens, routed layers, top_k]


def model_of(family: str, seed: int) -> Any:
    """A model of the family, with routers so wide that tokens and routes do not depend on the batch."""
    from paged_engine.models import MODELS, POSITIONS_MAX, build_model, ready
    from paged_engine.text import VOCAB_SIZE

    if family in MODELS:
        return build_model(family, seed=seed, vocab_size=VOCAB_SIZE)
    tiny = tiny_moe.build(family, vocab_size=VOCAB_SIZE, max_position_embeddings=POSITIONS_MAX)
    return ready(tiny.model, seed=seed)


def unpaged(model: Any) -> Any:
    """``model`` with an attention of transformers' own."""
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    return model


def rollouts(family: str, folder: Path) -> list[Rollout]:
    """Sequences that were swapped, shared and copied; that went on from a store; that went from prefill to decode."""
    model = model_of(family, seed=0)
    outputs = {"swap": _swapped(model, folder), "store": _swapped(model, folder), "decode": _handed_over(model)}
    found = [(way, o.sequence, o.routes) for way, made in outputs.items() for o in made]
    unpaged(model)
    return [Rollout(way, tuple(tokens), routes, _native(model, tokens)) for way, tokens, routes in found]


def load(file: Path) -> list[Rollout]:
    """The rollouts that the script has written for one family."""
    with np.load(file) as stored:
        return [
            Rollout(
                str(way),
                tuple(stored[f"tokens{i}"].tolist()),
                Routes.from_bytes(stored[f"routes{i}"].tobytes()),
                stored[f"native{i}"],
            )
            for i, way in enumerate(stored["ways"])
        ]


def _prompts() -> list[list[int]]:
    from paged_engine import text

    return [text.opening(text.paragraphs()[i % 2])[:40] + text.turn(text.questions()[i]) for i in range(4)]


def _requests() -> list[Any]:
    from paged_engine.request import Request

    return [Request(f"r{i}", tuple(prompt), 12, n=1 + i % 2) for i, prompt in enumerate(_prompts())]


def _swapped(model: Any, folder: Path) -> list[Any]:
    """An engine with too little room, beside a store; the second one finds the first one's blocks there."""
    from cache_manager.keys import Namespace
    from cache_manager.storage import open_store
    from paged_engine.engine import Engine
    from paged_engine.request import EngineConfig

    found_there = (folder / "store").exists()
    store = open_store(folder.joinpath("store").as_uri())
    tight = EngineConfig(device_blocks=12, host_blocks=10)
    with Engine(model, tight, Namespace("rollouts", weights_version=3), store=store) as engine:
        for request in _requests():
            engine.add(request)
        outputs = engine.run()
        assert engine.drain()
        again = engine.manager.counters.restored_tokens
        assert (again if found_there else engine.aux.counters.swapped_in_rows) > 0
    store.close()
    return list(outputs)


def _handed_over(model: Any) -> list[Any]:
    """Two engines, the second of which takes over what the first has computed of the prompts."""
    from cache_manager.keys import Namespace
    from paged_engine.handover import DecodeEngine, PrefillEngine
    from paged_engine.processes import until
    from paged_engine.request import EngineConfig
    from transfer import ZmqLink, ZmqSettings

    room, namespace, outputs = EngineConfig(device_blocks=64, host_blocks=16), Namespace("m", 3), list[Any]()
    binding, connecting = ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*")), ZmqLink(ZmqSettings())
    with (
        PrefillEngine(model, room, namespace, link=binding) as prefill,
        DecodeEngine(model, room, namespace, link=connecting) as decode,
    ):
        for request in _requests():
            decode.add(request, prefill.lend(request))
            prefill.run()
            until(lambda: bool(outputs.extend(decode.step()) or not decode.busy), "decode has answered", DEADLINE_S)
        assert decode.crossed.transferred_rows > 0
    return outputs


def _native(model: Any, sequence: Any) -> NDArray[Any]:
    import torch
    from experts_seen import experts_of

    from paged_engine.models import BATCH_MULTIPLE

    # Padded at the end, so that float32 products are summed in one order whatever the length; see the models.
    tokens = torch.zeros(1, -(-len(sequence) // BATCH_MULTIPLE) * BATCH_MULTIPLE, dtype=torch.int64)
    tokens[0, : len(sequence)] = torch.tensor(sequence)
    return experts_of(model, tokens)[: len(sequence)]


def main(folder: Path, *families: str) -> None:
    import torch

    torch.set_num_threads(1)
    for family in families:
        made = rollouts(family, folder / family)
        arrays = {f"tokens{i}": np.array(r.tokens) for i, r in enumerate(made)}
        arrays |= {f"routes{i}": np.frombuffer(r.routes.to_bytes(), np.uint8) for i, r in enumerate(made)}
        arrays |= {f"native{i}": r.native for i, r in enumerate(made)}
        np.savez(folder / f"{family}.npz", ways=np.array([r.way for r in made]), **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

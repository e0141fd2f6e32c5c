"""What each trainer's adapter gives, read back from the trainer's own form, and how it spells what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from adapters import WHOLE, unpacked
from numpy.typing import NDArray

from kvroute import Routes
from kvroute.replay import nemo_rl, prime_rl, skyrl, slime, transformers, verl

SIGNED = ("error", "zero", "arange", "minus1", "spread")
UNSIGNED = ("error", "zero", "arange", "spread")


@dataclass(frozen=True)
class Trainer:
    """``given(routes, prompt, response, word)`` answers ``[tokens or fewer, layers, top_k]`` from position 0 on."""

    given: Callable[[Routes, int, int, str], Any]
    words: tuple[str, ...]
    routed_only: bool = False  # its layer axis has no dense layers
    prefix: bool = False  # it takes rows up to the first that is missing

    def spelled(
        self, word: str, positions: NDArray[Any], layers: NDArray[Any], experts: int, top_k: int
    ) -> NDArray[Any] | None:
        """A cell that is missing in this word, ``[positions, layers, top_k]``; None where nothing may be missing."""
        shape = (len(positions), len(layers), top_k)
        if word in ("error", "cut"):
            return None
        if word == "spread":
            first = positions[:, None] * top_k + layers[None, :] * top_k
            return (first[:, :, None] + np.arange(top_k)) % experts
        return np.broadcast_to({"zero": 0, "minus1": -1, "arange": np.arange(top_k)}[word], shape)


def masked(routes: Routes, prompt: int, response: int, _word: str) -> Any:
    """verl's rows with its mask: a token that the mask leaves out is the router's own."""
    rows = verl.jagged([routes], [prompt + response], missing="arange").unbind()[0].numpy().copy()
    mask = verl.replay_mask([routes], [prompt + response]).unbind()[0].numpy()
    rows[~mask[: len(rows)]] = -1
    return rows


def batched(routes: Routes, prompt: int, response: int, word: str) -> Any:
    """A batch in which the sample stands behind another one, padded on both sides."""
    batch = verl.padded([routes] * 2, [prompt] * 2, [response] * 2, prompt + 3, response + 2, missing=word)  # type: ignore[arg-type]
    return batch[1, 3 : 3 + prompt + response]


def second(rows: Any, tokens: int) -> Any:
    """The second of two samples that are laid end to end."""
    return rows[tokens:]


def left_padded(routes: Routes, prompt: int, response: int, _word: str) -> Any:
    mask = torch.zeros(2, prompt + response + 3, dtype=torch.int64)
    mask[:, 3:] = 1
    return transformers.padded([routes] * 2, mask)[1, 3:]


def delta(routes: Routes, prompt: int, response: int, _word: str) -> Any:
    rows = prompt + response - 1
    return np.concatenate([skyrl.delta(routes, 0, prompt + 1), skyrl.delta(routes, prompt, rows + 1)])


TRAINERS: dict[str, Trainer] = {
    "materialize": Trainer(lambda r, p, n, word: r.materialize(p + n - 1, "all", "int32", word), SIGNED),
    "materialize, routed": Trainer(lambda r, p, n, word: r.materialize(p + n - 1, "moe", "int64", word), SIGNED, True),
    "verl.agent_loop": Trainer(lambda r, p, n, word: WHOLE["verl agent loop"](r, p, n, missing=word), SIGNED),
    "verl.padded": Trainer(batched, SIGNED),
    "verl.jagged": Trainer(lambda r, p, n, word: WHOLE["verl jagged"](r, p, n, missing=word), SIGNED),
    "verl.replay_mask": Trainer(masked, ("minus1",)),
    "slime.sample": Trainer(lambda r, p, n, word: slime.sample(r, p + n, missing=word), SIGNED),
    "slime.miles_sample": Trainer(lambda r, p, n, word: slime.miles_sample(r, p + n, missing=word), SIGNED),
    "skyrl": Trainer(
        lambda r, p, n, word: skyrl.rollout_expert_indices([r], [p + n], holes=word)[0], ("error", "cut"), prefix=True
    ),
    "skyrl.delta": Trainer(delta, ("error",)),
    "prime_rl": Trainer(lambda r, p, n, word: unpacked(prime_rl.routed_experts(r, p + n, missing=word)), UNSIGNED),
    "nemo_rl.sequence": Trainer(lambda r, p, n, _: nemo_rl.sequence(r, p + n), ("minus1",), True),
    "nemo_rl.sequence, all": Trainer(lambda r, p, n, _: nemo_rl.sequence(r, p + n, layers="all"), ("minus1",)),
    "nemo_rl.batch": Trainer(lambda r, p, n, _: nemo_rl.batch([r] * 2, [p + n] * 2, p + n + 3)[1], ("minus1",), True),
    "transformers.packed": Trainer(
        lambda r, p, n, _: second(transformers.packed([r] * 2, [p + n] * 2), p + n), ("minus1",), True
    ),
    "transformers.padded": Trainer(left_padded, ("minus1",), True),
}

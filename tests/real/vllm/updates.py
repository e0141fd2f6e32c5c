"""Weight updates of engines under test: a part of a checkpoint put in place, and the rows that many weights make."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from experts_seen import Seen
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import kvroute

EMBEDDING = "model.embed_tokens.weight"
"""It decides all routing, and vLLM has it on a CPU as the checkpoint does: linear layers are packed there."""
OF_GPT_OSS = "model.embedding.weight"
"""Its name in vLLM's gpt-oss."""


def with_embedding_of(home: Path, other: Path, at: Path) -> Path:
    """The checkpoint of ``home`` with the embedding of ``other``."""
    shutil.copytree(home, at)
    weights = load_file(home / "model.safetensors")
    weights[EMBEDDING] = load_file(other / "model.safetensors")[EMBEDDING]
    save_file(weights, at / "model.safetensors", metadata={"format": "pt"})
    return at


class Embedding:
    """Additional methods of a worker (``worker_extension_cls``)."""

    get_model: Any

    def put(self, home: str) -> None:
        """The embedding of the checkpoint in ``home`` takes the place of the worker's; not every stage has one."""
        new = load_file(Path(home) / "model.safetensors")[EMBEDDING]
        held = dict(self.get_model().named_parameters())
        for name in {EMBEDDING, OF_GPT_OSS} & held.keys():
            held[name].data[: len(new)].copy_(new)


def due(parts: Sequence[tuple[int, Path]], tokens: list[int]) -> NDArray[np.int64]:
    """The experts that a sequence's tokens are routed to, sorted: ``[tokens, layers, top_k]``.

    ``parts`` are stops and checkpoints: each computes its part over the KV of those before it.
    """
    rows, past, start = [], None, 0
    for stop, home in parts:
        model = models.reference(home)
        seen = Seen(model)
        with torch.no_grad():
            past = model(torch.tensor([tokens[start:stop]]), past_key_values=past, use_cache=True).past_key_values
        seen.close()
        rows.append(seen.rows())
        start = stop
    return np.sort(np.concatenate(rows).astype(np.int64), axis=-1)


def due_again(parts: Sequence[tuple[int, Path]], tokens: list[int]) -> NDArray[np.int64]:
    """As :func:`due`, where each part's weights have computed all tokens again."""
    whole = [due([(len(tokens), home)], tokens) for _, home in parts]
    starts = [0, *(stop for stop, _ in parts)]
    return np.concatenate([each[a:b] for each, a, (b, _) in zip(whole, starts, parts, strict=False)])


def right(found: kvroute.Routes, tokens: list[int], homes: dict[int, Path], *, again: bool = False) -> bool:
    """Whether every row is there, has a version, and is that of transformers with the weights that it names.

    Those compute over the KV of others, or all tokens ``again``.
    """
    assert found.complete
    assert len(found) == len(tokens) - 1
    spans = found.weights_versions
    assert [start for start, _, _ in spans] == [0, *(stop for _, stop, _ in spans[:-1])]
    assert spans[-1][1] == len(found)
    expected = (due_again if again else due)([(stop, homes[version]) for _, stop, version in spans], tokens[:-1])
    return bool((np.sort(found.ids.astype(np.int64), axis=-1) == expected).all())

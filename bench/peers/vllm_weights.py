"""Additional methods of vLLM's workers in the experiments: a part of another checkpoint takes the place of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

EMBEDDING = "model.embed_tokens.weight"
"""It decides all routing, and has one name in all families of the experiments but gpt-oss."""


class Embedding:
    """For ``worker_extension_cls``."""

    get_model: Any

    def put(self, home: str) -> None:
        """The embedding of the checkpoint in ``home`` takes the place of the worker's, or of its share."""
        new = load_file(Path(home) / "model.safetensors")[EMBEDDING]
        held = dict(self.get_model().named_parameters()).get(EMBEDDING)
        if held is not None:  # another stage of a pipeline has it
            held.weight_loader(held, new)

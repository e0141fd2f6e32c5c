"""A small MoE model for engines that are not ours, and a judge of the routes that they leave.

With ``salted`` a number is drawn for every token of every forward pass. It is added to the token's embedding, and so
decides its routes and its KV; attention adds nothing, so that both depend on the token and its salt alone. The KV of a
token, wherever it was moved, then tells which pass made it: the V of layer 0 is looked up, byte by byte, among those
that were computed. Rows of another pass than that of the KV beside them are wrong by their values. Without ``salted``
attention is as usual, and a route depends on every token before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYERS, EXPERTS, TOP_K, VOCABULARY = 3, 16, 4, 128
TIE = 1e-3
"""Two router logits this close may come out in either order when a batch is computed in another shape."""


def small_moe(seed: int) -> Qwen3MoeForCausalLM:
    """Seeded weights; the routers' are large, so that few choices are close."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.1)
            for layer in model.model.layers:
                layer.mlp.gate.weight.normal_(0, 0.5)
    return model


@dataclass(frozen=True, slots=True)
class Expected:
    ids: NDArray[np.int64]  # [tokens, layers, top_k]
    margin: NDArray[np.float32]  # [tokens, layers]  the last chosen logit less the first that was not


class SaltedMoe:
    """``model`` is for an engine to run; everything else knows nothing of that engine."""

    def __init__(self, *, salted: bool, seed: int = 0) -> None:
        self.model, self._reference = small_moe(seed), small_moe(seed)
        self._rng = np.random.default_rng(seed)
        self._drawn = self._given = np.empty(0, np.float32)
        self._salt_of: dict[bytes, float] = {}
        self._direction = torch.from_numpy(self._rng.normal(0, 0.3, 64).astype(np.float32))
        self.salted = salted
        if salted:
            for model in (self.model, self._reference):
                for layer in model.model.layers:
                    torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            self.model.model.embed_tokens.register_forward_hook(self._draw)
            self.model.model.layers[0].self_attn.v_proj.register_forward_hook(self._note)
            self._reference.model.embed_tokens.register_forward_hook(lambda _m, _a, out: self._add(out, self._given))
        self._logits: list[torch.Tensor] = []
        for layer in self._reference.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _m, _a, out: self._logits.append(out[0]))

    def change_weights(self, seed: int) -> None:
        """Others, in place, as a trainer would."""
        fresh = small_moe(seed).state_dict()
        for model in (self.model, self._reference):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if not (self.salted and "o_proj" in name):
                        parameter.copy_(fresh[name])

    def salts(self, values: torch.Tensor) -> NDArray[np.float32]:
        """The salt of each token, by its V of layer 0, ``values [tokens, ...]``; ``KeyError`` if no pass made it."""
        flat = np.ascontiguousarray(values.detach().numpy()).reshape(len(values), -1)
        return np.array([self._salt_of[each.tobytes()] for each in flat], np.float32)

    def expected(self, tokens: Sequence[int], salts: NDArray[np.float32] | None) -> Expected:
        """An independent forward over all ``tokens``."""
        self._logits.clear()
        self._given = salts if salts is not None else np.zeros(len(tokens), np.float32)
        with torch.no_grad():
            self._reference(torch.tensor([list(tokens)]))
        logits = torch.stack([each.reshape(len(tokens), EXPERTS) for each in self._logits], dim=1)
        ranked = logits.sort(dim=-1, descending=True)
        margin = ranked.values[..., TOP_K - 1] - ranked.values[..., TOP_K]
        return Expected(ranked.indices[..., :TOP_K].numpy(), margin.numpy())

    def _draw(self, _module: Any, _args: Any, embedded: torch.Tensor) -> torch.Tensor:
        self._drawn = self._rng.normal(0, 3, embedded.shape[-2]).astype(np.float32)
        return self._add(embedded, self._drawn)

    def _add(self, embedded: torch.Tensor, salts: NDArray[np.float32]) -> torch.Tensor:
        return embedded + torch.from_numpy(salts)[None, :, None] * self._direction

    def _note(self, _module: Any, _args: Any, values: torch.Tensor) -> None:
        flat = values.detach().reshape(-1, values.shape[-1]).numpy()
        for each, salt in zip(flat, self._drawn.tolist(), strict=True):
            self._salt_of[each.tobytes()] = salt


@dataclass(slots=True)
class Verdict:
    """Rows by what they turned out to be; ``close`` ones differ where two experts were all but equal."""

    due: int = 0
    right: int = 0
    missing: int = 0
    close: int = 0
    wrong: int = 0

    def add(self, routes: Any, expected: Expected) -> None:
        """``routes`` of the same tokens."""
        assert len(routes) == len(expected.ids)
        same = (np.sort(routes.ids, axis=-1) == np.sort(expected.ids, axis=-1)).all(axis=-1)  # [tokens, layers]
        right = same.all(axis=-1) & routes.valid
        wrong = (~same & (expected.margin > TIE)).any(axis=-1) & routes.valid
        self.due += len(routes)
        self.right += int(right.sum())
        self.wrong += int(wrong.sum())
        self.missing += int((~routes.valid).sum())
        self.close += int((routes.valid & ~right & ~wrong).sum())

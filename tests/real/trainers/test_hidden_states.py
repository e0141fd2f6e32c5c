"""Hidden states as rows of their own spec, from a model's layers to the reader of speculators (hs-connectors)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from hs_connectors import FileTransfer
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvroute import AuxBlockDataSpec, AuxBlocks, Namespace, open_store

LAYERS, HIDDEN, BLOCK = (0, 2, 3), 32, 4
TOKENS = [5, 9, 13, 21, 33, 47, 8, 60]


def spec() -> AuxBlockDataSpec:
    """``[layers, hidden]`` bfloat16, which numpy has not: their bits."""
    attrs = {"layer_ids": LAYERS, "of": "bfloat16"}
    return AuxBlockDataSpec("hidden_states", (len(LAYERS), HIDDEN), "uint16", BLOCK, attrs=attrs)


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).to(torch.bfloat16).eval()


def test_speculators_reads_what_the_layers_computed(tmp_path: Path) -> None:
    """Goal: bit for bit, from the layers' own outputs, through blocks that are given out again and loaded from a store,
    to the sample that a draft model trains on. Method: hooks; the file as vLLM's own connector names and fills it."""
    target, states = model(), dict[int, torch.Tensor]()
    for layer in LAYERS:
        target.model.layers[layer].register_forward_hook(
            lambda _module, _given, out, layer=layer: states.__setitem__(
                layer, out[0] if isinstance(out, tuple) else out
            )
        )
    store = open_store("memory:")
    aux = AuxBlocks([spec()], blocks=8, namespace=Namespace("m", weights_version=1), store=store)
    lives = aux.renew([2, 3])
    with torch.no_grad():
        target(torch.tensor([TOKENS]), use_cache=False)
    written = torch.stack([states[layer].reshape(-1, HIDDEN) for layer in LAYERS], dim=1)
    aux.write_step(np.arange(8, 16), {"hidden_states": written.view(torch.uint16).numpy()})
    keys = aux.keys.keys(TOKENS)
    assert all(aux.persist(dict(zip(keys, [2, 3], strict=True)), lives).values())
    aux.renew([2, 3])
    assert not aux.read("hidden_states", [2, 3], generations=lives).valid.any()
    lives = aux.renew([5, 6])
    assert all(aux.restore(dict(zip(keys, [5, 6], strict=True)), lives).values())
    rows = aux.read("hidden_states", [5, 6], generations=lives)
    aux.close()
    assert rows.valid.all()
    tensors = {"hidden_states": torch.from_numpy(rows.values).view(torch.bfloat16), "token_ids": torch.tensor(TOKENS)}
    save_file(tensors, tmp_path / "hs_7.safetensors")
    sample = FileTransfer(tmp_path).get_cached(7)
    assert sample is not None
    assert sample["token_ids"].tolist() == TOKENS
    assert sample["hidden_states"].shape == (len(TOKENS), len(LAYERS), HIDDEN)
    assert sample["hidden_states"].view(torch.uint16).equal(written.view(torch.uint16))
    assert FileTransfer(tmp_path).get_cached(8) is None

"""What tests of unchanged trainers share: a checkpoint that talks, plugins as installed ones, judge and table."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import models
import numpy as np
import requests
import updates
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from bench.engines import installed

HERE = Path(__file__).parent
FAMILY = "qwen3_moe_dense_first" if find_spec("vllm") else "qwen3_moe"
"""SGLang's Qwen3-MoE takes every layer for one with experts (``models/qwen3_moe.py``: "all layers are sparse"), and
leaves those of a dense layer as they are in memory: what it computes then is NaN."""
LAYERS = 4 if find_spec("vllm") else 3
ROUTED = [1, 2, 3] if find_spec("vllm") else [0, 1, 2]
SPECIAL = ["<|im_start|>", "<|im_end|>", "\n", "system", "user", "assistant", "tool"]
FIRST = ["<bos>", "<eos>", "<pad>", "<unk>"]
WORDS = [*FIRST, *(f"t{i}" for i in range(len(FIRST), models.VOCABULARY - len(SPECIAL))), *SPECIAL]
STOCK = "KVROUTE_LIVE_STOCK" in os.environ
"""The same plan without kvroute: the engine's own capture fills the field, and what is wrong or missing is counted."""
STOPS = WORDS[8:500:8]
"""Strings of which a sampled token is one in eight."""
TEMPLATE = """{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' \n ' + m['content'] + ' <|im_end|> \n ' }}
{%- endfor %}{%- if add_generation_prompt %}<|im_start|> assistant \n {% endif %}"""


def talking(home: Path) -> Path:
    """The checkpoint in ``home`` with a tokenizer of whole words that has Qwen's chat template."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))  # noqa: S106 - no password
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    special = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), FIRST, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(home)
    return home


def as_installed(folder: Path, vllm: str) -> str:
    """``PYTHONPATH`` of a process whose vLLM loads the plugins of kvroute and of these tests, and has its own name in
    the metadata of packages (a build for CPUs has another)."""
    installed(
        folder,
        "vllm.general_plugins",
        kvroute="kvroute.integrations.vllm.field:take_over",
        on_cpu="on_cpu:register",
        **({"prime_rl": "prime_rl_parts:register"} if find_spec("prime_rl") else {}),
    )
    about = folder / f"vllm-{vllm}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm}+cpu\n")
    own = [HERE, HERE / "behind", folder, HERE.parent / "vllm", HERE.parent / "vllm/smoke", HERE.parents[1] / "worlds"]
    return ":".join([*map(str, own), os.environ.get("PYTHONPATH", "")])


def sglang_as_installed(folder: Path, _: str) -> str:
    """``PYTHONPATH`` of a process whose SGLang and verl load the plugins of kvroute, and SGLang that of these tests."""
    kvroute = "kvroute.integrations.sglang:register"
    installed(folder, "sglang.srt.plugins", kvroute=kvroute, cpu="sglang_on_cpu:register")
    with (folder / "of_kvroute-0.0.1.dist-info/entry_points.txt").open("a") as file:
        file.write("[verl.plugins]\nkvroute = kvroute.integrations.verl:MOVED\n")
    sglang = HERE.parent / "sglang"
    own = [HERE, HERE / "behind", folder, HERE.parent / "vllm", sglang, HERE.parents[1] / "worlds"]
    return ":".join([*map(str, own), os.environ.get("PYTHONPATH", "")])


def share_by_file() -> None:
    """From now on tensors cross in files of shared memory. Their manager outlives this session's own folder."""
    import torch
    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy("file_system")
    with patch.dict(os.environ, TMPDIR="/tmp"):  # noqa: S108 - torch's own folder there
        torch.ones(1).share_memory_()


def running(address: str) -> int:
    """How many requests an SGLang at this address has, by its own page."""
    return sum(rank["num_reqs"] for rank in requests.get(f"http://{address}/get_load", timeout=60).json())


def free_port() -> int:
    """A TCP port of this machine that nobody has now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def prompt(seed: int, tokens: int) -> str:
    """So many words, other ones for each seed."""
    numbers = np.random.default_rng(seed).integers(5, 500, tokens)
    return " ".join(WORDS[i] for i in numbers)


@dataclass
class Tally:
    """Cells, one for each layer of a row, and the answers that have no rows at all."""

    answers: int = 0
    due: int = 0
    right: int = 0
    wrong: int = 0
    missing: int = 0
    places: list[tuple[int, ...]] = field(default_factory=list)
    """The first wrong cells of each answer: answer, position, layer among the routed ones."""

    def add(
        self, rows: NDArray[Any] | None, tokens: Sequence[int], expected: NDArray[Any], own: Sequence[int] = ()
    ) -> None:
        """``rows`` ``[tokens, layers, top_k]`` as the trainer has them, of the tokens' first position on; ``None``: the
        answer has none. ``expected`` ``[tokens - 1, routed layers, top_k]``, sorted. The last token has no row, and
        what the trainer has at its ``own`` positions is not due."""
        due = len(tokens) - 1
        self.answers += 1
        self.due += (due - len(own)) * len(ROUTED)
        if rows is None:
            self.missing += (due - len(own)) * len(ROUTED)
            return
        assert rows.shape[1] == LAYERS
        there = np.sort(np.asarray(rows[:due, ROUTED]).astype(np.int64), axis=-1)
        same = np.delete((there == expected[: len(there)]).all(axis=-1), own, axis=0)
        self.right += int(same.sum())
        self.wrong += int((~same).sum())
        self.missing += (due - len(there)) * len(ROUTED)
        self.places += [(self.answers, *map(int, place)) for place in np.argwhere(~same)[:3]]


def judged(
    home: Path, samples: Sequence[tuple[Any, Sequence[int]]], own: Sequence[Sequence[int]] | None = None
) -> Tally:
    """Of ``(rows, tokens)`` that the weights in ``home`` have computed, but for positions of the trainer's ``own``."""
    tally = Tally()
    for (rows, tokens), positions in zip(samples, own or [()] * len(samples), strict=True):
        tally.add(rows, tokens, models.routing(home, list(tokens))[:-1], positions)
    return tally


def judged_over_update(
    before: Path, after: Path, samples: Sequence[tuple[Any, Sequence[int]]], *, again: bool, least: int = 0
) -> tuple[Tally, list[int]]:
    """Of ``(rows, tokens)`` that the weights in ``before`` have computed up to some position, and those in ``after``
    from there on, over the KV that was there or, with ``again``, over all tokens computed again. And those positions:
    where the first row is that the weights before have not computed, ``least`` or later."""
    tally, cuts = Tally(), list[int]()
    for rows, tokens in samples:
        first, known = models.routing(before, list(tokens))[:-1], list(tokens[:-1])
        if rows is None:
            tally.add(None, tokens, first)
            continue
        there = np.sort(np.asarray(rows[: len(known), ROUTED]).astype(np.int64), axis=-1)
        same = (there == first[: len(there)]).all(axis=(1, 2))
        cut = len(known) if same.all() else max(least, int(same.argmin()))
        expected = first
        if again:
            expected = np.concatenate([first[:cut], models.routing(after, list(tokens))[cut:-1]])
        elif 0 < cut < len(known):
            expected = updates.due([(cut, before), (len(known), after)], known)
        tally.add(rows, tokens, expected)
        cuts.append(cut)
    return tally, cuts


HOST_PAGES = {
    "enable_hierarchical_cache": "true",
    "hicache_ratio": "8",
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
}
"""SGLang's arguments for pages on the host, where a machine has no GPU."""
OUTSIDE = "prefixes whose KV came from pages on the host"


TABLE: list[dict[str, Any]] = []
"""By trainer, engine, scenario and who fills the field: the counts, in the order of the tests."""


def verdict(trainer: str, engine: str, scenario: str, tally: Tally) -> None:
    """Into the table, which is printed when the tests end; and with kvroute every cell is right."""
    counts = {name: count for name, count in asdict(tally).items() if name != "places"}
    TABLE.append({"trainer": trainer, "engine": engine, "scenario": scenario, "stock": STOCK, **counts})
    assert STOCK or (tally.right, tally.wrong, tally.missing) == (tally.due, 0, 0), (trainer, engine, scenario, tally)


def refused(trainer: str, engine: str, scenario: str, why: str) -> None:
    """Into the table: the engine does not start so."""
    TABLE.append({"trainer": trainer, "engine": engine, "scenario": scenario, "stock": STOCK, "refused": why})


def stock_beside_a_connector(trainer: str, engine: str, scenario: str, home: Path) -> None:
    """Into the table: stock vLLM's flag beside a connector of its own, as a trainer would set both, is refused."""
    import pytest
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    arguments = AsyncEngineArgs(str(home), enable_return_routed_experts=True, kv_transfer_config=transfer)
    with pytest.raises(ValueError, match="--enable-return-routed-experts is incompatible with KV connectors"):
        arguments.create_engine_config()
    refused(trainer, engine, scenario, "the flag is incompatible with KV connectors")


def left() -> None:
    """Print the table, and leave it in the folder that ``KVROUTE_LIVE_RESULTS`` names."""
    import table

    print(f"\n{table.markdown(TABLE)}")
    folder = os.environ.get("KVROUTE_LIVE_RESULTS")
    if folder and TABLE:
        name = f"{TABLE[0]['trainer']} {TABLE[0]['engine']} {'stock' if STOCK else 'kvroute'}.json".replace(" ", "-")
        Path(folder, name).write_text(json.dumps(TABLE, indent=1))

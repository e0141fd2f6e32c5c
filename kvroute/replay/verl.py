"""Routes for verl: the agent loop's output, the padded batch, and the engine's jagged tensors.

verl takes every layer of the model, dense ones included, as int16. A missing row would read as zeros, and verl replays
every row except the last of each sequence, so a hole is an error here unless it is spelled: with distinct experts
(``missing="spread"``), or with :func:`replay_mask`, which leaves the token to the router. A row that lacks a layer is a
hole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvroute.replay.rows import ReplayError, all_layers, check_batch, counted, read_rows, versions
from kvroute.routes import Routes
from kvroute.routes.fill import Missing

if TYPE_CHECKING:
    import torch


def agent_loop(
    routes: Routes,
    prompt: int,
    response: int,
    *,
    missing: Missing = "error",
) -> NDArray[np.int16]:
    """``AgentLoopOutput.routed_experts`` of one sample: int16 ``[prompt + response - 1, num_layers, top_k]``.

    ``prompt`` and ``response`` are its tokens. verl adds the last row itself, as zeros. A response that was cut gets
    the rows of its remaining tokens.
    """
    return all_layers(routes, counted("prompt", prompt) + counted("response", response), "int16", missing)


def delta(
    routes: Routes,
    held: int,
    tokens: int,
    *,
    missing: Missing = "error",
) -> NDArray[np.int16]:
    """``TokenOutput.routed_experts`` of a generation that resumes: int16, the rows ``[held, tokens - 1)``.

    ``held`` is the number of rows that verl has from earlier attempts, ``tokens`` that of all tokens at the end of this
    one. The result has as many rows as this attempt has tokens: verl keeps just those of a resumed generation.
    """
    return all_layers(routes, tokens, "int16", missing, held=held)


def global_steps(routes: Routes, prompt: int, response: int) -> dict[str, int]:
    """For ``extra_fields``: the weights versions that computed a sample's rows: the last, the least and the largest."""
    found = versions(routes, counted("prompt", prompt) + counted("response", response))
    return {"global_steps": found[-1], "min_global_steps": min(found), "max_global_steps": max(found)}


def padded(
    routes: Sequence[Routes],
    prompts: Sequence[int],
    responses: Sequence[int],
    prompt_length: int,
    response_length: int,
    *,
    missing: Missing = "error",
) -> torch.Tensor:
    """``DataProto.batch["routed_experts"]``: int16 ``[batch, prompt_length + response_length, num_layers, top_k]``.

    Prompts are padded on their left to ``prompt_length``, responses on their right to ``response_length``, as verl's
    ``input_ids`` are. Padding and the last row are zeros, which verl ignores.
    """
    import torch

    check_batch(routes, prompts=prompts, responses=responses)
    width = counted("prompt_length", prompt_length) + counted("response_length", response_length)
    shape = (len(routes), width, routes[0].num_layers, routes[0].top_k)
    batch = np.zeros(shape, np.int16)
    for i, (part, prompt, response) in enumerate(zip(routes, prompts, responses, strict=True)):
        rows = all_layers(part, counted("prompts", prompt) + counted("responses", response), "int16", missing)
        if prompt > prompt_length or response > response_length:
            wanted = f"at most {prompt_length} and {response_length} tokens"
            raise ReplayError(f"sample {i}", wanted, f"{prompt} and {response}")
        left = prompt_length - prompt
        batch[i, left : left + len(rows)] = rows
    return torch.from_numpy(batch)


def jagged(
    routes: Sequence[Routes],
    tokens: Sequence[int],
    *,
    missing: Missing = "error",
) -> torch.Tensor:
    """The engine's ``TensorDict["routed_experts"]``: jagged int16 ``[batch, tokens[i] - 1, num_layers, top_k]``.

    verl's ``align_r3_router_replay_data`` appends the last row of each sample.
    """
    import torch

    check_batch(routes, tokens=tokens)
    both = zip(routes, tokens, strict=True)
    parts = [torch.from_numpy(all_layers(part, count, "int16", missing)) for part, count in both]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def replay_mask(routes: Sequence[Routes], tokens: Sequence[int]) -> torch.Tensor:
    """``set_router_replay_data(replay_mask=...)``: jagged bool ``[batch, tokens[i]]``, False without a whole row.

    One bit is for all layers of a token: if a layer is missing, the router chooses in all of them. Use it with rows
    whose holes are spelled in any way; the last row of each sample is False.
    """
    import torch

    check_batch(routes, tokens=tokens)
    masks: list[Any] = []
    for part, count in zip(routes, tokens, strict=True):
        mask = np.zeros(read_rows(count) + 1, np.bool_)
        there = mask[part.start : min(part.stop, len(mask) - 1)]
        there[:] = part.valid[: len(there)] & (not part.missing_layers)
        masks.append(torch.from_numpy(mask))
    return torch.nested.as_nested_tensor(masks, layout=torch.jagged)

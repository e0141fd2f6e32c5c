"""The demo's last act: the weights change while answers are being generated, as in a rollout that training overtakes.

Every unfinished sequence loses its KV and is computed again by the new weights, whose routers choose other experts for
the same tokens; then it goes on. The judge saw which row of each position came first.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import nn

from cache_manager.keys import Namespace
from paged_engine.driver import Tell, rows_of
from paged_engine.engine import Engine
from paged_engine.findings import Update
from paged_engine.judge import Checker, Verdict
from paged_engine.request import EngineConfig
from paged_engine.workload import Conversation

CONVERSATIONS_MAX: Final = 6
UPDATE_AFTER_TOKENS: Final = 8
"""The update comes when the first answer has this many tokens."""


def across_update(model: nn.Module, config: EngineConfig, clients: list[Conversation], tell: Tell) -> Update:
    """Let ``clients`` ask once, change the routers of ``model`` on the way, and judge what they get."""
    checker, outputs = Checker(), []
    checker.attach(model)
    with Engine(model, config, Namespace("across an update", weights_version=0), observer=checker) as engine:
        for client in clients:
            engine.add(client.ask())
        while engine.busy:
            answers = [len(sequence.generated) for sequence in engine.scheduler.unfinished]
            if not engine.aux.namespace.weights_version and max(answers, default=0) >= UPDATE_AFTER_TOKENS:
                move_routers(model, seed=1)
                engine.reset(weights_version=1)
                checker.weights_changed()
            outputs += (ended := engine.step())
            tell(len(ended))
    checker.detach()
    verdict = Verdict()
    for output in outputs:
        nothing = np.full(output.routes.ids.shape, -1, np.int32)  # nobody but the watched passes made these rows
        owner, prompt = f"{output.request.id}#{output.sample}", len(output.request.prompt)
        verdict += checker.judge(output.sequence, output.routes, rows_of(output), nothing, owner=owner, prompt=prompt)
    return Update(
        update_samples=sum(len(output.routes.weights_versions) > 1 for output in outputs),
        update_rows_expected=verdict.rows_expected,
        update_rows_wrong=verdict.rows_wrong,
        update_rows_missing=verdict.rows_missing,
        update_rows_recomputed=checker.rows_computed_differently,
    )


def move_routers(model: nn.Module, seed: int) -> None:
    """Change the weights of every router by as much as they vary, so that most tokens change experts."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for weight in module.parameters(recurse=False) if "Router" in type(module).__name__ else ():
                noise = torch.randn(weight.shape, generator=draw, dtype=weight.dtype).to(weight.device)
                weight.add_(weight.std() * noise)


__all__ = ["CONVERSATIONS_MAX", "across_update", "move_routers"]

"""What each adapter makes of one sample's routes, read back from the trainer's own form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvroute.replay import nemo_rl, prime_rl, skyrl, slime, verl


def unpacked(packed: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(packed["data"]), packed["dtype"]).reshape(packed["shape"])


# Of a sample with so many tokens of prompt and of response: its rows at the front, on the layer axis of all layers.
WHOLE: dict[str, Callable[..., Any]] = {
    "verl agent loop": verl.agent_loop,
    "verl padded": lambda r, p, n, **k: verl.padded([r], [p], [n], p, n, **k)[0],
    "verl jagged": lambda r, p, n, **k: verl.jagged([r], [p + n], **k).unbind()[0],
    "slime": lambda r, p, n, **k: slime.sample(r, p + n, **k),
    "miles": lambda r, p, n, **k: slime.miles_sample(r, p + n, **k),
    "prime-rl": lambda r, p, n, **k: unpacked(prime_rl.routed_experts(r, p + n, **k)),
    "NeMo-RL": lambda r, p, n: nemo_rl.sequence(r, p + n, layers="all"),
    "SkyRL": lambda r, p, n: skyrl.rollout_expert_indices([r], [p + n])[0],
}

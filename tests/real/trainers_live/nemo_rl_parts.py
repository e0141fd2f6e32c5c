"""NeMo-RL's extension of vLLM's worker where there is no GPU: the weights that it receives lie in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers

with patch.object(transformers, "__version__", "5.11.0"):  # see test_nemo_rl.py
    from nemo_rl.models.generation.vllm import vllm_backend
    from nemo_rl.models.policy.utils import IPCProtocol, calculate_aligned_size

ADDRESS = "KVROUTE_LIVE_REFIT"
"""The environment variable with the address where weights are asked for."""

vllm_backend.rebuild_cuda_tensor_from_ipc = lambda file, _: torch.from_numpy(np.fromfile(file, np.uint8))
for name in ("range_push", "range_pop"):  # of NVIDIA's profiler
    setattr(torch.cuda.nvtx, name, lambda *_: 0)


class OnCpu(vllm_backend.VllmInternalWorkerExtension):
    """NeMo-RL names the address by the number of a GPU, and waits for that GPU before it says that it has read."""

    def get_zmq_address(self) -> str:
        return os.environ[ADDRESS]

    def _synchronize_before_ipc_data_ack(self) -> None: ...


def sent(socket: Any, weights: dict[str, torch.Tensor], file: Path) -> None:
    """The other end of NeMo-RL's protocol: one message with all ``weights``, which lie in ``file``, and the end."""
    parts = [weight.contiguous().view(torch.uint8).flatten() for weight in weights.values()]
    sizes = [calculate_aligned_size(len(part)) for part in parts]
    padded = [torch.nn.functional.pad(part, (0, size - len(part))) for part, size in zip(parts, sizes, strict=True)]
    torch.cat(padded).numpy().tofile(file)
    for message in (str(file), list(weights), sum(sizes)), IPCProtocol.COMPLETE:
        socket.send_pyobj(message)
        assert socket.recv() == IPCProtocol.ACK.value.encode()

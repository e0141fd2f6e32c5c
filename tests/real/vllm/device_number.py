"""What vLLM's MooncakeConnector asks for at its start and a CPU does not have: the number of the accelerator in use.

vLLM calls :func:`give` in each process of an engine, as its plugin.
"""

from __future__ import annotations

import torch


def give() -> None:
    """Let it be 0, which ``torch.cpu`` takes for its only device; all else of the connector is vLLM's."""
    torch.accelerator.current_device_index = lambda: 0


__all__ = ["give"]

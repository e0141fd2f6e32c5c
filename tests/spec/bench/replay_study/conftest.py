"""One thread: the matrices are small, and tests may run beside others."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

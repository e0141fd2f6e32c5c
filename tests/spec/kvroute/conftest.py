"""One thread: the models and engines are so small that threads would only wait for each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

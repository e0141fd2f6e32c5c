"""How many lives the life-cycle kit plays; one thread for the small models of the connector's machines."""

from __future__ import annotations

import torch
from budget import ALL_LIVES

from cache_manager.testing.life import BlockManagerMachine

BlockManagerMachine.examples = ALL_LIVES
torch.set_num_threads(1)

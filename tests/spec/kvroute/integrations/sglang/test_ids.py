"""The ids of SGLang's routers, which come as 32-bit numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache_manager.keys import Namespace
from kvroute import routing_spec
from kvroute.connector.settings import Common
from kvroute.integrations.sglang.rows import RoutedRows

PAGE = 4


@pytest.mark.parametrize("wrong", [256 + 7, -1, 250, 8])
def test_ids_that_no_router_can_choose_cost_their_own_row_only(wrong: int) -> None:
    """Goal: an id that does not fit its byte is not another one. Method: in one token's last layer an id past the byte,
    one below it, one that is no expert's, and one that comes twice."""
    spec = routing_spec(num_experts=250, top_k=2, layer_ids=[1, 2], num_layers=3, block_tokens=PAGE)
    rows = RoutedRows(spec, 3, Namespace("m", 1), Common(strict=True))
    ids = torch.arange(18, dtype=torch.int32).reshape(3, 3, 2)  # [tokens, layers, top_k]
    ids[1, 2] = torch.tensor([8, wrong])
    rows.launch(torch.arange(PAGE, PAGE + 3), ids).finalize()
    found, *_ = rows.read(np.arange(PAGE, PAGE + 3), 0).routes()
    assert found.valid.tolist() == [True, False, True]
    assert found.ids[[0, 2]].tolist() == ids[[0, 2], 1:].tolist()
    rows.close()

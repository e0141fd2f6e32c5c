"""The engine where one launch a pass captures the rows, as on a GPU; here the launch is interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from kvroute.capture.capture import find_routers
from kvroute.capture.errors import CaptureError
from kvroute.capture.launched import LaunchedCapture
from kvroute.routing import routing_spec_from_hf


def test_tokens_beyond_the_slots_are_padding(qwen: nn.Module) -> None:
    """Goal: a padded pass, as graphs have it, writes only at the given slots. Method: eight tokens at eight slots, then
    eight others at two."""
    spec = routing_spec_from_hf(qwen.config, 4)
    with AuxBlocks([spec], blocks=3, namespace=Namespace("tests", weights_version=1), memory="shared") as blocks:
        blocks.renew(range(3))
        capture, seen = LaunchedCapture(qwen, spec, blocks.region("device"), 8), []
        for slots in (np.arange(8), np.array([9, 8])):
            with capture.step(blocks.begin_step, slots):
                qwen(torch.arange(8)[None] + 11 * len(slots), use_cache=False)
            seen.append(blocks.read(spec.name, range(3)))
        capture.close()
    before, after = seen
    assert before.valid.tolist() == [True] * 8 + [False] * 4
    assert after.valid.tolist() == [True] * 10 + [False] * 2
    assert np.array_equal(after.values[:8], before.values[:8])


def test_a_pass_that_failed_does_not_fail_the_next_one(qwen: nn.Module) -> None:
    """Goal: each pass is judged by itself. Method: a router is called once more beside a pass; then a pass as usual."""
    spec, slots = routing_spec_from_hf(qwen.config, 4), np.arange(6)
    router = next(iter(find_routers(qwen).values()))
    with AuxBlocks([spec], blocks=2, namespace=Namespace("tests", weights_version=1), memory="shared") as blocks:
        blocks.renew(range(2))
        capture = LaunchedCapture(qwen, spec, blocks.region("device"), 8)
        refused = pytest.raises(CaptureError, match="wanted one call a pass, got 2 calls")
        with refused, capture.step(blocks.begin_step, slots):
            router(torch.zeros(6, qwen.config.hidden_size, dtype=router.weight.dtype))
            qwen(torch.arange(6)[None], use_cache=False)
        assert not blocks.read(spec.name, range(2)).valid.any()
        with capture.step(blocks.begin_step, slots):
            qwen(torch.arange(6)[None], use_cache=False)
        assert blocks.read(spec.name, range(2)).valid.tolist() == [True] * 6 + [False] * 2
        capture.close()


def test_a_pass_of_fewer_tokens_than_slots_leaves_no_rows(qwen: nn.Module) -> None:
    """Goal: a launch that has not written every slot is recognised. Method: six slots with rows of a pass; then a pass
    of four tokens for the six; then one of six again."""
    spec, slots = routing_spec_from_hf(qwen.config, 4), np.arange(6)
    with AuxBlocks([spec], blocks=2, namespace=Namespace("tests", weights_version=1), memory="shared") as blocks:
        blocks.renew(range(2))
        capture = LaunchedCapture(qwen, spec, blocks.region("device"), 8)
        for tokens in (6, 4, 6):
            ids = torch.arange(tokens)[None] + 11
            if tokens < len(slots):
                refused = pytest.raises(
                    CaptureError, match="pass: wanted a launch of 6 tokens or more at the end of the pass, got 4"
                )
                with refused, capture.step(blocks.begin_step, slots):
                    qwen(ids, use_cache=False)
            else:
                with capture.step(blocks.begin_step, slots):
                    qwen(ids, use_cache=False)
            valid = blocks.read(spec.name, range(2)).valid
            assert valid.tolist() == [tokens == len(slots)] * 6 + [False] * 2
        assert blocks.in_flight == 0
        capture.close()

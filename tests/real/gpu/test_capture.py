"""Capture on a GPU: every row right, in graphs, under resets, from late devices and on two streams.

``TRITON_INTERPRET=0 pytest tests/real/gpu``. Without a CUDA GPU these are skipped; what the kernel computes is tested
everywhere, through Triton's interpreter, which knows no memory of a GPU.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
import torch

import kvroute
from cache_manager.blocks import AuxBlocks
from kvroute.capture.layers import LayerCapture
from kvroute.capture.plan import Check

if not torch.cuda.is_available():
    pytest.skip("wanted a CUDA GPU, torch sees none here", allow_module_level=True)
if os.environ["TRITON_INTERPRET"] != "0":
    pytest.skip("wanted TRITON_INTERPRET=0, got 1, with which kernels run on the CPU", allow_module_level=True)

from bench.gpu_capture import (
    BLOCK_TOKENS,
    BLOCKS,
    DEVICE,
    MODELS,
    TOKENS,
    TOP_K,
    Model,
    Pass,
    blocks_of,
    graph_of,
    keep_all,
    slots_of,
)

SOAK_TOKENS, SOAK_ROWS, SOAK_S = (64, 256, 1024), 10_000_000, 60.0


def random_slots(tokens: int, rng: np.random.Generator) -> Any:
    """Random slots for a decode, random whole blocks for a prefill; a tenth is padding."""
    decodes = tokens <= SOAK_TOKENS[-1]
    slots = rng.choice(BLOCKS * BLOCK_TOKENS, tokens, replace=False) if decodes else slots_of(tokens, rng)
    return np.where(rng.random(tokens) < 0.1, -1, slots).astype(np.int64)


def wanted(batch: Pass) -> Any:
    """The ids of a batch as numpy ``[tokens, layers, top_k]``."""
    return batch.ids.transpose(0, 1).cpu().numpy()


def judged(aux: Any, batch: Pass, slots: Any) -> int:
    """How many of the step's rows differ from what the routers chose; missing rows count as wrong too."""
    rows = aux.read("routing", range(BLOCKS))
    used = slots >= 0
    wrong = (rows.values[slots[used]] != wanted(batch)[used]).any(axis=(1, 2)) | ~rows.valid[slots[used]]
    return int(wrong.sum())


def every_size_is_right(model: Model, aux: Any, capture: Any) -> None:
    """Each batch size once outside of a graph, slots random, a tenth of them padding, int16 and int64 ids too."""
    rng = np.random.default_rng(0)
    for tokens in TOKENS:
        batch = Pass(model, tokens)
        slots = random_slots(tokens, rng)
        for dtype in (torch.int32, torch.int16, torch.int64):
            batch.draw()
            step = aux.begin_step(slots, in_place=True)
            cast = batch.ids.to(dtype)
            for layer in range(model.layers):
                capture.hook(layer)(cast[layer])
            capture.commit(torch.from_numpy(slots).to(DEVICE))
            torch.cuda.synchronize()
            step.wrote("routing")
            verdict = capture.verdict(tokens)
            assert verdict.keep is None, verdict
            step.commit()
            assert (wrong := judged(aux, batch, slots)) == 0, f"{model.name}, {tokens} tokens, {dtype}: {wrong} wrong"


def bad_ids_are_missing(model: Model, aux: Any, capture: Any) -> None:
    """A bad id on the device is counted, named and missing."""
    batch, slots = Pass(model, 64), np.arange(64)
    batch.ids[5, 7, 3] = model.experts
    batch.ids[9, 20, 1] = batch.ids[9, 20, 0]
    step = aux.begin_step(slots, in_place=True)
    keep_all(capture, batch)
    capture.commit(torch.from_numpy(slots).to(DEVICE))
    torch.cuda.synchronize()
    step.wrote("routing")
    verdict = capture.verdict(64)
    assert verdict.counts == {Check.RANGE: 1, Check.DUPLICATE: 1}, verdict
    assert verdict.first.startswith("routing, token 7, layer 5"), verdict.first
    assert np.flatnonzero(~verdict.keep).tolist() == [7, 20]
    step.commit(verdict.keep)
    assert np.flatnonzero(~aux.read("routing", [0]).valid).tolist() == [7, 20]
    capture.verdict(64)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_row_of_every_shape_is_right_and_a_bad_id_is_missing(model: Model) -> None:
    """Method: all batch sizes, three widths of ids, random slots with padding; then ids that no router can choose."""
    with blocks_of(model) as (aux, capture):
        every_size_is_right(model, aux, capture)
        bad_ids_are_missing(model, aux, capture)


def test_random_steps_in_graphs_with_resets_in_flight() -> None:
    """Goal: no row is wrong or outlives its weights. Method: a minute of graphs of several sizes, on a side stream."""
    model, rng = MODELS[0], np.random.default_rng(0)
    with blocks_of(model) as (aux, capture):
        rows = wrong = resets = 0

        def graph_with(batch: Pass) -> torch.cuda.CUDAGraph:
            def launches() -> None:
                keep_all(capture, batch)
                batch.work()
                capture.commit(batch.slots)

            return graph_of(launches)

        batches = [Pass(model, tokens) for tokens in SOAK_TOKENS]
        graphs = [graph_with(batch) for batch in batches]
        capture.ready()
        assert capture.verdict(max(TOKENS)).keep is None  # the warm-up's rows: no step was begun for them
        stream, until = torch.cuda.Stream(), time.monotonic() + SOAK_S
        while rows < SOAK_ROWS and time.monotonic() < until:
            pick = int(rng.integers(len(batches)))
            batch, slots = batches[pick], random_slots(batches[pick].tokens, rng)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                batch.draw()
                batch.slots.copy_(torch.from_numpy(slots))
                step = aux.begin_step(slots, in_place=True)
                graphs[pick].replay()
            event = stream.record_event()
            lives = rng.random() < 0.02
            if lives:  # a weight update while the device writes
                aux.reset(weights_version=(resets := resets + 1))
            event.synchronize()
            step.wrote("routing")
            step.commit(capture.verdict(batch.tokens).keep)
            used = slots[slots >= 0]
            touched, where = np.unique(used // BLOCK_TOKENS, return_inverse=True)
            found = aux.read("routing", touched)
            at = where * BLOCK_TOKENS + used % BLOCK_TOKENS
            if lives:
                wrong += int(found.valid[at].sum())  # rows of the weights before
            else:
                same = (found.values[at] == wanted(batch)[slots >= 0]).all(axis=(1, 2)) & found.valid[at]
                wrong += int((~same).sum())
            rows += used.size
        assert (rows > 0, wrong) == (True, 0), (rows, wrong, resets)


def test_a_late_device_writes_among_no_new_lifes_rows() -> None:
    """A device that is late for a block's new life: its rows never lie among the new life's readable ones."""
    model = MODELS[0]
    spec = kvroute.routing_spec(model.experts, TOP_K, range(model.layers), model.layers, BLOCK_TOKENS)
    namespace = kvroute.Namespace("late", weights_version=0)
    with AuxBlocks([spec], blocks=4, namespace=namespace, memory="shared") as engine:
        engine.renew(range(4))
        with LayerCapture(engine.region("device"), 256, DEVICE) as capture:
            old, slots = Pass(model, 128), np.arange(128)
            on_device = torch.from_numpy(slots).to(DEVICE)
            before = wanted(old)
            keep_all(capture, old)
            capture.commit(on_device)  # compiled and loaded, so that only the sleep delays the next
            torch.cuda.synchronize()
            late = engine.begin_step(slots, in_place=True)
            torch.cuda._sleep(400_000_000)
            keep_all(capture, old)
            capture.commit(on_device)
            done = torch.cuda.current_stream().record_event()
            engine.renew([0])  # given to another owner while the device still has to write it
            new = before[:64] ^ 1
            engine.write_step(slots[:64], {"routing": new})
            assert not done.query(), "the device was to be late"
            assert not engine.read("routing", [0]).valid.any(), "readable while the device may still write"
            done.synchronize()
            late.wrote("routing")
            late.commit(capture.verdict(128).keep)
            rows = engine.read("routing", [0, 1])
            assert not rows.valid[:64].any(), "a late row among the new life's"
            assert rows.valid[64:128].all()
            assert (rows.values[64:128] == before[64:128]).all()
            engine.write_step(slots[:64], {"routing": new})
            again = engine.read("routing", [0])
            assert again.valid.all()
            assert (again.values == new).all()


def test_two_passes_in_flight_on_two_streams() -> None:
    """Two passes in flight on two streams, each with its own capture, into one region."""
    model, rng = MODELS[0], np.random.default_rng(0)
    with blocks_of(model) as (aux, first), LayerCapture(aux.region("device"), 1024, DEVICE) as second:
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        batches = [Pass(model, 256), Pass(model, 512)]
        for _ in range(20):
            slots = np.split(rng.permutation(BLOCKS * BLOCK_TOKENS)[:768].astype(np.int64), [256])
            for batch in batches:
                batch.draw()
            torch.cuda.synchronize()
            steps = []
            for capture, stream, batch, at in zip((first, second), streams, batches, slots, strict=True):
                with torch.cuda.stream(stream):
                    steps.append(aux.begin_step(at, in_place=True))
                    on_device = torch.from_numpy(at).to(DEVICE)
                    torch.cuda._sleep(2_000_000)
                    batch.work()
                    keep_all(capture, batch)
                    capture.commit(on_device)
                    steps[-1].wrote("routing")
            events = [stream.record_event() for stream in streams]
            for i in (1, 0) if rng.random() < 0.5 else (0, 1):
                events[i].synchronize()
                steps[i].commit((first, second)[i].verdict(batches[i].tokens).keep)
            for batch, at in zip(batches, slots, strict=True):
                assert (wrong := judged(aux, batch, at)) == 0, f"micro-batches: {wrong} wrong"

"""What must be right on a GPU before ``bench.gpu_capture`` measures anything."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

import kvroute
from bench.gpu_passes import (
    BLOCK_TOKENS,
    BLOCKS,
    DEVICE,
    MODELS,
    SOAK_ROWS,
    SOAK_TOKENS,
    TOKENS,
    TOP_K,
    Model,
    Pass,
    blocks_of,
    graph_of,
    keep_all,
    random_slots,
)
from cache_manager.blocks import AuxBlocks
from kvroute.capture.layers import LayerCapture
from kvroute.capture.plan import Check


def judged(aux: Any, batch: Pass, slots: Any) -> int:
    """How many of the step's rows that can be read differ from what the routers chose; missing ones are wrong too."""
    rows = aux.read("routing", range(BLOCKS))
    used = slots >= 0
    wrong = (rows.values[slots[used]] != batch.wanted()[used]).any(axis=(1, 2)) | ~rows.valid[slots[used]]
    return int(wrong.sum())


def check_shapes(model: Model, aux: Any, capture: Any, rng: np.random.Generator) -> int:
    """Each batch size once outside of a graph, slots random, a tenth of them padding, int16 and int64 ids too."""
    rows = 0
    for tokens in TOKENS:
        batch = Pass(model, tokens)
        slots = random_slots(tokens, rng, 0.1)
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
            rows += tokens
    return rows


def check_bad(model: Model, aux: Any, capture: Any) -> None:
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


def soak(model: Model, aux: Any, capture: Any, rng: np.random.Generator, seconds: float) -> tuple[int, int, int]:
    """Random steps in graphs of several batch sizes on a side stream: rows, wrong ones, resets."""
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
    assert capture.verdict(max(TOKENS)).keep is None  # the warm-up's rows: nobody has a step for them
    stream, until = torch.cuda.Stream(), time.monotonic() + seconds
    while rows < SOAK_ROWS and time.monotonic() < until:
        pick = int(rng.integers(len(batches)))
        batch, slots = batches[pick], random_slots(batches[pick].tokens, rng, 0.1)
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
            same = (found.values[at] == batch.wanted()[slots >= 0]).all(axis=(1, 2)) & found.valid[at]
            wrong += int((~same).sum())
        rows += used.size
    return rows, wrong, resets


def check_late(model: Model) -> None:
    """A device that is late for a block's new life: its rows never lie among the new life's readable ones."""
    spec = kvroute.routing_spec(model.experts, TOP_K, range(model.layers), model.layers, BLOCK_TOKENS)
    namespace = kvroute.Namespace("late", weights_version=0)
    with AuxBlocks([spec], blocks=4, namespace=namespace, memory="shared") as engine:
        engine.renew(range(4))
        with LayerCapture(engine.region("device"), 256, DEVICE) as capture:
            old, slots = Pass(model, 128), np.arange(128)
            on_device = torch.from_numpy(slots).to(DEVICE)
            before = old.wanted()
            keep_all(capture, old)
            capture.commit(on_device)  # compiled and loaded, so that only the sleep delays the next
            torch.cuda.synchronize()
            late = engine.begin_step(slots, in_place=True)
            torch.cuda._sleep(400_000_000)
            keep_all(capture, old)
            capture.commit(on_device)
            done = torch.cuda.current_stream().record_event()
            engine.renew([0])  # given to somebody else while the device still has to write it
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


def check_micro_batches(model: Model, rng: np.random.Generator) -> int:
    """Two passes in flight on two streams, each with its own capture, into one region: how many rows were right."""
    rows = 0
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
                rows += batch.tokens
    return rows


def checked(rng: np.random.Generator, seconds: float) -> list[str]:
    """Everything that must be right before anything is measured: what was seen. Raises ``AssertionError``."""
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        print(line, flush=True)

    for model in MODELS:
        with blocks_of(model) as (aux, capture):
            rows = check_shapes(model, aux, capture, rng)
            check_bad(model, aux, capture)
            say(f"{model.name}: {rows} rows right, int16, int32 and int64; bad ids counted, named and missing")
        with blocks_of(model, staged=True) as (aux, capture):
            rows = check_shapes(model, aux, capture, rng)
            check_bad(model, aux, capture)
            say(f"{model.name}, staged: {rows} rows right; bad ids counted, named and missing")
    say(f"two micro-batches in flight on two streams: {check_micro_batches(MODELS[0], rng)} rows right")
    check_late(MODELS[0])
    say("a late device: no row of it among the new life's")
    with blocks_of(MODELS[0]) as (aux, capture):
        rows, wrong, resets = soak(MODELS[0], aux, capture, rng, seconds)
        say(f"soak: {rows} rows in graphs, {resets} resets in flight, {wrong} wrong")
        assert wrong == 0
    return said

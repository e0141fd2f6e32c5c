"""transformers' continuous batching with kvroute embedded, on a CPU: every row of every request judged.

The judge is an independent forward of the same weights (``salted_moe``), whose routes and KV depend on a salt that is
drawn for each token of each pass: only the rows of the very pass that made the KV in use are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from salted_moe import SaltedMoe
from served_transformers import PAGE, all_right, example, prompts, served
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState
from waiting import GIVE_UP_S

import kvroute

SCENARIOS: dict[str, tuple[dict[str, Any], list[list[int]], int, dict[str, int]]] = {
    "plain batches, prompts end within and at a block": (
        {"num_blocks": 64, "max_batch_tokens": 256}, prompts([5, 33, 8, 17, 64]), 127 + 5 * 19, {},
    ),
    "prompts in chunks of 24, decodes beside them": (
        {"num_blocks": 96, "max_batch_tokens": 24}, prompts([100, 37, 3, 90]), 230 + 4 * 19, {},
    ),
    "a common prefix, two at a time: some duplicate each other's blocks, later ones hit them": (
        {"num_blocks": 48, "max_batch_tokens": 256, "max_requests_per_batch": 2},
        prompts([9, 14, 4, 8, 30, 1], shared=40), 6 * 40 + 66 + 6 * 19, {"hit": 80, "duplicate": 2},
    ),
    "three answers a prompt: the last block of a prompt is full, or not, when they part": (
        {"returns": 3, "num_blocks": 128, "max_batch_tokens": 128},
        prompts([13, 17, 42, 90]), 3 * (162 + 4 * 19), {"copied": 2},
    ),
    "16 blocks for 8 requests that each grow to 8: swapped to the CPU and back": (
        {"new": 40, "num_blocks": 16, "max_batch_tokens": 128, "cpu_offload_space": 0.01},
        prompts([20] * 8), 8 * 59, {"swapped": 2},
    ),
    "the same with nowhere to swap to: computed again": (
        {"new": 40, "num_blocks": 16, "max_batch_tokens": 128}, prompts([20] * 8), 8 * 59, {"soft reset": 2},
    ),
}  # fmt: skip
"""Of each: the engine, what it is asked, how many rows are due, and what must have happened how often at least."""


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_every_row_is_of_the_pass_that_made_its_kv(moe: SaltedMoe, scenario: str) -> None:
    """Goal: no row is wrong or missing, whatever happens to blocks. Method: the scenarios above, judged row by row."""
    engine_of, asked, due, happened = SCENARIOS[scenario]
    with served(moe, **engine_of) as engine:
        engine.ask(asked)
        assert all(engine.seen[what] >= count for what, count in happened.items()), engine.seen
        assert "swapped" not in happened or engine.seen["soft reset"] == 0
        all_right(engine.verdict(), due=due)


def test_weights_are_of_the_pass_that_made_the_kv_too(moe: SaltedMoe) -> None:
    """Goal: a weight is that of its id's own pass, through prefix hits, forks and swaps. Method: the judge's weights of
    the salts that the engine's KV has; another pass of the same token is off by much more than rounding."""
    embed = partial(example.EmbeddedRoutes, weights=True)
    with served(moe, embed=embed, returns=2, num_blocks=20, max_batch_tokens=48, cpu_offload_space=0.01) as engine:
        engine.ask(prompts([9, 14, 4, 30], shared=40))
        assert min(engine.seen[what] for what in ("hit", "copied", "swapped")) > 0
        assert engine.weights_error() < 1e-4
        all_right(engine.verdict(), due=2 * (4 * 40 + 57 + 4 * 19))
        engine.embedded.reset(weights_version=2)
        assert not engine.embedded.weights


def test_the_next_turn_hits_generated_blocks(moe: SaltedMoe) -> None:
    """Goal: rows of generated tokens outlive their request. Method: a second turn on the answer of the first."""
    with served(moe, num_blocks=48, max_batch_tokens=256) as engine:
        engine.ask(prompts([20]))
        ((tokens, _),) = engine.finished.values()
        engine.verdict()
        engine.ask([[*tokens, 5, 6, 7]])
        assert engine.seen["hit"] == 39 // PAGE * PAGE
        all_right(engine.verdict(), due=42 + 19)


def test_cancelled_requests_leave_their_blocks_to_others(moe: SaltedMoe) -> None:
    """Goal: no request reads rows that a cancelled one left. Method: two requests that decode without end are
    cancelled, twice, and others get their blocks."""
    with served(moe, new=1000, num_blocks=24, max_batch_tokens=64) as engine:
        for turn in range(2):
            engine.hold(passes=15, until=lambda: engine.manager.cancel_queue.qsize() == 2)
            names = engine.begin(prompts([40, 30], seed=turn))
            engine.held()
            assert all(engine.running(name) > 32 for name in names)
            for name in names:
                engine.manager.cancel_request(name)
        while engine.engine.has_pending_requests():
            assert engine.manager.get_result(timeout=0.01) is None
        assert not engine.embedded.routes
        engine.manager.generation_config.max_new_tokens = 20
        engine.ask(prompts([40, 11, 12, 13, 14, 41], seed=9))
        all_right(engine.verdict(), due=131 + 6 * 19)


def test_new_weights(moe: SaltedMoe) -> None:
    """Goal: after a weight update no row of the old weights is handed out, and none of the new is missing. Method: the
    same prompts before and after, in a second session of one engine, whose cache remembers the first."""
    asked = prompts([20, 30], shared=24)
    with served(moe, num_blocks=64, max_batch_tokens=256) as engine:
        engine.ask(asked)
        all_right(engine.verdict(), due=98 + 2 * 19)
        engine.stop(keep_for_next_session=True)
        moe.change_weights(seed=7)
        engine.embedded.reset(weights_version=2)
        engine.ask(asked)
        assert {v for each in engine.embedded.routes.values() for _, _, v in each.weights_versions} == {2}
        all_right(engine.verdict(), due=98 + 2 * 19)


def test_new_weights_in_the_middle_of_a_request() -> None:
    """Goal: a request across a weight update has only rows of the new weights. Method: the engine is paused while it
    decodes; what was computed before is missing, and what comes after is right."""
    moe = SaltedMoe(salted=True)  # with attention the new weights would see KV of the old ones, here as anywhere
    with served(moe, new=120, num_blocks=64, max_batch_tokens=64) as engine:
        engine.hold(passes=10, until=engine.manager.background_thread_status.is_pause_requested)
        (name,) = engine.begin(prompts([30]))
        engine.held()
        with engine.manager.pause():
            before = engine.running(name)
            moe.change_weights(seed=7)
            engine.embedded.reset(weights_version=2)
        assert engine.manager.get_result(timeout=GIVE_UP_S) is not None
        assert engine.embedded.routes[name].missing == ((0, before),)
        verdict = engine.verdict()
        assert (verdict.wrong, verdict.missing) == (0, before)


def test_a_block_that_the_engine_hits_wrongly_has_no_rows(moe: SaltedMoe) -> None:
    """Goal: KV of old weights, which transformers hits in a second session when it is not evicted, comes without rows.
    Method: the weights change and kvroute is told, but the engine keeps its idle blocks."""
    with served(moe, num_blocks=64, max_batch_tokens=256) as engine:
        engine.ask(prompts([20], shared=24))
        engine.verdict()
        engine.stop(keep_for_next_session=True)
        moe.change_weights(seed=7)
        engine.embedded.rows.reset(weights_version=2)
        engine.ask(prompts([20], shared=24))
        stale = engine.seen["hit"]
        assert stale == 40
        assert [each.missing for each in engine.embedded.routes.values()] == [((0, stale),)]


class Stubborn(example.EmbeddedRoutes):
    """Reads the blocks that a request was computed into, and not those that it ends with."""

    def _passed(self, forward: Callable[[Any], None], model: Any) -> None:
        for each in self.engine.inputs_and_outputs.requests_in_batch:
            request = each.state.request_id
            own = self.__dict__.setdefault("_own", {}).setdefault(request, [])
            own += self.allocator.block_table[request][len(own) :]
        super()._passed(forward, model)

    def _finished(self, finish: Callable[[str], None], request: str) -> None:
        tables = self.allocator.block_table
        kept, tables[request] = tables[request], self._own[request]
        super()._finished(lambda _: None, request)
        tables[request] = kept
        finish(request)


def test_the_judge_sees_rows_of_another_pass() -> None:
    """Goal: the judge can tell two passes over the same tokens apart. Method: an embedding that does not notice when a
    request gives a duplicate block up for its twin; only the KV's own witness knows whose pass it is."""
    moe = SaltedMoe(salted=True)
    with served(moe, embed=Stubborn, num_blocks=64, max_batch_tokens=256) as engine:
        engine.ask(prompts([2, 3], shared=40))
        assert engine.seen["duplicate"] >= 2
        assert engine.verdict().wrong > 20


class Unfollowing(example.EmbeddedRoutes):
    """Copies of blocks are not reported."""

    def _copied(self, copy: Callable[..., Any], *pairs: Any) -> None:
        copy(*pairs)


def test_a_fork_that_is_not_followed_has_missing_rows(moe: SaltedMoe) -> None:
    """Goal: a forgotten hook makes rows missing, not wrong. Method: copies of blocks are not reported."""
    with served(moe, embed=Unfollowing, returns=2, num_blocks=64, max_batch_tokens=128) as engine:
        engine.ask(prompts([13]))
        verdict = engine.verdict()
        assert (verdict.wrong, verdict.missing) == (0, 12 % PAGE)


def test_a_router_that_does_not_run_makes_rows_missing(moe: SaltedMoe) -> None:
    """Goal: a pass whose rows cannot be taken does not stop the engine, and is counted. Method: a hook is lost."""
    with served(moe, num_blocks=64, max_batch_tokens=256) as engine:
        engine.embedded.capture.handles[1].remove()
        engine.ask(prompts([9]))
        assert engine.embedded.passes_without_rows == 20
        assert engine.verdict().missing == 9 + 19


def test_padding_and_the_decode_path_have_slots(moe: SaltedMoe) -> None:
    """Goal: slots are right where a GPU pads its batches, and where flash attention reads block tables. Method: the
    engine's own inputs, prepared as it would there, against the block tables."""
    with served(moe, num_blocks=32, max_batch_tokens=64) as engine:
        cache, processor = engine.engine.cache, engine.engine.logit_processor
        cache.max_blocks_per_request = 8
        states = [RequestState(request_id=f"r{i}", initial_tokens=list(range(n))) for i, n in enumerate((11, 16, 5))]
        io = ContinuousBatchingIOs(
            cache, cache.config, engine.engine.cb_config, torch.device("cpu"), torch.float32, processor
        )
        tables = engine.embedded.allocator.block_table

        def prepared(counts: Sequence[int], fast: bool, padded: int) -> tuple[list[int], list[int]]:
            wanted = []
            for state, n in zip(states, counts, strict=True):
                state.tokens_to_process = [1] * n
                assert cache.can_store_request_tokens(state, n)
                at = range(state.current_len(), state.current_len() + n)
                wanted += [tables[state.request_id][i // PAGE] * PAGE + i % PAGE for i in at]
            batch = [FutureRequestState(state, True, {}, n) for state, n in zip(states, counts, strict=True)]
            io.prepare_batch_tensors(batch, processor, fast, padded, 0, use_padding=True)
            assert io.use_block_table == fast
            return engine.embedded.slots(io).tolist(), wanted + [-1] * (padded - len(wanted))

        for counts, fast, padded in (((11, 16, 5), False, 64), ((1, 1, 1), True, 4), ((3, 2, 9), False, 16)):
            found, wanted = prepared(counts, fast, padded)
            assert found == wanted


@pytest.mark.parametrize("unfit", [{"use_async_batching": True}, {"default_compile_level": 1}, {}])
def test_what_is_not_followed_is_refused(unfit: dict[str, Any]) -> None:
    """Goal: an engine whose rows would be missing or wrong is refused by name, before it runs. Method: batches that
    overlap, compiled passes; and, with neither, layers with a sliding window."""
    moe = SaltedMoe(salted=False)
    if not unfit:
        moe.model.config.sliding_window = 16
        moe.model.config.layer_types = ["sliding_attention", "full_attention", "full_attention"]
    wanted = "no async batching or compilation" if unfit else "wanted full_attention"
    with pytest.raises(kvroute.ConfigError, match=wanted), served(moe, num_blocks=16, max_batch_tokens=64, **unfit):
        pass


def test_the_example_runs_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: the command in the docs works. Method: its main."""
    example.main()
    assert capsys.readouterr().out.count("33 + 12 tokens Routes(positions 0..43, 3 of 3 layers") == 4

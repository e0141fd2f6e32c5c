"""vLLM's own field, ``outputs[i].routed_experts``, filled by kvroute: every row equals transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import numpy as np
import pytest
import torch
from engines import BLOCK, Engine, prompts
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import kvroute
from kvroute import routing_spec
from kvroute.connector.step_rows import Outcome, Piece, StepRows
from kvroute.connector.worker import WorkerRows
from kvroute.integrations.vllm import field, missing, routes

LAYERS, TOP_K = 3, 4


def expected_of(home: Path, tokens: Sequence[int], start: int) -> np.ndarray:
    """Stock's array of these tokens: ``[tokens - 1 - start, layers, top_k]``, the ids of each layer sorted."""
    layers = models.moe_layers(home)
    array = np.zeros((len(tokens) - 1 - start, layers[-1] + 1, TOP_K), np.uint8)
    array[:, layers] = models.routing(home, tokens)[start : len(tokens) - 1]
    return array


def assert_right(engine: Engine, outputs: Sequence[Any], start: int = 0) -> int:
    """Every answer has the field, of stock's shape and dtype, and each row is right; how many rows there are."""
    rows = 0
    for output in outputs:
        for completion in output.outputs:
            tokens = [*output.prompt_token_ids, *completion.token_ids]
            array = completion.routed_experts
            assert array is not None, (output.request_id, output.kv_transfer_params)
            assert array.dtype == np.uint8
            np.testing.assert_array_equal(np.sort(array, axis=-1), expected_of(engine.home, tokens, start))
            rows += len(array)
    return rows


@pytest.fixture(scope="module")
def qwen(model: Callable[..., Path]) -> Iterator[Engine]:
    engine = Engine(model("qwen3_moe"), settings={"field": True})
    yield engine
    engine.close()


def test_batches_and_prefix_hits(qwen: Engine) -> None:
    """Goal: the rows of prompts, of cached blocks and of sampled tokens. Method: many lengths, asked twice."""
    asked = prompts(21, 1, 10, 31, 32, 33, 64, 65, 150)
    assert assert_right(qwen, qwen.ask(asked)) == sum(map(len, asked)) + 19 * len(asked)
    again = qwen.ask(asked)
    assert sum(output.num_cached_tokens for output in again) >= 8 * BLOCK
    assert_right(qwen, again)
    assert again[0].kv_transfer_params is None, "no rollouts unless they are asked for"


def test_where_the_client_begins(qwen: Engine) -> None:
    """Goal: ``routed_experts_prompt_start``. Method: the first position, one inside, the last, and the whole prompt."""
    (asked,) = prompts(22, 70)
    for start in (0, 1, 33, 69, 70):
        for max_tokens in (1, 6):
            assert_right(qwen, qwen.ask([asked], max_tokens, routed_experts_prompt_start=start), start)


def test_stop_strings_and_several_completions(qwen: Engine) -> None:
    """Goal: requests that the front end ends, and n > 1. Method: a stop string that greedy decoding is known to say."""
    (asked,) = prompts(23, 45)
    (whole,) = qwen.ask([asked])
    word = f"t{whole.outputs[0].token_ids[7]}"
    (stopped,) = qwen.ask([asked], stop=[word])
    assert stopped.outputs[0].stop_reason == word
    assert_right(qwen, [whole, stopped])
    assert_right(qwen, qwen.ask(prompts(24, 40, 64), n=3, temperature=1.0, seed=1))


@pytest.mark.parametrize("asked_for", [{"strat": 1}, 7])
def test_a_request_that_asks_for_what_there_is_not_is_told(qwen: Engine, asked_for: Any) -> None:
    """Goal: a misspelt key is not ignored where rows go into the field alone. Method: the answer has its rows, and says
    what was wrong."""
    (output,) = qwen.ask(prompts(28, 40), extra_args={"kv_transfer_params": {"kvroute": asked_for}})
    assert_right(qwen, [output])
    with pytest.raises(kvroute.RowError, match="kvroute: wanted a mapping with start"):
        routes(output)


def test_a_lost_row_costs_the_answer_its_field(qwen: Engine) -> None:
    """Goal: never zeros, never a shorter array. Method: in two steps of one request the router of one layer says ids
    twice; the other request of the prompt, and later ones, have their rows."""
    forgets(qwen.kept, steps=(0, 5))
    (output,) = qwen.ask(prompts(26, 40))
    assert output.outputs[0].routed_experts is None
    ((start, stop, why),) = missing(output)
    assert (start, stop) == (0, 40)
    assert "no row was written" in why
    assert_right(qwen, qwen.ask(prompts(27, 40)))


def forgets(kept: WorkerRows, steps: Sequence[int]) -> None:
    """The worker loses one layer's ids in these steps from now on."""
    take, counter = kept.ids.take, iter(range(99))
    again = kept.ids.hook(1)

    def losing(tokens: int) -> Any:
        step = next(counter)
        if step in steps:
            again(torch.zeros(tokens, TOP_K, dtype=torch.int32))
        if step == max(steps):
            kept.ids.take = take  # type: ignore[method-assign]
        return take(tokens)

    kept.ids.take = losing  # type: ignore[method-assign]


def test_rows_of_a_message_go_together_and_each_request_gets_its_own() -> None:
    """Goal: one array a message in place of one a request. Method: a step's outputs through vLLM's own serialization
    to a front end's requests, one of which has gone; nothing is in the field of any output by itself."""
    rows = np.arange(8 * LAYERS * TOP_K, dtype=np.uint8).reshape(8, LAYERS, TOP_K)
    counts = {"a": 3, "b": 1, "gone": 2, "c": 0, "d": 2}
    pieces, outcomes = [], []
    for name, count in counts.items():
        at = sum(piece.stop for piece in pieces)
        pieces.append(Piece(name, 0, count))
        outcomes.append(Outcome(pieces[-1], rows[at : at + count]))
    spec = routing_spec(8, TOP_K, range(LAYERS), num_layers=LAYERS, block_tokens=4)
    engine = SimpleNamespace(spec=spec, settings=SimpleNamespace(on_missing="tell"))
    stream = SimpleNamespace(read=lambda *_, **__: (outcomes, None))
    own = field.Field(SimpleNamespace(engine=engine, stream=stream), LAYERS)  # type: ignore[arg-type]
    sent = EngineCoreOutputs(outputs=[EngineCoreOutput(request_id=name, new_token_ids=[1]) for name in counts])
    own.fill([sent.outputs], StepRows(pieces, None, 0.0), apart=True)
    came = MsgpackDecoder(EngineCoreOutputs).decode([bytes(part) for part in MsgpackEncoder().encode(sent)])
    assert [output.routed_experts for output in came.outputs] == [None] * len(counts)
    states = {name: SimpleNamespace(routed_experts_chunks=[]) for name in counts if name != "gone"}
    process = field.dividing(lambda *_: None)
    process(SimpleNamespace(request_states=states), came.outputs)
    assert [output.kv_transfer_params for output in came.outputs] == [None] * len(counts)
    at = 0
    for name, count in counts.items():
        if name in states:
            (chunk,) = states[name].routed_experts_chunks
            np.testing.assert_array_equal(chunk, rows[at : at + count])
            assert chunk.base is None, "a long request keeps nobody else's rows"
        at += count

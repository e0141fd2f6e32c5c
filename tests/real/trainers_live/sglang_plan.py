"""What miles and slime are asked, for whichever of both a test file names."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import updates
from live import OUTSIDE, STOCK, STOPS, WORDS, judged, judged_over_update, prompt, running, verdict
from safetensors.torch import load_file
from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang_rollouts import PAGE, POOL, RESPONSE, Rollouts, samples

ASKED = [prompt(seed, 100 + seed) for seed in range(4)]


def answers_and_prefix_hits(rollouts: Rollouts, home: Path, folder: Path, name: str, engine: str) -> None:
    """Answers, the same prompts again, whose KV is hit, and answers that a string ends; by its whole rollout."""
    first = samples(rollouts(rollouts.source(ASKED, folder)))
    verdict(name, engine, "answers", judged(home, first))
    again = rollouts(rollouts.source(ASKED, folder))
    assert all(sample.prefix_cache_info.cached_tokens >= 96 for sample in again)
    verdict(name, engine, "prefix hits", judged(home, samples(again)))
    stopped = samples(rollouts(rollouts.source(ASKED, folder, rollout_stop=STOPS)))
    ends = [WORDS[tokens[-1]] for _, tokens in stopped]
    assert all(any(stop in end for stop in STOPS) for end in ends), ends  # SGLang takes a part of a word, too
    verdict(name, engine, "stop strings", judged(home, stopped))


def kv_from_outside(rollouts: Rollouts, home: Path, folder: Path, name: str, engine: str) -> None:
    """Answers to prompts whose KV SGLang has copied to the host, and given up on the device: others have computed more
    tokens since than its pool has."""
    rollouts(rollouts.source(ASKED, folder, rollout_stop=None))
    others = [prompt(seed, 110) for seed in range(20, 28)]
    between = [samples(rollouts(rollouts.source(some, folder))) for some in (others[:4], others[4:])]
    assert sum(len(tokens) for answers in between for _, tokens in answers) > POOL
    again = rollouts(rollouts.source(ASKED, folder))
    assert all(sample.prefix_cache_info.cached_tokens >= 96 for sample in again)
    verdict(name, engine, OUTSIDE, judged(home, samples(again)))


def an_update_that_aborts(rollouts: Rollouts, homes: dict[str, Path], folder: Path, name: str, engine: str) -> None:
    """The steps of slime's own update: pause, which aborts what runs, flush, send, go on. What was aborted goes on
    later from its tokens, as slime's partial rollouts do: with the rows of the weights that compute them anew."""
    source = rollouts.source(ASKED, folder, rollout_stop=None)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(rollouts, source)
        address = f"{rollouts.engine.server_host}:{rollouts.engine.server_port}"
        while running(address) < len(ASKED):
            time.sleep(0.05)
        time.sleep(0.3)  # some of the tokens, and not all
        rollouts.engine.pause_generation()
        rollouts.engine.flush_cache()
        rollouts.put(updates.EMBEDDING, load_file(homes["B"] / "model.safetensors")[updates.EMBEDDING], "2")
        rollouts.engine.continue_generation()
        cut = asked.result(600)
    verdict(name, engine, "answers that an update aborted", judged(homes["A"], samples(cut)))
    aborted = [sample for sample in cut if sample.status is sample.Status.ABORTED]
    lengths = {sample.index: sample.response_length for sample in aborted}
    assert any(lengths.values()), cut
    rollouts.args.rollout_batch_size = rollouts.args.over_sampling_batch_size = len(aborted)
    source.add_samples([[sample] for sample in aborted])
    whole = rollouts(source)
    assert all(sample.response_length > lengths.pop(sample.index) for sample in whole)
    assert not lengths
    verdict(name, engine, "the same, gone on after the update", judged(homes["B"], samples(whole)))


def an_update_amid_answers(rollouts: Rollouts, homes: dict[str, Path], folder: Path, name: str, engine: str) -> None:
    """The steps of miles' own update, in its default mode: pause, which retracts what runs, send, go on.

    Each token's row is of the weights that it was sampled with; later ones are of the new weights, over all tokens.
    miles flushes, too, before it sends. A release of SGLang does not, while requests wait: no prompt here has a page to
    hit.
    """
    source = rollouts.source([prompt(seed, PAGE - 1) for seed in range(40, 44)], folder, rollout_stop=None)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(rollouts, source)
        address = f"{rollouts.engine.server_host}:{rollouts.engine.server_port}"
        while running(address) < 4:
            time.sleep(0.05)
        time.sleep(0.3)  # some of the tokens, and not all
        rollouts.engine.pause_generation(mode=rollouts.args.pause_generation_mode)
        rollouts.put(updates.EMBEDDING, load_file(homes["B"] / "model.safetensors")[updates.EMBEDDING], "2")
        rollouts.engine.continue_generation()
        pairs = samples(asked.result(600))
    tally, cuts = judged_over_update(homes["A"], homes["B"], pairs, again=True, least=PAGE - 1)
    lengths = [len(tokens) for _, tokens in pairs]
    assert STOCK or any(n - RESPONSE < cut < n - 1 for cut, n in zip(cuts, lengths, strict=True)), (cuts, lengths)
    verdict(name, engine, "weights updated amid answers", tally)
    rollouts.engine.flush_cache()
    verdict(name, engine, "after an update", judged(homes["B"], samples(rollouts(rollouts.source(ASKED, folder)))))


SPECS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


class Twice:
    """A parser of calls that takes the first two answers for a call: a model of random weights would never write one.
    miles makes one for each sample."""

    def __init__(self) -> None:
        self.calls = 2

    def has_tool_call(self, text: str) -> bool:
        return True

    def detect_and_parse(self, text: str, tools: object) -> StreamingParseResult:
        self.calls -= 1
        call = ToolCallItem(tool_index=0, name="look", parameters="{}")
        return StreamingParseResult(normal_text=text, calls=[call] if self.calls >= 0 else [])


async def look(_name: str, _parameters: object) -> str:
    """The tool."""
    return "t7 t11 t13 t17 t19"


def turns_with_a_tool(rollouts: Rollouts, home: Path, folder: Path, name: str, engine: str) -> None:
    """miles' own loop of several turns. An answer that a string ends is a call of the tool."""
    FunctionCallParser.ToolCallParserEnum["twice"] = Twice
    loop = f"{rollouts.package}.rollout.generate_hub.multi_turn.generate"
    tool = {"specs": f"{__name__}.SPECS", "function": f"{__name__}.look"}
    source = rollouts.source(
        [prompt(7, 40), prompt(8, 60)], folder, rollout_stop=STOPS, custom_generate_function_path=loop,
        generate_max_turns=3, generate_tool_specs_path=tool["specs"], generate_tool_call_parser="twice",
        generate_execute_tool_function_path=tool["function"], generate_multi_samples=False,
    )  # fmt: skip
    turns = rollouts(source)
    rollouts.args.custom_generate_function_path = None
    assert max(sum(1 for before, after in pairwise(sample.loss_mask) if after < before) for sample in turns) == 2
    verdict(name, engine, "three turns with a tool", judged(home, samples(turns)))

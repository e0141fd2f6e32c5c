"""transformers' continuous batching with the example's rows embedded, and a witness of the KV that each request ended
with."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from salted_moe import SaltedMoe, Verdict
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import RequestState
from waiting import GIVE_UP_S

import kvroute

PAGE = 8
EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_continuous_batching.py"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("transformers_continuous_batching", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example = load_example()


class Served:
    """An engine that runs, the rows embedded in it, and a witness of the KV that each finished request ended with."""

    def __init__(self, moe: SaltedMoe, embed: Callable[..., Any], new: int, returns: int, **config: Any) -> None:
        self.moe, self.seen = moe, Counter()
        self.finished: dict[str, tuple[list[int], Any]] = {}  # tokens that were computed, and their KV's salts
        generation = GenerationConfig(
            max_new_tokens=new, do_sample=returns > 1, num_return_sequences=returns, eos_token_id=-1, pad_token_id=0
        )
        options = {"page_size": PAGE, "use_cuda_graph": False, "use_async_batching": False, "seed": 0, **config}
        self.manager = moe.model.init_continuous_batching(generation, ContinuousBatchingConfig(**options))
        self.embedded = embed(self.manager, kvroute.Namespace("small", weights_version=1))
        engine = self.engine = self.embedded.engine
        self._passes, self._hold_at, self._until = 0, -1, lambda: True
        self._held = threading.Event()
        self._wrap(engine, "_generation_step", self._passing)
        self._wrap(engine.scheduler, "finish_request", self._finishing)
        self._wrap(engine.cache, "search_prefix_match", self._matching)
        self._wrap(self.embedded.allocator, "copy_blocks", self._copying)
        self._wrap(self.embedded.allocator.ledger, "register_new_hash", self._registering)

    def ask(self, prompts: Sequence[list[int]]) -> None:
        """All of them, to the end."""
        waiting = self.begin(prompts)
        while waiting:
            answer = self.manager.get_result(timeout=GIVE_UP_S)
            assert answer is not None, "the engine answers"
            assert answer.error is None, answer.error
            waiting.discard(answer.request_id)

    def begin(self, prompts: Sequence[list[int]]) -> set[str]:
        """The names of all requests, children too."""
        if not self.manager.is_running():
            self.manager.start()
        names = self.manager.add_requests([list(each) for each in prompts])
        children = range(self.manager.num_return_sequences - 1)
        return {*names, *(f"{name}__child#{i}" for name in names for i in children)}

    def hold(self, passes: int, until: Callable[[], bool]) -> None:
        """After this many further passes, begin no other until the condition holds; call this before any request."""
        self._held.clear()
        self._hold_at, self._until = self._passes + passes, until

    def held(self) -> None:
        assert self._held.wait(timeout=GIVE_UP_S), "the engine comes to that pass"

    def running(self, request: str) -> int:
        """How many tokens of the request are computed; 0 when it does not run."""
        state = self.engine.scheduler.active_requests.get(request)
        return state.current_len() if state is not None else 0

    def verdict(self) -> Verdict:
        """Of everything that has finished since the last verdict."""
        verdict = Verdict()
        for request, (tokens, salts) in self.finished.items():
            verdict.add(self.embedded.routes.pop(request), self.moe.expected(tokens, salts))
        self.finished.clear()
        assert not self.embedded.routes, "routes of requests that did not finish"
        return verdict

    def stop(self, **options: Any) -> None:
        self.manager.stop(**options)

    def _wrap(self, part: Any, method: str, around: Callable[..., Any]) -> None:
        inner = getattr(part, method)
        setattr(part, method, lambda *args, **kwargs: around(inner, *args, **kwargs))

    def _passing(self, forward: Callable[..., None], *args: Any) -> None:
        if self._passes == self._hold_at:
            self._held.set()
            while not self._until():
                time.sleep(0.002)
        self._passes += 1
        forward(*args)

    def _finishing(self, finish: Callable[[str], None], request: str) -> None:
        state: RequestState = self.engine.scheduler.active_requests[request]
        table = self.embedded.allocator.block_table.get(request)
        if table is None:
            self.seen["swapped" if state.is_cpu_offloaded else "soft reset"] += 1
        else:
            tokens = [*state.initial_tokens, *state.generated_tokens][: state.current_len()]
            self.finished[request] = tokens, self._salts(table, len(tokens)) if self.moe.salted else None
        finish(request)

    def _salts(self, table: list[int], count: int) -> Any:
        """Which pass made the KV: read from the engine's own cache tensor, through its own block table."""
        stride = self.embedded.allocator.block_physical_stride
        at = [table[i // PAGE] * stride + i % PAGE for i in range(count)]
        _, values = self.embedded.allocator._kv_token_views[0]
        return self.moe.salts(values[torch.tensor(at)])

    def _matching(self, match: Callable[..., int], *args: Any) -> int:
        self.seen["hit"] += (tokens := match(*args))
        return tokens

    def _registering(self, register: Callable[..., int | None], *args: Any) -> int | None:
        twin = register(*args)
        self.seen["duplicate"] += twin is not None
        return twin

    def _copying(self, copy: Callable[..., None], sources: list[int], targets: list[int]) -> None:
        self.seen["copied"] += len(sources)
        copy(sources, targets)


@contextmanager
def served(
    moe: SaltedMoe, embed: Callable[..., Any] = example.EmbeddedRoutes, new: int = 20, returns: int = 1, **config: Any
) -> Iterator[Served]:
    engine = Served(moe, embed, new, returns, **config)
    try:
        yield engine
    finally:
        if engine.manager.is_running():
            engine.stop()
        engine.manager.destroy()
        engine.embedded.close()


def prompts(lengths: Sequence[int], shared: int = 0, seed: int = 0) -> list[list[int]]:
    """Random tokens, the first ``shared`` of them the same in all."""
    rng = np.random.default_rng(seed)
    common = rng.integers(2, 128, shared).tolist()
    return [common + rng.integers(2, 128, n).tolist() for n in lengths]


def all_right(verdict: Verdict, due: int) -> None:
    assert verdict.due == due
    assert verdict.wrong == verdict.missing == 0, verdict
    assert verdict.close <= due // 50, verdict  # else nothing was judged

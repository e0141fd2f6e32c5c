"""Both ends of a connector under a scheduler that acts at random, as real ones may; clients judge their answers.

The engine here runs several requests at once: chunks, prefix hits (of blocks that the same step fills, too), rejected
drafts, preemption, aborts, keys that are used again, KV from outside, weights that change under running requests and
resets. What each slot holds is kept beside it: the tokens, and the weights that computed it. So every row of every
answer is known, and its version: rows are those that its tokens were sampled with.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from toy_engine import Toy, held
from toy_requests import TOKENS, row_of, seeded
from waiting import GIVE_UP_S

from cache_manager.errors import RowError
from kvroute.connector import Key, Tokens, routes
from kvroute.rollout import open_rollouts

BLOCKS, RUNNING_MAX, AGAIN = 14, 4, ("a", "b", "c")
HEADS = ([0, 1, 1, 0, 1, 0, 0, 1], [0, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0])


class Kv(NamedTuple):
    """The content of a slot."""

    prefix: tuple[int, ...]
    weights: int
    version: int | None  # as it was known when it was computed
    loaded: bool = False  # from outside: its rows may be missing


class Running:
    """A request, under the names that the connector asks for."""

    def __init__(self, request_id: str, key: str, tokens: list[int]) -> None:
        self.request_id, self.key, self.all_token_ids = request_id, key, tokens
        self.num_prompt_tokens, self.num_computed_tokens = len(tokens), 0
        self.table: list[int] = []
        self.admitted = False
        self.settled: list[Kv] = []  # the rows that its tokens were sampled with, up to its last preemption

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(TOKENS, len(self.all_token_ids) + 1, TOKENS)
        return [hashlib.sha256(bytes(self.all_token_ids[:end])).digest() for end in ends]


class Said(NamedTuple):
    """An answer, and the rows that are due."""

    key: str
    tokens: list[int]
    prompt: int
    due: list[Kv]
    told: Future[dict[str, Any]]
    aborted: bool = False  # its client has no handle
    lossy: bool = False  # all was forgotten while the worker was behind


class House:
    """An engine, its clients, and whoever changes its weights, who all do something at random by ``seed``."""

    settings: Mapping[str, Any] = MappingProxyType({})  # of the connector, beside the random ones
    scarce = False  # no spare blocks: rows of blocks that are given out too early are lost

    def __init__(self, seed: int, home: Path) -> None:
        self.random = pick = random.Random(seed)
        self.late, store, near = pick.random() < 0.6, pick.random() < 0.4, pick.random() < 0.5
        version = pick.choice([None, 0])
        url, reads = self.url(home, near=near)
        self.rollouts = open_rollouts(reads) if reads else None
        said: dict[str, Any] = {"rollouts": url, "weights_version": version, **self.settings}
        if store:
            said["store"] = f"file://{home}/rows"
        self.outside = dict[bytes, tuple[list[Kv], dict[str, torch.Tensor]]]() if store else None
        self.toy = Toy(late=self.late, blocks=BLOCKS, kept={} if store else None, **said)
        self.rows, self.worker = self.toy.scheduler, self.toy.worker
        self.rows.blocks_of = lambda name, first, last: self.running[name].table[first:last]
        self.running: OrderedDict[str, Running] = OrderedDict()
        self.free, self.refs, self.cached = list(range(BLOCKS)), Counter[int](), dict[bytes, int]()
        self.kv: dict[tuple[int, int], Kv] = {}
        self.weights, self.version, self.newest = 0, version, 0
        self.made, self.said = 0, list[Said]()
        self.go: threading.Event | None = None

    def lives(self, operations: int) -> None:
        """So many operations, most of them steps."""
        often = self.odds()
        for does in self.random.choices(list(often), list(often.values()), k=operations):
            getattr(self, does)()
            held_by = Counter(block for each in self.running.values() for block in each.table)
            assert +self.refs == held_by
            assert len(self.free) == BLOCKS - len(held_by)
        self.let_worker_go_on()
        self.collect()
        self.toy.settle()
        self.worker.blocks.assert_consistent()

    def url(self, home: Path, *, near: bool) -> tuple[str, str]:
        """The setting of where rollouts are left, in the answers if ``near``, and where they are read."""
        return ("response:", "") if near else (f"file://{home}/rollouts", f"file://{home}/rollouts")

    def odds(self) -> dict[str, int]:
        """How often each operation is chosen."""
        often = {"steps": 12, "arrives": 4, "ends": 3, "preempts": 2, "tries_again": 3, "collect": 1}
        return often | {"the_device_is_slow": 3, "weights_change": 2, "is_paused": 1, "forgets": 1}

    def close(self) -> None:
        self.let_worker_go_on()
        self.toy.close()
        if self.rollouts is not None:
            self.rollouts.close()

    # ---------------------------------------------------------------- the pool

    def _take(self, n: int) -> list[int] | None:
        if n > len(self.free):
            return None
        given, self.free = self.free[:n], self.free[n:]
        self.cached = {digest: block for digest, block in self.cached.items() if block not in given}
        self.refs.update(given)
        if given:
            self.rows.given(given)
        return given

    def _let_go(self, request: Running) -> None:
        for block in reversed(request.table):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)
        request.table = []

    def let_worker_go_on(self) -> None:
        if self.go is not None:
            self.go.set()
            self.go = None

    # ---------------------------------------------------------------- requests

    def arrives(self) -> None:
        """A request, whose client gives it a key that it never uses again, or one that it uses all the time."""
        if len(self.running) >= RUNNING_MAX:
            return
        pick = self.random
        tokens = pick.choice(HEADS)[: pick.randint(1, 8)] + pick.choices([0, 1], k=pick.randint(0, 5))
        self.made += 1
        request_id = f"r-{self.made}"
        request = Running(request_id, pick.choice(AGAIN) if pick.random() < 0.3 else request_id, tokens)
        self.running[request_id] = request
        self._admit(request)

    def _admit(self, request: Running) -> None:
        hashes, size = request.block_hashes, len(request.all_token_ids)
        most = (size - 1) // TOKENS
        local = next((i for i, each in enumerate(hashes[:most]) if each not in self.cached), most)
        there = self.outside or {}
        found = next((i for i, each in enumerate(hashes[local:most]) if each not in there), most - local)
        hit = [self.cached[each] for each in hashes[:local]]
        fresh = -(-size // TOKENS) - local
        if fresh + sum(not self.refs[block] for block in hit) > len(self.free):
            return
        taken = self.rows.matched(request, local * TOKENS, found * TOKENS, later=False)
        assert taken in range(0, found * TOKENS + 1, TOKENS)
        for block in hit:
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1
        request.table = hit + (self._take(fresh) or [])
        self.rows.admitted(request, list(request.table), taken)
        request.num_computed_tokens, request.admitted = local * TOKENS + taken, True
        loads = range(local, local + taken // TOKENS)
        self.steps(request, [(request, place) for place in loads])  # an admitted request computes in the same step

    def tries_again(self) -> None:
        for each in [each for each in self.running.values() if not each.admitted][:1]:
            self._admit(each)

    def steps(self, new: Running | None = None, loads: Sequence[tuple[Running, int]] = ()) -> None:
        """Some requests compute some tokens; those that have read all of theirs get one more, or drafts as well."""
        scheduled, drafts, pick = dict[str, int](), dict[str, tuple[list[int], int]](), self.random
        for name, request in self.running.items():
            if not request.admitted or (request is not new and pick.random() < 0.2):
                continue
            left = len(request.all_token_ids) - request.num_computed_tokens
            n = left if pick.random() < 0.7 else pick.randint(1, left)
            extra = pick.randint(0, 2) if n == left else 0
            need = -(-(request.num_computed_tokens + n + extra) // TOKENS) - len(request.table)
            given = self._take(max(0, need))
            if given is None:
                continue
            request.table += given
            scheduled[name] = n + extra
            if extra:
                drafts[name] = pick.choices([0, 1], k=extra), pick.randint(0, extra)
        if scheduled:
            self._step(scheduled, drafts, loads)

    def _step(
        self,
        scheduled: dict[str, int],
        drafts: dict[str, tuple[list[int], int]] | None = None,
        loads: Sequence[tuple[Running, int]] = (),
    ) -> None:
        meta, drafts = self.rows.step(scheduled, copies=self.copies()), drafts or {}
        if self.go is not None and self.toy.worker._behind._calls.qsize() > 8:  # type: ignore[union-attr]
            self.let_worker_go_on()
        self.worker.begin(meta)
        for request, place in loads:
            kv, pages = (self.outside or {})[request.block_hashes[place]]
            for name, page in pages.items():
                self.toy.kv[name][request.table[place]] = page
            for offset, each in enumerate(kv):
                self.kv[request.table[place], offset] = each._replace(loaded=True)
        at, chosen, prefixes = list[int](), list[Any](), list[tuple[int, ...]]()
        for name, n in scheduled.items():
            request = self.running[name]
            start = request.num_computed_tokens
            tokens = [*request.all_token_ids, *drafts.get(name, ((), 0))[0]]
            for i in range(start, start + n):
                prefix, block, offset = tuple(tokens[: i + 1]), request.table[i // TOKENS], i % TOKENS
                for layer in self.toy.layers:
                    page = self.toy.kv[f"layers.{layer}"]
                    random = seeded([*prefix, layer], self.weights)
                    page[block, :, offset] = torch.from_numpy(random.normal(size=(page.shape[1], 8)))
                self.kv[block, offset] = Kv(prefix, self.weights, self.version)
                at.append(block * TOKENS + offset)
                chosen.append(row_of(prefix, self.weights))
                prefixes.append(prefix)
        rows = np.stack(chosen)
        for layer, hook in enumerate(self.toy.hooks):
            hook(torch.from_numpy(rows[:, layer].copy()))
        self.toy.weigh(prefixes)
        self.worker.slots = torch.tensor(at)
        self.worker.end()
        assert not self.worker.failures()
        for name, n in scheduled.items():
            request, (drafted, good) = self.running[name], drafts.get(name, ([], 0))
            request.num_computed_tokens += n - len(drafted)
            known = min(request.num_computed_tokens, len(request.all_token_ids))
            full = min(known // TOKENS, len(request.block_hashes))
            if request.num_computed_tokens == len(request.all_token_ids):
                request.all_token_ids += drafted[:good]
                request.num_computed_tokens += good
                request.all_token_ids.append(self.random.randint(0, 1))
            for place in range(full):
                digest, block = request.block_hashes[place], request.table[place]
                if digest not in self.cached and block not in self.cached.values():
                    self.cached[digest] = block
                if self.outside is not None and digest not in self.outside:
                    pages = {name: page[block].clone() for name, page in self.toy.kv.items()}
                    self.outside[digest] = [self.kv[block, i] for i in range(TOKENS)], pages

    def copies(self) -> list[tuple[int, int]]:
        """What the engine copies before the step at hand, (source, target)."""
        return []

    def _settled(self, request: Running, stop: int) -> list[Kv]:
        now = [self.kv[request.table[i // TOKENS], i % TOKENS] for i in range(len(request.settled), stop)]
        return request.settled + now

    def _preempt(self, request: Running) -> None:
        self.rows.preempted(request)
        if request.num_prompt_tokens < len(request.all_token_ids):
            stop = min(len(request.all_token_ids) - 1, request.num_computed_tokens)
            request.settled = self._settled(request, stop)
        self._let_go(request)
        request.admitted, request.num_computed_tokens = False, 0

    def preempts(self) -> None:
        if admitted := [each for each in self.running.values() if each.admitted]:
            self._preempt(self.random.choice(admitted))

    def ends(self) -> None:
        """A request is done, or aborted: then its front end may have answered fewer tokens; rows are found by key."""
        begun = [each for each in self.running.values() if each.admitted or each.settled]
        if not begun:
            return
        request, cut = self.random.choice(begun), self.random.randint(0, 2)
        aborted = self.rollouts is not None and self.random.random() < 0.4
        tokens, prompt = list(request.all_token_ids), request.num_prompt_tokens
        stop = min(len(tokens) - 1, request.num_computed_tokens)
        due = self._settled(request, stop)
        ended = self.rows.forget(request.request_id)
        of = Tokens(tokens, prompt, aborted)
        told = self.rows.finished(Key(request.key, of_client=True), list(request.table), stop, of, ended=ended)
        assert told is not None
        self.is_over(request)
        self._let_go(request)
        del self.running[request.request_id]
        if aborted:
            tokens = tokens[: max(prompt, len(tokens) - cut)]
            due = due[: len(tokens) - 1]
        self.said.append(Said(request.key, tokens, prompt, due, told, aborted))

    def is_over(self, request: Running) -> None:
        """The request has ended, and still has its blocks."""

    def collect(self) -> None:
        """Judge what was answered."""
        self.let_worker_go_on()
        answers, self.said = self.said, []
        for said in answers:
            choice = {
                "index": 0,
                "prompt_token_ids": said.tokens[: said.prompt],
                "token_ids": said.tokens[said.prompt :],
            }
            told = said.told.result(GIVE_UP_S)
            answer = {"id": "r", "choices": [choice], "kv_transfer_params": None if said.aborted else told}
            again = said.key in AGAIN  # perhaps of another request with this prompt: then none are found
            short = len(said.due) < len(said.tokens) - 1  # aborted before all tokens were computed
            wait_s = 0.05 if again or short else 5
            with self.may_lack(said):
                try:
                    found = self.found(answer, rollouts=self.rollouts, key=said.key, wait_s=wait_s)
                except RowError:
                    if (again and self.rollouts is not None) or (short and said.aborted):
                        continue
                    raise
                self._judge(said, found)

    def found(self, answer: dict[str, Any], **where: Any) -> Any:
        """The routes of an answer."""
        return routes(answer, **where)

    def may_lack(self, said: Said) -> AbstractContextManager[None]:
        """Around the judgement of an answer: where it may have no rows at all."""
        return nullcontext()

    def _judge(self, said: Said, found: Any) -> None:
        assert not found.start
        assert found.stop <= len(said.due)
        assert said.aborted or found.stop == len(said.due)
        for i, kv in enumerate(said.due[: found.stop]):
            known = found.known[i]
            right = (found.ids[i] == row_of(kv.prefix, kv.weights)[list(found.layer_ids)]).all(1)
            assert right[known].all(), f"{said.key}: a wrong row at {i}, due {kv}"
            assert known.all() or kv.loaded or said.lossy or self.scarce, (
                f"{said.key}: a row is missing at {i}, due {kv}"
            )
        for start, stop, version in found.weights_versions:
            for kv in said.due[start:stop]:
                assert kv.weights == version == kv.version, f"{said.key}: a false version in [{start}, {stop})"
        labelled = {i for start, stop, _ in found.weights_versions for i in range(start, stop)}
        for i, kv in enumerate(said.due[: found.stop]):
            known = kv.version is not None and found.valid[i]
            assert i in labelled or not known or kv.loaded, f"{said.key}: no version at {i}, due {kv}"

    # ---------------------------------------------------------------- weights

    def weights_change(self) -> None:
        """Weights change under running requests; their KV is kept."""
        self._other_weights()
        self.version = self.newest if self.random.random() < 0.6 else None
        self.rows.weights.changed(*([] if self.version is None else [self.version]))

    def _other_weights(self) -> None:
        self.newest += 1
        self.weights = self.toy.weights = self.newest

    def is_paused(self) -> None:
        named = self.random.random() < 0.5
        self.rows.weights.paused()
        if named or self.random.random() < 0.6:
            self._other_weights()
        if named:
            self.rows.weights.changed(self.weights)
        self.rows.weights.resumed()
        self.version = self.weights if named else None

    def forgets(self) -> None:
        """All KV is forgotten, after running requests have lost their blocks."""
        if sure := self.random.random() < 0.5:
            self.let_worker_go_on()
            self.worker.settle()
        elif self.late:
            self.said = [each._replace(lossy=True) for each in self.said]
        for request in list(self.running.values()):
            if request.admitted:
                self._preempt(request)
            if self.late and not sure:
                request.settled = [each._replace(loaded=True) for each in request.settled]
        self.cached.clear()
        version = self.version if self.rows.weights._sure else None
        self.rows.reset()
        self.version = version
        if self.random.random() < 0.5:
            self._other_weights()
            self.version = self.newest
            self.rows.weights.changed(self.newest)

    # ---------------------------------------------------------------- the worker

    def the_device_is_slow(self) -> None:
        """The worker's host work waits until its result is needed."""
        if self.go is not None:
            self.let_worker_go_on()
        elif self.late:
            self.go = held(self.toy)


__all__ = ["House", "Kv", "Running"]

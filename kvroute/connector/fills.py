"""Which blocks a step fills, so that they are stored, and of which tokens a block's rows went by KV from outside. Pure.

A request that computes one token a step is looked at when its block can be full, and not in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvroute.connector.tickets import PromptRequest


class Request(PromptRequest, Protocol):
    """A request as its scheduler has it, under vLLM's names; another engine's has properties of these names.

    Its tokens are asked for where rows are lent or fetched, and where it loses its blocks.
    """

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Of its full blocks in order, one each, or several: of equal parts of a block. Each stands for all tokens up
        to the end of its block or part."""
        ...


@dataclass(slots=True)
class _Filling:
    request: Request
    done: int  # leading tokens, of whole blocks, whose rows were hit, are loaded or are stored
    loaded: bool  # some of its KV comes from outside, and may fail to: it is looked at in every step
    due: int = 0  # the step in which it is looked at


class Fills:
    """Of ``blocks`` blocks of ``size`` tokens and with ``hashes`` hashes each; ``blocks_of`` is that of
    :class:`SchedulerRows`."""

    def __init__(
        self,
        blocks: int,
        size: int,
        blocks_of: Callable[[str, int, int], list[int]],
        hashes: int = 1,
    ) -> None:
        self._size = size
        self._hashes = hashes
        self._blocks_of = blocks_of
        self._step = 0
        self._of: dict[str, _Filling] = {}
        self._due: dict[int, list[str]] = {}  # requests, by step
        self._lives: NDArray[np.int64] = np.zeros(blocks, np.int64)  # of blocks whose rows went by their KV,
        self._front: NDArray[np.int64] = np.zeros(blocks, np.int64)  # and of how many of their tokens
        self._came = False  # whether there were any

    def admitted(self, request: Request, done: int, *, loaded: bool) -> None:
        """The request has blocks now, of which the first ``done`` tokens were hit here or are ``loaded``."""
        filling = self._of[request.request_id] = _Filling(request, done, loaded)
        self._look_at(filling, self._step + 1)

    def ended(self, name: str) -> None:
        self._of.pop(name, None)

    def by_kv(self, blocks: Sequence[int], lives: NDArray[np.int64]) -> None:
        """Rows come for these blocks, by their KV."""
        self._lives[blocks], self._front[blocks], self._came = lives, self._size, True

    def copied(
        self,
        source: int,
        target: int,
        rows: int,
        lives: NDArray[np.int64],
    ) -> None:
        """The first ``rows`` of a block are copied to another one; ``lives [2]`` are theirs."""
        came_by_kv = self._lives[source] == lives[0]
        self._lives[target], self._front[target] = lives[1], min(self._front[source], rows) if came_by_kv else 0

    def slots_by_kv(
        self,
        slots: NDArray[np.int64],
        lives: NDArray[np.int64],
    ) -> NDArray[np.bool_] | None:
        """Which of ``slots [n]``, whose blocks are in these ``lives [n]``, have rows that came by KV; ``None``: no row
        has ever come."""
        if not self._came:
            return None
        blocks = slots // self._size
        front = np.where(self._lives[blocks] == lives, self._front[blocks], 0)
        return slots % self._size < front

    def step(
        self,
        scheduled: Mapping[str, int],
        *,
        stores: bool,
    ) -> list[tuple[Request, int, int]]:
        """The requests and their blocks ``[first, last)`` that a step completes, of so many tokens ``scheduled`` each.

        Drafts that may fail have no hashes, and so are not among them. Where the step ``stores`` nothing they come
        later, with those of another one; so they do after a call that has raised.
        """
        step = self._step + 1
        size = self._size
        names: Iterable[str] = self._due.get(step, ())
        # in the order of the step: a request may have hit blocks that one before it fills
        if max(scheduled.values(), default=0) > 1:
            due = set(names)
            names = [*(name for name, n in scheduled.items() if n > 1 or name in due), *names]
        filled: list[tuple[Request, int, int]] = []
        looked: list[tuple[_Filling, int, int]] = []
        for name in dict.fromkeys(names):
            filling = self._of.get(name)
            if filling is None:
                continue
            n = scheduled.get(name, 0)
            computed = filling.request.num_computed_tokens
            done = filling.done
            wait = 1
            if n and stores:
                # tokens are computed again after KV has failed to load; else nothing is done until a block is full
                if not 0 <= computed - done < size - n and (full := self._filled(filling, computed, n)):
                    filled.append(full)
                    done = full[2] * size
                wait = 1 if filling.loaded else max(1, done + size - computed - n)
            looked.append((filling, done, step + wait))
        self._step = step
        self._due.pop(step, None)
        for filling, done, due_at in looked:
            filling.done = done
            self._look_at(filling, due_at)
        return filled

    def _look_at(self, filling: _Filling, step: int) -> None:
        if not self._step < filling.due <= step:  # else it is looked at before
            filling.due = step
            self._due.setdefault(step, []).append(filling.request.request_id)

    def _filled(
        self,
        filling: _Filling,
        computed: int,
        n: int,
    ) -> tuple[Request, int, int] | None:
        size = self._size
        request = filling.request
        done = filling.done
        if computed < done:  # it had been loaded, and is computed here now
            for i, block in enumerate(self._blocks_of(request.request_id, computed // size, done // size)):
                self._front[block] = min(self._front[block], 0 if i else computed % size)
        first = min(done, computed) // size
        last = min((computed + n) // size, len(request.block_hashes) // self._hashes)
        return (request, first, last) if first < last else None


__all__ = ["Fills", "Request"]

"""Which forward pass a recomputation belongs to, in whatever order backward passes run.

Autograd numbers the nodes of a graph in the order in which a thread makes them. A recomputation runs inside the
backward pass of a node that its forward pass has made: that of a checkpoint (reentrant), or of an operation in one (not
reentrant). So the node's number lies between those of the beginning and the end of its forward pass, and says which of
them is computed again, without a look at the order, at token counts or at values.

A recomputation inside a recomputation has nodes that the backward pass has made. Where all micro-batches but one are
over it is told from theirs; Megatron's adapter refuses a reentrant one in a reentrant one. **Not told apart**: one that
is not reentrant inside a reentrant one, while several micro-batches of one Megatron schedule wait for their backward
passes; it would take the rows of the last one. Megatron-core nests no checkpoints so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from kvroute.replay.rows import ReplayError

PASSES_MAX: Final = 1024
"""Replays of a router that are over and are known one by one; older ones, with what ran between them, are one."""

Model = nn.Module | Sequence[nn.Module]
"""A model, or the chunks of a virtual pipeline."""

_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
_node_of_backward: Callable[[], Any] = torch._C._current_autograd_node


class Pass:
    """The forward passes of one router with one micro-batch's rows: the numbers ``[start, stop)`` of their nodes."""

    __slots__ = ("ids", "over", "start", "stop")

    def __init__(self, ids: torch.Tensor | None) -> None:
        self.ids = ids  # [tokens, top_k]
        self.start = _next_node()
        self.stop = self.start
        self.over = False


class Passes:
    """The replayed forward passes of one router, in order."""

    def __init__(self) -> None:
        self.replaying = False
        """Whether a replay has begun that is not over."""
        self.current: Pass | None = None
        """The pass to which forward passes belong now."""
        self._passes: list[Pass] = []
        self._thread = 0

    def begin(self, ids: torch.Tensor | None = None) -> None:
        """From here on, forward passes are those of another micro-batch, with the experts ``ids`` ``[tokens, top_k]``.

        They and this call have to be in one thread: each thread numbers its nodes by itself.
        """
        self.end()
        self._thread = threading.get_ident()
        self.replaying = True
        self.current = Pass(ids)

    def end(self) -> None:
        """From here on, forward passes belong to no micro-batch; the rows stay for recomputations."""
        if self.current is not None:
            self.current.stop = _next_node()
            if self.current.start < self.current.stop:  # without a node nothing of it can be computed again
                self._passes.append(self.current)
            self.current = None

    def finish(self) -> None:
        """The replay is over: its rows are forgotten, and a recomputation of its passes is an error from here on."""
        self.end()
        self.replaying = False
        for forward in self._passes:
            forward.ids = None
            forward.over = True
        while len(self._passes) > PASSES_MAX:
            self._passes[1].start = self._passes[0].start
            del self._passes[0]

    def recomputed(self, where: str) -> Pass | None:
        """The pass that is being computed again; None in a forward pass, and if nothing was replayed.

        :class:`ReplayError` names ``where`` if that pass had no rows although others have, or its replay is over.
        """
        node = _node_of_backward()
        if node is None:
            if self.replaying and threading.get_ident() != self._thread:
                wanted = "forward passes in the thread that gave the rows"
                raise ReplayError(where, wanted, threading.current_thread())
            return None
        number = node._sequence_nr()
        if self.current is not None and number >= self.current.start:
            return self.current
        for forward in reversed(self._passes):
            if forward.start <= number < forward.stop:
                if forward.over:
                    wanted = "a backward pass inside the replay of its forward pass"
                    got = "one after it, which computes again without its rows"
                    raise ReplayError(where, wanted, got)
                return forward
        if self.replaying:
            wanted = "a recomputation of a forward pass that had rows"
            got = "one that had none, or a recomputation inside a recomputation"
            raise ReplayError(where, wanted, got)
        return None


_PASSES: WeakKeyDictionary[nn.Module, Passes] = WeakKeyDictionary()


def passes_of(router: nn.Module, before: Callable[[nn.Module, tuple[Any, ...]], None]) -> Passes:
    """The passes of ``router``, before each of whose forward passes ``before`` is called from now on.

    That stays so when a replay is over: a recomputation that comes too late is then seen. A copy of the router is
    another router.
    """
    passes = _PASSES.get(router)
    if passes is None:
        passes = _PASSES[router] = Passes()
        router.register_forward_pre_hook(before)
    return passes


def known_passes(router: nn.Module) -> Passes | None:
    """The passes of ``router``; None if nothing was replayed in it, as in a copy of a router."""
    return _PASSES.get(router)


@contextmanager
def one_pass(routers: Mapping[int, nn.Module]) -> Iterator[None]:
    """Within the block, forward passes of ``routers``, by layer, and their recomputations are those of one micro-batch.

    A recomputation of the block's passes behind it, and one of other passes inside it, raise :class:`ReplayError`.
    """
    passes = [passes_of(router, _Before(layer)) for layer, router in routers.items()]
    try:
        for router_passes in passes:
            router_passes.begin()
        yield
    finally:
        for router_passes in passes:
            router_passes.finish()


class _Before:
    """Looks before a router's forward pass whether it is a recomputation that belongs here."""

    def __init__(self, layer: int) -> None:
        self._where = f"router of layer {layer}"

    def __call__(self, router: nn.Module, _inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        passes = known_passes(router)
        if passes is not None:
            passes.recomputed(self._where)

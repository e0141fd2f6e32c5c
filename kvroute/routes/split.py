"""Which positions and layers one rank of a trainer has, with Megatron's cuts; pure arithmetic.

The order is fixed. Every sequence is padded at its end to a multiple of ``align``. Context parallelism cuts each one
into ``2 cp`` chunks of which rank ``r`` takes chunks ``r`` and ``2 cp - 1 - r`` (zigzag: so that causal attention costs
every rank the same), or takes the ``r``-th part of all sequences end to end (contiguous). Every rank's buffer is padded
to a multiple of ``tail_align``; with contiguous cuts the padding comes after the last sequence and before the cut, as
in slime. Sequence parallelism gives each tensor-parallel rank an equal part of that. Pipeline parallelism cuts layers:
each stage sees its own, dense ones counted. Expert parallelism cuts nothing: ids name experts of the whole model.

A cut is a list of spans, so a rank can ask a store for just its positions and its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, get_args

from cache_manager.errors import InvalidInputError
from kvroute.checks import whole

Cut = Literal["zigzag", "contiguous"]

TAIL: Final = -1
"""The ``sequence`` of a span that is padding of the whole buffer."""


class Shard(NamedTuple):
    """Positions ``[start, stop)`` of sequence number ``sequence``; those after its tokens are padding."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Split:
    """The sizes of a trainer's parallel groups and one rank's place in each.

    ``sp`` says whether sequence parallelism is on: each of ``tp`` ranks then holds its part of the tokens. Every
    sequence is padded to a multiple of ``align``; the default is ``tp * cp``, twice that for zigzag with ``cp > 1``, as
    in verl and SkyRL (slime: ``2 * cp`` if ``cp > 1``, and ``tail_align=tp * data_pad_size_multiplier``). Pipeline
    stages have equal shares of the layers; a rank with another share passes its ``layers``.
    """

    tp: int = 1
    tp_rank: int = 0
    cp: int = 1
    cp_rank: int = 0
    sp: bool = False
    pp: int = 1
    pp_rank: int = 0
    layout: Cut = "zigzag"
    align: int | None = None
    tail_align: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "pp"):
            size = whole(name, getattr(self, name), 1)
            rank = getattr(self, f"{name}_rank")
            if whole(f"{name}_rank", rank) >= size:
                raise InvalidInputError(f"{name}_rank", f"0 to {size - 1}", rank)
        for name, size in (("tail_align", self.tail_align), ("align", 1 if self.align is None else self.align)):
            whole(name, size, 1)
        if not isinstance(self.sp, bool):
            raise InvalidInputError("sp", "True or False", repr(self.sp))
        if self.layout not in get_args(Cut):
            raise InvalidInputError("layout", "zigzag or contiguous", repr(self.layout))

    @property
    def sequence_align(self) -> int:
        """Every sequence of a packed batch is padded to a multiple of this."""
        zigzag = self.layout == "zigzag" and self.cp > 1
        return self.align or self.tp * self.cp * (1 + zigzag)

    # ---------------------------------------------------------------- layers

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The layer ids, of ``num_layers``, of this pipeline stage; all for ``pp=1``.

        >>> Split(pp=2, pp_rank=1).layers(8)
        (4, 5, 6, 7)
        """
        if num_layers % self.pp:
            wanted = f"a divisor of {num_layers} layers; else say which layers there are"
            raise InvalidInputError("pp", wanted, self.pp)
        size = num_layers // self.pp
        return tuple(range(self.pp_rank * size, (self.pp_rank + 1) * size))

    # ---------------------------------------------------------------- positions

    def packed(self, tokens: Sequence[int]) -> list[Shard]:
        """This rank's part of a packed batch of sequences of ``tokens`` tokens, in order.

        >>> Split(cp=2).packed([5, 3])
        [Shard(sequence=0, start=0, stop=2), Shard(sequence=0, start=6, stop=8), Shard(sequence=1, start=0, stop=1), \
Shard(sequence=1, start=3, stop=4)]
        """
        for i, count in enumerate(tokens):
            whole(f"tokens of sequence {i}", count)
        align = self.sequence_align
        padded = [-(-n // align) * align for n in tokens]
        if self.cp == 1:
            shards = [Shard(i, 0, n) for i, n in enumerate(padded) if n]
        elif self.layout == "zigzag":
            shards = [Shard(i, a, b) for i, n in enumerate(padded) for a, b in self._zigzag(n, f"sequence {i}")]
        else:
            total = sum(padded)
            part = -(-total // (self.cp * self.tail_align)) * self.tail_align
            every = [Shard(i, 0, n) for i, n in enumerate(padded) if n]
            every += [Shard(TAIL, 0, part * self.cp - total)] if part * self.cp > total else []
            shards = _cut(every, part * self.cp_rank, part * (self.cp_rank + 1))
        tail = -count_places(shards) % self.tail_align
        if tail:
            shards.append(Shard(TAIL, 0, tail))
        return self._scattered(shards)

    def columns(self, width: int) -> list[Shard]:
        """This rank's columns of a padded batch ``[batch, width]``, as shards of a sequence 0."""
        chunks = 1 if self.cp == 1 else self.cp * (1 + (self.layout == "zigzag"))
        if whole("width", width) % chunks:
            wanted = f"a multiple of {chunks}, for cp={self.cp} with {self.layout} cuts"
            raise InvalidInputError("width", wanted, width)
        return replace(self, align=1, tail_align=1).packed([width])

    def _zigzag(self, padded: int, subject: str) -> list[tuple[int, int]]:
        if padded % (2 * self.cp):
            wanted = f"a padded length that is a multiple of 2 cp = {2 * self.cp}"
            raise InvalidInputError(subject, wanted, padded)
        chunk = padded // (2 * self.cp)
        chunks = (self.cp_rank, 2 * self.cp - 1 - self.cp_rank)
        return [(c * chunk, (c + 1) * chunk) for c in chunks] if chunk else []

    def _scattered(self, shards: list[Shard]) -> list[Shard]:
        """The part of ``shards`` that sequence parallelism leaves to this tensor-parallel rank; neighbours joined."""
        if self.sp and self.tp > 1:
            total = count_places(shards)
            if total % self.tp:
                wanted = f"a multiple of tp={self.tp}; see tail_align"
                raise InvalidInputError("local tokens", wanted, total)
            part = total // self.tp
            shards = _cut(shards, part * self.tp_rank, part * (self.tp_rank + 1))
        if len(shards) < 2:
            return shards
        joined: list[Shard] = []
        for shard in shards:
            if joined and (joined[-1].sequence, joined[-1].stop) == shard[:2]:
                shard = joined.pop()._replace(stop=shard.stop)
            joined.append(shard)
        return joined


def count_places(shards: Sequence[Shard]) -> int:
    """How many positions ``shards`` have together."""
    return sum([stop - start for _, start, stop in shards])


def _cut(shards: Sequence[Shard], start: int, stop: int) -> list[Shard]:
    """The places ``[start, stop)`` of ``shards`` laid end to end."""
    cut = []
    place = 0
    for sequence, first, last in shards:
        a = max(start, place)
        b = min(stop, place + last - first)
        if a < b:
            cut.append(Shard(sequence, first + a - place, first + b - place))
        place += last - first
    return cut

"""What a trainer's routers used of the rows that were due, counted: values alone, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvroute.replay.rows import ReplayError


@dataclass(frozen=True, slots=True)
class Use:
    """What the router of one layer did with one micro-batch. Counts by sample are in the order of ``samples``."""

    micro_batch: int
    """Counted from 0 in the order in which rows became due."""
    layer: int
    """Counted from 0 over the whole model."""
    samples: tuple[int | None, ...]
    """Numbers of samples within the micro-batch; None for tokens whose sample is not known, and for padding."""
    due: tuple[int, ...]
    """Tokens of each sample that have a row: the router has to use its experts."""
    taken: tuple[int, ...]
    """Of these, the tokens that every forward pass sent to the experts of their rows; 0 without a forward pass."""
    repeated: tuple[int, ...]
    """Of these, the tokens that every recomputation sent there; 0 without a recomputation."""
    passes: int
    """Forward passes of this router."""
    recomputations: int
    """Times that a backward pass computed this router again."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that was due and was not used, or a pass for which nothing was due.

    ``layer``, ``micro_batch`` and ``sample`` are None where they are not known, or where it concerns all of them.
    """

    layer: int | None
    micro_batch: int | None
    sample: int | None
    wanted: str
    got: str

    @property
    def where(self) -> str:
        """Such as ``micro-batch 1 layer 3 sample 0``."""
        places = (("micro-batch", self.micro_batch), ("layer", self.layer), ("sample", self.sample))
        return " ".join(f"{name} {number}" for name, number in places if number is not None) or "receipt"


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the routers of one rank used between the beginning of a watch and the call that made this receipt."""

    layers: tuple[int, ...]
    """The layers whose routers were watched; none in a pipeline stage without routers."""
    uses: tuple[Use, ...]
    """By micro-batch, then by layer."""
    gaps: tuple[Gap, ...]
    """In the same order; passes for which nothing was due come last."""

    @property
    def due(self) -> int:
        """Rows that were due, over all layers and micro-batches."""
        return sum(sum(use.due) for use in self.uses)

    @property
    def taken(self) -> int:
        """Of these, the rows that the routers used in every forward pass."""
        return sum(sum(use.taken) for use in self.uses)

    @property
    def recomputations(self) -> int:
        """Recomputations of a router, over all layers and micro-batches."""
        return sum(use.recomputations for use in self.uses)

    def check(self) -> None:
        """Raise :class:`ReplayError` that names the first gap: micro-batch, layer, sample, what was wanted and got."""
        for gap in self.gaps:
            raise ReplayError(gap.where, gap.wanted, gap.got)

"""vLLM's draft passes: which one reads the tokens of a step, and with which token each.

``propose`` of vLLM's proposers runs the draft's model several times a step. The first pass reads the step's tokens, at
their slots, each with the token behind it; later ones read drafts. The law: a router's hook takes the first call in a
proposal, and none outside one, as of a warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

import torch

from cache_manager.errors import ConfigError
from kvroute.connector.mtp import MtpIds
from kvroute.integrations.vllm.versions import lacking

PROPOSER: Final = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
PROPOSER_NAMES: Final = {PROPOSER: "propose input_ids", "vllm.forward_context": "get_forward_context"}
"""What is taken or replaced in vLLM for rows of an MTP layer alone."""


@dataclass(slots=True)
class Proposal:
    """A call of ``propose`` that is under way."""

    proposer: Any
    read: bool = False  # the first pass has called the router


_under_way: list[Proposal] = []


@contextmanager
def proposing(proposer: Any) -> Iterator[None]:
    """The ``proposer`` drafts meanwhile."""
    _under_way.append(Proposal(proposer))
    try:
        yield
    finally:
        _under_way.pop()


def follow_drafts() -> None:
    """Have vLLM's proposers say when they draft, once a process. Raises :class:`ConfigError` that lists what this
    release lacks, before anything is hooked."""
    absent = list(lacking(PROPOSER_NAMES))
    if absent:
        raise ConfigError("settings.mtp", "a release of vLLM whose drafts were judged: 0.32", f"none of {absent}")
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # type: ignore[import-not-found]

    propose = SpecDecodeBaseProposer.propose
    if hasattr(propose, "__wrapped__") and getattr(propose, "follows_drafts", False):
        return

    @wraps(propose)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        with proposing(self):
            return propose(self, *args, **kwargs)

    followed.follows_drafts = True  # type: ignore[attr-defined]
    SpecDecodeBaseProposer.propose = followed


def mtp_hook(mtp: MtpIds) -> Callable[[torch.Tensor], None]:
    """The hook of the MTP layer's router: its ids ``[tokens, top_k]`` in the first pass of a proposal go to ``mtp``."""

    def keep(ids: torch.Tensor) -> None:
        from vllm.forward_context import get_forward_context  # type: ignore[import-not-found]

        if not _under_way or _under_way[-1].read:
            return
        proposal = _under_way[-1]
        proposal.read = True
        slots = get_forward_context().slot_mapping
        if isinstance(slots, dict) and slots:
            tokens = len(ids)
            own_slots = next(iter(slots.values()))[:tokens]
            mtp.keep(ids, own_slots, proposal.proposer.input_ids[:tokens])

    return keep


__all__ = ["PROPOSER_NAMES", "follow_drafts", "mtp_hook", "proposing"]

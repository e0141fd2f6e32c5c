"""What the servers are asked: JSON bodies, checked before anything is done with them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cache_manager.errors import InvalidInputError
from paged_engine import text
from paged_engine.request import SAMPLES_MAX, Request
from paged_engine.sequence import Handover

DRAW: Final = "completion"
"""What sampling noise depends on beside the seed: the same seed draws the same tokens on every server."""
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("top_p", "best_of"), (1,)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
    **dict.fromkeys(("logit_bias", "stream_options"), ({},)),
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
    "stop": ("", []),
}
"""OpenAI's parameters that nothing is done with, and their values (or null) that ask for nothing."""


class Handed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What prefill answers when it has begun, and a request for decode has as ``handover``.

    ``transfer`` is 32 hex digits, or null where the blocks could not be lent.
    """

    transfer: str | None
    address: str
    model: str
    weights_version: int
    prompt_tokens: int

    def taken(self, mine: Handed, prefills: tuple[str, ...]) -> tuple[Handover | None, str]:
        """What decode takes over, or none and why it computes the prompt itself. ``mine``: what decode would say.

        Raises :class:`InvalidInputError` for one that is not of this request, or of none of the ``prefills``.
        """
        if self.transfer is None:
            return None, "computed here: prefill could not lend it"
        if self.address not in prefills:
            known = " or ".join(prefills) or "none: this decode has no --prefill"
            raise InvalidInputError("handover.address", known, repr(self.address)[:80])
        if self.prompt_tokens != mine.prompt_tokens:
            raise InvalidInputError("handover.prompt_tokens", mine.prompt_tokens, self.prompt_tokens)
        if len(self.transfer) != 32 or set(self.transfer) - set("0123456789abcdef"):
            raise InvalidInputError("handover.transfer", "32 hex digits", repr(self.transfer)[:80])
        for name in ("model", "weights_version"):  # an update that one of the two has not seen yet
            if (wanted := getattr(mine, name)) != (got := getattr(self, name)):
                return None, f"computed here: {name}: wanted {wanted}, got {got}"
        return Handover(bytes.fromhex(self.transfer), self.address), ""


class Completion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request, as OpenAI has it; from ``ignore_eos`` on the keys are vLLM's and kvroute's own."""

    prompt: str | list[int]
    model: str | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    seed: int = 0
    n: int = 1
    stream: bool = False
    user: str | None = None
    ignore_eos: bool = False
    return_routed_experts: bool = False
    handover: Handed | None = None

    def request(self, request_id: str, model: str) -> Request:
        """What the engine is asked; :class:`InvalidInputError` names the field. A long text takes a while."""
        if self.model not in (None, model):
            raise InvalidInputError("model", model, repr(self.model))
        prompt = text.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt
        if not prompt:
            raise InvalidInputError("prompt", "at least 1 token", 0)
        if wrong := [token for token in prompt if not 0 <= token < text.VOCAB_SIZE]:
            raise InvalidInputError("prompt", f"token ids in [0, {text.VOCAB_SIZE})", wrong[0])
        for name, low, high in (("max_tokens", 1, 1 << 31), ("n", 1, SAMPLES_MAX), ("seed", 0, (1 << 63) - 1)):
            if not low <= getattr(self, name) <= high:
                raise InvalidInputError(name, f"{low} to {high}", getattr(self, name))
        if not 0.0 <= self.temperature <= 100.0:
            raise InvalidInputError("temperature", "a number from 0 to 100", self.temperature)
        stops = frozenset() if self.ignore_eos else frozenset({text.END})
        sampled = {"n": self.n, "temperature": self.temperature, "seed": self.seed}
        return Request(request_id, tuple(prompt), self.max_tokens, stop_tokens=stops, draw=DRAW, **sampled)  # type: ignore[arg-type]


def parse(body: bytes) -> Completion:
    """The request that ``body`` is. :class:`InvalidInputError` says in one line what is wrong."""
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
        for name in NEUTRAL.keys() & given.keys():
            if (value := given.pop(name)) is not None and value not in NEUTRAL[name]:
                raise InvalidInputError(name, " or ".join(map(repr, (*NEUTRAL[name], None))), repr(value)[:80])
        return msgspec.convert(given, Completion)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError("body", "a completion as JSON", str(error)[:200]) from error


__all__ = ["DRAW", "Completion", "Handed", "parse"]

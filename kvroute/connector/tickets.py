"""The scheduler's part of rows that cross to another engine: which are lent and fetched, and the tickets in answers.

A *ticket* in prefill's answer tells decode where the rows are, ``kv_transfer_params["kvroute"]["transfer"]`` in vLLM:
it goes beside the inner connector's parameters, on the same way. It names the KV that these parameters bring, so that
rows never come beside KV of another computation of the same prompt.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, Protocol

import msgspec
from numpy.typing import NDArray

from kvroute.routes.token_hash import token_hash

TRANSFER: Final = "transfer"
"""The ticket's key in the data beside an answer."""
MIXED: Final = "prefill's weights have changed and its KV was kept: its rows have no one name"
NO_TICKET: Final = "prefill's answer has no ticket for its rows: is kvroute there, with the same carrier?"

UNNAMED: Final[Mapping[str, str]] = MappingProxyType({})
"""The names of KV whose connector gives it none."""

MissingSpan = tuple[int, int, str]
"""Positions ``[start, stop)`` whose rows are missing, and why."""


_Text = Annotated[str, msgspec.Meta(max_length=256)]
"""It comes back through a client, and goes into reasons and logs."""


class Ticket(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the rows of a prompt are lent; JSON. With ``why`` nothing is lent."""

    id: _Text = ""  # of the transfer, 16 bytes as hex
    address: _Text = ""  # where prefill's worker lends
    tokens: int = 0  # number of the prompt's tokens,
    digest: _Text = ""  # and their hash, as hex
    kv: dict[_Text, _Text] = {}  # what names prefill's KV among the inner connector's parameters
    why: _Text = ""


@dataclass(frozen=True, slots=True)
class Lend:
    """To the worker: the step fills these blocks of a prompt, from its ``first`` on; ``tokens`` from their start."""

    transfer: bytes
    first: int
    blocks: list[int]
    lives: list[int]
    tokens: int
    last: bool


@dataclass(frozen=True, slots=True)
class Fetch:
    """To the worker: KV comes into these blocks of a request, its ``first`` and on; this transfer brings their rows."""

    request: str
    transfer: bytes
    address: str
    first: int
    blocks: list[int]
    lives: list[int]
    tokens: int


class PromptRequest(Protocol):
    """The part of a request that is read here."""

    request_id: str
    num_computed_tokens: int

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...


@dataclass(slots=True)
class _Lent:
    request: PromptRequest
    transfer: bytes
    blocks: int = 0  # lent so far
    whole: bool = False


class Tickets:
    """The scheduler's part of the crossing. ``lives()`` returns the generations of all blocks, from the feed."""

    def __init__(self, tokens: int, lives: Callable[[], NDArray[Any]]) -> None:
        self.address = ""  # where this engine's worker lends
        self._size = tokens
        self._lives = lives
        self._lent: dict[str, _Lent] = {}
        self._withdrawn: list[bytes] = []
        self._fetches: list[tuple[str, Ticket, int, list[int], int]] = []  # since the last step was sent
        self._why: dict[str, dict[int, str]] = {}  # by request and block

    def lend(self, request: PromptRequest) -> None:
        """The request has got blocks, and computes its prompt for another engine."""
        self.end(request.request_id)  # after a preemption this is another computation
        self._lent[request.request_id] = _Lent(request, secrets.token_bytes(16))

    def fetch(
        self,
        request: PromptRequest,
        encoded: Any,
        first: int,
        external: int,
        blocks: Sequence[int],
        kv: Mapping[str, str] = UNNAMED,
    ) -> None:
        """KV of ``external`` tokens comes into the request's blocks from ``first`` on: ``encoded`` is its ticket, and
        ``kv`` are its names."""
        name = request.request_id
        start = first * self._size
        prompt = list(request.all_token_ids)
        stop = min(start + external, len(prompt) - 1)  # the last token is computed here again, for its logits
        held = list(blocks[first : -(-stop // self._size)]) if stop > start else []
        try:
            ticket = Ticket(why=NO_TICKET) if encoded is None else msgspec.convert(encoded, Ticket)
            why = ticket.why or self._refusal(ticket, prompt, kv)
        except (msgspec.ValidationError, ValueError) as error:
            why = f"an invalid ticket: {error}"
        if not why:
            self._fetches.append((name, ticket, first, held, max(0, stop - start)))
        elif held:
            self._why[name] = dict.fromkeys(range(first, first + len(held)), why)

    def _refusal(
        self,
        ticket: Ticket,
        prompt: Sequence[int],
        kv: Mapping[str, str],
    ) -> str:
        if len(bytes.fromhex(ticket.id)) != 16:
            return f"an invalid ticket: id of {len(ticket.id) // 2} bytes, not 16"
        if ticket.tokens not in (len(prompt) - 1, len(prompt)):  # beside a state prefill leaves the last one to decode
            return f"prompt: prefill's has {ticket.tokens} tokens, decode's {len(prompt)}"
        if ticket.digest != (digest := token_hash(prompt[: ticket.tokens]).hex()):
            return f"prompt: the hash of prefill's tokens is {ticket.digest[:64]}, of decode's {digest}"
        for name, value in ticket.kv.items():
            if kv.get(name) != value:
                return f"the ticket is of other KV: {name}: wanted {value}, got {kv.get(name)}"
        return ""

    def fetches(self) -> list[Fetch]:
        """The fetches that begin with the next step; the blocks' lives are known by now."""
        lives = self._lives()
        fetches = self._fetches
        self._fetches = []
        return [
            Fetch(name, bytes.fromhex(t.id), t.address, first, held, lives[held].tolist(), tokens)
            for name, t, first, held, tokens in fetches
        ]

    def fills(
        self,
        scheduled: Mapping[str, int],
        blocks_of: Callable[[str, int, int], list[int]],
        *,
        mixed: bool,
    ) -> list[Lend]:
        """The lent blocks that a step fills, which computes ``scheduled`` tokens of each request."""
        lends = list[Lend]()
        size = self._size
        lives = self._lives()
        for name, tokens in scheduled.items() if self._lent else ():
            lent = self._lent.get(name)
            if lent is None:
                continue
            start = lent.request.num_computed_tokens
            prompt = lent.request.num_prompt_tokens
            if start < min(lent.blocks * size, prompt) or mixed:  # lent blocks are computed again, or must not go out
                self._withdrawn.append(lent.transfer)
                lent.transfer = secrets.token_bytes(16)
                lent.blocks = 0
                lent.whole = False
            if lent.whole or mixed:
                continue
            stop = min(start + tokens, prompt)
            lent.whole = stop == prompt
            full = -(-stop // size) if lent.whole else stop // size
            held = blocks_of(name, lent.blocks, full)
            if held:
                lent_tokens = stop - lent.blocks * size if lent.whole else len(held) * size
                lends.append(Lend(lent.transfer, lent.blocks, held, lives[held].tolist(), lent_tokens, lent.whole))
                lent.blocks = full
        return lends

    def withdrawn(self) -> list[bytes]:
        """Withdrawn transfers that the worker has not been told of."""
        transfers = self._withdrawn
        self._withdrawn = []
        return transfers

    def ticket(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        mixed: bool,
        kv: Mapping[str, str] = UNNAMED,
    ) -> dict[str, Any] | None:
        """The ticket in the request's answer; ``None`` if the request is not lent. Its prompt is ``tokens``, and its KV
        is known as ``kv``."""
        lent = self._lent.pop(name, None)
        if lent is None:
            return None
        if mixed or not lent.whole:
            self._withdrawn.append(lent.transfer)
            return {TRANSFER: msgspec.to_builtins(Ticket(why=MIXED if mixed else "prefill did not compute all of it"))}
        ticket = Ticket(lent.transfer.hex(), self.address, len(tokens), token_hash(tokens).hex(), dict(kv))
        return {TRANSFER: msgspec.to_builtins(ticket)}

    def came(self, name: str, why: Mapping[int, str]) -> None:
        """The request's fetch is over, or the wait for it is: ``why`` has the reasons for missing blocks."""
        self._why[name] = dict(why)

    def why(self, name: str) -> Mapping[int, str]:
        """The reasons known so far for rows of the request that did not come, by block; for :func:`gaps_of`."""
        return self._why.get(name, {})

    def end(self, name: str) -> Mapping[int, str]:
        """The request has ended, or begins again: withdraw what has no ticket, and fetch nothing into blocks that it no
        longer has. Returns reasons for :func:`gaps_of`."""
        self._fetches = [fetch for fetch in self._fetches if fetch[0] != name]
        lent = self._lent.pop(name, None)
        if lent is not None:
            self._withdrawn.append(lent.transfer)
        return self._why.pop(name, {})


def gaps_of(
    missing: Sequence[tuple[int, int]],
    why: Mapping[int, str],
    size: int,
    other: str = "",
) -> list[MissingSpan]:
    """The known reasons for ``missing`` positions, by their blocks of ``size`` tokens, and the ``other`` one for the
    rest; without that the rest is left out."""
    gaps = list[MissingSpan]()
    for start, stop in missing if why or other else ():
        for block in range(start // size, -(-stop // size)):
            reason = why.get(block, other)
            if not reason:
                continue
            gap = max(start, block * size), min(stop, (block + 1) * size), reason
            if gaps and gaps[-1][1:] == (gap[0], reason):
                gap = gaps.pop()[0], gap[1], reason
            gaps.append(gap)
    return gaps


__all__ = ["TRANSFER", "Fetch", "Lend", "MissingSpan", "Ticket", "Tickets", "gaps_of"]

"""The engine's configuration, requests and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cache_manager.errors import InvalidInputError
from cache_manager.jobs import JobLimits
from kvroute.routes import Routes

SAMPLES_MAX = 64


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The sizes of an engine.

    ``step_tokens`` is the most tokens that one forward pass computes; a longer prompt is computed in chunks.
    ``sequences_max`` bounds the sequences that run at once. With ``caching=False`` nothing is reused or stored.
    ``jobs`` bounds the store's concurrent jobs, ``restore_wait_s`` how long a sequence waits for the store before it is
    computed. With ``transfer_process`` KV is in SharedMemory, and a process beside the engine copies it; on a CPU.
    """

    block_tokens: int = 16
    device_blocks: int = 256
    host_blocks: int = 0
    step_tokens: int = 64
    sequences_max: int = 8
    caching: bool = True
    jobs: JobLimits = field(default_factory=JobLimits)
    restore_wait_s: float = 10.0
    transfer_process: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to continue it, in ``n`` samples that share the prompt's blocks.

    ``temperature`` 0 takes the likeliest token. Otherwise the noise depends only on ``seed``, the sample's number and
    the position: the same prompt and seed draw the same tokens in every batch and every engine. A sample stops after
    ``max_tokens`` tokens, or at a token of ``stop_tokens``.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name, true, wanted in (
            ("id", bool(self.id), "a non-empty string"),
            ("prompt", bool(self.prompt), "at least one token"),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("n", 1 <= self.n <= SAMPLES_MAX, f"1 to {SAMPLES_MAX} samples"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "a finite number of 0 or more"),
        ):
            if not true:
                raise InvalidInputError(f"request {self.id} {name}", wanted, repr(getattr(self, name))[:80])


class FinishReason(Enum):
    """Why a sample ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Output:
    """One finished sample.

    ``tokens`` are the generated ones; ``routes`` cover the positions ``[0, computed)`` of prompt and tokens together,
    and are bound to them. For a sample that ended by itself these are all but the last token, which was sampled but
    never read by a forward pass. An aborted sample has the routes of the computed positions, perhaps none. ``note``
    says why a prompt that another engine had computed was computed again, if so.
    """

    request: Request
    sample: int
    tokens: tuple[int, ...]
    reason: FinishReason
    routes: Routes
    note: str = ""

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and generated tokens."""
        return self.request.prompt + self.tokens

"""Capture of a whole forward pass by one launch, straight into the device tier's region. Needs Triton.

During the pass the hooks keep references and launch nothing; ``commit`` launches once. In a CUDA graph the launch is
part of the graph, and every replay reads the tensors that the hooks got at capture time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.ports import Region
from kvroute.capture import kernel
from kvroute.capture.errors import CaptureError
from kvroute.capture.hooks import Form, Hooks, Values
from kvroute.capture.host_memory import HostRows
from kvroute.capture.plan import NO_BAD_ROW, Check, Plan, check_words

GRAPHS_MAX: Final = 128
RING: Final = 8
RING_PART: Final = 4
"""Tables per wait: one wait frees so many before the ring reuses them."""
CHECK_REASONS: Final = {
    Check.RANGE: "an id that is no expert",
    Check.DUPLICATE: "an expert twice",
    Check.MISSING: "a layer that was not recorded",
    Check.ZERO: "a row of zeros",
    Check.SLOT: "a slot outside the buffer",
}


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """The launch's findings in the rows that it stored since the last verdict."""

    keep: NDArray[np.bool_] | None  # [tokens] for ``step.commit``; None: every row is sound
    counts: Mapping[Check, int]  # of bad values; empty if all are sound
    first: str  # the first bad row: what, token and layer


_SOUND: Final = Verdict(None, MappingProxyType({}), "")


class LayerCapture:
    """Captures rows of some of ``region``'s specs (all) from tensors that the routers' callbacks deliver.

    ``hook(layer_id, name)`` returns a callback for one layer, as :meth:`Hooks.hook` does; ``commit(slots)`` stores what
    they kept in one launch, and ``clear()`` forgets it. Meant for a step begun with ``in_place=True``: ``wrote(name)``
    for each of ``names``, and once the launch has completed ``step.commit(capture.verdict(tokens).keep)``.

    A capture serves one stream and at most two launches in flight; overlapping micro-batches need one each. It keeps a
    registration of the region's memory: close it before the region.

    Raises :class:`CaptureError` for specs that do not fit, and ``RegistrationError`` if the driver refuses.
    """

    def __init__(
        self,
        region: Region,
        max_tokens: int,
        device: torch.device | str,
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._max_tokens = max_tokens
        self.plan = Plan.of(region.layout, names)
        self.names = tuple(spec.name for spec in self.plan.specs)
        on_gpu = self._device.type == "cuda"
        self._hooks = Hooks([Values(s.name, s.layer_ids, s.top_k, _dtypes(s.dtype)) for s in self.plan.specs])
        self.hook = self._hooks.hook
        self.clear = self._hooks.clear
        layers = sum(spec.layers for spec in self.plan.specs)
        self._checks = torch.from_numpy(check_words())
        self._bad = torch.zeros(max_tokens, dtype=torch.int32)
        self._sent = torch.zeros(RING + GRAPHS_MAX, layers, 3, dtype=torch.int64)
        if on_gpu:
            self._checks, self._bad, self._sent = (t.pin_memory() for t in (self._checks, self._bad, self._sent))
        self._sent_words = self._sent.numpy()
        self._sent_tables: list[torch.Tensor] = list(self._sent)
        self._tables: list[torch.Tensor] = list(torch.empty_like(self._sent, device=self._device))
        self._tables_used = RING  # the first RING serve launches outside graphs, in turn
        self._turn = 0
        self._copied: list[torch.cuda.Event | None] = [None] * (RING // RING_PART)
        self._addresses: NDArray[np.int64] | None = None  # in the current table on the device
        self._launches: dict[tuple[tuple[torch.dtype, ...], int], kernel.Launch] = {}
        self._words, self._flags = self._checks.numpy(), self._bad.numpy()  # the host's view
        self._found = self._words[: Check.TOKENS]  # counts of bad values
        self._seen = self._found.copy()
        self._before: NDArray[np.bool_] | None = None
        self._held: list[list[torch.Tensor]] = []  # tensors that graphs read
        streams: Any = torch.cuda  # its Stream is untyped
        self._upload: torch.cuda.Stream | None = streams.Stream(self._device) if on_gpu else None
        self._uploading = False
        self._slots_end = region.blocks * self.plan.block_tokens
        self._rows = HostRows(region, self._device)

    def commit(self, slots: torch.Tensor) -> None:
        """Store the rows of the pass at ``slots [tokens]`` int64 (negative: padding), on the current stream.

        ``slots`` may be pinned host memory: the launch reads them across the bus. Tokens of the pass beyond ``slots``
        are padding. Hooks are ready for the next pass at once. Raises :class:`CaptureError`, and stores nothing, for a
        layer that was not recorded or recorded twice, for tensors that do not fit, and for two layers in the same
        memory.
        """
        try:
            if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
                got = f"{slots.dtype} of shape {tuple(slots.shape)}"
                raise CaptureError("slots", "int64 [tokens], contiguous", got)
            if slots.numel() > self._max_tokens:
                wanted = f"at most {self._max_tokens} tokens"
                raise CaptureError("slots", wanted, slots.numel())
            sources, form, addresses = self._hooks.taken(slots.numel())
        finally:
            self.clear()
        rows = self._rows.tensor
        assert rows is not None, "commit() after close()"
        table = self._table(form, addresses, sources)
        looks = form.dtypes, kernel.group_of(slots.numel())
        launch = self._launches.get(looks)
        if launch is None:
            launch = kernel.Launch(self.plan, looks[0], rows.data_ptr(), self._device, looks[1])
            self._launches[looks] = launch
        launch(table, slots, rows, self._slots_end, self._checks, self._bad)

    def expect(self) -> None:
        """A pass begins whose launch Python cannot see, for example a graph's replay. See :attr:`launched`."""
        self._words[Check.TOKENS] = 0

    @property
    def launched(self) -> int:
        """The tokens, with padding, of the last launch completed since :meth:`expect`; 0: none."""
        return int(self._words[Check.TOKENS])

    def verdict(self, tokens: int) -> Verdict:
        """The bad rows of the last completed launch, of ``tokens`` tokens.

        Call it after each launch has completed, before the second launch after it. If the next launch is already in
        flight, its bad rows may be reported now, and again at the next call.
        """
        now = self._found.copy()
        if self._before is None and now.tobytes() == self._seen.tobytes():
            return _SOUND
        bad = self._flags != 0
        self._flags[bad] = 0  # not all: a launch in flight may be setting others
        counts = {
            check: int(now[check] - self._seen[check]) for check in CHECK_REASONS if now[check] != self._seen[check]
        }
        first = ""
        number = int(now[Check.FIRST])
        if number != NO_BAD_ROW:
            token, spec, layer = self.plan.place(number)
            first = f"{spec.name}, token {token}, layer {layer}: " + ", ".join(CHECK_REASONS[check] for check in counts)
        keep = ~bad if self._before is None else ~(bad | self._before)
        self._before = bad if counts else None
        self._seen = now
        self._words[Check.FIRST] = self._seen[Check.FIRST] = NO_BAD_ROW
        return Verdict(keep[:tokens], counts, first)

    def _table(
        self,
        form: Form,
        addresses: NDArray[np.int64],
        sources: list[torch.Tensor],
    ) -> torch.Tensor:
        """The pointer table on the device: the shared one, or, while a graph is captured, one for that graph alone."""
        captures = self._upload is not None and torch.cuda.is_current_stream_capturing()
        if captures:
            if self._tables_used == RING + GRAPHS_MAX:
                wanted = f"at most {GRAPHS_MAX} of one capture"
                raise CaptureError("graphs", wanted, "one more")
            index = self._tables_used
            self._tables_used = self._tables_used + 1
        elif addresses is self._addresses:
            return self._tables[self._turn]
        else:
            index = self._turn = (self._turn + 1) % RING
            if index % RING_PART == 0 and (copied := self._copied[index // RING_PART]) is not None:
                copied.synchronize()  # of five launches ago
        self._sent_words[index, :, 0] = addresses
        self._sent_words[index, :, 1:] = form.strides
        if captures:
            with torch.cuda.stream(self._upload):  # beside the graph: the table is filled once, not at each replay
                self._tables[index].copy_(self._sent_tables[index], non_blocking=True)
            self._uploading = True
            self._held.append(sources)
            return self._tables[index]
        self._tables[index].copy_(self._sent_tables[index], non_blocking=True)
        self._addresses = addresses
        if index % RING_PART == RING_PART - 1 and self._upload is not None:
            self._copied[index // RING_PART] = torch.cuda.current_stream(self._device).record_event()
        return self._tables[index]

    def ready(self) -> None:
        """Wait until the tables of captured graphs are on the device. Call it before the first replay."""
        if self._upload is not None and self._uploading:
            self._upload.synchronize()
            self._uploading = False

    def close(self) -> None:
        """Wait for the device and release the region; a second call is harmless."""
        self._held.clear()
        self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _dtypes(of_rows: str) -> tuple[torch.dtype, ...]:
    """The dtypes of values that fit rows of this dtype."""
    return tuple(dtype for dtype in kernel.SOURCES if (dtype == torch.float32) == (of_rows == "float32"))


__all__ = ["LayerCapture", "Verdict"]

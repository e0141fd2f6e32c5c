"""The right routes: those of transformers' own forward pass of a checkpoint, on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from cache_manager.errors import InvalidInputError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.capture.capture import find_routers
from kvroute.verify.asking import RowIds, RowMask

NOISE: Final = {"float32": 2**-14, "float16": 2**-9, "bfloat16": 2**-6}
"""The relative rounding of a router's input in an engine that computes in this dtype."""
DRAWS: Final = 32
HEADROOM: Final = 1.25
"""Free memory must be so many times the weights."""


@contextmanager
def _no_bar() -> Iterator[None]:
    """transformers draws no bar of its own, which is drawn where output is piped, too."""
    drawn = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            enable_progress_bar()


class Heard(NamedTuple):
    """A router's last call, of ``T`` tokens."""

    hidden: torch.Tensor  # [T, hidden]
    beside: tuple[Any, ...]  # what else it was given: a bias, or the tokens of hash routing
    ids: torch.Tensor  # [..., top_k]
    axes: int  # of the hidden values that it was given: 2, or more, with batches of one sequence

    def of(self, rows: NDArray[np.intp]) -> tuple[Any, ...]:
        """What was given beside these tokens' hidden values, for :data:`DRAWS` draws of each."""
        return tuple(
            value.reshape(-1)[rows].repeat(DRAWS) if _of_each_token(value, len(self.hidden)) else value
            for value in self.beside
        )


def _of_each_token(value: Any, tokens: int) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.numel() == tokens


class Weights:
    """A checkpoint, computed in float32 if there is memory for that, else in its own dtype."""

    def __init__(
        self,
        home: Path,
        spec: AuxBlockDataSpec,
        noise: float,
        computed: torch.dtype,
    ) -> None:
        self._noise = noise
        text = type(AutoConfig.from_pretrained(home)) in AutoModelForCausalLM._model_mapping
        auto = AutoModelForCausalLM if text else AutoModelForImageTextToText
        with _no_bar():
            self._model: Any = auto.from_pretrained(home, dtype=computed).eval()
        self._routers = find_routers(self._model)
        if tuple(self._routers) != spec.attrs["layer_ids"]:
            raise InvalidInputError("layers with a router", list(spec.attrs["layer_ids"]), list(self._routers))
        self._top_k = spec.row_shape[1]
        self._heard: dict[int, Heard] = {}
        self._listening = True
        for layer, router in self._routers.items():
            router.register_forward_hook(self._listener(layer))

    @classmethod
    def where_they_fit(
        cls,
        home: Path,
        spec: AuxBlockDataSpec,
        served: str,
    ) -> tuple[Self | None, str]:
        """Weights to judge by, or ``None``, and the judge in words. The server computes in the dtype ``served``.

        ``auto``: in the checkpoint's dtype, or in bfloat16 if that is float32, as in vLLM.
        """
        nbytes = sum(file.stat().st_size for file in home.glob("*.safetensors")) if home.is_dir() else 0
        if not nbytes:
            return None, f"equal prefixes and what no router chooses: there are no weights (*.safetensors) in {home}"
        dtype = getattr(AutoConfig.from_pretrained(home), "dtype", None) or torch.float32
        if served == "auto":
            served = "float16" if dtype is torch.float16 else "bfloat16"
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        for computed, wanted in ((torch.float32, nbytes * 4 // dtype.itemsize), (dtype, nbytes)):
            if wanted * HEADROOM < free:
                by = f"a pass of {home} in {str(computed).removeprefix('torch.')}, choices by rounding in {served}"
                return cls(home, spec, NOISE[served], computed), by
        return (
            None,
            f"equal prefixes and what no router chooses: {nbytes >> 20:,} MiB of weights, {free >> 20:,} are free",
        )

    def _listener(self, layer: int) -> Any:
        def listen(_router: Any, inputs: tuple[torch.Tensor, ...], answer: Any) -> None:
            if self._listening:
                hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
                self._heard[layer] = Heard(hidden, inputs[1:], self._ids(answer), inputs[0].ndim)

        return listen

    def _ids(self, answer: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The ids ``[..., top_k]`` of a router's answer; where it has logits alone (Jamba, Llama 4), of their top-k."""
        values = answer if isinstance(answer, tuple) else (answer,)
        ids = next((value for value in values if not value.is_floating_point()), None)
        return values[-1].topk(self._top_k, dim=-1).indices if ids is None else ids

    def routed(self, tokens: Sequence[int]) -> RowIds:
        """The experts of each token, sorted: ``[tokens, layers, top_k]``; :class:`InvalidInputError` for a token that
        the model does not have."""
        vocabulary = self._model.get_input_embeddings().num_embeddings
        if max(tokens, default=0) >= vocabulary:
            wanted = f"below {vocabulary}, as the model has"
            raise InvalidInputError("token ids", wanted, max(tokens))
        with torch.no_grad():
            self._model(torch.tensor([list(tokens)]), use_cache=False)
        of_layers = [heard.ids.reshape(len(tokens), -1) for heard in self._heard.values()]
        choices = torch.stack(of_layers, dim=1)
        return np.sort(choices.numpy().astype(np.int32), axis=2)

    def close(self, ids: RowIds, mask: RowMask) -> RowMask:
        """Whether a router's input that differs by rounding from that of the last pass chooses these experts."""
        close = np.zeros_like(mask)
        self._listening = False
        noise = torch.Generator().manual_seed(0)
        try:
            for index, (layer, router) in enumerate(self._routers.items()):
                rows = np.flatnonzero(mask[:, index])
                if not len(rows):
                    continue
                heard = self._heard[layer]
                inputs = heard.hidden[rows].repeat(DRAWS, 1)
                size = inputs.float().pow(2).mean(dim=1, keepdim=True).sqrt() * self._noise
                inputs = inputs + (torch.randn(inputs.shape, generator=noise) * size).to(inputs.dtype)
                inputs = inputs.reshape(*[1] * (heard.axes - 2), *inputs.shape)
                with torch.no_grad():
                    answer = router(inputs, *heard.of(rows))
                drawn = self._ids(answer).reshape(DRAWS, len(rows), 1, -1).numpy()
                wanted = ids[rows, index][None, :, :, None]
                is_drawn = (drawn == wanted).any(axis=(0, 3))  # [rows, top_k]
                close[rows, index] = is_drawn.all(axis=1)
        finally:
            self._listening = True
        return close


__all__ = ["Weights"]

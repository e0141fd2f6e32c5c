"""Rows in an engine's own field, ``routed_experts``, as clients get it: an array, or its ``.npy`` file as base64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pybase64
from numpy.typing import NDArray

from cache_manager.errors import KVRouteError, RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.encodings import ROUTED_EXPERTS, npy_array
from kvroute.routes import Layout, Routes

NPY: Final = b"\x93NUMPY"


def of(output: Any, index: int) -> Any:
    """The field of completion ``index`` of an engine's output or of a server's answer; ``None`` if it has none."""
    is_json = isinstance(output, Mapping)
    completions = (output.get("choices") if is_json else getattr(output, "outputs", None)) or ()
    for completion in completions:
        number = completion.get("index") if is_json else completion.index
        if number == index:
            return completion.get(ROUTED_EXPERTS) if is_json else getattr(completion, ROUTED_EXPERTS, None)
    return None


def bound_routes(
    packed: Any,
    tokens: Sequence[int] | None,
    prompt: int,
    spec: AuxBlockDataSpec,
) -> Routes:
    """The field's rows: of the last of ``tokens`` but one, and those before it; the first ``prompt`` are the prompt.

    ``packed`` is an array ``[n, layers, top_k]`` with all of the model's layers, 0 in those without a router, or its
    file. Raises :class:`RowError` for an array of another model, and for an answer without token ids.
    """
    layout = Layout.of(spec)
    array = packed if isinstance(packed, np.ndarray) else unpacked(packed)
    wanted = f"[tokens, {layout.num_layers}, {layout.top_k}] of whole numbers"
    if array.shape[1:] != (layout.num_layers, layout.top_k) or array.dtype.kind not in "iu":
        raise RowError(ROUTED_EXPERTS, wanted, f"{list(array.shape)} of {array.dtype}")
    if tokens is None:
        wanted = "an answer with token ids, which say of which positions its rows are"
        raise RowError(ROUTED_EXPERTS, wanted, "none")
    start = len(tokens) - 1 - len(array)
    if start < 0:
        wanted = f"{len(tokens) - 1} rows at most, one for each token but the last"
        raise RowError(ROUTED_EXPERTS, wanted, len(array))
    routed = array[:, layout.routed_layers]
    if int(routed.max(initial=0)) >= layout.num_experts or int(routed.min(initial=0)) < 0:
        wanted = f"experts in [0, {layout.num_experts})"
        raise RowError(ROUTED_EXPERTS, wanted, f"{routed.min()} to {routed.max()}")
    valid = np.ones(len(array), np.bool_)
    fields = layout.layer_ids, layout.num_experts, layout.num_layers, start
    bound = Routes(routed.astype(layout.dtype), valid, *fields)
    counts = {start or bound.stop, prompt, bound.stop}
    return bound.bind(tokens, [count for count in counts if start <= count <= bound.stop])


def unpacked(packed: Any) -> NDArray[Any]:
    """What a server sent as base64, not yet judged: vLLM's ``.npy``, or SGLang's int32 one after the other, ``[n]``.

    Raises :class:`RowError` for anything else; the memory used is a fixed multiple of the size of ``packed``.
    """
    try:
        content = pybase64.b64decode(packed, validate=True)
        return npy_array(content) if content.startswith(NPY) else np.frombuffer(content, "<i4")
    except KVRouteError:
        raise
    except (TypeError, ValueError) as error:
        wanted = "a .npy, or the bytes of int32, as base64"
        raise RowError(ROUTED_EXPERTS, wanted, repr(error)) from error


__all__ = ["ROUTED_EXPERTS", "bound_routes", "of", "unpacked"]

"""Routes in an answer: kvroute's own self-describing object, and the containers of five engines.

==============  =====================================================  ==========================  ==================
encoding        container                                              layers, dtype               missing rows
==============  =====================================================  ==========================  ==================
``kvroute``     JSON object of a record: ``Routes.to_json``            routed; uint8 to uint32     a mask
``vllm``        base64 of a ``.npy``                                   all; uint8, uint16          refused
``sglang``      base64 of the bytes                                    all; int32                  refused
``lightllm``    JSON object ``{"shape", "dtype", "data"}``             routed; uint8, int16        refused
``nemo``        ``nrlre1:<dtype>:<rows>x<layers>x<top_k>:<base64>``    routed; int8 to int32       all -1
``fastdeploy``  base64 of the bytes                                    routed; uint8 to uint32     all ones in binary
==============  =====================================================  ==========================  ==================

Ids are in C order, little endian; layers without a router are zeros where a container has all layers. An encoding that
cannot mark a missing row refuses routes that lack a row, or a layer of one: any ids would name some experts. The others
mark each layer by itself. Decoded ids are checked as in every :class:`Routes`, so that a row of zeros, with which some
engines mark a lost row, is an error and never a row; only with top-1 it may be one, and the two look alike. Pure: no
I/O.

Sources: ``vllm/utils/serial_utils.py`` and ``routed_experts_capturer.py`` of vLLM 0.33; ``srt/state_capturer`` of
SGLang 0.5.23; ``MoeRouteInfoManager`` of LightLLM's main branch, August 2026; NeMo-RL's ``routed_experts_codec.py``;
FastDeploy's ``RoutingReplayConfig.postprocess`` (#7390, #7960), which counts one value more than the experts.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray
from pybase64 import b64encode_as_string

from cache_manager.errors import InvalidInputError, RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routes import Layout, Routes
from kvroute.routes.wire import from_base64

Encoding = Literal["kvroute", "sglang", "vllm", "lightllm", "nemo", "fastdeploy"]
ENCODINGS: Final[tuple[str, ...]] = get_args(Encoding)

ROUTED_EXPERTS: Final = "routed_experts"
"""The name that every engine gives to the field."""
_FIELD_DTYPE: Final = f"{ROUTED_EXPERTS}.dtype"
_FIELD_SHAPE: Final = f"{ROUTED_EXPERTS}.shape"
_FIELD_DATA: Final = f"{ROUTED_EXPERTS}.data"
"""What errors call its parts."""
_NPY_HEADER_NBYTES_MAX: Final = 256
"""Header of a ``.npy`` that numpy writes for three dimensions: magic, version, length and text, a multiple of 64."""
_WIDTH_MAX: Final = 1 << 16
"""Layers, or experts of a token: numpy has no array, of no row either, that is wider by far."""
_NPY_MAGIC: Final = b"\x93NUMPY\x01\x00"
_NPY_TEXT = re.compile(
    rb"\{'descr': '([^']{1,8})', 'fortran_order': (True|False), 'shape': \((\d{1,12}), (\d{1,12}), (\d{1,12})\), \} *\n"
)
_NPY_INTEGERS = re.compile("[<|][iu][1248]")
_NEMO_HEAD = re.compile(r"nrlre1:(int8|int16|int32):([0-9]{1,12})x([0-9]{1,12})x([0-9]{1,12}):", re.ASCII)

Shape = tuple[int, int]
"""Layers and top-k of a container's rows."""


def encode(routes: Routes, encoding: str = "kvroute") -> Any:
    """``routes`` in ``encoding``: a JSON object or a string; ``None`` if :func:`refusal` gives a reason."""
    if refusal(routes, encoding) is not None:
        return None
    if encoding == "kvroute":
        return routes.to_json()
    how = _FOREIGN[encoding]
    layout = routes.layout
    layers = layout.chosen("all" if how.dense else "moe")
    columns = [layers.index(layer) for layer in layout.layer_ids]
    shape = (len(routes), len(layers), layout.top_k)
    ids = np.zeros(shape, how.dtype(layout.num_experts))
    ids[:, columns] = routes.ids
    if not routes.complete:
        known = np.zeros(ids.shape[:2], np.bool_)
        known[:, columns] = routes.known
        ids[~known] = _all_ones(ids.dtype)
    return how.pack(ids)


def decode(
    encoded: Any,
    spec: AuxBlockDataSpec,
    encoding: str = "kvroute",
    start: int = 0,
) -> Routes:
    """The routes that are ``encoded`` in ``encoding``, for the routers of ``spec``, from position ``start``.

    Raises :class:`RowError` for anything else, naming the field, what was wanted and what came. The memory used is a
    fixed multiple of the size of ``encoded``, whatever shape it claims. kvroute's own object has its start. An answer
    of FastDeploy may end with a row for the last sampled token, which no forward pass has read: it has the slot's old
    content. Only the caller knows whether it is there; slice it off.
    """
    _check_encoding(encoding)
    layout = Layout.of(spec)
    if encoding == "kvroute":
        routes = Routes.from_json(encoded)
        layout.check_model(routes.layout, ROUTED_EXPERTS)
        return routes
    how = _FOREIGN[encoding]
    layers = layout.chosen("all" if how.dense else "moe")
    dtype = np.dtype(how.dtype(layout.num_experts))
    ids = how.unpack(encoded, dtype, (len(layers), layout.top_k))
    known = np.ones(len(ids), np.bool_)
    if how.masked:
        known = ~(ids == _all_ones(ids.dtype)).all(axis=2)
    if how.dense and len(layers) > len(layout.layer_ids):
        for layer in set(layers).difference(layout.layer_ids):
            if ids[:, layer].any():
                wanted = "zeros, as the model has no router there"
                raise RowError(f"{ROUTED_EXPERTS} layer {layer}", wanted, "other ids")
        ids = ids[:, list(layout.layer_ids)]
    return Routes(ids, known, layout.layer_ids, layout.num_experts, layout.num_layers, start)


def refusal(routes: Routes, encoding: str) -> str | None:
    """Why ``routes`` cannot be expressed in ``encoding``, in one line; ``None`` if they can."""
    _check_encoding(encoding)
    if encoding == "kvroute":
        return None
    how = _FOREIGN[encoding]
    widest, most = how.dtypes[-1]
    if routes.num_experts > most:
        bits = 8 * np.dtype(widest).itemsize
        return f"{how.name}'s encoding has ids of {bits} bits, and there are {routes.num_experts} experts"
    if how.masked or routes.complete:
        return None
    return _missing_text(routes)


def _check_encoding(encoding: object) -> None:
    if encoding not in ENCODINGS:
        wanted = "one of " + ", ".join(ENCODINGS)
        raise InvalidInputError("encoding", wanted, repr(encoding))


def _missing_text(routes: Routes) -> str:
    """Which rows, or layers of them, are missing, in one line."""
    missing = routes.missing
    lost = sum(stop - start for start, stop in missing)
    text = f"{lost} of {len(routes)} rows are missing: positions "
    text += ", ".join(f"[{start}, {stop})" for start, stop in missing[:8])
    if len(missing) > 8:
        text += f" and {len(missing) - 8} more ranges"
    gap = routes.first_gap(routes.stop, routes.start)
    if gap is not None and gap[1] is not None:
        text += f", of which {gap[0]} lacks layer {gap[1]}"
    return text


def _all_ones(dtype: np.dtype[Any]) -> Any:
    """The id whose bits are all ones: -1 if it is signed."""
    return np.array(-1).astype(dtype)


# Containers -----------------------------------------------------------------------------------------------------------


def _text(ids: NDArray[Any]) -> str:
    little = ids.astype(ids.dtype.newbyteorder("<"), copy=False)
    return b64encode_as_string(np.ascontiguousarray(little).data)


def _ids(
    field: str,
    content: bytes,
    dtype: np.dtype[Any],
    rows: int,
    shape: Shape,
) -> NDArray[Any]:
    """``content`` as ids ``[rows, layers, top_k]``, if it has that size."""
    little = dtype.newbyteorder("<")
    nbytes = rows * shape[0] * shape[1] * little.itemsize
    if len(content) != nbytes:
        raise RowError(field, f"{nbytes} bytes", len(content))
    return np.frombuffer(content, little).reshape(rows, *shape)


def _checked_rows(field: str, claimed: tuple[int, ...], shape: Shape) -> int:
    if len(claimed) != 3 or claimed[1:] != shape:
        wanted = f"(rows, {shape[0]}, {shape[1]}), as the model has"
        raise RowError(field, wanted, claimed)
    return claimed[0]


def _bare_ids(encoded: Any, dtype: np.dtype[Any], shape: Shape) -> NDArray[Any]:
    content = from_base64(ROUTED_EXPERTS, encoded)
    row_nbytes = shape[0] * shape[1] * dtype.itemsize
    if len(content) % row_nbytes:
        wanted = f"base64 of rows of {row_nbytes} bytes"
        raise RowError(ROUTED_EXPERTS, wanted, f"{len(content)} bytes")
    rows = len(content) // row_nbytes
    return _ids(ROUTED_EXPERTS, content, dtype, rows, shape)


def _npy(ids: NDArray[Any]) -> str:
    file = io.BytesIO()
    np.save(file, ids, allow_pickle=False)
    return b64encode_as_string(file.getbuffer())


def npy_array(file: bytes) -> NDArray[Any]:
    """The integers ``[rows, layers, top_k]`` of a ``.npy``, in C order; read-only. :class:`RowError` for anything else.

    The header's text is parsed here: numpy's own reader would allocate memory for any shape that it claims, and raises
    errors of Python's parser.
    """
    descr, (rows, *shape), data = _npy_parts(file)
    if _NPY_INTEGERS.fullmatch(descr) is None:
        raise RowError(_FIELD_DTYPE, "integers, little endian", descr)
    if max(shape) > _WIDTH_MAX:
        wanted = f"layers and top-k of at most {_WIDTH_MAX}"
        raise RowError(_FIELD_SHAPE, wanted, shape)
    return _ids(_FIELD_DATA, data, np.dtype(descr), rows, (shape[0], shape[1]))


def _npy_ids(encoded: Any, dtype: np.dtype[Any], shape: Shape) -> NDArray[Any]:
    descr, claimed, data = _npy_parts(from_base64(ROUTED_EXPERTS, encoded))
    wanted = dtype.newbyteorder("<").str
    if descr != wanted:
        raise RowError(_FIELD_DTYPE, f"{wanted}, as the model's experts need", descr)
    rows = _checked_rows(_FIELD_SHAPE, claimed, shape)
    return _ids(_FIELD_DATA, data, dtype, rows, shape)


def _npy_parts(file: bytes) -> tuple[str, tuple[int, ...], bytes]:
    """The dtype, as numpy writes it, the shape of three dimensions, and the bytes in C order of a ``.npy``."""
    if file[: len(_NPY_MAGIC)] != _NPY_MAGIC:
        raise RowError(ROUTED_EXPERTS, "a .npy of version 1.0", repr(file[:8]))
    stop = 10 + int.from_bytes(file[8:10], "little")
    if stop > min(_NPY_HEADER_NBYTES_MAX, len(file)):
        wanted = f"a header of at most {_NPY_HEADER_NBYTES_MAX} bytes inside the file"
        raise RowError(ROUTED_EXPERTS, wanted, stop)
    header = _NPY_TEXT.fullmatch(file[10:stop])
    if header is None:
        wanted = "the header of an array of three dimensions"
        raise RowError(ROUTED_EXPERTS, wanted, repr(file[10:stop]))
    descr, fortran = (part.decode("latin-1") for part in header.group(1, 2))
    if fortran != "False":
        wanted = "an array in C order"
        got = f"{descr}, fortran_order {fortran}"
        raise RowError(_FIELD_DTYPE, wanted, got)
    return descr, tuple(map(int, header.groups()[2:])), file[stop:]


class _Object(msgspec.Struct, forbid_unknown_fields=True):
    shape: tuple[int, int, int]
    dtype: str
    data: str


def _object(ids: NDArray[Any]) -> dict[str, Any]:
    return {"shape": list(ids.shape), "dtype": ids.dtype.name, "data": _text(ids)}


def _object_ids(encoded: Any, dtype: np.dtype[Any], shape: Shape) -> NDArray[Any]:
    try:
        array = msgspec.convert(encoded, _Object)
    except (msgspec.ValidationError, RecursionError) as error:
        wanted = "an object with shape, dtype and data"
        raise RowError(ROUTED_EXPERTS, wanted, error) from error
    rows = _checked_rows(_FIELD_SHAPE, array.shape, shape)
    if array.dtype != dtype.name:
        wanted = f"{dtype.name}, as the model's experts need"
        raise RowError(_FIELD_DTYPE, wanted, repr(array.dtype))
    return _ids(_FIELD_DATA, from_base64(_FIELD_DATA, array.data), dtype, rows, shape)


def _envelope(ids: NDArray[Any]) -> str:
    return f"nrlre1:{ids.dtype.name}:{'x'.join(map(str, ids.shape))}:{_text(ids)}"


def _envelope_ids(encoded: Any, dtype: np.dtype[Any], shape: Shape) -> NDArray[Any]:
    """Accepts a wider dtype than the model needs: NeMo-RL uses one for models that it does not know."""
    head = _NEMO_HEAD.match(encoded) if isinstance(encoded, str) else None
    if head is None:
        got = repr(encoded[:40]) if isinstance(encoded, str) else type(encoded).__name__
        wanted = "nrlre1:<dtype>:<rows>x<layers>x<top_k>:<base64>"
        raise RowError(ROUTED_EXPERTS, wanted, got)
    sent_dtype = np.dtype(head[1])
    if sent_dtype.itemsize < dtype.itemsize:
        wanted = f"{dtype.name} or wider, as the model's experts need"
        raise RowError(_FIELD_DTYPE, wanted, head[1])
    rows = _checked_rows(_FIELD_SHAPE, (int(head[2]), int(head[3]), int(head[4])), shape)
    return _ids(
        _FIELD_DATA,
        from_base64(_FIELD_DATA, encoded[head.end() :]),
        sent_dtype,
        rows,
        shape,
    )


@dataclass(frozen=True, slots=True)
class _Foreign:
    """How an engine expresses routes. ``dtypes`` are those of ids, each with the largest number of experts for it.

    ``dense``: every layer of the model has a place; else the routed ones. ``masked``: missing cells are all ones in
    binary; else they cannot be expressed. ``pack`` makes a container of ids ``[n, layers, top_k]``; ``unpack`` reads
    them from one, for the model's dtype and shape, or raises :class:`RowError`.
    """

    name: str
    dtypes: tuple[tuple[str, int], ...]
    dense: bool
    masked: bool
    pack: Callable[[NDArray[Any]], Any]
    unpack: Callable[[Any, np.dtype[Any], Shape], NDArray[Any]]

    def dtype(self, num_experts: int) -> str:
        return next((dtype for dtype, most in self.dtypes if num_experts <= most), self.dtypes[-1][0])


_INTS: Final = (("int8", 1 << 7), ("int16", 1 << 15), ("int32", 1 << 31))
_FD: Final = (("uint8", (1 << 8) - 2), ("uint16", (1 << 16) - 2), ("uint32", (1 << 32) - 2))
_FOREIGN: Final = {
    "vllm": _Foreign("vLLM", (("uint8", 1 << 8), ("uint16", 1 << 16)), True, False, _npy, _npy_ids),
    "sglang": _Foreign("SGLang", (("int32", 1 << 31),), True, False, _text, _bare_ids),
    "lightllm": _Foreign("LightLLM", (("uint8", 1 << 8), ("int16", 1 << 15)), False, False, _object, _object_ids),
    "nemo": _Foreign("NeMo-RL", _INTS, False, True, _envelope, _envelope_ids),
    "fastdeploy": _Foreign("FastDeploy", _FD, False, True, _text, _bare_ids),
}
assert set(ENCODINGS) == {"kvroute", *_FOREIGN}

__all__ = ["ENCODINGS", "Encoding", "decode", "encode", "npy_array", "refusal"]

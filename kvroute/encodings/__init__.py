"""Routes in an answer: kvroute's own self-describing object, and what the clients of five engines decode.

Every encoding is a module with the same three functions:

* ``encode(routes)``: what goes into the answer; ``None`` when :func:`refusal` says why not;
* ``decode(given, spec, start=0)``: the routes that were encoded, or :class:`RowError`;
* ``refusal(routes)``: why these routes cannot be told in this encoding, in one line; ``None`` when they can.

==============  =====================================================  ==========================  ==================
encoding        container                                              layers, dtype               missing rows
==============  =====================================================  ==========================  ==================
``kvroute``     JSON object with a checksum                            routed; uint8 to uint32     a mask
``vllm``        base64 of a ``.npy``                                   all; uint8, uint16          refused
``sglang``      base64 of the bytes                                    all; int32                  refused
``lightllm``    JSON object ``{"shape", "dtype", "data"}``             routed; uint8, int16        refused
``nemo``        ``nrlre1:<dtype>:<rows>x<layers>x<top_k>:<base64>``    routed; int8 to int32       all -1
``fastdeploy``  base64 of the bytes                                    routed; uint8 to uint32     all ones in binary
==============  =====================================================  ==========================  ==================

An encoding without a way to say that a row is missing refuses routes that miss one, or a layer of one: any spelling as
ids is some expert's. The others say so of each layer by itself. What is decoded is checked as every :class:`Routes` is,
so that a row of zeros, which is how some engines spell a row that they lost, is an error and never a row. Pure: no I/O.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final, Literal, get_args

from cache_manager.errors import InvalidInputError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.encodings import fastdeploy, lightllm, nemo, own, sglang, vllm
from kvroute.routes import Routes

Encoding = Literal["kvroute", "sglang", "vllm", "lightllm", "nemo", "fastdeploy"]
ENCODINGS: Final[tuple[str, ...]] = get_args(Encoding)

_MODULES: Final[dict[str, ModuleType]] = {
    "kvroute": own,
    "sglang": sglang,
    "vllm": vllm,
    "lightllm": lightllm,
    "nemo": nemo,
    "fastdeploy": fastdeploy,
}
assert tuple(_MODULES) == ENCODINGS


def encode(routes: Routes, encoding: str = "kvroute") -> Any:
    """``routes`` in ``encoding``: a JSON object or a string, ``None`` where :func:`refusal` says why not."""
    return _module(encoding).encode(routes)


def decode(given: Any, spec: AuxBlockDataSpec, encoding: str = "kvroute", start: int = 0) -> Routes:
    """The routes that are ``given`` in ``encoding``, for the routers of ``spec``, from position ``start``.

    Raises :class:`RowError` for anything else, whatever it is, that names the field, what was wanted and what came. The
    memory that it takes is a fixed multiple of the size of what was given, whatever shape that claims to have.
    kvroute's own object says its start itself.
    """
    routes: Routes = _module(encoding).decode(given, spec, start)
    return routes


def refusal(routes: Routes, encoding: str) -> str | None:
    """Why ``routes`` cannot be told in ``encoding``, in one line; ``None`` when they can."""
    why: str | None = _module(encoding).refusal(routes)
    return why


def _module(encoding: str) -> ModuleType:
    module = _MODULES.get(encoding) if isinstance(encoding, str) else None
    if module is None:
        raise InvalidInputError("encoding", "one of " + ", ".join(ENCODINGS), repr(encoding))
    return module


__all__ = ["ENCODINGS", "Encoding", "decode", "encode", "refusal"]

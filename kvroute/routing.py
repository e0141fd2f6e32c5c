"""The specs of the rows of Mixture-of-Experts routing, from numbers or from a model's configuration.

A routing row holds, for one token, the ids of the experts that each MoE layer chose: *logical* ids, as the router emits
them, before any expert-parallel load balancer maps them to physical copies. Shared experts are never among them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cache_manager.errors import SpecError
from cache_manager.spec import AuxBlockDataSpec

ROUTING = "routing"
"""The name of the spec that :func:`routing_spec` makes."""
ROUTING_WEIGHTS = "routing_weights"
"""The name of the spec that :func:`routing_weights_spec` makes."""

_EXPERTS_MAX = 1 << 32
SPECS_KEPT = 64
"""Specs that are cached: every ``Routes`` asks for one, and a process has those of a few models."""


def routing_spec(
    num_experts: int,
    top_k: int,
    layer_ids: Iterable[int],
    num_layers: int,
    block_tokens: int,
) -> AuxBlockDataSpec:
    """The spec of routing rows ``[len(layer_ids), top_k]``, in the narrowest unsigned dtype that holds every id.

    ``layer_ids`` are the decoder layers that have routed experts, counted from 0 among all ``num_layers`` and strictly
    increasing. No id is set aside as a sentinel: 256 experts fit ``uint8``, because validity is a bit beside the row.

    Raises :class:`SpecError` for invalid values.

    >>> spec = routing_spec(num_experts=256, top_k=8, layer_ids=range(3, 61), num_layers=61, block_tokens=64)
    >>> spec.row_shape, spec.dtype, spec.row_nbytes
    ((58, 8), 'uint8', 464)
    >>> spec.fingerprint.hex()
    'df187916a80108e5c4fc1a9c0c504c87'
    """
    ids = tuple(layer_ids)
    plain = set(map(type, (num_experts, top_k, num_layers, block_tokens, *ids))) == {int}  # True is equal to 1
    make = _routing_spec if plain else _routing_spec.__wrapped__
    return make(num_experts, top_k, ids, num_layers, block_tokens)


@lru_cache(maxsize=SPECS_KEPT)
def _routing_spec(
    num_experts: int,
    top_k: int,
    layer_ids: tuple[int, ...],
    num_layers: int,
    block_tokens: int,
) -> AuxBlockDataSpec:
    experts = _integer("num_experts", num_experts, 1, _EXPERTS_MAX)
    k = _integer("top_k", top_k, 1, experts)
    layers = _integer("num_layers", num_layers, 1, 1 << 20)
    ids = _checked_layer_ids(layer_ids, layers)
    return AuxBlockDataSpec(
        ROUTING,
        row_shape=(len(ids), k),
        dtype=id_dtype(experts),
        block_tokens=block_tokens,
        attrs={"num_experts": experts, "layer_ids": ids, "num_layers": layers},
    )


def routing_weights_spec(routing: AuxBlockDataSpec) -> AuxBlockDataSpec:
    """The spec of routing weights beside the ids of ``routing``, a :func:`routing_spec`: ``float32``, of its shape.

    The weights are those that the experts' outputs are summed by, normalised and scaled as the model does. Put both
    specs into one record: then no block has one without the other.

    >>> ids = routing_spec(num_experts=128, top_k=8, layer_ids=range(48), num_layers=48, block_tokens=16)
    >>> ids.row_nbytes + routing_weights_spec(ids).row_nbytes
    1920
    """
    return AuxBlockDataSpec(
        ROUTING_WEIGHTS,
        routing.row_shape,
        "float32",
        block_tokens=routing.block_tokens,
        attrs=routing.attrs,
    )


def weights_version_spec(block_tokens: int) -> AuxBlockDataSpec:
    """One ``uint32`` per token: the weights version that computed it, so that a rollout may cross an update."""
    return AuxBlockDataSpec("weights_version", row_shape=(), dtype="uint32", block_tokens=block_tokens)


def logprob_spec(block_tokens: int) -> AuxBlockDataSpec:
    """One ``float32`` per token: the log probability of the *next* token in the sampler."""
    return AuxBlockDataSpec("logprob", row_shape=(), dtype="float32", block_tokens=block_tokens)


def id_dtype(num_experts: int) -> str:
    """The narrowest unsigned dtype that holds the ids ``0 .. num_experts - 1``.

    >>> [id_dtype(n) for n in (1, 256, 257, 65536, 65537)]
    ['uint8', 'uint8', 'uint16', 'uint16', 'uint32']
    """
    if num_experts <= 1 << 8:
        return "uint8"
    return "uint16" if num_experts <= 1 << 16 else "uint32"


def _integer(name: str, value: object, least: int, most: int) -> int:
    wanted = f"an integer in [{least}, {most}]"
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise SpecError(name, wanted, repr(value))
    if not least <= value <= most:
        raise SpecError(name, wanted, repr(value))
    return int(value)


def _checked_layer_ids(layer_ids: Iterable[int], num_layers: int) -> tuple[int, ...]:
    last = num_layers - 1
    ids = tuple(_integer(f"layer_ids[{i}]", layer, 0, last) for i, layer in enumerate(layer_ids))
    if not ids:
        raise SpecError("layer_ids", "at least one layer with routed experts", "none")
    for before, after in pairwise(ids):
        if after == before:
            raise SpecError("layer_ids", "distinct layers", f"{after} twice")
        if after < before:
            raise SpecError("layer_ids", "increasing layers", f"{after} after {before}")
    return ids


# From a model's configuration --------------------------------------------------------------------------------------


class TransformersConfig(Protocol):
    """A configuration object of the transformers library; only its attributes are used."""

    model_type: str


# The names in use, the clearest first. If several are there they must agree.
_NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_NUM_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "dense_mlp_idx")
_NESTED = ("thinker_config", "text_config", "language_config", "llm_config")

_MOE_KINDS = frozenset({"sparse", "moe", "hash_moe"})


class _Fields:
    """Reads a configuration whether it is a mapping or an object; a field that is ``None`` is absent."""

    def __init__(self, config: object) -> None:
        self.config = config

    def get(self, name: str) -> Any:
        if isinstance(self.config, Mapping):
            return self.config.get(name)
        return getattr(self.config, name, None)

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def integer(self, name: str, default: int) -> int:
        value = self.get(name)
        return default if value is None else _integer(name, value, 0, _EXPERTS_MAX)

    def one(self, subject: str, names: Sequence[str]) -> int:
        """The one value that the fields called ``names`` agree on."""
        values = {name: _uniform(name, self.get(name)) for name in names if self.has(name)}
        if not values:
            wanted = "one of " + ", ".join(names)
            got = "none of them: not a Mixture-of-Experts"
            raise SpecError(f"config {subject}", wanted, got)
        if len(set(values.values())) > 1:
            raise SpecError(f"config {subject}", "one value", ", ".join(f"{k}={v}" for k, v in values.items()))
        return next(iter(values.values()))


def routing_spec_from_hf(
    config: TransformersConfig | Mapping[str, Any] | str | os.PathLike[str], block_tokens: int
) -> AuxBlockDataSpec:
    """The routing spec of a model in the Hugging Face format.

    ``config`` is a transformers configuration object, the content of a ``config.json`` as a mapping, or the path of
    that file or of its directory. Multimodal configurations are read at their text model. Layers are counted as in the
    decoder, without layers for multi-token prediction.

    A path costs one file read. Raises :class:`SpecError` for a model without routed experts, and for one whose layers
    do not all have the same number of experts and top-k.

    >>> mixtral = {"num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
    >>> routing_spec_from_hf(mixtral, block_tokens=16).row_shape
    (32, 2)
    """
    fields = _text_fields(_config_of(config))
    for switch in ("enable_moe_block", "is_moe"):  # Gemma 4 and Doge: the experts are an option
        if fields.get(switch) is False:
            raise SpecError(f"config {switch}", "a model with routed experts", False)
    experts_at = fields
    if fields.has("ffn_config"):  # DBRX
        experts_at = _Fields(fields.get("ffn_config"))
    num_experts = experts_at.one("number of experts", _NUM_EXPERTS)
    # LongCat's router can also choose experts that compute nothing, and its routes name them.
    num_experts += fields.integer("zero_expert_num", 0)
    if num_experts < 2:
        wanted = "at least 2: a Mixture-of-Experts"
        raise SpecError("config number of experts", wanted, num_experts)
    top_k = experts_at.one("top-k", _TOP_K)
    num_layers = _num_layers(fields)
    layer_ids = _moe_layers(fields, num_layers)
    return routing_spec(num_experts, top_k, layer_ids, num_layers, block_tokens)


def _config_of(config: object) -> object:
    if not isinstance(config, (str, os.PathLike)):
        return config
    path = Path(config)
    if path.is_dir():
        path /= "config.json"
    try:
        loaded = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SpecError("config", f"a readable JSON file at {path}", error) from error
    if not isinstance(loaded, dict):
        raise SpecError("config", f"a JSON object in {path}", type(loaded).__name__)
    return loaded


def _text_fields(config: object) -> _Fields:
    fields = _Fields(config)
    nested = [name for name in _NESTED if fields.has(name)]
    while nested:
        fields = _Fields(fields.get(nested[0]))
        nested = [name for name in _NESTED if fields.has(name)]
    return fields


def _num_layers(fields: _Fields) -> int:
    if fields.get("model_type") == "longcat_flash":  # each decoder layer counts twice in its num_hidden_layers
        return _integer("config num_layers", fields.get("num_layers"), 1, 1 << 20)
    for name in ("layers_block_type", "hybrid_override_pattern"):  # Nemotron-H: its other fields do not count
        if isinstance(kinds := fields.get(name), Sequence):
            return len(kinds)
    for name in _NUM_LAYERS:
        if fields.has(name):
            return _integer(f"config {name}", fields.get(name), 1, 1 << 20)
    wanted = "one of " + ", ".join(_NUM_LAYERS)
    raise SpecError("config number of layers", wanted, "none of them")


def _moe_layers(fields: _Fields, num_layers: int) -> list[int]:
    """The decoder layers that have routed experts, by the first rule whose field the configuration has."""
    for name, rule in _RULES:
        if not fields.has(name):
            continue
        try:
            layers = rule(fields, fields.get(name), num_layers)
        except (TypeError, ValueError, ArithmeticError) as error:
            if isinstance(error, SpecError):
                raise
            wanted = "a value that says which layers have experts"
            raise SpecError(f"config {name}", wanted, error) from error
        if layers is not None:
            return sorted(layers)
    return list(range(num_layers))


def _by_mlp_kind(_fields: _Fields, kinds: Sequence[str], num_layers: int) -> list[int]:
    unknown = sorted(set(kinds) - _MOE_KINDS - {"dense"})
    if unknown:
        wanted = "dense, " + ", ".join(sorted(_MOE_KINDS))
        raise SpecError("config mlp_layer_types", wanted, ", ".join(unknown))
    layer_kinds = _per_layer("mlp_layer_types", kinds, num_layers)
    return [i for i, kind in enumerate(layer_kinds) if kind != "dense"]


def _by_block_kind(
    _fields: _Fields,
    kinds: Sequence[str],
    _num_layers: int,
) -> list[int] | None:
    if not _MOE_KINDS & set(kinds):  # the kinds of attention, in most hybrid models
        return None
    return [i for i, kind in enumerate(kinds) if kind in _MOE_KINDS]


def _by_pattern(_fields: _Fields, pattern: str, _num_layers: int) -> list[int]:
    return [i for i, kind in enumerate(pattern) if kind == "E"]


def _by_list(_fields: _Fields, ids: Iterable[int] | str, num_layers: int) -> list[int]:
    parts = ids.split(",") if isinstance(ids, str) else ids
    numbers = [int(part) for part in parts]
    return [_integer("config MoE layer", number, 0, num_layers - 1) for number in numbers]


def _by_sparse_step(fields: _Fields, step: int, num_layers: int) -> list[int]:
    dense = set(fields.get("mlp_only_layers") or ())
    return [i for i in range(num_layers) if step and i not in dense and (i + 1) % step == 0]


def _by_period(fields: _Fields, period: int, num_layers: int) -> list[int]:
    offset = fields.integer("expert_layer_offset", 0)
    return [i for i in range(num_layers) if i % period == offset]


def _by_start_index(fields: _Fields, first: int, num_layers: int) -> list[int]:
    end = fields.get("moe_layer_end_index")
    last = num_layers - 1 if end in (None, -1) else end
    step = fields.integer("moe_layer_interval", 1) or 1
    return [i for i in range(num_layers) if first <= i <= last and (i + 1) % step == 0]


def _by_frequency(
    fields: _Fields,
    frequency: int | Sequence[int],
    num_layers: int,
) -> list[int]:
    firsts = [fields.integer(name, 0) for name in _DENSE_FIRST if fields.has(name)]
    first = firsts[0] if firsts else 0
    if isinstance(frequency, Sequence):
        flags = _per_layer("moe_layer_freq", frequency, num_layers)
        return [i for i in range(first, num_layers) if flags[i]]
    return [i for i in range(first, num_layers) if i % frequency == 0]


def _by_dense_first(fields: _Fields, _first: int, num_layers: int) -> list[int]:
    return _by_frequency(fields, 1, num_layers)


_Rule = Callable[[_Fields, Any, int], list[int] | None]

# Fields that say which layers have experts, the most explicit first. Without any of them every layer has experts.
_RULES: tuple[tuple[str, _Rule], ...] = (
    ("mlp_layer_types", _by_mlp_kind),
    ("layers_block_type", _by_block_kind),
    ("hybrid_override_pattern", _by_pattern),  # Nemotron-H
    ("moe_layers", _by_list),  # Llama 4
    ("moe_layers_enum", _by_list),  # Step 3
    ("decoder_sparse_step", _by_sparse_step),  # Qwen
    ("expert_layer_period", _by_period),  # Jamba
    ("moe_layer_start_index", _by_start_index),  # ERNIE 4.5; the last layer may be written as -1
    ("moe_layer_freq", _by_frequency),  # DeepSeek; a number, or a flag for each layer
    *((name, _by_dense_first) for name in _DENSE_FIRST),
)


def _per_layer(name: str, values: Sequence[Any], num_layers: int) -> Sequence[Any]:
    if len(values) != num_layers:
        raise SpecError(f"config {name}", f"{num_layers} entries", len(values))
    return values


def _uniform(name: str, value: Any) -> int:
    """``value``, or the one value of a list that gives it layer by layer."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    listed = list(value) if is_list else [value]
    values = {_integer(f"config {name}", v, 0, _EXPERTS_MAX) for v in listed}
    if len(values) != 1:
        raise SpecError(f"config {name}", "the same value for every layer", value)
    return values.pop()

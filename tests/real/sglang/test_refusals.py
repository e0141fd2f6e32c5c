"""Every server argument of the installed SGLang was decided about: refused, judged, or of no matter to a row."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
from sglang.srt.server_args import ServerArgs

from kvroute.connector.settings import Lending
from kvroute.integrations.sglang.hooks import COMPUTES
from kvroute.integrations.sglang.refusals import ARGUMENTS, OLDER, REFUSED, refusals

NAMES = (Path(__file__).parent / "server_args.txt").read_text().split()


def arguments(**changed: Any) -> Any:
    defaults = ServerArgs(model_path="m")
    return SimpleNamespace(**{name: getattr(defaults, name) for name in ServerArgs.__struct_fields__} | changed)


def test_a_new_argument_of_sglang_is_noticed() -> None:
    """Method: a file has the names of all. Decide about a new one in ``refusals.py``, then add it to the file."""
    assert sorted(ServerArgs.__struct_fields__) == NAMES
    assert {*(entry.argument for entry in REFUSED), *ARGUMENTS, *COMPUTES} <= set(NAMES)
    assert not {entry.argument for entry in REFUSED} & set(ARGUMENTS)
    assert not {entry.argument for entry in OLDER} & set(NAMES)


def test_an_engine_with_default_arguments_is_accepted() -> None:
    assert list(refusals(arguments(), Lending())) == []


@pytest.mark.parametrize("argument", [entry.argument for entry in REFUSED])
def test_each_argument_is_refused_by_name(argument: str) -> None:
    """Method: a value of its type that is not the default."""
    default = getattr(arguments(), argument)
    value = not default if isinstance(default, bool) else 2 if isinstance(default, int) else "another"
    ((name, wanted, got),) = refusals(arguments(**{argument: value}), Lending())
    assert (name, got) == (argument, value)
    assert wanted


@pytest.mark.parametrize("argument", ["dp_size", "attn_dp_size"])
def test_data_parallelism_of_a_release_that_was_not_judged_with_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    monkeypatch.setattr(sglang, "__version__", "0.5.22")
    ((name, wanted, got),) = refusals(arguments(**{argument: 2}, disable_cuda_graph=True), Lending())
    assert (name, wanted, got) == (argument, "1: SGLang 0.5.22 was not judged with it", 2)


def test_what_depends_on_other_arguments_is_refused_by_name() -> None:
    linker = {"linker": "KvrouteLinker", "linker_extra_config": {}}
    ours = {"enable_unified_cache_external_linker": True, "unified_cache_external_linker_config": linker}
    store = Lending(store="memory:")
    ranks = {"tp_size": 2, "attn_dp_size": 2}
    cases: list[tuple[dict[str, Any], Lending, str | None]] = [
        (ours, Lending(), "store"),
        ({"hicache_storage_backend": "file"}, Lending(), "store"),
        (ours | {"tp_size": 2}, store, None),
        (ours | {"tp_size": 2}, Lending(store="file:///d"), "store"),
        (ours | {"tp_size": 2}, Lending(store="file:///d/{rank}"), None),
        ({"tp_size": 2}, Lending(store="file:///d"), None),
        ({"tp_size": 2}, store, None),
        ({"dp_size": 2}, store, None),
        ({"dp_size": 2}, Lending(store="file:///d"), "store"),
        ({"dp_size": 2}, Lending(store="file:///d/{rank}"), None),
        (ranks, store, "disable_cuda_graph"),
        (ranks | {"disable_cuda_graph": True}, store, None),
        (ranks | {"disable_cuda_graph": True} | ours, store, None),
        (ranks | {"disable_cuda_graph": True, "tp_size": 4} | ours, store, None),
        ({"hicache_storage_backend": "file"}, store, None),
        ({"hicache_storage_backend": "file", "tp_size": 2}, store, "tp_size"),
        ({"enable_unified_cache_external_linker": True, "tp_size": 2}, store, "tp_size"),
        (ranks | {"disable_cuda_graph": True, "hicache_storage_backend": "file"}, store, None),
        (ranks | {"disable_cuda_graph": True, "hicache_storage_backend": "file", "tp_size": 4}, store, "tp_size"),
        ({"enable_lora": True}, store, "enable_lora"),
        ({"enable_lora": True}, Lending(), None),
        ({"load_format": "remote"}, store, "load_format"),
        ({"load_format": "remote"}, Lending(store="memory:", weights="w"), None),
    ]
    for changed, settings, refused in cases:
        assert [name for name, *_ in refusals(arguments(**changed), settings)] == ([refused] if refused else [])


def test_what_is_refused_with_drafts() -> None:
    """Goal: each kind that was judged is accepted with what it was judged with, and each other thing is refused by its
    name."""
    drafts = {"speculative_algorithm": "NGRAM", "disable_cuda_graph": True}
    model = drafts | {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}
    pages = {"enable_hierarchical_cache": True}
    linker = {"enable_unified_cache_external_linker": True}
    cases: list[tuple[dict[str, Any], list[str]]] = [
        (drafts, []),
        (drafts | {"speculative_eagle_topk": 4}, []),  # its breadth
        (drafts | pages, []),
        (drafts | linker, ["enable_unified_cache_external_linker"]),
        (drafts | {"disable_cuda_graph": False}, ["disable_cuda_graph"]),
        (drafts | {"tp_size": 2}, ["tp_size"]),
        (drafts | {"dp_size": 2}, ["dp_size"]),
        (drafts | {"disaggregation_mode": "decode"}, ["disaggregation_mode"]),
        (drafts | {"enable_mixed_chunk": True}, ["enable_mixed_chunk"]),
        (drafts | {"speculative_algorithm": "DFLASH"}, ["speculative_algorithm"]),
        *((model | {"speculative_algorithm": kind}, []) for kind in ("EAGLE", "NEXTN", "EAGLE3", "STANDALONE")),
        (model | {"speculative_eagle_topk": 4}, ["speculative_eagle_topk"]),
        (model | {"enable_multi_layer_eagle": True}, ["enable_multi_layer_eagle"]),
        (model | {"speculative_adaptive": True}, ["speculative_adaptive"]),
        (model | pages, ["enable_hierarchical_cache"]),
    ]
    for changed, refused in cases:
        given = refusals(arguments(**changed), Lending(store="memory:"))
        assert [name for name, *_ in given] == refused, changed


def test_drafts_in_a_release_that_was_not_judged_with_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "__version__", "0.5.22")
    drafts = {"speculative_algorithm": "NGRAM", "disable_cuda_graph": True}
    ((name, wanted, got),) = refusals(arguments(**drafts), Lending())
    assert (name, got) == ("speculative_algorithm", "NGRAM")
    assert wanted == "None in SGLang 0.5.22: it was judged in 0.5.23"


def test_what_is_refused_with_routing_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what was not judged beside weights does not start, and an engine without them starts as before. Method:
    each feature of the engine, beside what was judged; releases before the one that was."""
    weights = Lending(routing_weights=True, store="memory:", weights="w")
    linker = {"enable_unified_cache_external_linker": True}
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({}, None),
        ({"enable_hierarchical_cache": True}, None),
        ({"hicache_storage_backend": "file"}, None),
        (linker, None),
        (linker | {"unified_cache_external_linker_config": {"linker": "KvrouteLinker"}}, None),
        ({"device": "cuda"}, "device"),
        ({"tp_size": 2}, "tp_size"),
        ({"dp_size": 2}, "dp_size"),
        ({"tp_size": 1, "attn_dp_size": 2, "disable_cuda_graph": True}, "attn_dp_size"),
        ({"ep_size": 2}, "ep_size"),
        ({"disaggregation_mode": "prefill"}, "disaggregation_mode"),
        ({"disaggregation_mode": "decode"}, "disaggregation_mode"),
        ({"speculative_algorithm": "NGRAM", "disable_cuda_graph": True}, "speculative_algorithm"),
    ]
    for changed, refused in cases:
        given = arguments(**{"device": "cpu", **changed})
        found = list(refusals(given, weights))
        assert [name for name, *_ in found] == ([refused] if refused else []), changed
        assert all("with routing_weights, which nothing has judged" in wanted for _, wanted, _ in found)
        assert not list(refusals(given, Lending(store="memory:", weights="w"))), changed
    plain = Lending(routing_weights=True)
    ((name, wanted, _),) = refusals(arguments(device="cpu", enable_lora=True), plain)
    assert (name, wanted) == (
        "enable_lora",
        "False with routing_weights, which nothing has judged: an adapter's experts are others",
    )
    monkeypatch.setattr(sglang, "__version__", "0.5.22")
    ((name, wanted, got),) = refusals(arguments(device="cpu"), plain)
    assert (name, wanted, got) == ("routing_weights", "false in SGLang 0.5.22: it was judged in 0.5.23", True)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_what_is_refused_with_prefill_and_decode_apart(mode: str) -> None:
    """Goal: both roles are accepted with what was judged, and each other thing is refused by its name."""
    cases: list[tuple[dict[str, Any], Lending, str | None]] = [
        ({}, Lending(), None),
        ({"disaggregation_transfer_backend": "nixl"}, Lending(), None),
        ({"disaggregation_transfer_backend": "mori"}, Lending(), "disaggregation_transfer_backend"),
        ({"disaggregation_transfer_backend": "fake"}, Lending(), "disaggregation_transfer_backend"),
        ({"tp_size": 2}, Lending(), None),
        ({"dp_size": 2}, Lending(), None),
        ({"dp_size": 2}, Lending(lend="tcp://127.0.0.1:65534"), None),
        ({"dp_size": 2}, Lending(lend="tcp://127.0.0.1:65535"), "lend"),
        ({"tp_size": 2, "attn_dp_size": 2, "disable_cuda_graph": True}, Lending(), "attn_dp_size"),
        ({"enable_hierarchical_cache": True}, Lending(), "enable_hierarchical_cache"),
        ({}, Lending(lend="ipc:///tmp/rows"), "lend"),
    ]
    for changed, settings, refused in cases:
        given = arguments(**{"disaggregation_mode": mode, **changed})
        assert [name for name, *_ in refusals(given, settings)] == ([refused] if refused else [])

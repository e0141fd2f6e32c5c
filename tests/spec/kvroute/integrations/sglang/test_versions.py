"""Releases of SGLang: which were judged, what is looked up in each, and how older ones are asked."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cache_manager.keys import Namespace
from kvroute import ConfigError, routing_spec
from kvroute.connector.settings import Common, Lending
from kvroute.integrations.sglang import versions
from kvroute.integrations.sglang.refusals import refusals
from kvroute.integrations.sglang.routers import routed_layers
from kvroute.integrations.sglang.rows import RoutedRows
from kvroute.integrations.sglang.settings import LINKER_NAME, settings_of_arguments
from kvroute.integrations.sglang.versions import HOST, JUDGED, LINKER, PREFERRED, WAYS, Place, release

ROOT = Path(__file__).parents[5]
PAGE = 4


def test_the_table_is_what_is_run_and_what_pages_say() -> None:
    """Goal: nobody says that a release was judged when nothing judges it. Method: the list of the Makefile, the pin of
    `make test-sglang`, the range that is installed, and the table of the page."""
    makefile = (ROOT / "Makefile").read_text()
    releases = re.search(r"^SGLANG_RELEASES := (.+)$", makefile, re.MULTILINE)
    pin = re.search(r"^sglang==(.+)$", (ROOT / "tests/real/sglang/requirements.txt").read_text(), re.MULTILINE)
    assert releases
    assert pin
    assert releases[1].split() == [judged.version for judged in JUDGED if "smoke" in judged.how]
    assert [pin[1]] == [judged.version for judged in JUDGED if "tests" in judged.how] == [PREFERRED]
    run = (ROOT / ".ci/run").read_text()
    assert all(target in run for target in ("test-sglang", "smoke-sglang"))

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    major, minor, patch = release(JUDGED[-1].version)
    assert extras["sglang"] == [f"sglang>={JUDGED[0].version},<{major}.{minor}.{patch + 1}"]

    page, readme = (ROOT / "docs/sglang.md").read_text(), (ROOT / "README.md").read_text()
    for version, how, date, note in JUDGED:
        ways = ", ".join(WAYS[way] for way in how)
        assert f"| {version} | {'; '.join(filter(None, (ways, note)))} | {date} |\n" in page
    for text in page, readme:
        assert f"sglang=={PREFERRED}" in text
        assert f"an SGLang from {JUDGED[0].version}" in text


def test_versions_of_the_table_are_in_order_and_judged_in_a_known_way() -> None:
    order = [(release(judged.version), judged.version) for judged in JUDGED]  # a repair has its release's numbers
    assert order == sorted(set(order))
    assert all(judged.how and set(judged.how) <= set(WAYS) for judged in JUDGED)


def test_a_release_is_asked_for_what_it_has_to_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what one part lacks costs that part alone, and what a release cannot have is not asked for. Method: places
    of the standard library, some of which are not there."""
    places = {
        "there": Place(("json.loads",), ("s",)),
        "renamed": Place(("json.new_load", "json.load")),
        "of later ones": Place(("json.later",), since=(0, 5, 17)),
        "of earlier ones": Place(("json.load",), part=LINKER, until=(0, 5, 12)),
        "of earlier ones, not there": Place(("json.earlier",), until=(0, 5, 11)),
        "of a part": Place(("json.dumps",), part=HOST),
        "of a part, not there": Place(("json.host",), part=HOST),
        "of another part": Place(("json.JSONEncoder.encode",), ("o",), part=LINKER),
    }
    monkeypatch.setattr(versions, "PLACES", places)
    monkeypatch.setattr(versions, "TAKEN", ())
    names = {"there": "json.loads", "renamed": "json.load", "of another part": "json.JSONEncoder.encode"}
    assert versions.hooked("0.5.16") == names
    assert versions.hooked("0.5.12.post1") == {**names, "of earlier ones": "json.load"}
    assert [versions.absent("0.5.16", part) for part in ("", HOST, LINKER)] == [[], ["json.host"], []]
    assert versions.absent("0.5.22") == ["json.later"]
    monkeypatch.setitem(places, "there", Place(("json.loads",), ("text",)))
    assert versions.absent("0.5.16") == ["json.loads(text)"]
    assert versions.unfit("0.5.16", "0.5.16") == (
        f"SGLang {' or '.join(versions.TESTED)}, or one with json.loads(text)",
        "0.5.16, which lacks it",
    )


@pytest.mark.parametrize(
    ("version", "part", "place"),
    [
        ("0.5.16", HOST, "cache_controller.HiCacheController.__init__"),
        ("0.5.22", HOST, "hybrid_cache_controller.HybridCacheController.__init__"),
        ("0.5.22", LINKER, "linker_factory.create_unified_cache_linker"),
    ],
)
def test_a_part_whose_names_are_absent_is_refused_by_its_argument(
    version: str, part: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: an SGLang of this version without any name, whose arguments are those that it has: no
    ``unified_cache_external_linker_config``."""
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__=version))
    defaults: dict[str, Any] = {HOST: False, LINKER: False, "hicache_storage_backend": None, "enable_lora": False}
    settings = Lending(store="memory:", weights="w")
    assert list(refusals(SimpleNamespace(**defaults), settings)) == []
    ((argument, wanted, got),) = refusals(SimpleNamespace(**defaults | {part: True}), settings)
    assert (argument, got) == (part, True)
    assert re.fullmatch(rf"False: SGLang {version} has not sglang\.\S+{place}, where its pages are followed", wanted)


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"hicache_storage_backend": "file"}, "2"),
        ({LINKER: True}, "2"),
        ({LINKER: True, "unified_cache_external_linker_config": {"linker": LINKER_NAME}}, None),
        ({"hicache_storage_backend": "file", "attn_dp_size": 2, "disable_cuda_graph": True}, None),
        ({}, None),
    ],
)
def test_ranks_with_a_part_of_the_kv_are_refused_where_others_keep_it(
    changed: dict[str, Any], refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: no row beside a rank's KV of another computation. Where others keep the KV, the first rank's part alone
    matches the rows: it does not see what another rank loads."""
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.23"))
    monkeypatch.setattr(versions, "absent", lambda *_: [])
    defaults: dict[str, Any] = {LINKER: False, "hicache_storage_backend": None, "enable_lora": False, "tp_size": 2}
    said = list(refusals(SimpleNamespace(**defaults | changed), Lending(store="memory:", weights="w")))
    assert [(name, str(got)) for name, _, got in said] == ([("tp_size", refused)] if refused else [])
    assert all("first rank's part" in wanted for _, wanted, _ in said)


def test_settings_are_those_of_the_environment_where_a_linker_has_no_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: 0.5.22 with a linker is refused by the linker's name, and not by an argument that it lacks."""
    monkeypatch.setenv("KVROUTE_SGLANG", json.dumps({"weights": "w"}))
    assert settings_of_arguments(SimpleNamespace(**{LINKER: True})) == Lending(weights="w")


class Elsewhere:
    """A tensor on a device, which this host copies and does not read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def to(self, device: str, *, non_blocking: bool) -> torch.Tensor:
        assert (device, non_blocking) == ("cpu", True)
        return self._tensor


def test_a_pass_is_copied_by_the_older_call() -> None:
    """Goal: up to 0.5.12 rows come to the host. Method: a pass whose slots and ids are on a device until then."""
    spec = routing_spec(num_experts=16, top_k=2, layer_ids=[0, 1], num_layers=2, block_tokens=PAGE)
    rows = RoutedRows(spec, 3, Namespace("m", 1), Common(strict=True))
    slots, ids = torch.arange(PAGE, 2 * PAGE), torch.arange(4 * PAGE, dtype=torch.int32).reshape(PAGE, 2, 2)
    launched = rows.launch(Elsewhere(slots), Elsewhere(ids))  # type: ignore[arg-type]
    launched.copy_to_cpu()
    launched.finalize()
    assert rows.read(np.arange(PAGE, 2 * PAGE), 0).routes()[0].ids.tolist() == ids.tolist()
    rows.close()


class TopK(torch.nn.Module):
    """A router of an SGLang up to 0.5.22, which names no form of its choice."""

    layer_id = 0
    topk_config = SimpleNamespace(output_format=None)


@pytest.mark.parametrize(
    ("backend", "form"),
    [
        ("triton_kernels", "TRITON_KERNEL"),
        ("flashinfer_trtllm", "BYPASSED"),
        ("flashinfer_mxfp4", "BYPASSED"),
        ("experimental_sgl_trtllm", "BYPASSED"),
        ("triton", ""),
    ],
)
def test_a_router_without_a_form_has_that_of_the_runner(
    backend: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: a backend of the runner that knows the names of all backends but one, as an older release does."""
    known = {"triton_kernels", "flashinfer_trtllm", "flashinfer_mxfp4", backend}
    asked = SimpleNamespace(**{f"is_{name}": lambda name=name: name == backend for name in known})
    monkeypatch.setattr(versions, "function_at", lambda _place: lambda: asked)
    model = torch.nn.ModuleDict({"topk": TopK()})
    if form:
        with pytest.raises(ConfigError, match=rf"try --moe-runner-backend triton, got .*TopK \({form}\) in topk"):
            routed_layers(model, [0])
    else:
        routed_layers(model, [0])

"""Settings of the SGLang integration, its door, and its tables, which a page shows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvroute import ConfigError
from kvroute.connector.settings import Lending
from kvroute.integrations.sglang import hooks, plugin, refusals, register, routers, versions
from kvroute.integrations.sglang.settings import lending_of


def test_invalid_settings_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a mistake can be mended by its message. Method: the place, what may stand there, and what was written."""
    wanted = "store, rollouts, weights, witness, strict, untested, lend, lent_nbytes_max, keys, routing_weights"
    with pytest.raises(ConfigError, match=rf"^linker_extra_config: wanted some of {wanted} .*got 'stor'"):
        lending_of({"linker": "KvrouteLinker", "linker_extra_config": {"stor": "x"}})
    monkeypatch.setenv("KVROUTE_SGLANG", "store=file:///x")
    with pytest.raises(ConfigError, match=r"^KVROUTE_SGLANG: wanted a JSON object, got 'store=file:///x'"):
        lending_of(None)
    monkeypatch.setenv("KVROUTE_SGLANG", '{"weights": 3}')
    with pytest.raises(ConfigError, match=r"^KVROUTE_SGLANG\.weights: wanted text, got 3"):
        lending_of(None)
    monkeypatch.setenv("KVROUTE_SGLANG", "")
    assert lending_of(None) == Lending()
    monkeypatch.setenv("KVROUTE_SGLANG", '{"weights": "w"}')
    assert lending_of({"linker": "another"}) == Lending(weights="w")


class Scheduler:
    """An engine's start."""

    def __init__(self, server_args: Any, port_args: Any) -> None:
        self.started = (server_args, port_args)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Scheduler]]:
    """A scheduler whose start is the door."""
    made = type("Scheduler", (Scheduler,), {"__init__": Scheduler.__init__})
    monkeypatch.setitem(sys.modules, "engine_of_a_test", SimpleNamespace(Scheduler=made))
    monkeypatch.setattr(versions, "DOOR", "engine_of_a_test.Scheduler.__init__")
    plugin.register_door.cache_clear()
    yield made
    plugin.register_door.cache_clear()


def test_a_plugin_that_two_packages_name_has_one_door(door: type[Scheduler], caplog: pytest.LogCaptureFixture) -> None:
    """Goal: kvroute installed twice is kvroute once. Method: the plugin is called twice; a scheduler starts."""
    caplog.set_level(logging.INFO)
    for _ in range(2):
        register()
    asked = SimpleNamespace(enable_return_routed_experts=False)
    assert door(asked, "ports").started == (asked, "ports")
    assert [record.message for record in caplog.records if "kvroute does nothing here" in record.message] == [
        "kvroute does nothing here: routed experts are not asked for (--enable-return-routed-experts)"
    ]


@pytest.mark.usefixtures("door")
def test_an_engine_without_the_door_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: never silent. SGLang's loader logs an ``Exception`` of a plugin and goes on, so it is none."""
    monkeypatch.setattr(versions, "DOOR", "engine_of_a_test.Scheduler.run")
    with pytest.raises(SystemExit, match=r"lacks engine_of_a_test\.Scheduler\.run .*: leave it out of SGLANG_PLUGINS"):
        register()


def test_what_a_server_refuses_is_on_the_page() -> None:
    """Goal: the page says what the code does. Method: each line of the tables, made from them."""
    page = (Path(__file__).parents[5] / "docs" / "sglang.md").read_text()
    lines = [f"| `{entry.argument}` | {entry.why} |" for entry in (*refusals.REFUSED, *refusals.OLDER)]
    lines += [f"| `{argument}` | {how} |" for argument, how in refusals.ARGUMENTS.items()]
    for table in (routers.ROUTERS, routers.FORMATS):
        for name, router in table.items():
            accepted = "accepted" if router.accepted else "refused"
            lines.append(f"| `{name}` | {router.sees} | {router.judged} | {accepted} |")
    lines += [f"| {path} | {sees} |" for path, sees in routers.PATHS.items()]
    assert [line for line in lines if line not in page] == []


@pytest.mark.parametrize(
    ("pools", "storage", "refused"),
    [
        (["kv", "indexer"], False, r"enable_hierarchical_cache: wanted a model .*got indexer"),
        (["kv", "swa", "draft_kv"], False, r"enable_hierarchical_cache: wanted a model .*got draft_kv"),
        (["kv", "swa"], True, r"hicache_storage_backend: wanted a model whose last layer attends.*got kv, swa, with"),
        (["kv", "mamba"], True, r"hicache_storage_backend: wanted a model whose last layer.*got kv, mamba, with"),
        (
            ["kv", "swa", "mamba"],
            True,
            r"hicache_storage_backend: wanted a model whose last .*got kv, swa, mamba, with",
        ),
    ],
)
def test_pages_on_the_host_that_were_not_judged_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, pools: list[str], storage: bool, refused: str
) -> None:
    """Goal: what was not judged does not start. Method: controllers of further pages beside those of all tokens, and
    storages that keep pages with windows or states of a last layer."""
    monkeypatch.setattr(hooks, "capturer", lambda: object())
    entries = [SimpleNamespace(name=name) for name in pools]
    device: dict[str, Any] = {"layers_mapping": {0: (0, False), 1: (0, True)}}
    if pools == ["kv", "mamba"]:
        device = {"full_attention_layer_id_mapping": {0: 0}, "mamba_pool": SimpleNamespace(mamba_layer_ids=[1])}
    controller = SimpleNamespace(
        mem_pool_host=SimpleNamespace(entries=entries),
        mem_pool_device=SimpleNamespace(**device),
        enable_storage=storage,
    )
    with pytest.raises(ConfigError, match=refused):
        hooks.HOOKS["hosted"](lambda _: None, controller)

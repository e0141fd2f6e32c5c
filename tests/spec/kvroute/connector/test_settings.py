"""An operator's settings: what is wrong with one is said by its name, before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cache_manager.errors import ConfigError
from kvroute.connector import Settings
from kvroute.connector.settings import Common
from kvroute.rollout import open_rollouts


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ({"witness": "maybe"}, ".witness: wanted 'auto' or 'flagged' or 'missing', got 'maybe'"),
        ({"strict": "yes"}, ".strict: wanted true or false, got 'yes'"),
        ({"lent_nbytes_max": 0}, ".lent_nbytes_max: wanted a whole number from 1, got 0"),
        ({"weights_version": -1}, ".weights_version: wanted a whole number from 0 to 4294967294 or null, got -1"),
        ({"untested": 0.34}, ".untested: wanted text, got 0.34"),
        ({"store": "bogus://x"}, ".store: wanted one of apart, file, memory, mooncake, tiered, got 'bogus'"),
        ({"store": "tiered:file:///a,bogus:b"}, ".store: wanted one of apart, file, memory, mooncake, tiered"),
        ({"store": "/var/lib/rows"}, ".store: wanted a URL such as file:///var/lib/kvroute, got '/var/lib/rows'"),
        ({"rollouts": "bogus:"}, ".rollouts: wanted response: or one of file, mooncake, ray, tq, got 'bogus'"),
        ({"lend": "tcp://127.0.0.1:99999"}, ".lend: wanted ipc:///PATH or tcp://HOST:PORT, got"),
        ({"lend": "tcp://10.0.0.1:7"}, ".lend: wanted an address of this machine alone, without CURVE keys"),
        ({"keys": "/nonexistent"}, ".keys: wanted a file with a public and a secret key, got /nonexistent"),
        ({"carrier": "layer"}, ".carrier: wanted a 'store' and no carrier, or neither with KvrouteOffloadingConnector"),
        ({"carrier": "pages"}, ".carrier: wanted 'auto' or 'connector' or 'transfer', got 'pages'"),
        ({"routing_weights": 1}, ".routing_weights: wanted true or false, got 1"),
        (
            {"routing_weights": True, "field": True},
            ".routing_weights: wanted false, or rollouts 'response:': weights go into answers",
        ),
        ({"routing_weights": True, "rollouts": "file:///a"}, ".routing_weights: wanted false, or rollouts 'response:'"),
        ({"indexer_topk": 1}, ".indexer_topk: wanted expert ids alone: nothing captures it in this engine"),
        ({"stor": "file:///a"}, ": wanted some of store, rollouts"),
        (7, ": wanted a mapping of settings (docs/settings.md), got 7"),
    ],
)
def test_a_wrong_setting_is_named(written: Any, wanted: str) -> None:
    """Goal: the error has the setting, what was wanted and what came. Method: each kind of value, unknown schemes,
    addresses that cannot be lent at, and a file that is not there."""
    with pytest.raises(ConfigError) as refused:
        Settings.of(written)
    assert str(refused.value).startswith("kv_connector_extra_config.kvroute" + wanted)


@pytest.mark.parametrize(
    ("store", "writes", "reads", "opens"),
    [
        ("", False, "", ""),
        ("memory:", True, "", "memory:"),
        ("file:///r?quota=1GiB", True, "file:///r?mode=read&absent=wait", "file:///r?quota=1GiB"),
        ("file:///mode=read/r", True, "file:///mode=read/r?mode=read&absent=wait", "file:///mode=read/r"),
        ("file:///absent=/r?mode=read", False, *["file:///absent=/r?mode=read&absent=wait"] * 2),
        ("file:///r?mode=read&absent=error", False, *["file:///r?mode=read&absent=error"] * 2),
        ("mooncake://h:1/mode=read", True, *["mooncake://h:1/mode=read"] * 2),
        ("apart:?call=1s,file:///r?quota=1GiB", True, "apart:?call=1s,file:///r?mode=read&absent=wait", None),
        ("apart:?call=1s,mooncake://h:1/r", True, "apart:?call=1s,mooncake://h:1/r", None),
        ("apart:file:///r?mode=read", False, *["apart:file:///r?mode=read&absent=wait"] * 2),
        ("tiered:memory:?capacity=1MiB,file:///r", True, "file:///r?mode=read&absent=wait", None),
        ("tiered:file:///a,b,mooncake://h:1", True, "tiered:file:///a,b?mode=read&absent=wait,mooncake://h:1", None),
        ("tiered:memory:,memory:", True, "", None),
    ],
)
def test_what_is_read_and_written_of_a_store(store: str, writes: bool, reads: str, opens: str | None) -> None:
    """Goal: a scheduler reads the files that its worker writes, and a path is no parameter. Method: URLs with words of
    parameters in their paths, and URLs that hold others."""
    settings = Settings.of({"store": store})
    assert (settings.writes, settings.reads, settings.opens) == (writes, reads, store if opens is None else opens)


def test_a_key_file_is_read_before_anything_starts(tmp_path: Path) -> None:
    """Goal: an address that other hosts reach is taken with keys. Method: a pair that was made for it."""
    from transfer.curve import make_keys

    keys = make_keys(tmp_path / "keys", "ours")
    assert Settings.of({"lend": "tcp://10.0.0.1:7", "keys": str(keys)}).keys == str(keys)


@pytest.mark.parametrize(
    ("rollouts", "wanted"),
    [
        ("apart:response:", "rollouts: wanted response: or apart: and the URL of one rollout store"),
        ("apart:apart:file:///a", "rollouts: wanted response: or apart: and the URL of one rollout store"),
        ("apart:file:///a,file:///b", "rollouts: wanted response: or apart: and the URL of one rollout store"),
        ("apart:", "rollouts: wanted response: or apart: and the URL of one rollout store"),
        ("apart:bogus:x", "rollouts: wanted response: or one of file, mooncake, ray, tq, got 'bogus'"),
        ("apart:?arena=1MiB,file:///a", "rollouts: wanted response: or one of call, got 'arena'"),
        ("apart:?call=soon,file:///a", "rollouts: wanted response: or a positive whole number with one of the units"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(rollouts: str, wanted: str) -> None:
    """Goal: the setting is named before anything starts. Method: what is no one store behind ``apart:``."""
    with pytest.raises(ConfigError) as refused:
        Settings.of({"rollouts": rollouts})
    assert wanted in str(refused.value)


def test_another_engine_refuses_it() -> None:
    """Goal: an engine without such a process says so. Method: the settings that all have; and who would read there by
    this URL."""
    with pytest.raises(ConfigError, match="only in vLLM and SGLang one is apart"):
        Common.of({"rollouts": "apart:file:///a"}, "settings")
    with pytest.raises(ConfigError, match="wanted one of file"):
        open_rollouts("apart:file:///a")

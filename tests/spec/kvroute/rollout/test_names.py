"""Rollout ids, handles and URLs, as they come from clients and over the wire."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from a_store import a_store
from hypothesis import given
from hypothesis import strategies as st

import kvroute.rollout
from cache_manager.errors import ConfigError, InvalidInputError
from kvroute.rollout import RolloutHandle, open_rollouts, previous_turn, rollout_id_of
from kvroute.rollout.ids import file_name
from kvroute.rollout.local import LocalRollouts
from kvroute.testing.rollouts import routes_of

UUID4 = "d9f16c5c-65f6-4815-b44d-14e2c581907c"
ids = st.text(min_size=1, max_size=60).filter(lambda text: max(text) < "\ud800" or max(text) > "\udfff")


@pytest.mark.parametrize(
    ("request_id", "rollout_id"),
    [
        (f"chatcmpl-xxx_xxx_epoch_15:2:2:1-{UUID4}_0", "xxx_xxx_epoch_15:2:2:1"),
        (f"chatcmpl-xxx_xxx_epoch_15:2:2:1-{UUID4}_3", "xxx_xxx_epoch_15:2:2:1~3"),  # not the rollout of sample 0
        (f"chatcmpl-my-user-7:0:0:0-{UUID4}", "my-user-7:0:0:0"),
        (f"chatcmpl-u-{UUID4}-{UUID4}", f"u-{UUID4}"),
        ("req-1", "req-1"),
        ("cmpl-abc", "cmpl-abc"),
    ],
)
def test_a_request_id_says_which_rollout_it_is(request_id: str, rollout_id: str) -> None:
    """Goal: names as FastDeploy makes them. Method: its own test vectors; ids of another form are used unchanged."""
    assert rollout_id_of(request_id) == rollout_id


def test_no_sample_has_the_name_of_another_request() -> None:
    """Goal: a client's rollout does not replace another client's. Method: an id that looks like a sample's."""
    names = [rollout_id_of("u", 1), rollout_id_of(f"chatcmpl-u-{UUID4}_2"), rollout_id_of("u"), rollout_id_of("u_1")]
    assert len({*names, rollout_id_of("u_1", 1), rollout_id_of("u_2")}) == 6
    for name in (*names[:2], f"chatcmpl-{names[0]}-{UUID4}"):
        with pytest.raises(InvalidInputError, match="does not end with ~<number>"):
            rollout_id_of(name)


@pytest.mark.parametrize("request_id", [f"chatcmpl-{UUID4}_0", f"chatcmpl-{UUID4}", "chatcmpl-user", "chatcmpl-", ""])
def test_a_request_without_a_user_is_refused(request_id: str) -> None:
    """Goal: no silent wrong key: FastDeploy takes the first field of the UUID for the user."""
    with pytest.raises(InvalidInputError, match="request id: wanted"):
        rollout_id_of(request_id)


@given(ids, st.integers(0, 99), st.integers(0, 99), st.integers(0, 9))
def test_the_turn_before_is_the_same_but_for_its_number(task: str, generation: int, turn: int, segment: int) -> None:
    before = previous_turn(f"{task}:{generation}:{turn}:{segment}")
    assert before == (f"{task}:{generation}:{turn - 1}:{segment}" if turn else None)


@given(ids)
def test_a_file_name_is_one_name_and_leads_nowhere_else(rollout_id: str) -> None:
    name = file_name(rollout_id)
    assert unquote(name) == rollout_id
    assert "/" not in name
    assert "\0" not in name
    assert not name.startswith(".")


def a_handle() -> RolloutHandle:
    return a_store().put("task:1:0:0", routes_of(1, 10, start=3))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", "kvroute.rollout/9", "format"),
        ("rollout_id", "", "rollout_id"),
        ("put_id", "zz", "put_id"),
        ("put_id", "0" * 32 + "\n", "put_id"),
        ("rows", -1, "rows"),
        ("start", -1, "start"),
        ("layout", {"layer_ids": []}, "layer_ids"),
        ("layout", {"top_k": 1 << 40}, "top_k"),
        ("layout", {"missing_layers": [1]}, "missing_layers"),
        ("part_layers", 7, "part_layers"),
        ("part_tokens", 1 << 50, "part_tokens"),
        ("header_nbytes", 1 << 40, "header_nbytes"),
        ("more", 1, "rollout handle"),
    ],
)
def test_a_handle_that_cannot_be_names_its_field(field: str, value: Any, message: str) -> None:
    """Goal: a handle from the wire allocates nothing by itself. Method: one field at a time has an impossible value."""
    handle = json.loads(a_handle().to_json())
    assert RolloutHandle.from_json(handle) == a_handle() or handle["put_id"] != a_handle().put_id
    with pytest.raises(InvalidInputError, match=message):
        RolloutHandle.from_json(handle | {field: handle[field] | value if isinstance(value, dict) else value})


@pytest.mark.parametrize("junk", [{}, {"x": None}, "", "{", "[1]", b"\xff", "null", {"format": []}])
def test_anything_else_is_no_handle(junk: Any) -> None:
    with pytest.raises(InvalidInputError, match="rollout handle"):
        RolloutHandle.from_json(junk)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere:", "rollout store scheme: wanted one of file, mooncake, ray, tq"),
        ("file:///x?layers=some", "layers: wanted 1 to 1024, or all"),
        ("file:///x?sync=always", "sync: wanted one of none, put"),
        ("file:///x?layers=1025", "layers: wanted 1 to 1024, or all"),
        ("file:///x?x=1", "store parameter"),
        ("response:", "rollout store scheme: wanted one of file"),
        ("mooncake://nowhere", "HOST:PORT"),
        ("", "^url: wanted a URL"),
        ("file://data/rollouts", "file: rollout store path: wanted file:///absolute/path or file:relative/path"),
        ("file://", "file: rollout store path: wanted"),
        ("file:?layers=1", "file: rollout store path: wanted"),
        ("file:///tmp/a\0b", "file: rollout store path: wanted"),
    ],
)
def test_a_url_that_cannot_be_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_rollouts(url)


def test_a_stranger_adds_a_scheme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Goal: a store by entry point. Method: the group has one more entry, as an installed package would bring
    it. A package that is not installed is named."""
    entry = EntryPoint("mine", "kvroute.rollout.local:open_local_rollouts", kvroute.rollout.GROUP)
    entries: Callable[..., list[EntryPoint]] = lambda group, name=None: [  # noqa: E731
        e for e in [entry] if group == kvroute.rollout.GROUP and name in (None, e.name)
    ]
    monkeypatch.setattr("cache_manager.storage.entry_points", entries)
    assert isinstance(open_rollouts(f"mine://{tmp_path}"), LocalRollouts)
    monkeypatch.setitem(kvroute.rollout.BUILT_IN, "ray", EntryPoint("ray", "no_ray_here.store:open", "x"))
    with pytest.raises(ConfigError, match="ray: rollout store: wanted the package no_ray_here"):
        open_rollouts("ray:x")
    with pytest.raises(ConfigError, match="file, mine, mooncake, ray, tq"):
        open_rollouts("other:")

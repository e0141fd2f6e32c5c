"""The deciding parts of the Mooncake store: the meaning of codes, the options of a URL, the requests to the master."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import ConfigError, StorageError
from cache_manager.storage import open_store
from cache_manager.storage.mooncake.codes import (
    BUGS,
    MASTER,
    MISSES,
    NAMES,
    REFUSALS,
    describe,
    failure_of_call,
    is_failure,
)
from cache_manager.storage.mooncake.master import ASK_S, pool_usage
from cache_manager.storage.mooncake.settings import MooncakeSettings
from cache_manager.storage.url import StoreUrl


@given(st.integers(-2000, -1))
def test_a_code_is_one_thing(code: int) -> None:
    sets = (MISSES, BUGS, REFUSALS)
    assert [*(code in each for each in sets), is_failure(code)].count(True) == 1
    assert code not in MASTER or is_failure(code)
    assert str(code) in describe(code)
    assert NAMES.get(code, "") in describe(code)


CODES = st.sampled_from([0, 1, 4096, *sorted(MISSES | BUGS | REFUSALS), -1, -500, -800, *sorted(MASTER)])


@given(st.lists(CODES, max_size=6))
def test_a_call_fails_for_all_its_records_or_for_its_master(codes: list[int]) -> None:
    """Goal: one bad record does not end a batch, and nothing goes on without the master. Method: any codes; the answer
    is one of them that is a failure."""
    failed = [is_failure(code) for code in codes]
    answer = failure_of_call(codes)
    of_master = not MASTER.isdisjoint(codes)
    assert (answer != 0) == (of_master or (bool(codes) and all(failed)))
    assert answer == 0 or (answer in codes and is_failure(answer))
    assert (answer in MASTER) == of_master


def test_a_url_sets_what_it_names() -> None:
    url = "mooncake://h:1/a/b?segment=16MiB&arena=2MiB&admin=h:2&host=x&protocol=rdma&device=mlx5_0&timeout_ms=7&log=/l"
    settings = MooncakeSettings.from_url(StoreUrl.parse(url))
    assert (settings.master, settings.prefix, settings.admin_address) == ("h:1", "a/b", ("h", 2))
    assert (settings.segment_nbytes, settings.arena_nbytes, settings.timeout_ms) == (16 << 20, 2 << 20, 7)
    assert settings.log == "/l"
    plain = MooncakeSettings.from_url(StoreUrl.parse("mooncake://h:1"))
    assert (plain.prefix, plain.admin_address, plain.timeout_ms) == ("kvroute", ("h", 9003), 3000)


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("mooncake:///prefix", "master"),
        ("mooncake://127.0.0.1/prefix", "master"),
        ("mooncake://127.0.0.1:50051?segment=1MiB", "segment"),
        ("mooncake://127.0.0.1:50051?arena=4KiB", "arena"),
        ("mooncake://127.0.0.1:50051?timeout_ms=0", "timeout_ms"),
        ("mooncake://127.0.0.1:50051?timeout_ms=1s", "timeout_ms"),
        ("mooncake://127.0.0.1:50051?quota=1GiB", "parameter"),
        ("mooncake://127.0.0.1:50051/a b", "path"),
    ],
)
def test_a_url_that_cannot_be_names_the_field(url: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        open_store(url)


def test_an_admin_port_that_says_nothing_is_an_error_in_time() -> None:
    """Method: the master accepts the connection and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        ended = threading.Event()

        def ask() -> None:
            with pytest.raises(StorageError, match="does not answer"):
                pool_usage(server.getsockname())
            ended.set()

        threading.Thread(target=ask, daemon=True).start()
        assert ended.wait(ASK_S + 60)

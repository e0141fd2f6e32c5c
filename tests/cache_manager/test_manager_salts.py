"""What separates equal tokens in the block manager: salts of tenants and adapters, digests of images."""

from __future__ import annotations

import pytest
from house import PROMPT, House

from cache_manager.errors import InvalidInputError


@pytest.fixture
def house():
    made = House(device=8)
    yield made
    made.close()


def test_equal_tokens_under_different_salts_never_hit(house) -> None:
    house.run("a", PROMPT, salt=b"lora-1")
    for salt, cached in ((b"", 0), (b"lora-2", 0), (b"lora-1", 8)):
        assert house.manager.allocate("b", PROMPT, salt=salt).cached_tokens == cached
        house.manager.free("b")
    house.manager.fork("a", "child")
    assert house.manager.append("child", 12)
    house.compute("child", list(range(12)))
    house.manager.free("a")
    house.manager.free("child")
    assert house.manager.allocate("c", list(range(13))).cached_tokens == 0
    assert house.manager.allocate("d", list(range(13)), salt=b"lora-1").cached_tokens == 12


def test_images_separate_what_they_and_all_after_them_make(house) -> None:
    """Goal: equal placeholders of other images never hit. Method: a digest in the second block; blocks before hit."""
    tokens = list(range(13))
    house.run("a", tokens, extra={1: b"cat"})
    keys = house.manager.keys("a", tokens)
    assert keys[0] == house.aux.keys.keys(tokens)[0]
    assert keys[1] == house.aux.keys.key(keys[0], tokens[4:8], extra=b"cat")
    for extra, cached in (({1: b"cat"}, 12), ({1: b"dog"}, 4), (b"", 4), (b"cat", 0), ({2: b"cat"}, 4)):
        assert house.manager.allocate("b", tokens, extra=extra).cached_tokens == cached
        house.manager.free("b")


def test_the_store_keeps_salts_apart(house) -> None:
    house.run("a", PROMPT, salt=b"lora-1")
    assert house.manager.persist("a") == 2
    again = House(house.store, house.kv)
    for salt, restored in ((b"lora-2", 0), (b"", 0), (b"lora-1", 8)):
        assert again.manager.allocate("b", PROMPT, salt=salt).restored_tokens == restored
        again.manager.free("b")
    again.close()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"salt": "lora"}, "salt: wanted bytes, got 'lora'"),
        ({"extra": "cat"}, "extra: wanted bytes, or bytes by index of a block, got 'cat'"),
        ({"extra": {-1: b"cat"}}, "extra: wanted bytes, .*, got b'cat' at -1"),
        ({"extra": {0: "cat"}}, "extra: wanted bytes, .*, got 'cat' at 0"),
    ],
)
def test_a_wrong_salt_or_extra_is_named(house, request_, message) -> None:
    before = house.state()
    with pytest.raises(InvalidInputError, match=message):
        house.manager.allocate("a", PROMPT, **request_)
    assert house.state() == before

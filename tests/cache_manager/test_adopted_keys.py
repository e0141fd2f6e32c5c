"""An engine's own block hashes as keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import InvalidInputError
from cache_manager.keys import KeyChain, Namespace
from cache_manager.spec import AuxBlockDataSpec, RecordLayout

LAYOUT = RecordLayout((AuxBlockDataSpec("routing", (2,), "uint8", 2),))
CHAIN = KeyChain(Namespace("m", 1), LAYOUT)
DIGEST = st.binary(min_size=16, max_size=64)


@given(DIGEST, DIGEST)
def test_equal_digests_share_a_key_and_others_do_not(one: bytes, other: bytes) -> None:
    assert (CHAIN.adopt(one) == CHAIN.adopt(other)) == (one == other)
    assert CHAIN.owns(CHAIN.adopt(one))


@given(DIGEST, st.integers(0, 3), st.text(max_size=3))
def test_a_digest_means_another_key_in_every_other_namespace_and_layout(digest: bytes, version: int, salt: str) -> None:
    namespace = Namespace("m", version, salt=salt)
    other = KeyChain(namespace, LAYOUT)
    assert (other.adopt(digest) == CHAIN.adopt(digest)) == (namespace == CHAIN.namespace)
    wider = RecordLayout((AuxBlockDataSpec("routing", (3,), "uint8", 2),))
    assert KeyChain(CHAIN.namespace, wider).adopt(digest) != CHAIN.adopt(digest)


def test_adopted_keys_and_keys_of_tokens_never_meet() -> None:
    """Method: the very bytes that a key of tokens is made of, adopted."""
    key = CHAIN.key(None, [1, 2])
    assert CHAIN.adopt(bytes(key)) != key


@pytest.mark.parametrize("digest", [b"", b"short", bytes(1025), "0" * 32, 7])
def test_what_is_no_digest_is_named(digest: object) -> None:
    with pytest.raises(InvalidInputError, match="digest: wanted 16 to 1024 bytes"):
        CHAIN.adopt(digest)  # type: ignore[arg-type]

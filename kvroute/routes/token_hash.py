"""Hashes of the first tokens of a sequence: they bind routes to their tokens, and parts to one sequence.

The row at position ``p`` depends on the tokens ``[0, p]``. So two parts are of one sequence if their tokens are the
same up to the end of the part that ends first: both have the same hash of at least as many first tokens, or the hashes
of both match tokens that the caller gives. Equal rows prove nothing, because equal tokens after different ones are
often routed alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cache_manager.errors import RowError
from cache_manager.slots import integers

TokenHash = tuple[int, bytes]
"""How many tokens, counted from position 0, and their :func:`token_hash`."""

TOKEN_HASH_NBYTES: Final = 16


def token_hash(tokens: ArrayLike) -> bytes:
    """The hash of ``tokens`` ``[n]``, 16 bytes: BLAKE2b of their ids, 8 bytes each, little endian.

    >>> token_hash([1, 2, 3]).hex()
    '2433db8a68579e7a195c621964573b5b'
    """
    ids = token_ids(tokens)
    return token_hashes(ids, [ids.size])[0][1]


def token_ids(tokens: ArrayLike, least: int = 0) -> NDArray[np.int64]:
    """``tokens`` as a new array ``[n]``; :class:`RowError` unless they are ``least`` or more integers below 2**63."""
    ids = integers(tokens, "tokens", "integers [n] below 2**63", error=RowError)
    if len(ids) < least:
        raise RowError("tokens", f"{least} or more, one for every position", len(ids))
    return ids


def token_hashes(tokens: ArrayLike, counts: Iterable[int]) -> tuple[TokenHash, ...]:
    """The :func:`token_hash` of the first ``count`` of ``tokens`` ``[n]``, for each of ``counts``, in one pass.

    :class:`RowError` for a count of more tokens than there are.
    """
    ids = token_ids(tokens)
    text = ids.astype("<i8", copy=False).tobytes()
    hashes = list[TokenHash]()
    hashed = 0
    running = hashlib.blake2b(digest_size=TOKEN_HASH_NBYTES, person=b"kvroute.tokens")
    for count in sorted(set(counts)):
        if not 0 <= count <= len(ids):
            raise RowError("tokens", f"{count} or more", len(ids))
        running.update(text[8 * hashed : 8 * count])
        hashes.append((count, running.digest()))
        hashed = count
    return tuple(hashes)


def joined_hashes(hashes: Iterable[TokenHash]) -> tuple[TokenHash, ...]:
    """``hashes`` in order of their counts, each once; :class:`RowError` if two hashes of the same count differ."""
    digests: dict[int, bytes] = {}
    for entry in hashes:
        if not _is_token_hash(entry):
            wanted = f"(tokens, hash of {TOKEN_HASH_NBYTES} bytes)"
            raise RowError("routes.token_hashes", wanted, repr(entry))
        count, digest = entry
        earlier = digests.setdefault(count, digest)
        if earlier != digest:
            what = f"hash of the first {count} tokens"
            raise RowError(what, earlier.hex(), digest.hex())
    return tuple(sorted(digests.items()))


def _is_token_hash(entry: object) -> bool:
    if not isinstance(entry, tuple) or len(entry) != 2:
        return False
    count, digest = entry
    if not isinstance(count, int) or count < 0:
        return False
    return isinstance(digest, bytes) and len(digest) == TOKEN_HASH_NBYTES


def tying(hashes: tuple[TokenHash, ...], end: int, count: int) -> tuple[TokenHash, ...]:
    """Those of ``hashes`` of at most ``count`` tokens; all, if none of these ties the rows up to ``end`` to tokens.

    A hash of more tokens cannot be compared with those of a part alone, but rows whose tie is kept are taken for no
    others.
    """
    kept = tuple(entry for entry in hashes if entry[0] <= count)
    is_tied = not end or any(number >= end for number, _ in kept)
    return kept if is_tied else hashes


def check_tokens(hashes: tuple[TokenHash, ...], tokens: NDArray[Any], end: int) -> None:
    """Raise :class:`RowError` unless each hash matches its count of first ``tokens`` ``[n]``, and one covers ``end``.

    ``hashes`` are in order of their counts.
    """
    if not hashes:
        wanted = "a hash of the tokens; see Routes.bind"
        raise RowError("routes.token_hashes", wanted, "none")
    most = hashes[-1][0]
    if most < end:
        wanted = f"a hash of {end} tokens or more, as there are rows"
        raise RowError("routes.token_hashes", wanted, f"of {most}")
    own_hashes = token_hashes(tokens, dict(hashes))
    for (count, own_digest), (_, digest) in zip(own_hashes, hashes, strict=True):
        if own_digest != digest:
            what = f"hash of the first {count} tokens"
            raise RowError(what, digest.hex(), own_digest.hex())


def of_one_sequence(parts: Sequence[tuple[int, tuple[TokenHash, ...]]]) -> tuple[TokenHash, ...]:
    """The hashes that hold for the union of ``parts``: the position after each one's last row, and its hashes in order.

    :class:`RowError` unless each part is tied to those that end later.
    """
    joined_hashes(entry for _, hashes in parts for entry in hashes)
    longest_first = sorted(parts, key=lambda part: (part[0], part[1][::-1]), reverse=True)
    (last, first), *shorter_parts = longest_first
    joined = dict(first)
    for end, hashes in shorter_parts:
        common = [count for count, digest in hashes if joined.get(count) == digest]
        shown = max(common, default=0)
        if shown < end:
            wanted = f"parts of one sequence: merge(..., tokens=...), or in both the hash of {end} first tokens or more"
            got = f"rows up to position {end - 1} without a tie to the others"
            raise RowError("routes", wanted, got)
        # Its hashes of later tokens hold for the whole if the whole has none of its own there.
        goes_on = shown >= max((last, *joined))
        joined |= {count: digest for count, digest in hashes if goes_on or count <= shown}
    return tuple(sorted(joined.items()))

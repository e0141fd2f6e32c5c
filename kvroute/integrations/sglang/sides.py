"""Windows and states of a prefix in a store of kvroute: records of their own beside those of pages.

A page's record has its KV, of the layers that attend to all tokens, and its rows. What layers that forget keep of a
prefix is there for its last pages alone, and SGLang numbers it in other ways. So it has records under the same names,
which another layout keeps apart. The law: **a window or a state comes back beside the page of the same origin alone**,
the page that was its last one when it was stored. So all of a prefix's end is of one computation, or it is no hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cache_manager.blocks import AuxBlocks
from cache_manager.job import PersistJob, RestoreJob
from cache_manager.keys import BlockKey, Namespace
from cache_manager.ports import StorageBackend
from cache_manager.spec import AuxBlockDataSpec
from kvroute.integrations.sglang.gone import GoneKeys
from kvroute.integrations.sglang.kv_origins import PageOrigins
from kvroute.integrations.sglang.passes import Ids


class Side:
    """What one kind of layers keeps, in blocks of ``kv`` (:class:`PagedBytes`): windows a page each, or states.

    The scheduler's thread calls it; :meth:`stored` may be called by any. ``store`` is the caller's.
    """

    def __init__(self, kv: Any, namespace: Namespace, store: StorageBackend | None, *, strict: bool) -> None:
        tokens = kv.spec.block_tokens
        self.name = kv.spec.name
        self.aux = AuxBlocks(
            [AuxBlockDataSpec("none", (1,), "uint8", tokens)],  # never written: a record has no rows here
            blocks=kv.blocks,
            namespace=namespace,
            store=store,
            kv=kv,
            required=[],
            strict=strict,
        )
        self._gone = GoneKeys()  # they are of another origin than their pages, or damaged

    def _adopted(self, names: Sequence[str]) -> list[BlockKey]:
        return [self.aux.keys.adopt(name.encode()) for name in names]

    def stored(self, names: Sequence[str]) -> list[bool]:
        """Which of these seem to be stored; only loading verifies that."""
        adopted = self._adopted(names)
        there = self.aux.jobs.records().contains(adopted)
        return [is_stored and key not in self._gone for key, is_stored in zip(adopted, there, strict=True)]

    def _begun(self, blocks: Ids, origins: PageOrigins) -> Ids:
        """The lives that these blocks begin, with contents of these origins."""
        lives = self.aux.renew(blocks)
        self.aux.exchange.name_origins(blocks, lives, origins)
        return lives

    def begin_persist(self, names: Sequence[str], blocks: Ids, origins: PageOrigins) -> PersistJob | None:
        """Store these blocks; ``origins`` are those of the pages of the same names. They are copied when it returns.

        ``None`` if there is no room: nothing is stored then.
        """
        lives = self._begun(blocks, origins)
        return self.aux.begin_persist(dict(zip(self._adopted(names), blocks.tolist(), strict=True)), lives)

    def fill(self, names: Sequence[str], blocks: Ids, origins: PageOrigins) -> bool:
        """Fill these blocks, beside pages of these ``origins``; whether all have come. Those that have not are no hits
        any more."""
        lives = self._begun(blocks, origins)
        adopted = self._adopted(names)
        answers: dict[BlockKey, bool] = {}
        job = self.aux.jobs.run(RestoreJob, dict(zip(adopted, blocks.tolist(), strict=True)), lives)
        if job.failure is None:
            answers = job.answers
            self._gone.add({key for key in adopted if not answers.get(key)})
        return all(answers.get(key) for key in adopted)

    def follow(self, weights_version: int) -> None:
        """The weights have another name: what was stored before is found no more."""
        self.aux.reset(weights_version=weights_version)
        self._gone.clear()

    def close(self) -> None:
        self.aux.close()


def restorable(lengths: Sequence[int], there: Sequence[bool], width: int) -> list[int]:
    """Those of these prefix ``lengths``, in pages, whose last ``width`` pages, or all if there are fewer, are
    ``there``.

    >>> restorable([1, 2, 3, 4], [True, False, True, True], 2)
    [1, 4]
    """
    return [length for length in lengths if all(there[max(0, length - width) : length])]


__all__ = ["Side", "restorable"]

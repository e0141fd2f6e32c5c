"""Mooncake's eviction groups: objects of one group are evicted together, whoever stored them. Pure.

An engine that stores KV in the same pool names a group for each chunk. Rows that are put under the same name go when
the KV goes, so that a KV hit without rows becomes rare; it stays possible, because grouping is a hint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cache_manager.errors import ConfigError
from cache_manager.keys import BlockKey

GroupKind = Literal["none", "vllm", "sglang", "plain"]
KINDS: Final[tuple[GroupKind, ...]] = ("none", "vllm", "sglang", "plain")
REMEMBERED_MAX: Final = 65_536


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """How an engine spells the group of a chunk. ``plain``: the engine's name is the group's name.

    >>> GroupFormat("vllm", model="m", namespace="-ns", cache_prefix="p").name("c0ffee")
    'vllm-mooncake-store:p@m-ns@c0ffee'
    >>> GroupFormat("sglang").name("tag_page")
    'sglang-hicache:tag_page'
    """

    kind: GroupKind = "none"
    model: str = ""
    namespace: str = ""
    cache_prefix: str = ""

    def __post_init__(self) -> None:
        if self.kind == "vllm" and not self.model:
            raise ConfigError(
                "mooncake: store parameter group_model", "the engine's model name for groups=vllm", "none"
            )
        if self.kind != "vllm" and (self.model or self.namespace or self.cache_prefix):
            raise ConfigError("mooncake: store parameter groups", "vllm, where group_* are given", self.kind)

    def name(self, chunk: str) -> str:
        """The group of the chunk that the engine calls ``chunk``: vLLM's chunk hash, SGLang's tagged page key."""
        match self.kind:
            case "vllm":
                prefix = f"{self.cache_prefix}@" if self.cache_prefix else ""
                return f"vllm-mooncake-store:{prefix}{self.model}{self.namespace}@{chunk}"
            case "sglang":
                return f"sglang-hicache:{chunk}"
            case "plain":
                return chunk
            case "none":
                return ""


class GroupNames:
    """The groups of keys that are about to be stored: at most ``REMEMBERED_MAX``, the oldest forgotten first.

    A key without a name is stored ungrouped. Not thread-safe.
    """

    __slots__ = ("_format", "_names")

    def __init__(self, format_: GroupFormat) -> None:
        self._format = format_
        self._names: OrderedDict[BlockKey, str] = OrderedDict()

    def learn(self, chunks: Mapping[BlockKey, str]) -> None:
        """Engine's chunk names by key."""
        if self._format.kind == "none":
            raise ConfigError("mooncake: store parameter groups", "one of vllm, sglang, plain", "none")
        for key, chunk in chunks.items():
            self._names[key] = self._format.name(chunk)
            self._names.move_to_end(key)
        while len(self._names) > REMEMBERED_MAX:
            self._names.popitem(last=False)

    def of(self, keys: Sequence[BlockKey]) -> list[str]:
        """The groups' names, ``""`` for a key without one; empty when no key has one."""
        if not self._names:
            return []
        groups = [self._names.get(key, "") for key in keys]
        return groups if any(groups) else []

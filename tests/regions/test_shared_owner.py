"""Shared regions among real processes: who sees what, and when a name goes."""

from __future__ import annotations

import numpy as np
import pytest
from region_children import LAYOUT, NAMESPACE, Start, create, rewrite

from cache_manager.errors import RegionMismatchError, RegionMissingError
from cache_manager.ports import TierName
from cache_manager.regions import RegionView, SharedRegion, list_regions
from cache_manager.regions.directory import DIRECTORY
from cache_manager.regions.header import NAMESPACE_OFFSET, pack_namespace


def test_another_process_reads_what_the_owner_wrote_and_answers(region: SharedRegion, child: Start) -> None:
    """Goal: it is shared. Method: an unrelated process attaches by name, reads a record, writes another."""
    region.rows[1] = np.arange(LAYOUT.nbytes) % 251
    region.valid[1, 1] = [3, 1]
    region.words[1] = 5 << 16
    reader = child(
        """
region = SharedRegion.attach(sys.argv[1], writable=True)
say(region.layout == LAYOUT, region.words[1] >> 16, region.valid[1].sum())
say((region.rows[1] == np.arange(LAYOUT.nbytes) % 251).all(), region.namespace == NAMESPACE)
region.rows[2] = 77
region.close()
""",
        region.name,
    )
    assert reader.heard() == ["True", "5", "4"]
    assert reader.heard() == ["True", "True"]
    assert reader.finish() == (0, "")
    assert (region.rows[2] == 77).all()
    assert not region.rows[3].any()


def test_a_reading_attacher_cannot_write(region: SharedRegion) -> None:
    with SharedRegion.attach(region.name, LAYOUT) as reader:
        with pytest.raises(ValueError, match="read-only"):
            reader.rows[0] = 1
        with pytest.raises(AssertionError, match="own"):
            reader.renew(NAMESPACE)


def test_the_name_goes_with_the_owner_and_the_memory_with_its_last_user() -> None:
    owner = create()
    owner.rows[0] = 8
    reader = SharedRegion.attach(owner.name, LAYOUT)
    owner.close()
    assert not (DIRECTORY / owner.name).exists()
    assert (reader.rows[0] == 8).all()
    with pytest.raises(RegionMissingError):
        SharedRegion.attach(owner.name, LAYOUT)
    reader.close()


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "1 / 0"])
def test_an_owner_that_exits_without_close_removes_the_region(child: Start, ending: str) -> None:
    owner = child(f"r = SharedRegion.create(LAYOUT, 4, tier='host', namespace=NAMESPACE); say(r.name)\n{ending}")
    (name,) = owner.heard()
    owner.finish()
    assert not (DIRECTORY / name).exists()


def test_a_forked_child_uses_the_region_but_never_removes_it(child: Start) -> None:
    """Goal: a worker forked by the owner may close or exit. Method: fork twice, once each way; write through both."""
    owner = child("""
region = SharedRegion.create(LAYOUT, 4, tier="device", namespace=NAMESPACE)
path = DIRECTORY / region.name
for ending in ("close", "exit"):
    pid = os.fork()
    if pid == 0:
        region.rows[0] += 1
        say(region.rows[0].min())
        region.close() if ending == "close" else None
        sys.exit(0)
    os.waitpid(pid, 0)
say(os.path.exists(path), region.rows[0].min())
region.close()
say(os.path.exists(path))
""")
    assert owner.heard() == ["1"]
    assert owner.heard() == ["2"]
    assert owner.heard() == ["True", "2"]
    assert owner.heard() == ["False"]
    assert owner.finish() == (0, "")


def test_a_namespace_that_is_being_changed_is_read_again(region: SharedRegion) -> None:
    """Goal: never half of one and half of another; an owner that died in between is nobody's. Method: write half."""
    other = pack_namespace(b"another--of--16b")
    with SharedRegion.attach(region.name) as reader:
        assert reader.namespace == NAMESPACE
        rewrite(region, NAMESPACE_OFFSET, other[:8])
        assert reader.namespace is None
        region.renew(b"another--of--16b")
        assert reader.namespace == b"another--of--16b"
    rewrite(region, NAMESPACE_OFFSET, other[:1] + b"?")
    with pytest.raises(RegionMismatchError) as caught:
        RegionView(region.name)
    assert (caught.value.field, caught.value.got) == ("namespace", "none")


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_name_says_whose_blocks_the_region_mirrors(tier: TierName) -> None:
    with SharedRegion.create(LAYOUT, 1, tier=tier, namespace=NAMESPACE) as region:
        assert region.name.endswith(f"-{tier}")
        (found,) = [info for info in list_regions() if info.name == region.name]
        assert found.tier == tier

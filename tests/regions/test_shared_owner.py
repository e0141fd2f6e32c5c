"""Shared regions among real processes: which process sees which changes, and when a name is removed."""

from __future__ import annotations

import pytest
from region_children import NAMESPACE, Start, create, rewrite

from cache_manager.errors import RegionMismatchError, RegionMissingError
from cache_manager.regions import RegionView, SharedRegion
from cache_manager.regions.directory import DIRECTORY
from cache_manager.regions.header import NAMESPACE_OFFSET, pack_namespace


def test_a_reading_attacher_cannot_write(region: SharedRegion) -> None:
    with SharedRegion.attach(region.name) as reader:
        with pytest.raises(ValueError, match="read-only"):
            reader.rows[0] = 1
        with pytest.raises(AssertionError, match="own"):
            reader.renew(NAMESPACE)


def test_the_name_goes_with_the_owner_and_the_memory_with_its_last_user() -> None:
    owner = create()
    owner.rows[0] = 8
    reader = SharedRegion.attach(owner.name)
    owner.close()
    assert not (DIRECTORY / owner.name).exists()
    assert (reader.rows[0] == 8).all()
    with pytest.raises(RegionMissingError):
        SharedRegion.attach(owner.name)
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
    """Goal: no reader gets half of one namespace and half of another; if the owner died in between, there is none.
    Method: write half."""
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

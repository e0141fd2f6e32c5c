"""Shared regions of killed processes: which processes remove them, and which must not."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from region_children import Start, create, names
from waiting import until

from cache_manager.regions import SharedRegion, list_regions, reap_orphans
from cache_manager.regions.directory import DIRECTORY

OWNER = "region = SharedRegion.create(LAYOUT, 4, tier='device', namespace=NAMESPACE); say(region.name); wait()"
ATTACHER = "region = SharedRegion.attach(sys.argv[1]); say('in'); wait()"


def test_a_killed_process_group_leaves_a_region_that_the_next_create_removes(child: Start) -> None:
    """Goal: a container stop leaves nothing for ever. Method: owner, forked worker and attacher die at one signal."""
    family = child(f"""
{OWNER.removesuffix("wait()")}
if os.fork() == 0:
    time.sleep(60)
import subprocess
subprocess.Popen([sys.executable, "-c", "import sys, time; from cache_manager.regions.directory import *; "
    "fd = os.open(region_path(sys.argv[1]), os.O_RDONLY); print(lock_shared(fd), flush=True); time.sleep(60)",
    region.name])
wait()
""")
    (name,) = family.heard()
    assert family.heard() == ["True"]
    with create():
        assert (DIRECTORY / name).exists()
    family.kill_group()
    until(lambda: not next(info.in_use for info in list_regions() if info.name == name))
    found = {info.name: info for info in list_regions()}[name]
    assert (found.in_use, found.tier) == (False, "device")
    create().close()
    assert not (DIRECTORY / name).exists()


def test_a_region_is_not_reaped_while_a_process_has_it_mapped(child: Start) -> None:
    """Goal: a reader survives its owner. Method: kill the owner, create, read on; kill the reader, create."""
    owner = child(OWNER)
    (name,) = owner.heard()
    with create(), SharedRegion.attach(name) as reader:
        attacher = child(ATTACHER, name)
        assert attacher.heard() == ["in"]
        owner.kill()
        assert name not in reap_orphans()
        assert {info.name: info for info in list_regions()}[name].in_use
        reader.close()
        assert name not in reap_orphans()
    attacher.kill()
    assert name in reap_orphans()
    assert not (DIRECTORY / name).exists()


def test_a_creator_killed_halfway_leaves_nothing(child: Start) -> None:
    """Goal: a region that has a name is complete. Method: stop a creator where it would name its region, look, and kill
    it."""
    before = names()
    creator = child("""
def stop_before_it_is_named(event, args):
    if event == "os.link":
        file = os.stat(args[0])
        say(file.st_nlink, file.st_size > 8192)
        wait()
sys.addaudithook(stop_before_it_is_named)
SharedRegion.create(LAYOUT, 4, tier="device", namespace=NAMESPACE)
""")
    assert creator.heard() == ["0", "True"]
    assert names() <= before
    creator.kill()
    assert names() <= before


def test_the_reaper_leaves_links_and_foreign_names_alone(squatted: tuple[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    squatted[1].symlink_to(target)
    foreign = DIRECTORY / f"kvroute-{os.geteuid()}-{uuid.uuid4().hex}-other"
    foreign.write_text("kept")
    try:
        reaped = reap_orphans()
        assert squatted[0] not in reaped
        assert foreign.name not in reaped
        assert target.read_text() == foreign.read_text() == "kept"
    finally:
        foreign.unlink()


def test_creators_and_reapers_at_once_do_not_harm_each_other(child: Start) -> None:
    """Goal: creation needs no luck. Method: three processes create, check, attach and close while each reaps."""
    workers = [
        child("""
for i in range(60):
    region = SharedRegion.create(LAYOUT, 2, tier="host", namespace=NAMESPACE)
    region.rows[1] = i
    assert not set(reap_orphans()) & {region.name}
    with SharedRegion.attach(region.name) as reader:
        assert (reader.rows[1] == i).all()
    list_regions()
    region.close()
say("done")
""")
        for _ in range(3)
    ]
    for worker in workers:
        assert worker.heard() == ["done"]
        assert worker.finish() == (0, "")

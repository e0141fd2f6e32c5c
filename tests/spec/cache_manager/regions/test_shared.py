"""Shared regions among real processes: who sees which changes, who removes a name, and what becomes of no room."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest
from region_children import LAYOUT, NAMESPACE, Start, create, names, rewrite
from waiting import until

from cache_manager.errors import NoSpaceError, RegionMismatchError, RegionMissingError
from cache_manager.regions import RegionView, SharedRegion, list_regions, reap_orphans
from cache_manager.regions.directory import DIRECTORY
from cache_manager.regions.header import NAMESPACE_OFFSET, pack_namespace


def test_a_reading_attacher_cannot_write(region: SharedRegion) -> None:
    with SharedRegion.attach(region.name) as reader:
        with pytest.raises(ValueError, match="read-only"):
            reader.rows[0] = 1
        with pytest.raises(AssertionError, match="own"):
            reader.enter(NAMESPACE)


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
        region.enter(b"another--of--16b")
        assert reader.namespace == b"another--of--16b"
    rewrite(region, NAMESPACE_OFFSET, other[:1] + b"?")
    with pytest.raises(RegionMismatchError) as caught:
        RegionView(region.name)
    assert (caught.value.field, caught.value.got) == ("namespace", "none")


# ---------------------------------------------------------------- killed processes

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


# ---------------------------------------------------------------- no room


def test_more_than_dev_shm_has_is_refused_with_the_numbers_and_leaves_nothing() -> None:
    before = names()
    free = shutil.disk_usage(DIRECTORY).free
    blocks = free // LAYOUT.nbytes + 1_000_000
    with pytest.raises(NoSpaceError, match="--shm-size=") as caught:
        create(blocks)
    assert caught.value.where == str(DIRECTORY)
    assert caught.value.wanted_nbytes > blocks * LAYOUT.nbytes > caught.value.free_nbytes
    assert names() <= before


def private_dev_shm(options: str = "size=8m") -> tuple[str, ...]:
    """A command prefix that gives a command its own file system for regions."""
    inside = ("sh", "-c", f'mount -t tmpfs -o {options} tmpfs {DIRECTORY} && exec "$0" "$@"')
    for command in (("unshare", "-m", *inside), ("unshare", "-r", "-m", *inside)):
        try:
            if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
                return command
        except FileNotFoundError:
            break
    pytest.skip("this system permits no private mounts")


def test_a_full_dev_shm_is_an_error_and_never_a_sigbus(child: Start) -> None:
    """Goal: docker's 64 MB. Method: a file system of 8 MiB: too big at once, then until full, then after a close."""
    inside = child(
        """
def create(mib):
    return SharedRegion.create(LAYOUT, (mib << 20) // LAYOUT.nbytes, tier="device", namespace=NAMESPACE)
try:
    create(100)
except NoSpaceError as error:
    remedy = f"--shm-size={-(-error.wanted_nbytes // (1 << 20))}m"
    say(error.where, error.wanted_nbytes >= (99 << 20), error.free_nbytes, remedy in str(error))
say(len(os.listdir(DIRECTORY)))
first, second = create(3), create(3)
try:
    create(3)
except NoSpaceError as error:
    say(error.free_nbytes < (3 << 20), len(os.listdir(DIRECTORY)))
first.close()
third = create(3)
third.rows[:] = 1
say(int(second.rows.sum()), int(third.rows.sum()) == third.rows.size)
""",
        before=private_dev_shm(),
    )
    assert inside.heard() == [str(DIRECTORY), "True", str(8 << 20), "True"]
    assert inside.heard() == ["0"]
    assert inside.heard() == ["True", "2"]
    assert inside.heard() == ["0", "True"]
    assert inside.finish() == (0, "")

"""Lack of room is an error with numbers, never a signal, and leaves no file behind."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from region_children import LAYOUT, Start, create, names

from cache_manager.errors import NoSpaceError
from cache_manager.regions.directory import DIRECTORY


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

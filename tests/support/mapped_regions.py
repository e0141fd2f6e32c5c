"""Which SharedMemory regions a process has mapped."""

from __future__ import annotations

from pathlib import Path

from cache_manager.regions.directory import DIRECTORY


def mapped_regions(pid: int | str) -> set[Path]:
    """The regions that process ``pid`` has mapped, by name.

    They are found by inode: a region gets its name when it is whole, and the map goes on showing it without one.
    """
    lines = (line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    inodes = {int(parts[4]) for parts in lines if len(parts) > 5 and Path(parts[5]).parent == DIRECTORY}
    return {path for path in DIRECTORY.glob("kvroute-*") if path.stat().st_ino in inodes}

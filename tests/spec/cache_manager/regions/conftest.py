"""Processes that the region tests start, and a check that none of them stays."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from region_children import Child, Start, create

from cache_manager.regions import SharedRegion, list_regions
from cache_manager.regions.directory import DIRECTORY


@pytest.fixture
def child() -> Iterator[Start]:
    """Starts children; none outlives the test."""
    children: list[Child] = []

    def start(script: str, *args: object, before: tuple[str, ...] = ()) -> Child:
        children.append(Child(script, *args, before=before))
        return children[-1]

    yield start
    for one in children:
        if one.process.poll() is None:
            one.kill_group()
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            stream.close()


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    with create() as region:
        yield region


@pytest.fixture
def squatted() -> Iterator[tuple[str, Path]]:
    """A name that fits, whose file the test makes itself."""
    name = f"kvroute-{os.geteuid()}-{uuid.uuid4().hex}-host"
    path = DIRECTORY / name
    yield name, path
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_in_shared_memory() -> Iterator[None]:
    """Goal: the tests of this directory clean up. Method: after the tests there is no new region without a user."""
    before = {info.name for info in list_regions()}
    yield
    assert [info.name for info in list_regions() if info.name not in before and not info.in_use] == []

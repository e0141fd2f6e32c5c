"""Work behind an engine's steps: in order, to its end, and never in the way of a close."""

from __future__ import annotations

import threading

import pytest
from waiting import GIVE_UP_S

from kvroute.connector.behind import AtOnce, Behind


def test_calls_are_done_in_order_and_settled() -> None:
    """Goal: whoever settles finds all of it done. Method: calls, one of which fails; then a close, after which there is
    nothing to wait for, and a second one."""
    done, failures = list[int](), list[BaseException]()
    behind = Behind("kvroute-test", failures.append)
    for number in range(5):
        behind.put(lambda number=number: done.append(number))  # type: ignore[misc]
        behind.put(lambda: 1 // 0)
    assert behind.settle(GIVE_UP_S)
    assert done == list(range(5))
    assert [type(error) for error in failures] == [ZeroDivisionError] * 5
    assert behind.close(GIVE_UP_S)
    assert behind.settle(0)
    assert behind.close(0)


def test_a_call_that_does_not_end_is_not_settled() -> None:
    """Goal: a close says that something is left, and waits no longer than it was told to. Method: a call that waits,
    and no room for a further one; then it ends."""
    go = threading.Event()
    behind = Behind("kvroute-test", room=1)
    behind.put(lambda: go.wait(GIVE_UP_S))
    behind.put(bool)
    assert not behind.settle(0.01)
    assert not behind.close(0.01)
    go.set()
    assert behind.close(GIVE_UP_S)


def test_beside_no_device_everything_is_done_at_once() -> None:
    done, host = list[int](), AtOnce()
    host.put(lambda: done.append(1))
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        host.put(lambda: 1 // 0)
    assert host.settle(0)
    assert host.close(0)

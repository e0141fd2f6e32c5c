"""A call in two threads at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from waiting import GIVE_UP_S


def raised_by_two(call: Callable[[], object]) -> list[BaseException]:
    """What the call raises in two threads, which take turns after a microsecond."""
    barrier = threading.Barrier(2)
    raised: list[BaseException] = []

    def run() -> None:
        barrier.wait(GIVE_UP_S)
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the test fails by it
            raised.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GIVE_UP_S)
    finally:
        sys.setswitchinterval(before)
    return raised

"""Runs the native client in a child; late calls kill and reap it before memory is reused."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final

from cache_manager.child import AskedChild, Child
from cache_manager.errors import StorageError
from cache_manager.storage.arena import Arena, Ranges
from cache_manager.storage.mooncake import wire

DOCTOR: Final = "`kvroute doctor` says what is missing and how to install it"


def native_environment(timeout_ms: int) -> dict[str, str]:
    """What the child's environment has besides what the operator has set: short waits."""
    seconds = str(max(-(-timeout_ms // 1000), 1))
    return {
        "MC_LOG_LEVEL": "ERROR",
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # each costs 4 s
        "MC_RPC_TIMEOUT_MS": str(timeout_ms),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_TCP_LANES_PER_PEER": "16",  # transfers to a hung peer time out lane by lane
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    }


class ClientLostError(StorageError):
    """The child process ended, or was killed, before it answered."""


class NativeClient(AskedChild[list[int]]):
    """A child process with one native client in it. Safe from several threads.

    A request's future ends with the native call's codes, or with :class:`ClientLostError` when the process is gone
    *and reaped*: whatever memory the call used is untouched from then on. Nothing here waits without a limit.
    """

    def __init__(self, arena: Arena | None, timeout_ms: int, log: Path | None) -> None:
        fds, environment = (arena.fd,) if arena else (), native_environment(timeout_ms)
        child = Child("cache_manager.storage.mooncake.child", *fds, environment=environment, log=log)
        super().__init__(child, "kvroute-mooncake")

    def _decoded(self, body: bytes) -> tuple[int, list[int] | Exception]:
        answer = wire.decode_answer(body)
        return answer.number, StorageError(f"native client: {answer.error}") if answer.error else answer.codes

    def _lost(self, cause: str) -> Exception:
        return ClientLostError(f"the native Mooncake client is lost: {cause}")

    def set_up(self, request: wire.SetUp, wait_s: float) -> None:
        """Connect; :class:`StorageError` says why not."""
        try:
            code = self.call(request, wait_s)[0]
        except StorageError as error:
            what = f"no connection to the Mooncake master at {request.master}"
            if "ImportError" in str(error) or "ModuleNotFoundError" in str(error):
                what = f"the Mooncake client cannot be loaded; {DOCTOR}"
            raise StorageError(f"{what}: {error}") from error
        if code:
            raise StorageError(f"Mooncake set-up with master {request.master} answered {wire.describe(code)}")

    def submit(self, request: wire.Request) -> Future[list[int]]:
        """Send a request; its future ends with codes or with a :class:`StorageError`."""
        return self.ask(lambda number: wire.encode(wire.Asked(number, request)))

    def call(self, request: wire.Request, wait_s: float, lent: Ranges | None = None) -> list[int]:
        """Send a request, which uses the memory ``lent``, and wait; a process that lets it wait longer is killed."""
        future = self.submit(request)
        if lent is not None:
            lent.call = future
        try:
            return future.result(wait_s)
        except TimeoutError:
            self.kill()
            what = type(request).__name__
            raise ClientLostError(f"Mooncake: no answer to {what} in {wait_s:.1f} s; a process of it hangs") from None

    def close(self, wait_s: float) -> None:
        """End the process; what it lends to the pool is handed back first, within ``wait_s``."""
        with suppress(StorageError):
            self.call(wire.Close(), wait_s)
        self.end()

    def end(self) -> None:
        """End the process, which lends nothing."""
        self.kill()
        self.join(1.0)

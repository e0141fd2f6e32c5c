"""Runs the native client in a child; late calls kill and reap it before memory is reused."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Final

from cache_manager.child import AskedChild, Child
from cache_manager.errors import StorageError
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.arena import Arena, Ranges

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
        """Connect; :class:`StorageError` says why not, and the process is gone then or soon."""
        try:
            code = self.call(request, wait_s)[0]
        except StorageError as error:
            self.kill()
            if "ImportError" in str(error) or "ModuleNotFoundError" in str(error):
                raise StorageError(f"the Mooncake client cannot be loaded; {DOCTOR} ({error})") from error
            raise StorageError(f"no connection to the Mooncake master at {request.master}: {error}") from error
        if code:
            self.kill()
            raise StorageError(f"Mooncake set-up with master {request.master} answered {wire.describe(code)}")

    def submit(self, request: wire.Request) -> Future[list[int]]:
        """Send a request; its future, to :meth:`wait` for, ends with codes or with a :class:`StorageError`."""
        return self.ask(lambda number: wire.encode(wire.Asked(number, request)), waits=True)

    def call(self, request: wire.Request, wait_s: float, lent: Ranges | None = None) -> list[int]:
        """Send a request and wait. ``lent`` is the memory that it uses."""
        future = self.submit(request)
        if lent is not None:
            lent.call = future
        try:
            return self.wait(future, wait_s)
        except TimeoutError:
            raise StorageError(f"no answer to {type(request).__name__} within {wait_s:.1f} s") from None

    def close(self, wait_s: float) -> None:
        """Close the native client and end the process: properly within ``wait_s``, by force after."""
        if not self._gone:
            try:
                self.call(wire.Close(), wait_s)
            except StorageError:
                self.kill()
        if not self.join(1.0):
            self.kill()

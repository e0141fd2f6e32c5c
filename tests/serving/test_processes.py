"""Prefill, decode and route as processes that are killed, stopped and started again.

Requests end complete or failed with a reason, no row is wrong, all blocks come back, nothing stays in /dev/shm.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mapped_regions import mapped_regions
from ports import hold_port
from serving import Plain, Process, all_blocks_are_back, ask, completion, metrics, wait_until

from cache_manager.regions import reap_orphans

LEASE_S = 2

Answer = tuple[int, dict[str, Any]]
Answered = list[tuple[dict[str, Any], Answer]]


class Cluster:
    """The three, with short leases so that what waits for one's end is over soon."""

    def __init__(self, directory: Path) -> None:
        transfer = f"tcp://127.0.0.1:{hold_port()}"
        sizes = ["--device-blocks", "48", "--host-blocks", "16"]
        self.prefill = Process("prefill", directory, [
            "--name", "p0", "--transfer-address", transfer, "--lease-s", str(LEASE_S), *sizes,
        ])  # fmt: skip
        self.decode = Process("decode", directory, [
            "--name", "d0", "--prefill", f"p0={transfer}", "--retry-s", "1", "--requests-max", "6", *sizes,
        ])  # fmt: skip
        self.route = Process("front", directory, [
            "--prefill", f"p0={self.prefill.url}", "--decode", f"d0={self.decode.url}",
            "--health-s", "0.1", "--prefill-timeout-s", "10", "--request-timeout-s", "60",
        ])  # fmt: skip
        self.all = (self.prefill, self.decode, self.route)

    def wait_ready(self) -> None:
        for process in self.all:
            process.wait_live()
        wait_until(lambda: ask(self.route.url, "/readyz")[0] == 200, "the route is ready")

    def quiet(self) -> bool:
        return all_blocks_are_back(self.prefill.url) and all_blocks_are_back(self.decode.url)

    def complete(self, body: dict[str, Any]) -> Answer:
        """Status and answer; status 0 when the front is not there or goes away."""
        try:
            return ask(self.route.url, "/v1/completions", body)
        except OSError:
            return 0, {}

    def shm(self) -> set[Path]:
        """The SharedMemory regions that prefill and decode have mapped."""
        return mapped_regions(self.prefill.process.pid) | mapped_regions(self.decode.process.pid)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        found.wait_ready()
        yield found
    finally:
        for process in found.all:
            process.kill()
        reap_orphans()


@pytest.fixture(autouse=True)
def _well_before_and_after(cluster: Cluster, plain: Plain) -> Iterator[None]:
    """Whatever a test does: afterwards the three work together again and hold nothing."""
    yield
    for process in cluster.all:
        if process.process.poll() is not None:
            process.start()
        process.signal(signal.SIGCONT)
    cluster.wait_ready()
    body = completion(1)
    wait_until(lambda: cluster.complete(body)[0] == 200, "requests are answered again")
    status, answer = cluster.complete(body)
    assert status == 200, answer
    assert plain.check(body, answer) == 0
    wait_until(cluster.quiet, "all blocks are back")


def load(
    cluster: Cluster, requests: int, first: int, disturb: Callable[[], None]
) -> list[tuple[dict[str, Any], Answer]]:
    """Ask for ``requests`` completions, four at a time, and ``disturb`` while they are worked on."""
    bodies = [completion(first + number, max_tokens=24, n=1 + number % 2) for number in range(requests)]
    with ThreadPoolExecutor(4) as pool:
        futures: list[Future[Answer]] = [pool.submit(cluster.complete, body) for body in bodies]
        wait_until(lambda: any(future.done() for future in futures), "the first is answered")
        disturb()
        answers = [future.result() for future in futures]
    return list(zip(bodies, answers, strict=True))


def judge(plain: Plain, answered: Answered) -> tuple[int, int]:
    """How many completions are whole, and how many failed; each with right tokens and rows, or with a reason."""
    whole = failed = 0
    for body, (status, answer) in answered:
        if status == 200:
            assert plain.check(body, answer) == 0
            whole += 1
        else:
            assert status == 0 or answer["error"]["message"], (status, answer)
            failed += 1
    return whole, failed


def prefilled(cluster: Cluster, body: dict[str, Any]) -> dict[str, Any]:
    """A body for decode, whose prompt prefill has computed and holds."""
    asked = {
        "id": f"direct-{time.monotonic_ns()}",
        "prompt": body["prompt"],
        "sampling": {"max_tokens": body["max_tokens"], "temperature": body["temperature"], "seed": body["seed"]},
    }
    status, answer = ask(cluster.prefill.url, "/v1/prefill", asked)
    assert status == 200, answer
    return asked | {"kv_transfer": answer["kv_transfer"]}


def check_decoded(plain: Plain, body: dict[str, Any], answer: Answer) -> None:
    """What decode itself answered is right."""
    status, found = answer
    assert status == 200, found
    choices = [
        {
            "token_ids": sample["tokens"],
            "finish_reason": sample["finish_reason"],
            "routed_experts": sample["routed_experts"],
            "missing_rows": sample["gaps"],
        }
        for sample in found["samples"]
    ]
    assert plain.check({**body, "ignore_eos": True}, {"choices": choices}) == 0


def test_prefill_is_killed_under_load(cluster: Cluster, plain: Plain) -> None:
    """Goal: a request outlives prefill or fails with a reason. Method: SIGKILL while others are worked on."""
    whole, failed = judge(plain, load(cluster, 12, 100, cluster.prefill.kill))
    assert whole
    assert whole + failed == 12


def test_prefill_is_killed_during_a_transfer(cluster: Cluster, plain: Plain) -> None:
    """Goal: a pull that will never end does. Method: prefill is stopped, the pull begins, prefill is killed."""
    body = completion(200)
    asked = prefilled(cluster, body)
    before = metrics(cluster.decode.url)["decode_pulls_total"]
    cluster.prefill.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask, cluster.decode.url, "/v1/decode", asked)
        wait_until(lambda: metrics(cluster.decode.url)["decode_pulls_total"] > before, "the pull has begun")
        cluster.prefill.kill()
        check_decoded(plain, body, future.result())
    assert metrics(cluster.decode.url)["decode_prefill_recomputed_tokens_total"] > 0


def test_decode_is_killed_during_a_transfer(cluster: Cluster) -> None:
    """Goal: prefill's blocks come back. Method: decode dies with a pull in flight; the lease ends by itself."""
    asked = prefilled(cluster, completion(201))
    before = metrics(cluster.decode.url)["decode_pulls_total"]
    cluster.prefill.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask, cluster.decode.url, "/v1/decode", asked)
        wait_until(lambda: metrics(cluster.decode.url)["decode_pulls_total"] > before, "the pull has begun")
        cluster.decode.kill()
        with pytest.raises(OSError):  # noqa: PT011 - reset, or closed without an answer
            future.result()
    cluster.prefill.signal(signal.SIGCONT)
    wait_until(lambda: all_blocks_are_back(cluster.prefill.url), "prefill has its blocks back")


def test_decode_is_killed_under_load(cluster: Cluster, plain: Plain) -> None:
    whole, _ = judge(plain, load(cluster, 12, 300, cluster.decode.kill))
    assert whole
    assert cluster.complete(completion(399))[0] == 503  # there is no other decode
    wait_until(lambda: all_blocks_are_back(cluster.prefill.url), "prefill has its blocks back")


def test_what_was_killed_leaves_shared_memory_that_can_be_reaped(cluster: Cluster) -> None:
    """Goal: /dev/shm is clean. Method: SIGKILL of both engines; the regions of theirs that stay are found orphaned."""
    regions = cluster.shm()
    assert len(regions) == 4
    cluster.prefill.kill()
    cluster.decode.kill()
    reap_orphans()
    assert not any(region.exists() for region in regions)


def test_the_route_is_killed_under_load(cluster: Cluster, plain: Plain) -> None:
    """Goal: the others forget the requests of a front that is gone. Method: SIGKILL; nothing stays in flight."""
    judge(plain, load(cluster, 12, 400, cluster.route.kill))
    wait_until(cluster.quiet, "all blocks are back")
    for server in (cluster.prefill, cluster.decode):
        wait_until(lambda url=server.url: metrics(url)["http_requests{in_flight}"] == 0, "the front is forgotten")


def test_decode_is_stopped_for_longer_than_the_lease(cluster: Cluster, plain: Plain) -> None:
    """Goal: a lease ends though its holder is only slow. Method: SIGSTOP until prefill has let go, then SIGCONT.

    Requests that were under way end right: what decode asks for too late is gone, and is computed there.
    """

    def pause() -> None:
        cluster.decode.signal(signal.SIGSTOP)
        wait_until(lambda: all_blocks_are_back(cluster.prefill.url), "prefill has its blocks back")
        cluster.decode.signal(signal.SIGCONT)

    answered = load(cluster, 8, 500, pause)
    assert judge(plain, answered) == (8, 0)


def test_prefill_is_stopped_for_longer_than_the_lease(cluster: Cluster, plain: Plain) -> None:
    """Goal: decode does not wait for ever. Method: prefill stops after its offer; decode's retries end."""
    body = completion(600)
    asked = prefilled(cluster, body)
    cluster.prefill.signal(signal.SIGSTOP)
    check_decoded(plain, body, ask(cluster.decode.url, "/v1/decode", asked))
    cluster.prefill.signal(signal.SIGCONT)
    wait_until(lambda: all_blocks_are_back(cluster.prefill.url), "prefill has its blocks back")


def test_a_full_queue_says_so(cluster: Cluster, plain: Plain) -> None:
    """Goal: full is a normal result. Method: a stopped decode has six requests in flight, more than it takes come."""
    bodies = [completion(700 + number, max_tokens=60, ignore_eos=True) for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(cluster.complete, bodies))
    whole, failed = judge(plain, list(zip(bodies, answers, strict=True)))
    assert whole >= 6
    for status, answer in answers:
        if status != 200:
            assert (status, "6 requests are in flight already" in answer["error"]["message"]) == (503, True)
    assert whole + failed == 12


def test_the_same_identity_again(cluster: Cluster, plain: Plain) -> None:
    """Goal: a restarted peer is another one. Method: prefill with the same name, port and address; the old is gone."""
    body = completion(800)
    asked = prefilled(cluster, body)
    cluster.prefill.kill()
    cluster.prefill.start()
    cluster.prefill.wait_live()
    check_decoded(plain, body, ask(cluster.decode.url, "/v1/decode", asked))
    again = completion(801)
    check_decoded(plain, again, ask(cluster.decode.url, "/v1/decode", prefilled(cluster, again)))


def test_sigterm_finishes_what_is_in_care(cluster: Cluster, plain: Plain) -> None:
    """Goal: a clean end. Method: SIGTERM to all with requests in flight: all answered, status 0, /dev/shm clean."""
    regions = cluster.shm()
    assert len(regions) == 4  # rows of device and host blocks, of prefill and decode
    assert all(region.exists() for region in regions)
    bodies = [completion(900 + number, max_tokens=24) for number in range(4)]
    before = metrics(cluster.route.url)["http_requests_total"]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(cluster.complete, body) for body in bodies]
        wait_until(lambda: metrics(cluster.route.url)["http_requests_total"] == before + 4, "the route has begun")
        cluster.route.signal(signal.SIGTERM)
        answers = [future.result() for future in futures]
    whole, _ = judge(plain, list(zip(bodies, answers, strict=True)))
    assert whole
    assert cluster.route.wait() == 0  # a second signal while it ends would be the system's
    assert [process.end() for process in (cluster.decode, cluster.prefill)] == [0, 0]
    assert not any(region.exists() for region in regions)


def test_sigterm_aborts_what_takes_too_long(cluster: Cluster) -> None:
    """Goal: the drain has an end. Method: decode is told to end with a request of thousands of tokens in flight."""
    body = completion(950, max_tokens=700, ignore_eos=True, prompt=[1, 2, 3])
    asked = prefilled(cluster, body)
    asked["sampling"]["max_tokens"] = 700
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask, cluster.decode.url, "/v1/decode", asked)
        wait_until(lambda: metrics(cluster.decode.url)["sequences{running}"] == 1, "it runs")
        assert cluster.decode.end() == 0
        status, answer = future.result()
    assert status in (200, 503)  # a fast machine may have finished it
    assert status == 200 or "aborted" in answer["error"]["message"]

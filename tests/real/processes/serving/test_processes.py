"""Prefill and decode as processes that are killed, stopped and started again.

Decode always answers, no row is wrong, all blocks come back, nothing stays in /dev/shm. Where decode itself dies, its
requests fail, and prefill holds nothing for them.
"""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from nursery import ENGINE, nursery
from serving import DEADLINE_S, ForkedPair, Plain, completion, pair

from cache_manager.regions import reap_orphans
from cache_manager.regions.directory import DIRECTORY
from paged_engine.processes import hold_port, until

pytestmark = pytest.mark.xdist_group("processes")  # its servers take seconds to start


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedPair]:
    with pair(tmp_path_factory.mktemp("cluster")) as found:
        found.wait_ready()
        yield found
    reap_orphans()


@pytest.fixture(autouse=True)
def _well_before_and_after(cluster: ForkedPair, plain: Plain) -> Iterator[None]:
    """After each test the two servers, those that ended started again, work together and hold no blocks."""
    yield
    for server in (cluster.prefill, cluster.decode):
        if server.process.poll() is not None:
            server.start()
        server.send(signal.SIGCONT)
    cluster.wait_ready()
    body = completion(1)
    status, answer = cluster.complete(body)
    assert (status, answer.get("handover_note")) == (200, None), answer
    plain.check(body, answer)
    assert cluster.wait_quiet()


def prefilled(cluster: ForkedPair, body: dict[str, Any]) -> dict[str, Any]:
    """A body for decode, whose prompt prefill has computed and lends."""
    status, handover = cluster.prefill.ask("/v1/completions", body)
    assert status == 200, handover
    return body | {"handover": handover}


def mapped_regions(pid: int | str) -> set[Path]:
    """The regions that process ``pid`` has mapped, by name.

    They are found by inode: a region gets its name when it is whole, and the map goes on showing it without one.
    """
    lines = (line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    inodes = {int(parts[4]) for parts in lines if len(parts) > 5 and Path(parts[5]).parent == DIRECTORY}
    return {path for path in DIRECTORY.glob("kvroute-*") if path.stat().st_ino in inodes}


def shm(cluster: ForkedPair) -> set[Path]:
    """The SharedMemory regions that prefill and decode have mapped: rows of device and host blocks of each."""
    found = mapped_regions(cluster.prefill.process.pid) | mapped_regions(cluster.decode.process.pid)
    assert len(found) == 4
    return found


@pytest.mark.parametrize("disturbed", ["prefill killed", "prefill stopped", "decode stopped"])
def test_decode_always_answers(cluster: ForkedPair, plain: Plain, disturbed: str) -> None:
    """Goal: whatever happens to prefill under load, and to decode short of its death, every answer is whole. Method:
    SIGKILL or SIGSTOP while others are worked on; without prefill the client asks decode alone."""
    bodies = [completion(100 + number, max_tokens=24, n=1 + number % 2) for number in range(12)]
    disturbed_one = getattr(cluster, disturbed.split()[0])

    def disturb() -> None:
        if "killed" in disturbed:
            disturbed_one.kill()
            return
        disturbed_one.send(signal.SIGSTOP)
        if disturbed == "decode stopped":
            until(lambda: cluster.prefill.quiet, "prefill holds nothing for it", DEADLINE_S)
        disturbed_one.send(signal.SIGCONT)

    for body, (status, answer) in zip(bodies, cluster.load(bodies, disturb), strict=True):
        assert status == 200, answer
        plain.check(body, answer)


@pytest.mark.parametrize("how", ["killed", "stopped", "restarted"])
def test_prefill_is_killed_during_a_transfer(cluster: ForkedPair, plain: Plain, how: str) -> None:
    """Goal: a fetch ends even if prefill never answers. Method: prefill is stopped when decode is asked, and killed or
    left so, or another one has its address by then; decode computes the prompt and reports why."""
    body = completion(200)
    asked = prefilled(cluster, body)
    cluster.prefill.send(signal.SIGSTOP)
    if how != "stopped":
        cluster.prefill.kill()
    if how == "restarted":
        cluster.prefill.start()
        cluster.prefill.wait_ready()
    status, answer = cluster.decode.ask("/v1/completions", asked)
    assert status == 200, answer
    assert answer["handover_note"].startswith("computed here from position "), answer
    plain.check(body, answer)


@pytest.mark.parametrize("when", ["under load", "during a transfer"])
def test_decode_is_killed_during_a_transfer(cluster: ForkedPair, plain: Plain, when: str) -> None:
    """Goal: prefill holds no block for a dead decode, and earlier answers were right. Method: SIGKILL."""
    bodies = [completion(300 + number, max_tokens=24) for number in range(8)]
    if when == "under load":
        answers = cluster.load(bodies, cluster.decode.kill)
        whole = [(body, answer) for body, (status, answer) in zip(bodies, answers, strict=True) if status == 200]
        assert whole
        assert {status for status, _ in answers} <= {200, 0}
        for body, answer in whole:
            plain.check(body, answer)
    else:
        asked = prefilled(cluster, bodies[0])
        cluster.prefill.send(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(cluster.decode.ask, "/v1/completions", asked)
            until(lambda: cluster.decode.counters()["decode"]["handovers"] > 0, "it has begun", DEADLINE_S)
            cluster.decode.kill()
            assert future.result()[0] == 0
        cluster.prefill.send(signal.SIGCONT)
    until(lambda: cluster.prefill.quiet, "prefill has its blocks back", DEADLINE_S)


def test_shared_memory_of_a_killed_process_can_be_reaped(cluster: ForkedPair) -> None:
    """Goal: /dev/shm is clean. Method: SIGKILL of both engines; their regions that remain are found orphaned."""
    regions = shm(cluster)
    cluster.prefill.kill()
    cluster.decode.kill()
    reap_orphans()
    assert not any(region.exists() for region in regions)


def test_sigterm_finishes_requests_in_flight(cluster: ForkedPair, plain: Plain) -> None:
    """Goal: a clean end. Method: SIGTERM to both with requests in flight: all answered, status 0, /dev/shm clean."""
    regions = shm(cluster)
    bodies = [completion(900 + number, max_tokens=24) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(cluster.complete, body) for body in bodies]
        until(lambda: cluster.decode.counters()["http"]["in_flight"] > 0, "decode is at work", DEADLINE_S)
        assert cluster.end() == (0, 0)
        answers = [future.result() for future in futures]
    assert any(status == 200 for status, _ in answers)
    for body, (status, answer) in zip(bodies, answers, strict=True):
        if status == 200:
            plain.check(body, answer)
    assert not any(region.exists() for region in regions)


def test_sigterm_aborts_what_takes_too_long(cluster: ForkedPair) -> None:
    """Goal: the drain has an end. Method: decode is told to end with a request of hundreds of tokens in flight."""
    body = completion(950, max_tokens=700, ignore_eos=True, prompt=[1, 2, 3])
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(cluster.decode.ask, "/v1/completions", body)
        until(lambda: cluster.decode.counters()["http"]["in_flight"] == 1, "it runs", DEADLINE_S)
        assert cluster.decode.end() == 0
        status, answer = future.result()
    assert status in (200, 503)  # a fast machine may have finished it
    assert status == 200 or "aborted" in answer["error"]["message"]


BROKEN = """
import sys
from paged_engine import engine
from paged_engine.servers import decode

method = sys.argv[2]
works = getattr(engine.Engine, method)

def broken(self, *args):
    if method == "abort" or self.steps == 3:
        raise IndexError("index 16 is out of bounds")
    return works(self, *args)

setattr(engine.Engine, method, broken)
sys.exit(decode(port=int(sys.argv[1])))
"""


@pytest.mark.parametrize("method", ["_forward", "abort"])
def test_a_process_whose_engine_fails_ends_with_the_cause(tmp_path: Path, method: str) -> None:
    """Goal: a process that can no longer work ends. Method: a pass raises; the request gets the cause, and the process
    ends with status 1 and the cause. Formerly it answered /healthz with 200 and every request with 503 for ever. Or an
    abort raises, for a client that leaves: formerly the error was not reported, and its blocks stayed."""
    port, log = hold_port(), tmp_path / "log"
    with log.open("w") as out:
        child = nursery(*ENGINE).start(["-c", BROKEN, str(port), method], stdout=out, stderr=out)
    until(lambda: "seeded weights at" in log.read_text(), "it listens", DEADLINE_S)
    body = json.dumps(completion(1, max_tokens=700, ignore_eos=True, stream=method == "abort")).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
    if method == "abort":
        with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:  # noqa: S310 - our own server
            assert answer.readline().startswith(b"data: {")
    else:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=DEADLINE_S)  # noqa: S310 - our own server
        said = json.loads(refused.value.read())["error"]["message"]
        assert (refused.value.code, said) == (500, "the engine has failed: IndexError: index 16 is out of bounds")
    assert child.wait(DEADLINE_S) == 1
    assert "the engine has failed: IndexError: index 16 is out of bounds" in log.read_text()

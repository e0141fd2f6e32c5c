"""``kvroute doctor --url``: engines that run are asked for a few tokens. Do answers have rows, does KV cross at all?

A prefill and a decode engine that exchange nothing give the same text as two that do: decode computes every prompt
again. vLLM's own counters show it: they are read before a request and after it. Requests have tokens that no cache has.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cache_manager.errors import ConfigError, RowError
from kvroute.connector.answers import missing, routes
from kvroute.connector.fields import ERROR, FIELD, GAPS, LEFT
from kvroute.connector.meter import PAGE, WITHOUT_ROWS
from kvroute.encodings import ROUTED_EXPERTS
from kvroute.findings import Finding, Level
from kvroute.verify.asking import ServerError, decoded, exchanged, served_by

PROMPT: Final = 160
"""Tokens of a prompt: several blocks of most engines."""
NEW: Final = 2
BLOCK_MAX: Final = 128
"""KV crosses by whole blocks, and the last token of a prompt is computed: so many of its tokens may be computed."""
LEAST: Final = PROMPT - BLOCK_MAX
FIRST, LAST = 3, 99
"""Token ids that every model has, and no special ones."""
COUNTED_S: Final = 5.0
"""vLLM has counted a request so soon after its answer."""
PARAMS: Final = "kv_transfer_params"
ASK_TO_LEND: Final[Mapping[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a proxy sends to prefill, for KV that decode is to fetch."""
CROSSING: Final = "docs/prefill-decode.md"
TICKET: Final = "transfer"


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine behind a URL."""

    role: str  # url, prefill or decode: the flag that named it
    url: str
    model: str
    kind: str  # SGLang or vLLM
    version: str

    @classmethod
    def at(cls, role: str, url: str) -> RunningEngine:
        """Raises :class:`ServerError` if no engine answers there."""
        url = url.rstrip("/")
        model, kind = served_by(url)
        path = "/server_info" if kind == "SGLang" else "/version"
        try:
            version = str(decoded(url + path, exchanged(url + path))["version"])
        except (ServerError, TypeError, LookupError):  # a proxy may have no such page
            version = "of an unknown version"
        return cls(role, url, model, kind, version)

    def ask(
        self,
        prompt: list[int],
        new: int = NEW,
        params: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Its answer, one completion. Raises :class:`ServerError`."""
        body: dict[str, Any]
        if self.kind == "SGLang":
            path = "/generate"
            sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling}
            body |= {"return_routed_experts": True, "return_prompt_token_ids": True}
        else:
            path = "/v1/completions"
            body = {"model": self.model, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
            body |= {"return_token_ids": True} | ({PARAMS: params} if params else {})
        answer = decoded(self.url + path, exchanged(self.url + path, body))
        answer = answer[0] if isinstance(answer, list) and answer else answer
        if not isinstance(answer, dict) or (self.kind == "vLLM" and not answer.get("choices")):
            wanted = "an answer with a completion"
            raise ServerError(self.url + path, wanted, repr(answer)[:200])
        return answer

    def counters(self) -> Counter[str]:
        """What its ``/metrics`` has counted, by name, and by name and ``/`` and source or cause where a sample has one.

        Empty if it has no such page.
        """
        try:
            text = exchanged(f"{self.url}/metrics").decode(errors="replace")
        except ServerError:
            return Counter()
        counted = Counter[str]()
        for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*)\})? ([\d.e+-]+)$", text, re.MULTILINE):
            part = re.search(r'\b(?:source|cause)="([^"]*)"', labels)
            counted[f"{name}/{part[1]}" if part else name] += float(value)  # type: ignore[assignment]
        return counted


TOKENS: Final = "vllm:prompt_tokens_total"
FETCHED: Final = ("vllm:prompt_tokens_by_source_total/external_kv_transfer", "vllm:external_prefix_cache_hits_total")
"""Tokens whose KV came from outside: the name of newer releases, and that of older ones."""
FAILED_TRANSFERS: Final = re.compile(r"vllm:\w+_num_failed_\w+")
"""Transfers that failed, by vLLM's connectors: what was to come is counted above all the same."""


def look_at(url: str | None, prefill: str | None, decode: str | None) -> list[Finding]:
    """The findings about one server; or about a pair, and about the proxy before it if there is a ``url``, too.

    Raises :class:`ConfigError` for half a pair, and for one that is not vLLM's; :class:`ServerError` where no engine
    answers.
    """
    if prefill is None and decode is None and url is not None:
        return list(_alone(RunningEngine.at("url", url)))
    if prefill is None or decode is None:
        raise ConfigError("--prefill, --decode", "both or neither", prefill or decode)
    pair = (RunningEngine.at("prefill", prefill), RunningEngine.at("decode", decode))
    for engine in pair:
        if engine.kind != "vLLM":
            wanted = "vLLM: where SGLang's decode gets no KV, the request has no answer, and nothing is hidden"
            raise ConfigError(f"--{engine.role}", wanted, engine.kind)
    return list(_pair(*pair, url and url.rstrip("/")))


def _prompt() -> list[int]:
    """Tokens that no cache has."""
    source = random.SystemRandom()
    return [source.randint(FIRST, LAST) for _ in range(PROMPT)]


def _version_of(engine: RunningEngine) -> Finding:
    return Finding(Level.OK, engine.role, f"{engine.url}: {engine.kind} {engine.version}, model {engine.model}")


def _alone(engine: RunningEngine) -> Iterator[Finding]:
    yield _version_of(engine)
    yield from _rows_of(engine.role, engine.ask(_prompt()))
    counted = engine.counters()
    if not counted:
        remedy = "SGLang has one with --enable-metrics" if engine.kind == "SGLang" else "no --disable-log-stats"
        yield Finding(Level.NOTE, "metrics", f"{engine.url}/metrics: none", remedy)
    for name, tokens in counted.items():
        if name.startswith(f"{WITHOUT_ROWS}/") and tokens:
            cause = name.partition("/")[2]
            yield Finding(Level.NOTE, "missing rows", f"{tokens:,.0f} tokens since its start: {cause}", f"see {PAGE}")


def _rows_of(subject: str, answer: dict[str, Any]) -> Iterator[Finding]:
    """Whether an answer has its rows, and why not."""
    completion = answer["choices"][0] if "choices" in answer else answer
    meta = answer.get("meta_info") or {}
    own_field = completion.get(ROUTED_EXPERTS) or meta.get(ROUTED_EXPERTS)
    entries = (answer.get(PARAMS) or {}).get(FIELD) or meta.get(FIELD)
    if not entries and own_field is None:
        text = "an answer has no rows: neither the engine's own field, nor routes of kvroute's"
        remedy = "--enable-return-routed-experts, or kvroute's connector in --kv-transfer-config (docs/vllm.md)"
        yield Finding(Level.PROBLEM, subject, text, remedy)
        return
    reasons = [why for _, _, why in missing(answer)] if entries else []
    if reasons:
        yield Finding(Level.PROBLEM, subject, f"rows are missing: {'; '.join(sorted(set(reasons)))}", f"see {PAGE}")
        return
    if own_field is not None:
        yield Finding(Level.OK, subject, f"an answer has the engine's own field {ROUTED_EXPERTS}")
        return
    if isinstance(entries, Mapping) and entries.get(LEFT) and not entries.get(ERROR):
        text = "an answer has the handle of its rows in a rollout store: kvroute verify --rollouts URL reads it"
        yield Finding(Level.OK, subject, text)
        return
    try:
        own_routes = routes(answer)
    except RowError as error:
        yield Finding(Level.PROBLEM, subject, f"an answer has no readable rows: {error}", f"see {PAGE}")
        return
    if not own_routes.complete:
        yield Finding(Level.PROBLEM, subject, f"rows are missing: {own_routes!r}", f"see {PAGE}")
        return
    yield Finding(Level.OK, subject, f"an answer has its rows: {own_routes!r}")
    if not own_routes.weights_versions:
        remedy = "the engine's call for new weights, with a whole number as version, or the setting weights_version"
        yield Finding(Level.NOTE, "weights", "rows have no weights version: none was named yet", remedy)


def _pair(
    prefill: RunningEngine,
    decode: RunningEngine,
    proxy: str | None,
) -> Iterator[Finding]:
    yield _version_of(prefill)
    yield _version_of(decode)
    prompt = _prompt()
    lent = prefill.ask(prompt, 1, ASK_TO_LEND).get(PARAMS)
    if not lent or not lent.get("do_remote_prefill"):
        text = f"lends no KV over NIXL: its answer to do_remote_decode has no {PARAMS} for decode ({lent or 'none'})"
        remedy = "--kv-transfer-config with KvrouteNixlConnector and kv_role kv_both; a pair of another connector is"
        remedy += " judged through its proxy alone, --url"
        yield Finding(Level.NOTE if proxy else Level.PROBLEM, "prefill", text, remedy)
        if proxy:
            yield from _proxied(prefill, decode, proxy, "")
        return
    yield Finding(Level.OK, "prefill", f"lends KV: its answer has {PARAMS} for decode")
    if TICKET not in (lent.get(FIELD) or {}):
        text = f"lends no rows: {(lent.get(FIELD) or {}).get(GAPS) or 'no ticket of kvroute is beside its KV'}"
        remedy = f"kvroute's connector on both sides, Kvroute<name of vLLM's> ({CROSSING})"
        yield Finding(Level.PROBLEM, "prefill", text, remedy)
    crossed, answer = _crossed(decode, lambda: decode.ask(prompt, NEW, lent))
    yield crossed
    yield from _rows_of("decode", answer)
    if proxy and crossed.level is Level.OK:
        yield from _proxied(prefill, decode, proxy, ", and without it they exchange KV")


def _crossed(
    decode: RunningEngine, ask: Callable[[], dict[str, Any]], subject: str = "decode"
) -> tuple[Finding, dict[str, Any]]:
    """Whether KV of a prompt came to decode from outside while ``ask`` was answered; the answer of that, too."""
    before = decode.counters()
    answer = ask()
    give_up_s = time.monotonic() + COUNTED_S
    while True:
        grown = decode.counters()
        grown.subtract(before)
        if grown[TOKENS] or time.monotonic() > give_up_s:
            break
        time.sleep(0.1)
    fetched = next((grown[name] for name in FETCHED if name in grown), 0)
    failed = sum(count for name, count in grown.items() if FAILED_TRANSFERS.fullmatch(name))
    if not before or not grown.keys() & set(FETCHED):
        text = "nothing is known of KV that came: its /metrics has no vllm:external_prefix_cache_hits"
        return Finding(Level.NOTE, subject, text, "no --disable-log-stats"), answer
    if grown[TOKENS] != PROMPT:
        text = f"others were asking: decode took in {grown[TOKENS]:,.0f} tokens of prompts, {PROMPT} of them ours"
        if not grown[TOKENS]:
            text = f"decode was not asked: it has taken in no prompt within {COUNTED_S} s"
        level = Level.NOTE if grown[TOKENS] else Level.PROBLEM
        return Finding(level, subject, text, "ask again while no other request is sent"), answer
    if fetched < LEAST or failed:
        text = f"computes every prompt again: KV of {fetched:,.0f} of {PROMPT} tokens came from prefill"
        if failed:
            text = f"computes prompts again: {failed:,.0f} transfers of KV failed"
        remedy = (
            f"one connector and one transport on both sides, and a way between them ({CROSSING}); decode's log says why"
        )
        return Finding(Level.PROBLEM, subject, text, remedy), answer
    return Finding(Level.OK, subject, f"KV of {fetched:,.0f} of {PROMPT} tokens came from prefill"), answer


def _proxied(
    prefill: RunningEngine,
    decode: RunningEngine,
    proxy: str,
    beside: str,
) -> Iterator[Finding]:
    """The same through the proxy, which has the parameters in its hands; ``beside`` is what was seen without it."""
    front = RunningEngine("url", proxy, decode.model, "vLLM", "")
    before = prefill.counters()
    crossed, answer = _crossed(decode, lambda: front.ask(_prompt()), "proxy")
    after = prefill.counters()
    if crossed.level is Level.PROBLEM:
        asked = after[TOKENS] > before[TOKENS]
        text = f"drops {PARAMS} between prefill and decode: {crossed.text}{beside}"
        if not beside:
            text = f"behind it decode {crossed.text}"
        if not asked:
            text = f"asks no prefill: {crossed.text}"
        remedy = f"a proxy that sends prefill do_remote_decode, and decode the {PARAMS} of prefill's answer, whole"
        yield Finding(Level.PROBLEM, "proxy", text, remedy)
        return
    yield crossed
    if not (answer.get(PARAMS) or {}).get(FIELD) and answer["choices"][0].get(ROUTED_EXPERTS) is None:
        text = f"drops {PARAMS} of decode's answer, where its rows are"
        yield Finding(Level.PROBLEM, "proxy", text, f"a proxy that answers with decode's {PARAMS}, or the own field")
        return
    yield from _rows_of("proxy", answer)


__all__ = ["RunningEngine", "look_at"]

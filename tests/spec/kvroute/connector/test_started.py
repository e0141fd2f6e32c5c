"""The line at an engine's start, where it goes, and the page that a line about missing rows names."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvroute
from kvroute.connector.carriers import ByKey, ByTransfer, NoCarrier
from kvroute.connector.meter import PAGE, Meter
from kvroute.connector.settings import Settings
from kvroute.connector.started import started
from kvroute.connector.versions import AS_LOADED
from kvroute.integrations.sglang.hooks import carrier_of
from kvroute.integrations.vllm import log

SPEC = kvroute.routing_spec(num_experts=8, top_k=2, layer_ids=[1, 2], num_layers=3, block_tokens=16)


def test_the_line_says_what_an_operator_would_ask_first() -> None:
    settings = Settings(store="file:///rows", rollouts="file:///routes")
    facts: dict[str, Any] = {"captured": 2, "blocks": 512, "carrier": "connector", "version": 17}
    assert started("vLLM 0.32.0", SPEC, settings, **facts) == (
        f"kvroute {kvroute.__version__} in vLLM 0.32.0: 2 of 2 routed layers captured, top 2 of 8 experts; "
        "512 blocks of 16 tokens; carrier connector; store file:///rows; rollouts file:///routes; weights version 17"
    )
    line = started("SGLang 0.5.23", SPEC, Settings(), **facts | {"version": AS_LOADED})
    assert line.endswith("store none; rollouts in the answer; weights version unknown")
    assert "rollouts none;" in started("SGLang 0.5.23", SPEC, Settings(field=True), **facts)


def test_a_carrier_is_called_as_in_the_settings() -> None:
    kinds = (NoCarrier, ByKey, ByTransfer)
    assert [kind.word for kind in kinds] == ["none", "connector", "transfer"]


@contextmanager
def engine_log() -> Iterator[io.StringIO]:
    """The log of an engine that sets up its own logger, as vLLM does; every logger is as before at the end."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    engine, root = logging.getLogger("an_engine"), logging.getLogger()
    ours = [logging.getLogger(name) for name in log.OURS]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in (engine, root, *ours)]
    engine.handlers, engine.propagate, root.handlers = [handler], False, []
    engine.setLevel(logging.INFO)
    try:
        yield written
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def test_our_lines_stand_in_the_engine_s_log() -> None:
    """Goal: a line of kvroute's has the time and level of the engine's own lines. Method: an engine that sets up its
    own logger alone, before and after we join it; joining twice writes no line twice."""
    logger = logging.getLogger("kvroute.connector.meter")
    with engine_log() as written:
        logger.info("lost")
        log.join("an_engine")
        log.join("an_engine")
        logger.info("said")
    assert written.getvalue() == "INFO kvroute.connector.meter said\n"


def test_a_handler_of_the_root_logger_alone_hides_no_line_and_repeats_none() -> None:
    """Goal: a library that gives the root logger a handler neither takes the line at the start away, nor writes it a
    second time. Method: that, into the same log, with the root logger's own level, which its handlers do not know."""
    with engine_log() as written:
        logging.getLogger().handlers = [logging.StreamHandler(written)]
        logging.getLogger().setLevel(logging.WARNING)
        log.join("an_engine")
        logging.getLogger("kvroute.integrations.vllm.connector").info("said")
    assert written.getvalue() == "INFO kvroute.integrations.vllm.connector said\n"


def test_an_operator_s_own_handler_hears_us_where_the_engine_has_none() -> None:
    """Goal: no line is lost. Method: an engine that sets up no logging (``VLLM_CONFIGURE_LOGGING=0``), and a handler of
    the root logger, whose level is above the engine's."""
    with engine_log() as written:
        engine = logging.getLogger("an_engine")
        engine.handlers, engine.propagate = [], True
        logging.getLogger().handlers = [logging.StreamHandler(written)]
        logging.getLogger().setLevel(logging.WARNING)
        log.join("an_engine")
        logging.getLogger("kvroute.connector.meter").warning("rows are lost")
    assert written.getvalue() == "rows are lost\n"


def test_who_has_set_up_logging_keeps_it() -> None:
    """Method: a handler of the root logger, and its level: it gets our lines already."""
    with engine_log():
        logging.getLogger().handlers = [logging.NullHandler()]
        logging.getLogger().setLevel(logging.INFO)
        log.join("an_engine")
        assert [logging.getLogger(name).handlers for name in log.OURS] == [[], [], []]


def test_a_line_about_missing_rows_names_a_page_that_is_there(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: the operator finds what helps. Method: the line of the first missing rows, and the page's heading."""
    meter = Meter(dict)
    meter.miss("a router was called twice in a step", 7)
    meter.miss("a router was called twice in a step", 9)
    (line,) = caplog.messages
    assert line.endswith(f"; see {PAGE}")
    page, _, anchor = PAGE.partition("#")
    headings = (Path(__file__).parents[4] / page).read_text().splitlines()
    assert f"## {anchor.capitalize()}" in headings


@pytest.mark.parametrize(
    ("flag", "carrier"),
    [
        ("", "none"),
        ("enable_hierarchical_cache", "hierarchical cache"),
        ("enable_unified_cache_external_linker", "linker"),
    ],
)
def test_sglang_s_carrier_is_named_by_its_arguments(flag: str, carrier: str) -> None:
    assert carrier_of(SimpleNamespace(**({flag: True} if flag else {}))) == carrier

"""A failure is logged once, counted, and keeps nothing alive."""

from __future__ import annotations

import logging
import re
import weakref
from pathlib import Path

import pytest

import kvlinker
from kvlinker.failures import FailureLog
from kvlinker.guard import BreakerOpenError
from kvlinker.metrics import FAILING_CALLS, LinkerMetrics

LOGGER = "kvlinker.failures"


class Tensor:
    """What must not stay in memory."""


class MuteError(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        msg = "no text"
        raise ValueError(msg)


def test_every_call_that_reports_a_failure_is_listed_and_no_other() -> None:
    texts = [
        path.read_text(encoding="utf-8") for path in Path(kvlinker.__file__).parent.glob("*.py")
    ]
    forms = (
        r'failures\.report\(\s*"(\w+)"',
        r'what(?:: str)? ?= ?"(\w+)"',
        r"@_shielded\(.*\)\s+def _?(\w+)",
    )

    found = {name for text in texts for form in forms for name in re.findall(form, text)}

    assert tuple(sorted(found)) == FAILING_CALLS


def raised(error: BaseException, *, cause: BaseException | None = None) -> weakref.ref[Tensor]:
    """Raise an error from a frame that holds a tensor; return whether it is still there."""
    tensor = Tensor()
    kept = weakref.ref(tensor)
    try:
        if cause is not None:
            try:
                raise cause
            except type(cause) as inner:
                raise error from inner
        raise error
    except type(error):
        return kept


def test_l1_a_failure_is_logged_once_with_store_pool_and_key_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = LinkerMetrics()
    failures = FailureLog("FileStore", metrics)

    with caplog.at_level(logging.INFO, LOGGER):
        failures.report("load", OSError("disk"), pool="kv", key=b"\x01\xab")

    assert [record.getMessage() for record in caplog.records] == [
        "load failed: store=FileStore pool=kv key=01ab: OSError: disk"
    ]
    assert metrics.snapshot().events == {"load_errors": 1}


def test_l1_what_is_not_known_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    FailureLog("S3Store", LinkerMetrics()).report("lookup", "late")

    assert caplog.messages == ["lookup failed: store=S3Store pool=- key=-: late"]


def test_t6_l1_what_an_open_breaker_refuses_is_counted_and_not_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = LinkerMetrics()

    FailureLog("S3Store", metrics).report("lookup", BreakerOpenError("not asked"))

    assert caplog.messages == []
    assert metrics.snapshot().events == {"lookup_refused": 1}


def test_l1_an_error_without_a_text_is_reported_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    FailureLog("S3Store", LinkerMetrics()).report("lookup", MuteError())

    assert caplog.messages == [
        "lookup failed: store=S3Store pool=- key=-: MuteError without a text"
    ]


def test_b50_an_error_that_its_store_keeps_keeps_no_frames() -> None:
    error, cause = OSError("kept"), ValueError("kept too")
    kept = raised(error, cause=cause)
    assert kept() is not None

    FailureLog("S3Store", LinkerMetrics()).report("load", error)

    assert kept() is None
    assert cause.__traceback__ is None


def test_b50_errors_that_lead_to_each_other_end() -> None:
    first, second = OSError("first"), OSError("second")
    first.__context__, second.__context__ = second, first

    FailureLog("S3Store", LinkerMetrics()).report("load", first)

    assert first.__context__ is second


def test_what_the_caller_was_handling_before_keeps_its_frames() -> None:
    error, outer = OSError("ours"), KeyError("the engine's")
    kept = raised(error, cause=outer)

    FailureLog("S3Store", LinkerMetrics()).report("load", error, outer=outer)

    assert error.__traceback__ is None
    assert outer.__traceback__ is not None
    assert kept() is not None


def test_the_traceback_is_logged_for_who_looks_for_it(caplog: pytest.LogCaptureFixture) -> None:
    error = OSError("where")
    raised(error)

    with caplog.at_level(logging.DEBUG, LOGGER):
        FailureLog("S3Store", LinkerMetrics()).report("load", error)

    assert "in raised" in caplog.records[-1].getMessage()
    assert caplog.records[-1].levelno == logging.DEBUG
    assert [record.exc_info for record in caplog.records] == [None, None]

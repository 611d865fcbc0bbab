"""Open reads: what a session keeps is let go of once, behind the last read."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from kvlinker.errors import StoreClosedError
from kvlinker.open_reads import OpenReads


def test_an_idle_session_lets_go_when_it_is_closed_and_only_then() -> None:
    released: list[str] = []
    reads = OpenReads(lambda: released.append("rows"))
    with reads.reading("kv"):
        pass
    assert released == []

    reads.close()
    reads.close()

    assert released == ["rows"]


def test_a_session_that_is_closed_under_reads_lets_go_behind_the_last_one() -> None:
    released: list[str] = []
    reads = OpenReads(lambda: released.append("rows"))
    first, second = ExitStack(), ExitStack()
    first.enter_context(reads.reading("kv"))
    second.enter_context(reads.reading("kv"))

    reads.close()
    first.close()
    assert released == []
    second.close()

    assert released == ["rows"]


def test_a_read_that_fails_ends_as_others_do() -> None:
    released: list[str] = []
    reads = OpenReads(lambda: released.append("rows"))

    def fail() -> None:
        with reads.reading("kv"):
            reads.close()
            msg = "away"
            raise OSError(msg)

    with pytest.raises(OSError, match="away"):
        fail()

    assert released == ["rows"]


def test_a_closed_session_begins_no_read_and_names_the_pool() -> None:
    reads = OpenReads(lambda: None)
    reads.close()

    with (
        pytest.raises(StoreClosedError, match="pool 'swa': this read session was closed"),
        reads.reading("swa"),
    ):
        pass

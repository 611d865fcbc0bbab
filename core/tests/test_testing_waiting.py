"""Waiting ends when something is so, names what did not come, and takes those errors alone for "not yet"."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvlinker.testing import waiting
from kvlinker.testing.waiting import wait_for


def test_it_ends_with_the_first_answer_that_is_true_of_it() -> None:
    answers: Iterator[object] = iter([0, [], None, 3])

    wait_for(lambda: next(answers), "a number")

    assert list(answers) == []


def test_what_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_LIMIT_SECONDS", 0.01)

    with pytest.raises(AssertionError, match=r"waited 0.01 s in vain for a miracle"):
        wait_for(lambda: False, "a miracle")


def test_errors_that_say_not_yet_are_waited_out_and_others_raised() -> None:
    errors: list[Exception] = [OSError("away"), OSError("away")]

    def ask() -> bool:
        if errors:
            raise errors.pop()
        return True

    wait_for(ask, "the server", despite=(OSError,))
    errors.append(ValueError("another"))
    with pytest.raises(ValueError, match="another"):
        wait_for(ask, "the server", despite=(OSError,))

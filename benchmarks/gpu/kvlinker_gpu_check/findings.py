"""What a check found: nothing wrong, or what was; and what was measured on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CheckFailedError", "Finding", "expect", "expect_equal", "expect_same_memory"]


class CheckFailedError(Exception):
    """A check found something wrong; the text says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check on one layout."""

    check: str
    layout: str
    problem: str = ""
    """Empty where nothing was wrong."""
    figure: str = ""
    """What was measured, as a cell of a table."""

    def __str__(self) -> str:
        outcome = f"WRONG: {self.problem}" if self.problem else self.figure or "right"
        return f"{self.check:44} {self.layout:18} {outcome}"


def expect(holds: object, problem: str) -> None:
    """Do nothing where a condition holds.

    Raises:
        CheckFailedError: it does not.
    """
    if not holds:
        raise CheckFailedError(problem)


def expect_equal(got: bytes, expected: bytes, what: str) -> None:
    """Do nothing where bytes are what they should be.

    Raises:
        CheckFailedError: they are not; the text says how many, and where the first is.
    """
    if got == expected:
        return
    wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b]
    first = wrong[0] if wrong else min(len(got), len(expected))
    msg = f"{what}: {len(wrong)} of {len(expected)} bytes are wrong, the first at {first}"
    raise CheckFailedError(msg)


def expect_same_memory(got: Mapping[str, bytes], expected: Mapping[str, bytes]) -> None:
    """Do nothing where two memories are equal, padding included.

    Raises:
        CheckFailedError: a buffer differs, or is missing.
    """
    expect(
        got.keys() == expected.keys(), f"buffers {sorted(got)} are there, not {sorted(expected)}"
    )
    for label, content in expected.items():
        expect_equal(got[label], content, f"buffer {label}")

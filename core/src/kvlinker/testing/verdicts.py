"""How a check of the kit says that something is wrong."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["expect", "fail"]


def fail(problem: str) -> NoReturn:
    """Fail the test with what is wrong, and what would be right.

    Raises:
        AssertionError: always.
    """
    __tracebackhide__ = True
    raise AssertionError(problem)


def expect(what: str, found: object, wanted: object) -> None:
    """Fail unless an answer is the one that is wanted.

    Raises:
        AssertionError: it is another one; the text has both.
    """
    __tracebackhide__ = True
    if found != wanted:
        fail(f"{what} answered {found}, expected {wanted}")

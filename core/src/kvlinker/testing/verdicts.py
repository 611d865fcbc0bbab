"""How a check of the kit says that something is wrong."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["fail"]


def fail(problem: str) -> NoReturn:
    """Fail the test with what is wrong, and what would be right.

    Raises:
        AssertionError: always.
    """
    __tracebackhide__ = True
    raise AssertionError(problem)

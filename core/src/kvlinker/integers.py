"""Integers at a boundary: Python's and numpy's are taken, bools and floats are refused."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from kvlinker.errors import ContractError

__all__ = ["as_integer"]


def as_integer(
    value: object, what: str, *, at_least: int | None = None, at_most: int | None = None
) -> int:
    """Return an integer as Python's own.

    Args:
        value: anything that is an integer, such as `numpy.int64`.
        what: names the value in messages.
        at_least: smallest value allowed.
        at_most: largest value allowed.

    Raises:
        ContractError: the value is no integer, is a bool, or is out of bounds.
    """
    number = _index(value)
    if number is None:
        msg = f"{what} must be an integer, got {value!r}"
        raise ContractError(msg)
    if at_least is not None and number < at_least:
        msg = f"{what} must be at least {at_least}, got {number}"
        raise ContractError(msg)
    if at_most is not None and number > at_most:
        msg = f"{what} must be at most {at_most}, got {number}"
        raise ContractError(msg)
    return number


def _index(value: object) -> int | None:
    if type(value) is int:
        return value  # nearly always, and asking for a protocol takes ten times as long
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None  # numpy.bool and arrays have __index__ and refuse

"""Integers at a boundary: numpy's are taken, bools and floats are refused."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import pytest

from kvlinker.errors import ContractError
from kvlinker.integers import as_integer


class Rank(IntEnum):
    """An integer by another name."""

    FIRST = 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, 7),
        (-7, -7),
        (2**70, 2**70),
        (np.int64(7), 7),
        (np.uint8(255), 255),
        (np.array(7), 7),
        (Rank.FIRST, 1),
    ],
)
def test_every_kind_of_integer_becomes_pythons_own(value: object, expected: int) -> None:
    number = as_integer(value, "rows")

    assert number == expected
    assert type(number) is int


@pytest.mark.parametrize(
    "value", [True, np.True_, np.array(True), 1.0, np.float32(1), "1", None, [1], np.array([1])]
)
def test_what_is_no_integer_is_refused_by_name_and_value(value: object) -> None:
    with pytest.raises(ContractError, match=r"^rows must be an integer, got "):
        as_integer(value, "rows")


def test_bounds_are_inclusive() -> None:
    assert as_integer(1, "rows", at_least=1, at_most=3) == 1
    assert as_integer(3, "rows", at_least=1, at_most=3) == 3
    with pytest.raises(ContractError, match=r"^rows must be at least 1, got 0$"):
        as_integer(0, "rows", at_least=1, at_most=3)
    with pytest.raises(ContractError, match=r"^rows must be at most 3, got 4$"):
        as_integer(4, "rows", at_least=1, at_most=3)

"""Options are bounds: seconds above 0 and at most a day, or whole numbers above 0."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvlinker.errors import ContractError
from kvlinker.linker_options import COUNTS, MAX_COUNT, LinkerOptions

NAMES = [item.name for item in fields(LinkerOptions)]
SECONDS = [name for name in NAMES if name.endswith("_seconds")]
NUMBERS = [name for name in NAMES if name not in SECONDS]
NO_NUMBERS = [0, -1, -0.5, True, "1", None, float("nan"), float("inf")]


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [*NO_NUMBERS, 86_401, 1e300, 10**400])
def test_seconds_that_are_not_above_0_and_at_most_a_day_are_refused_by_name(
    name: str, value: object
) -> None:
    message = (
        rf"linker option {name} must be a number of seconds above 0, at most 86400 \(a day\), got "
    )

    with pytest.raises(ContractError, match=message):
        LinkerOptions(**{name: value})  # type: ignore[arg-type]  # callers without types


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [*NO_NUMBERS, 0.5, 1.7, MAX_COUNT + 1])
def test_counts_that_are_no_whole_numbers_above_0_are_refused_by_name(
    name: str, value: object
) -> None:
    with pytest.raises(ContractError, match=f"linker option {name} must be "):
        LinkerOptions(**{name: value})  # type: ignore[arg-type]  # callers without types


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1, 2, 86_400])
def test_bounds_above_0_are_taken(name: str, value: int) -> None:
    options = LinkerOptions(**{name: value})

    assert {item.name: getattr(options, item.name) for item in fields(options)}[name] == value


def test_seconds_may_be_fractions() -> None:
    assert LinkerOptions(lookup_seconds=0.25).lookup_seconds == 0.25


def test_counts_are_told_from_seconds() -> None:
    assert set(NUMBERS) == COUNTS

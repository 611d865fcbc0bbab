"""Options are bounds: each is a number above 0."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvlinker.errors import ContractError
from kvlinker.linker_options import LinkerOptions

NAMES = [item.name for item in fields(LinkerOptions)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1, -0.5, True, "1", None, float("nan"), float("inf")])
def test_a_bound_that_is_no_number_above_0_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ContractError, match=f"linker option {name} must be a number above 0"):
        LinkerOptions(**{name: value})  # type: ignore[arg-type]  # callers without types


@pytest.mark.parametrize("name", NAMES)
def test_bounds_above_0_are_taken(name: str) -> None:
    options = LinkerOptions(**{name: 2})

    assert {item.name: getattr(options, item.name) for item in fields(options)}[name] == 2

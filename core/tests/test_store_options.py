"""Options of store plugins: which names, sizes, times and flags are taken, and what the others are told."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from kvlinker.errors import ContractError
from kvlinker.quantities import as_bytes, parse_bytes
from kvlinker.store_options import as_flag, as_seconds, check_names

KNOWN = ("path", "capacity", "verify")
NEEDED = {"path": "'/var/cache/kv'", "capacity": "'20GiB'"}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"path": 1, "capasity": 2},
            "a store: unknown option 'capasity'; did you mean 'capacity'?",
        ),
        ({"path": 1, "zz": 2}, r"a store: unknown option 'zz'; known are \['capacity', 'path', "),
        ({"path": 1, 7: 2}, "a store: unknown option 7; known are"),
        ({"verify": 1}, "a store: option 'path' is needed, such as '/var/cache/kv'"),
        ({"path": None}, "a store: option 'capacity' is needed, such as '20GiB'"),
    ],
)
def test_a_name_that_is_unknown_or_missing_is_refused_with_what_was_meant(
    config: Mapping[object, object], text: str
) -> None:
    with pytest.raises(ContractError, match=text):
        check_names("a store", config, KNOWN, needed=NEEDED)


def test_names_that_are_known_and_enough_are_taken() -> None:
    check_names("a store", ["capacity", "path"], KNOWN, needed=NEEDED)


@pytest.mark.parametrize(("value", "seconds"), [(3, 3.0), (0.5, 0.5), (3600, 3600.0)])
def test_seconds_are_numbers_up_to_a_limit(value: object, seconds: float) -> None:
    found = as_seconds(value, "pause_seconds")

    assert (found, type(found)) == (seconds, float)


@pytest.mark.parametrize("value", [0, -1, 3600.5, math.inf, math.nan, 10**400, True, "3", None])
def test_other_seconds_are_refused(value: object) -> None:
    with pytest.raises(
        ContractError, match="pause_seconds must be a positive number of seconds, at most an hour"
    ):
        as_seconds(value, "pause_seconds")


def test_a_limit_and_whether_nobody_may_wait_are_the_option_s_own() -> None:
    assert as_seconds(0, "x", may_be_zero=True) == 0
    assert as_seconds(7200, "x", at_most=86_400) == 7200
    for limit, text in ((86_400, "at most a day"), (12, "at most 12, got -1")):
        with pytest.raises(ContractError, match=text):
            as_seconds(-1, "x", at_most=limit, may_be_zero=True)


@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_a_flag_is_true_or_false_and_nothing_like_it(value: object) -> None:
    assert [as_flag(flag, "verify") for flag in (True, False)] == [True, False]
    with pytest.raises(ContractError, match=f"verify must be true or false, got {value!r}"):
        as_flag(value, "verify")


@pytest.mark.parametrize(
    ("value", "size"),
    [(4096, 4096), (np.int64(7), 7), ("20GiB", 20 << 30), (2e10, 20_000_000_000), ("1.5kB", 1500)],
)
def test_sizes_are_whole_numbers_or_texts(value: object, size: int) -> None:
    found = as_bytes(value, "capacity")

    assert (found, type(found)) == (size, int)


@pytest.mark.parametrize("value", [1.5, math.inf, math.nan, True, None, b"1B"])
def test_other_sizes_are_refused(value: object) -> None:
    with pytest.raises(ContractError, match="capacity must be a whole number of bytes or a text"):
        as_bytes(value, "capacity")


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "20 G", "1e3 B"])
def test_a_text_that_is_no_size_is_refused_by_the_name_of_its_option(text: str) -> None:
    with pytest.raises(ContractError, match=r"^capacity: .* is not a number of bytes such as"):
        as_bytes(text, "capacity")


def test_bounds_of_a_size_are_those_of_the_bytes() -> None:
    with pytest.raises(ContractError, match="capacity must be at least 2048, got 1024"):
        as_bytes("1KiB", "capacity", at_least=2048)
    with pytest.raises(ContractError, match="capacity must be at most 10, got 20"):
        as_bytes(20.0, "capacity", at_most=10)


def test_a_number_that_no_float_has_is_read_to_the_byte() -> None:
    assert parse_bytes("9007199254740993") == 2**53 + 1

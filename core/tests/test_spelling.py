"""What somebody meant is the name with the fewest mistakes, not the one that difflib lists first."""

from __future__ import annotations

import pytest

from kvlinker.spelling import nearest_names


@pytest.mark.parametrize(
    ("typed", "known", "nearest"),
    [
        ("mah", ("mla", "mha"), ("mha",)),
        ("mlaa", ("mla", "mha"), ("mla",)),
        ("stores", ("store", "strategy"), ("store",)),
        ("mxa", ("mla", "mha"), ("mha", "mla")),
        ("load_second", ("load_seconds", "hold_seconds", "lookup_seconds"), ("load_seconds",)),
        ("qqq", ("mla", "mha"), ()),
        ("mla", (), ()),
    ],
)
def test_the_name_with_the_fewest_mistakes_is_nearest(
    typed: str, known: tuple[str, ...], nearest: tuple[str, ...]
) -> None:
    assert nearest_names(typed, known) == nearest
    assert nearest_names(typed, reversed(known)) == nearest


def test_a_lower_cutoff_finds_what_resembles_less() -> None:
    assert nearest_names("model", ["model_id"]) == ("model_id",)
    assert nearest_names("port", ["transport_of"]) == ()
    assert nearest_names("port", ["transport_of"], cutoff=0.4) == ("transport_of",)

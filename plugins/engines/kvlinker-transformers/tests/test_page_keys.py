"""Page keys: equal prefixes share keys in every process, and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.errors import ContractError
from kvlinker_transformers.page_keys import page_keys

GOLDEN = (
    "d36fef9489e5a2ef41d11a9164c8939bf4b20bc2ec50be6866489f0eec3d7ed3",
    "d021404b51bed83967a79a64a9249723f24539f7331f51767acc095a3bf10e5c",
)
"""Keys of tokens 1..4 in pages of 2 without salt: a change makes every stored page a miss."""

tokens = st.lists(st.integers(0, 2**40), max_size=12)
texts = st.none() | st.text(max_size=4)


def test_keys_without_salt_never_change() -> None:
    assert page_keys([1, 2, 3, 4], 2) == GOLDEN


def test_whole_pages_have_keys_and_the_unfinished_one_has_none() -> None:
    for length, pages in ((0, 0), (15, 0), (16, 1), (17, 1), (31, 1), (32, 2)):
        assert len(page_keys(range(length), 16)) == pages


def test_b42_a_key_has_at_least_128_bits() -> None:
    (key,) = page_keys(range(16), 16)

    assert len(bytes.fromhex(key)) >= 16


@given(tokens, tokens, st.integers(1, 4))
def test_pages_share_a_key_exactly_when_they_share_everything_up_to_their_end(
    left: list[int], right: list[int], page_size: int
) -> None:
    pairs = zip(page_keys(left, page_size), page_keys(right, page_size), strict=False)

    for page, (a, b) in enumerate(pairs, start=1):
        end = page * page_size
        assert (a == b) == (left[:end] == right[:end])


@given(st.tuples(texts, texts), st.tuples(texts, texts))
def test_b35_salt_and_adapter_are_told_apart_from_each_other_and_from_none(
    left: tuple[str | None, str | None], right: tuple[str | None, str | None]
) -> None:
    def keys(fields: tuple[str | None, str | None]) -> tuple[str, ...]:
        return page_keys([1, 2], 1, salt=fields[0], adapter=fields[1])

    assert (keys(left) == keys(right)) == (left == right)


def test_b35_two_salts_and_two_adapters_give_disjoint_chains() -> None:
    chains = [
        page_keys(range(64), 16, salt=salt, adapter=adapter)
        for salt in (None, "a", "b")
        for adapter in (None, "x", "y")
    ]

    assert len({key for chain in chains for key in chain}) == 9 * 4


def test_a_page_of_another_size_never_has_the_same_key() -> None:
    keys = {key for size in (1, 2, 4, 8) for key in page_keys([7] * 8, size)}

    assert len(keys) == 8 + 4 + 2 + 1


def test_b38_keys_are_equal_in_processes_with_other_hash_seeds() -> None:
    code = (
        "import json; from kvlinker_transformers.page_keys import page_keys; "
        "print(json.dumps([page_keys(range(40), 16), page_keys(range(40), 16, salt='s', adapter='ä')]))"
    )
    expected = [
        list(page_keys(range(40), 16)),
        list(page_keys(range(40), 16, salt="s", adapter="ä")),
    ]

    for seed in ("0", "1", "4242", "random"):
        output = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(output.stdout) == expected


def test_numpy_tokens_have_the_keys_of_plain_ones() -> None:
    assert page_keys(np.arange(32, dtype=np.int32).tolist(), 16) == page_keys(range(32), 16)
    assert page_keys(list(np.arange(32, dtype=np.uint16)), 16) == page_keys(range(32), 16)


@pytest.mark.parametrize("token", [True, -1, 2**63, 1.0, "1", None])
def test_what_is_no_token_id_is_refused(token: int) -> None:
    with pytest.raises(ContractError, match="token ids are integers of at least 0, got"):
        page_keys([token], 1)


@pytest.mark.parametrize("page_size", [0, -16])
def test_a_page_without_slots_is_refused(page_size: int) -> None:
    with pytest.raises(ContractError, match=f"page_size must be at least 1, got {page_size}"):
        page_keys([1], page_size)

"""A transfer holds keys and indices that can mean something, or cannot be made."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import pytest
import torch

from kvlinker.errors import ContractError
from kvlinker.transfers import (
    HitPolicy,
    PoolTransfer,
    Resolution,
    ResolutionStatus,
    TensorIndices,
    as_index_array,
)


class EnginePolicy(StrEnum):
    """An engine's own enum of the same policies."""

    TRAILING_PAGES = "trailing_pages"


# ---- transfers --------------------------------------------------------------------------------


def test_a_lookup_carries_keys_alone() -> None:
    transfer = PoolTransfer(name="kv", keys=("a", b"b"))

    assert transfer.device_indices is None
    assert transfer.hit_policy is HitPolicy.ALL_PAGES


def test_keys_are_kept_apart_from_the_callers_own_list() -> None:
    keys = ["a", "b"]
    transfer = PoolTransfer(name="kv", keys=keys)  # type: ignore[arg-type]  # lists are taken

    keys.clear()

    assert transfer.keys == ("a", "b")


@pytest.mark.parametrize(
    "policy", ["trailing_pages", EnginePolicy.TRAILING_PAGES], ids=["text", "enum"]
)
def test_an_engines_own_policy_is_taken_by_its_value(policy: HitPolicy) -> None:
    assert PoolTransfer(name="swa", hit_policy=policy).hit_policy is HitPolicy.TRAILING_PAGES


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": ""}, "a transfer needs the name of a logical pool"),
        ({"keys": "abc"}, "pool 'kv': keys must be a sequence of page keys, got 'abc'"),
        ({"keys": b"abc"}, "pool 'kv': keys must be a sequence of page keys, got b'abc'"),
        ({"keys": None}, "pool 'kv': keys must be a sequence of page keys, got None"),
        ({"keys": ("a", "")}, "pool 'kv': a page key must be non-empty text or bytes, got ''"),
        ({"keys": (b"",)}, "a page key must be non-empty text or bytes, got b''"),
        ({"keys": (1,)}, "a page key must be non-empty text or bytes, got 1"),
        (
            {"hit_policy": "some_pages"},
            "'some_pages' is no hit policy; use one of all_pages, trail",
        ),
    ],
)
def test_a_transfer_that_can_mean_nothing_is_refused(
    fields: dict[str, object], problem: str
) -> None:
    with pytest.raises(ContractError, match=problem):
        PoolTransfer(**{"name": "kv", **fields})  # type: ignore[arg-type]  # wrong types are under test


def test_a_resolution_is_a_sequence_of_transfers() -> None:
    first, second = PoolTransfer(name="kv"), PoolTransfer(name="index")
    resolution = Resolution((first, second), ResolutionStatus.COMPLETE)

    assert list(resolution) == [first, second]
    assert (len(resolution), resolution[1], resolution[:1]) == (2, second, (first,))
    assert second in resolution
    assert (resolution.missing, resolution.unused) == ((), ())


# ---- indices ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "indices",
    [
        [3, 1],
        (3, 1),
        np.array([3, 1], dtype=np.int16),
        np.array([3, 1], dtype=">i8"),
        np.array([3, 0, 1])[::2],
        torch.tensor([3, 1]),
        torch.tensor([3, 1], dtype=torch.int32),
        torch.tensor([3, 0, 1])[::2],
        [np.int64(3), 1],
    ],
    ids=["list", "tuple", "int16", "big endian", "strided", "tensor", "int32", "view", "numpy"],
)
def test_c5_indices_become_one_array_of_int64(indices: object) -> None:
    array = as_index_array(indices, pool="kv")

    assert array.tolist() == [3, 1]
    assert array.dtype == np.dtype("=i8")


def test_c5_indices_are_kept_apart_from_the_callers_own() -> None:
    array, tensor = np.array([3, 1]), torch.tensor([3, 1])
    mine, yours = as_index_array(array, pool="kv"), as_index_array(tensor, pool="kv")

    array[:] = 0
    tensor[:] = 0

    assert mine.tolist() == yours.tolist() == [3, 1]


def test_c5_a_tensor_is_known_by_what_it_can_do() -> None:
    assert isinstance(torch.tensor([1]), TensorIndices)
    assert not isinstance(np.array([1]), TensorIndices)


def test_c5_the_largest_slot_is_the_largest_int64() -> None:
    assert as_index_array(np.array([2**63 - 1], dtype=np.uint64), pool="kv").tolist() == [2**63 - 1]
    with pytest.raises(ContractError, match=f"pool 'kv': index {2**63} is no slot"):
        as_index_array(np.array([2**63], dtype=np.uint64), pool="kv")


@pytest.mark.parametrize(
    ("indices", "problem"),
    [
        (None, "must be an array, a tensor or a sequence, got NoneType"),
        (3, "must be an array, a tensor or a sequence, got int"),
        ({3, 1}, "must be an array, a tensor or a sequence, got set"),
        ("31", "must be an array, a tensor or a sequence, got str"),
        (b"31", "must be an array, a tensor or a sequence, got bytes"),
        ([[1], [2, 3]], "a list cannot be read as indices: "),
        ([True, "x"], "must be integers, got dtype bool"),
        (torch.zeros(2, dtype=torch.bfloat16), "a Tensor cannot be read as indices: "),
        (torch.zeros(2, device="meta"), "a Tensor cannot be read as indices: "),
        (torch.eye(2).to_sparse(), "a Tensor cannot be read as indices: "),
        (torch.empty(0), "must be integers, got dtype float32"),
        (np.empty(0), "must be integers, got dtype float64"),
    ],
)
def test_c5_what_is_no_row_of_slots_is_refused(indices: object, problem: str) -> None:
    with pytest.raises(ContractError, match=f"^pool 'kv': .*{problem}"):
        as_index_array(indices, pool="kv")

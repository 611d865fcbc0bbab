"""What SGLang asks, in the core's words."""

from __future__ import annotations

import numpy as np
import pytest
from host_stand_ins import PoolHitPolicy, PoolName, PoolTransfer

from kvlinker.errors import ContractError
from kvlinker.transfers import HitPolicy
from kvlinker_sglang.transfers import core_transfers


def test_names_keys_slots_and_policies_are_taken_over() -> None:
    slots = np.arange(16, 32)
    asked = [
        PoolTransfer(PoolName.KV, ["a", "b"], slots, PoolHitPolicy.ALL_PAGES),
        PoolTransfer(PoolName.SWA, ["b"], None, PoolHitPolicy.TRAILING_PAGES),
    ]

    kv, swa = core_transfers(asked)  # type: ignore[arg-type]  # stand-ins

    assert (kv.name, kv.keys, kv.hit_policy) == ("kv", ("a", "b"), HitPolicy.ALL_PAGES)
    assert kv.device_indices is slots
    assert (swa.name, swa.keys, swa.hit_policy) == ("swa", ("b",), HitPolicy.TRAILING_PAGES)
    assert swa.device_indices is None


@pytest.mark.parametrize("keys", [None, []])
def test_a_transfer_without_pages_asks_for_nothing(keys: list[str] | None) -> None:
    assert core_transfers([PoolTransfer(PoolName.KV, keys, None, PoolHitPolicy.ALL_PAGES)]) == ()  # type: ignore[list-item]  # a stand-in


def test_a_policy_that_the_core_does_not_know_is_refused() -> None:
    transfer = PoolTransfer(PoolName.KV, ["a"], None, PoolName.KV)

    with pytest.raises((ContractError, ValueError), match="kv"):
        core_transfers([transfer])  # type: ignore[list-item]  # a stand-in

"""What a load may be asked for: pages of its own, in any pools, in calls that the store takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from linker_rig import (
    NAMESPACE,
    errors_of,
    linked,
)

from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.linker import Linker
from kvlinker.pools import KV, DevicePoolGroup
from kvlinker.testing import (
    Call,
    FakePools,
    Family,
    FaultStore,
    MemoryStore,
    OpaqueMemory,
    PagePattern,
    fake_group,
    page_keys,
)
from kvlinker.transfers import HitPolicy, PoolTransfer

KEYS = page_keys(4)
LAYERS = 4


def test_l1_a_second_load_of_a_queued_request_is_refused() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))

        assert rig.linker.load("a", rig.transfers(KEYS, 4))
        assert not rig.linker.load("a", rig.transfers(KEYS, 8))

        assert rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())
        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()


def test_l1_two_queued_requests_cannot_load_into_one_page() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        assert rig.linker.load("a", rig.transfers(KEYS, 4))

        assert not rig.linker.load("b", rig.transfers(KEYS, 7))
        assert rig.linker.load("b", rig.transfers(KEYS, 8))

        assert errors_of(rig.linker) == {"load_errors": 1}
        assert rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())


def test_l1_a_page_is_free_again_once_its_load_was_cancelled() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        assert rig.linker.load("a", rig.transfers(KEYS, 4))
        assert rig.linker.cancel_queued_load("a")

        assert rig.linker.load("b", rig.transfers(KEYS, 4))


def test_b30_no_page_or_half_a_page_is_no_load() -> None:
    with linked(Family.MHA) as rig:
        transfer = rig.transfers(KEYS, 4)[0]
        half = replace(transfer, device_indices=rig.pools.slots(KV, [4, 5, 6, 7])[:-2])

        assert not rig.linker.load("a", rig.transfers((), 4))
        assert not rig.linker.load("a", ())
        assert not rig.linker.load("a", [half])
        assert not rig.linker.load("a", [replace(transfer, device_indices=None)])
        assert not rig.linker.offload([half])
        assert not rig.linker.offload(())

        assert rig.linker.start_layer_wise_loading() == -1
        assert rig.linker.num_completed_offloads() == 0


def test_l1_a_load_that_is_refused_leaves_the_lookup_as_it_was() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        rig.linker.lookup("a", rig.asked(KEYS))

        assert not rig.linker.load("a", [replace(rig.transfers(KEYS, 4)[0], device_indices=None)])

        assert rig.memory_store.kept() > 0
        assert rig.restore("a", KEYS)
        rig.assert_at_rest()


def test_indices_that_the_engine_changes_after_the_call_do_not_matter() -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)
        transfer = rig.transfers(KEYS, 4)[0]
        slots = rig.pools.slots(KV, [4, 5, 6, 7])
        assert rig.linker.load("a", [replace(transfer, device_indices=slots)])
        slots[:] = 0

        assert rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())

        assert rig.pools.wrong_pages([transfer]) == ()


def test_a_stage_without_the_pools_of_a_load_answers_like_the_others() -> None:
    with linked(Family.MHA) as rig:
        states = PoolTransfer(
            name="mamba", keys=KEYS[:1], device_indices=np.array([3], dtype=np.int64)
        )

        assert rig.linker.load("a", [states])
        index = rig.linker.start_layer_wise_loading()
        assert index == 0
        assert rig.linker.finish_layer_wise_loading(index)
        assert rig.linker.offload([states])
        assert rig.completion()

        assert rig.store.records == ()


def two_page_sizes(memory: OpaqueMemory) -> DevicePoolGroup:
    """Return a group whose states are kept in pages of two pages of the prefix."""
    kv = fake_group(memory=memory).group.entries[0]
    spans = [memory.allocate(8, 40, label=f"state[{layer}]") for layer in range(LAYERS)]
    state = DevicePoolEntry(
        name="state",
        indices_from_pool="state",
        components=[spans],
        layer_mapping={layer: layer for layer in range(LAYERS)},
        page_size=8,
        rows_are_pages=True,
    )
    return DevicePoolGroup([kv, state], LAYERS, 4, layout="two/1", page_multiples={"state": 2})


def test_b27_a_larger_page_is_named_by_the_last_page_of_the_prefix_in_it() -> None:
    memory = OpaqueMemory()
    group = two_page_sizes(memory)
    pools = FakePools(group, memory, pages=8, windows={"state": 1}, pattern=PagePattern())
    with linked(pools=pools) as rig:

        def transfers(kv_pages: range, state_page: int) -> list[PoolTransfer]:
            return [
                PoolTransfer(name=KV, keys=KEYS, device_indices=pools.slots(KV, kv_pages)),
                PoolTransfer(
                    name="state",
                    keys=KEYS[3:],
                    device_indices=pools.slots("state", [state_page]),
                    hit_policy=HitPolicy.TRAILING_PAGES,
                ),
            ]

        written = transfers(range(4), 1)
        pools.fill(written)
        assert rig.linker.offload(written)
        assert rig.completion()
        memory.poison()

        asked = [replace(transfer, device_indices=None) for transfer in written]
        assert rig.linker.lookup("a", asked) == [4]
        loaded = transfers(range(4, 8), 3)
        assert rig.linker.load("a", loaded)
        assert rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())
        assert pools.wrong_pages(loaded) == ()


def test_g1_a_prefix_whose_pages_are_not_those_of_kv_is_refused() -> None:
    memory = OpaqueMemory()
    kv = fake_group(memory=memory).group.entries[0]
    group = DevicePoolGroup([kv], LAYERS, 2, layout="half/1", page_multiples={KV: 2})

    with pytest.raises(ContractError, match="pool 'kv': its pages are 2 pages of the prefix long"):
        Linker(group, MemoryStore(), NAMESPACE, device=memory.access())


def test_registered_memory_is_registered_and_forgotten_with_the_linker() -> None:
    pools = fake_group(Family.DSA, memory=OpaqueMemory())
    store = FaultStore(MemoryStore(registers_memory=True))

    linker = Linker(pools.group, store, NAMESPACE, device=pools.access())
    linker.close()
    linker.close()

    assert [record.call for record in store.records] == [Call.REGISTER, Call.UNREGISTER]


@pytest.mark.parametrize("family", [Family.MHA, Family.MHA_UNPACKED, Family.SCATTERED])
@pytest.mark.parametrize("ranged", [True, False], ids=["ranged", "whole"])
def test_a_store_with_a_bound_on_ranges_gets_calls_within_it(
    family: Family, *, ranged: bool
) -> None:
    with linked(family, ranged_reads=ranged, max_ranges_per_call=20) as rig:
        rig.keep(KEYS)
        assert rig.restore("a", KEYS)

        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()
        assert errors_of(rig.linker) == {}


def test_a_page_too_scattered_for_the_stores_bound_fails_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with linked(Family.SCATTERED, max_ranges_per_call=8) as rig:
        transfer = replace(
            rig.transfers(KEYS[:1])[0], device_indices=np.array([9, 3, 12, 1], dtype=np.int64)
        )
        rig.pools.fill([transfer])

        assert rig.linker.offload([transfer])

        assert not rig.completion()
        assert "pool 'kv': one page has 16 ranges, and the store takes 8" in caplog.text


def test_a_group_whose_objects_no_call_can_take_is_refused() -> None:
    pools = fake_group(memory=OpaqueMemory())
    store = MemoryStore(max_ranges_per_call=7)

    with pytest.raises(
        ContractError, match="an object has 8 ranges, and MemoryStore takes at most 7"
    ):
        Linker(pools.group, store, NAMESPACE, device=pools.access())


def test_a_group_whose_objects_are_too_large_is_refused() -> None:
    pools = fake_group(Family.MHA_UNPACKED, memory=OpaqueMemory())
    store = MemoryStore(max_object_bytes=24 * 4 * LAYERS - 1)

    with pytest.raises(ContractError, match="pool 'kv': an object has 384 B"):
        Linker(pools.group, store, NAMESPACE, device=pools.access())

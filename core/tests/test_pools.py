"""A group is one layout with one fingerprint, and resolves what an engine asks for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvlinker.description import RankAxis
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError, StalePoolError
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.transfers import HitPolicy, PoolTransfer, ResolutionStatus

PAGE = 4
TRAILING = HitPolicy.TRAILING_PAGES


def entry(
    name: str = "kv",
    source: str | None = None,
    *,
    page_size: int = PAGE,
    layers: Sequence[int] = (0, 1),
    **changed: object,
) -> DevicePoolEntry:
    spans = [
        BufferSpan(base_ptr=(i + 1) << 20, rows=64, row_bytes=8, row_stride=8, label=f"{name}[{i}]")
        for i in range(len(layers))
    ]
    fields: dict[str, object] = {
        "name": name,
        "indices_from_pool": source or name,
        "components": (spans,),
        "layer_mapping": {layer: i for i, layer in enumerate(layers)},
        "page_size": page_size,
        "rows_are_pages": True,
    }
    return DevicePoolEntry(**{**fields, **changed})  # type: ignore[arg-type]  # any field may change


def group(*entries: DevicePoolEntry, **changed: object) -> DevicePoolGroup:
    fields: dict[str, object] = {"num_layers": 2, "page_size": PAGE, "layout": "plain/1"}
    return DevicePoolGroup(entries, **{**fields, **changed})  # type: ignore[arg-type]  # wrong types are under test


def slots_of(*pages: int, page_size: int = PAGE) -> list[int]:
    return [page * page_size + i for page in pages for i in range(page_size)]


# ---- G1: what makes a group -------------------------------------------------------------------


def test_g1_names_are_unique() -> None:
    with pytest.raises(ContractError, match=r"entries with distinct names, got \['kv', 'kv'\]"):
        group(entry(), entry())


def test_g1_a_group_has_entries() -> None:
    with pytest.raises(ContractError, match=r"entries with distinct names, got \[\]"):
        group()


def test_g1_layer_ids_are_below_the_number_of_layers() -> None:
    assert group(entry(layers=(0, 1))).num_layers == 2
    with pytest.raises(ContractError, match=r"pool 'kv': layer 2 is outside of the group's 0..1"):
        group(entry(layers=(0, 2)))


def test_g1_b96_page_sizes_in_no_known_relation_are_refused_with_both_numbers() -> None:
    with pytest.raises(ContractError, match="pool 'swa': page size 32 does not fit the group's 8"):
        group(entry(page_size=8), entry("swa", page_size=32), page_size=8)


def test_g1_b96_a_stated_multiple_is_a_known_relation() -> None:
    entries = (entry(page_size=8), entry("swa", page_size=32))

    assert group(*entries, page_size=8, page_multiples={"swa": 4}).page_multiples == {"swa": 4}
    with pytest.raises(ContractError, match=r"page size 32 does not fit the group's 8 \(times 2\)"):
        group(*entries, page_size=8, page_multiples={"swa": 2})


def test_g1_a_multiple_of_one_is_the_same_page_size() -> None:
    assert group(entry(), page_multiples={"kv": 1}).page_size == PAGE


def test_g1_slot_pools_have_page_size_one_beside_any_tree() -> None:
    states = entry("mamba", page_size=1)

    assert group(entry(), states).entry_map["mamba"] is states
    with pytest.raises(ContractError, match="pool 'kv': page size 1 does not fit the group's 4"):
        group(entry(page_size=1))
    assert group(entry(page_size=1), states, page_size=1).page_size == 1


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"num_layers": 0}, r"group \['kv'\]: num_layers must be at least 1, got 0"),
        ({"num_layers": 2.0}, "num_layers must be an integer"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"page_size": True}, "page_size must be an integer"),
        ({"layout": ""}, "needs a layout with its version, such as dsa/1"),
        ({"layer_range": (3, 3)}, "end of global layers must be at least 4, got 3"),
        ({"layer_range": (-1, 3)}, "first global layer must be at least 0, got -1"),
        ({"page_multiples": {"kv": 0}}, "page multiple of 'kv' must be at least 1, got 0"),
        ({"page_multiples": {"kv": 0.5}}, "page multiple of 'kv' must be an integer"),
    ],
)
def test_g1_a_group_that_cannot_be_is_refused(changed: dict[str, object], problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        group(entry(), **changed)


def test_g1_numpy_integers_are_kept_as_pythons_own() -> None:
    made = group(
        entry(),
        num_layers=np.int64(2),
        page_size=np.int32(PAGE),
        layer_range=(np.int64(3), np.int64(5)),
        page_multiples={"kv": np.int64(1)},
    )

    numbers = (made.num_layers, made.page_size, *made.layer_range, *made.page_multiples.values())
    assert {type(number) for number in numbers} == {int}
    assert made.layer_range == (3, 5)


def test_a_group_shows_its_entries_their_sources_and_its_memory() -> None:
    region = MemoryRegion(base_ptr=1 << 20, size_bytes=1 << 20)
    span = BufferSpan(base_ptr=1 << 20, rows=64, row_bytes=8, row_stride=8, region=region)
    first = entry("kv", components=((span,),), layer_mapping={0: 0})
    second = entry("index", "kv", components=((span,),), layer_mapping={0: 0})
    made = group(first, second)

    assert made.entry_map == {"kv": first, "index": second}
    assert made.sources == {"kv": "kv", "index": "kv"}
    assert made.regions == (region,)
    assert made.layer_range == (0, 2)


def test_a_group_that_is_given_up_keeps_no_memory_that_it_has_shown() -> None:
    memory = torch.zeros(64, 8, dtype=torch.uint8)
    kept = weakref.ref(memory)
    made = group(
        entry(components=((BufferSpan.from_tensor(memory),),), layer_mapping={0: 0}), num_layers=1
    )
    assert made.regions is made.regions, "they are asked for by every load"

    made.close()
    del memory

    gc.collect()
    assert kept() is None
    with pytest.raises(StalePoolError, match="the group was closed"):
        _ = made.regions


def test_regions_are_refused_once_one_of_the_pools_is_given_up() -> None:
    made = group(first := entry(), entry("index", "kv"))
    assert made.regions == ()

    first.retire("its buffer moved")

    with pytest.raises(StalePoolError, match=r"'kv'.* its buffer moved"):
        _ = made.regions


# ---- G2: resolution ---------------------------------------------------------------------------


def hybrid() -> DevicePoolGroup:
    """Return a group of KV with an index, a window and a state."""
    return group(
        entry("kv"),
        entry("index", "kv"),
        entry("swa"),
        entry("state", "mamba", page_size=1),
    )


def kv(*pages: int, **changed: object) -> PoolTransfer:
    fields: dict[str, object] = {"name": "kv", "device_indices": slots_of(*pages)}
    keys = tuple(f"key{page}" for page in pages)
    return PoolTransfer(**{**fields, "keys": keys, **changed})  # type: ignore[arg-type]  # any field may change


def swa(*pages: int) -> PoolTransfer:
    return kv(*pages, name="swa", hit_policy=TRAILING)


def mamba(slot: int) -> PoolTransfer:
    return kv(slot, name="mamba", device_indices=[slot], hit_policy=TRAILING)


def test_g2_transfers_expand_in_entry_order_whatever_order_they_come_in() -> None:
    resolution = hybrid().resolve_transfers([mamba(9), swa(2), kv(1, 2)])

    assert resolution.status is ResolutionStatus.COMPLETE
    assert [transfer.name for transfer in resolution] == ["kv", "index", "swa", "state"]
    assert [transfer.keys for transfer in resolution] == [
        ("key1", "key2"),
        ("key1", "key2"),
        ("key2",),
        ("key9",),
    ]
    assert (resolution.missing, resolution.unused) == ((), ())


def test_g2_indices_are_translated_once_for_each_entry() -> None:
    made = group(
        entry("kv"), entry("index", "kv", index_mapper=lambda slots: slots + PAGE), num_layers=2
    )

    kv_part, index_part = made.resolve_transfers([kv(1, device_indices=torch.tensor(slots_of(1)))])

    assert np.asarray(kv_part.device_indices).tolist() == slots_of(1)
    assert np.asarray(index_part.device_indices).tolist() == slots_of(2)


def test_g2_lookups_carry_keys_alone() -> None:
    resolution = hybrid().resolve_transfers(
        [PoolTransfer(name=name, keys=("a", "b")) for name in ("kv", "swa", "mamba")]
    )

    assert resolution.status is ResolutionStatus.COMPLETE
    assert [transfer.device_indices for transfer in resolution] == [None] * 4


@pytest.mark.parametrize("transfers", [[], [PoolTransfer(name="kv")], [kv(), swa()]])
@pytest.mark.parametrize("allow", [True, False])
def test_g2_without_keys_there_is_nothing(transfers: list[PoolTransfer], *, allow: bool) -> None:
    resolution = hybrid().resolve_transfers(transfers, allow_partial=allow, allow_missing_kv=allow)

    assert (len(resolution), resolution.status) == (0, ResolutionStatus.EMPTY)
    assert resolution.missing == ("kv", "swa", "mamba")


@pytest.mark.parametrize("absent", [[], [PoolTransfer(name="kv")]], ids=["absent", "no keys"])
def test_g2_without_kv_there_is_nothing_unless_it_is_allowed(absent: list[PoolTransfer]) -> None:
    transfers = [*absent, swa(2), mamba(9)]
    made = hybrid()

    for allow_partial in (True, False):
        refused = made.resolve_transfers(transfers, allow_partial=allow_partial)
        assert (len(refused), refused.status) == (0, ResolutionStatus.MISSING_KV)
        assert refused.missing == ("kv",)
    allowed = made.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
    assert [transfer.name for transfer in allowed] == ["swa", "state"]
    assert (allowed.status, allowed.missing) == (ResolutionStatus.PARTIAL, ("kv",))


def test_g2_a_missing_pool_leaves_nothing_unless_a_part_is_allowed() -> None:
    made = hybrid()

    refused = made.resolve_transfers([kv(1)])
    assert (len(refused), refused.status) == (0, ResolutionStatus.MISSING_POOLS)
    assert refused.missing == ("swa", "mamba")
    assert made.resolve_transfers([swa(1)], allow_missing_kv=True).missing == ("kv", "mamba")

    allowed = made.resolve_transfers([kv(1), mamba(9)], allow_partial=True)
    assert [transfer.name for transfer in allowed] == ["kv", "index", "state"]
    assert (allowed.status, allowed.missing) == (ResolutionStatus.PARTIAL, ("swa",))


def test_g2_b13_kv_may_have_no_storage_of_its_own() -> None:
    window_alone = group(entry("swa"))

    resolution = window_alone.resolve_transfers([kv(1, 2), swa(2)])

    assert resolution.status is ResolutionStatus.COMPLETE
    assert [transfer.name for transfer in resolution] == ["swa"]
    assert (resolution.missing, resolution.unused) == ((), ("kv",))
    without = window_alone.resolve_transfers([swa(2)])
    assert (without.status, without.missing) == (ResolutionStatus.MISSING_KV, ("kv",))
    allowed = window_alone.resolve_transfers([swa(2)], allow_missing_kv=True)
    assert (len(allowed), allowed.status) == (1, ResolutionStatus.COMPLETE)


def test_g2_a_pool_that_this_stage_has_no_layer_of_is_left_aside_by_name() -> None:
    resolution = group(entry("kv")).resolve_transfers([kv(1), mamba(9)])

    assert [transfer.name for transfer in resolution] == ["kv"]
    assert (resolution.status, resolution.unused) == (ResolutionStatus.COMPLETE, ("mamba",))


# ---- G3: policies -----------------------------------------------------------------------------


def test_g3_what_is_fed_from_kv_always_needs_all_pages() -> None:
    resolution = hybrid().resolve_transfers([kv(1, 2, hit_policy=TRAILING), swa(2), mamba(9)])

    assert [transfer.hit_policy for transfer in resolution] == [
        HitPolicy.ALL_PAGES,
        HitPolicy.ALL_PAGES,
        TRAILING,
        TRAILING,
    ]


def test_g3_other_pools_keep_the_policy_they_are_asked_for_with() -> None:
    whole = kv(1, name="swa")

    resolution = hybrid().resolve_transfers([kv(1), whole, mamba(9)])

    assert resolution[2].hit_policy is HitPolicy.ALL_PAGES


# ---- G4: counts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "pages"), [(3, 2), (3, 1), (1, 2), (2, 0)], ids=["3-2", "3-1", "1-2", "2-0"]
)
def test_g4_dh4_w16_key_and_page_counts_that_differ_are_refused(keys: int, pages: int) -> None:
    transfer = kv(*range(pages), keys=[f"key{i}" for i in range(keys)])
    problem = f"pool 'kv': {keys} keys do not fit {pages * PAGE} slots of pages of 4; pass one key"

    with pytest.raises(ContractError, match=problem):
        group(entry()).resolve_transfers([transfer])


def test_g4_w16_slots_without_any_key_are_refused() -> None:
    with pytest.raises(ContractError, match="pool 'kv': 0 keys do not fit 8 slots"):
        group(entry()).resolve_transfers([kv(1, 2, keys=())])


def test_g4_a_state_has_one_key_for_one_slot() -> None:
    made = group(entry("kv"), entry("state", "mamba", page_size=1))

    assert len(made.resolve_transfers([kv(1), mamba(9)])) == 2
    with pytest.raises(
        ContractError, match="pool 'state': 1 keys do not fit 2 slots of pages of 1"
    ):
        made.resolve_transfers([kv(1), kv(9, name="mamba", device_indices=[9, 10])])


def test_g4_w15_two_transfers_of_one_pool_are_refused() -> None:
    for twice in ([kv(1), kv(2)], [kv(1), PoolTransfer(name="kv")]):
        with pytest.raises(ContractError, match="pool 'kv': two transfers for one logical pool"):
            group(entry()).resolve_transfers(twice)


def test_g4_an_index_map_may_not_change_the_number_of_slots() -> None:
    made = group(entry(index_mapper=lambda slots: slots[:1]))

    with pytest.raises(ContractError, match="the index map turned 4 slots into 1"):
        made.resolve_transfers([kv(1)])


# ---- G6: replication --------------------------------------------------------------------------


def test_g6_a_group_is_replicated_when_all_of_its_entries_are() -> None:
    sharded = RankAxis(name="tp", rank=0, size=2)
    latent = entry("kv", replicated=True)
    state = entry("state", "mamba", page_size=1, rank_axes=[sharded], is_writer=False)

    assert group(latent).rank_replicated
    assert not group(latent, state).rank_replicated
    assert (latent.replicated, latent.rank_axes, latent.is_writer) == (True, (), True)
    assert (state.replicated, state.rank_axes, state.is_writer) == (False, (sharded,), False)

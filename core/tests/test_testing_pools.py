"""Fake pools tell every wrong byte, in every family, on either memory."""

from __future__ import annotations

import numpy as np
import pytest

from kvlinker.errors import ContractError
from kvlinker.store import ReadRequest, ReadStatus, WriteBatch, WriteStatus
from kvlinker.testing import (
    FakePools,
    Family,
    HostMemory,
    MemoryStore,
    OpaqueMemory,
    PageFault,
    PagePattern,
    PoolMemory,
    fake_group,
    page_keys,
)
from kvlinker.transfers import HitPolicy, PoolTransfer

KEYS = page_keys(4)
MEMORIES = [HostMemory, OpaqueMemory]


def pages_of(pools: FakePools, pages: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Give each pool the last pages within its window."""
    return {name: pages[-pools.windows.get(name, len(pages)) :] for name in pools.logical_pools}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("family", Family)
def test_every_family_comes_back_through_a_store_at_other_pages(
    family: Family, memory: type[PoolMemory]
) -> None:
    pools = fake_group(family, memory=memory())
    store, access = MemoryStore(), pools.access()
    source = pools.page_transfers(KEYS, pages_of(pools, (3, 1, 7, 5)))
    target = pools.page_transfers(KEYS, pages_of(pools, (2, 9, 12, 0)))
    pools.fill(source)

    for was, becomes in zip(
        pools.group.resolve_transfers(source), pools.group.resolve_transfers(target), strict=True
    ):
        entry = pools.group.entry_map[was.name]
        plans = entry.page_plan(entry.prepare_locations(was.device_indices)).by_part()
        others = entry.page_plan(entry.prepare_locations(becomes.device_indices)).by_part()
        for part, (plan, other) in enumerate(zip(plans, others, strict=True)):
            keys = tuple(f"{was.name}/{part}/{key!r}".encode() for key in was.keys)
            batch = WriteBatch(keys=keys, plan=plan, fingerprint=b"f")
            (written,) = store.write([batch], access, may_publish=lambda: True)
            size = plan.object_bytes
            request = ReadRequest(keys=keys, object_bytes=size, fingerprint=b"f")
            with store.open_read(request) as session:
                read = session.read(other, access)
            assert set(written) == {WriteStatus.WRITTEN}
            assert set(read) == {ReadStatus.OK}

    assert pools.wrong_pages(source) == ()
    assert pools.wrong_pages(target) == ()


@pytest.mark.parametrize("family", Family)
def test_fresh_pages_are_wrong_everywhere(family: Family) -> None:
    pools = fake_group(family)
    transfers = pools.page_transfers(KEYS, pages_of(pools, (0, 1, 2, 3)))

    wrong = {(fault.pool, fault.label) for fault in pools.wrong_pages(transfers)}

    assert wrong == {
        (entry.name, span.label) for entry in pools.group.entries for span in entry.spans
    }


@pytest.mark.parametrize("family", Family)
def test_one_changed_byte_is_found_in_its_place(family: Family) -> None:
    pools = fake_group(family)
    transfers = pools.page_transfers(KEYS, pages_of(pools, (0, 1, 2, 3)))
    pools.fill(transfers)

    for entry in pools.group.entries:
        for span in entry.spans:
            page = pages_of(pools, (0, 1, 2, 3))[entry.indices_from_pool][-1]
            row = (page + 1) * entry.page_rows - 1
            right = pools.memory.read(span, row)
            pools.memory.write(span, row, right[:-1] + bytes([right[-1] ^ 1]))
            assert pools.wrong_pages(transfers) == (
                PageFault(pool=entry.name, label=span.label, page=page),
            )
            pools.memory.write(span, row, right)

    assert pools.wrong_pages(transfers) == ()


def test_a_check_of_some_layers_looks_at_their_spans_alone() -> None:
    pools = fake_group(Family.V4)
    transfers = pools.page_transfers(KEYS, pages_of(pools, (0, 1, 2, 3)))
    pools.fill(transfers)
    spoilt = pools.group.entry_map["deepseek_v4_c4"].spans[1]
    pools.memory.write(spoilt, 2, bytes(24))

    assert pools.wrong_pages(transfers, layers=[0, 1, 3]) == ()
    assert pools.wrong_pages(transfers, layers=[2]) == (
        PageFault(pool="deepseek_v4_c4", label="c4_kv[1]", page=2),
    )


def test_scattered_slots_are_filled_and_checked_one_by_one() -> None:
    pools = fake_group(Family.SCATTERED)
    slots = np.array([9, 2, 40, 3])
    transfer = PoolTransfer(name="kv", keys=KEYS[:1], device_indices=slots)

    pools.fill([transfer])
    before = pools.wrong_pages([transfer])
    pools.memory.write(pools.group.entries[0].spans[2], 40, bytes(18))

    assert before == ()
    assert [fault.label for fault in pools.wrong_pages([transfer])] == ["latent[2]"]


def test_contents_tell_keys_pools_spans_and_seeds_apart() -> None:
    contents = {
        PagePattern(seed=seed).content(pool=pool, label=label, page_key=key, size=32)
        for seed in (b"", b"other")
        for pool in ("kv", "swa")
        for label in ("k[0]", "k[1]")
        for key in KEYS
    }

    assert len(contents) == 2 * 2 * 2 * 4
    assert {len(content) for content in contents} == {32}


def test_page_keys_are_chained() -> None:
    assert page_keys(3) == page_keys(5)[:3]
    assert set(page_keys(3)).isdisjoint(page_keys(3, chain="other"))
    assert len(set(page_keys(100))) == 100


def test_transfers_are_what_an_engine_asks() -> None:
    pools = fake_group(Family.V4)

    lookup = pools.lookup_transfers(KEYS)
    load = pools.page_transfers(KEYS, {"kv": (0, 1, 2, 3), "swa": (8, 9)})

    assert {t.name: t.keys for t in lookup} == {"swa": KEYS[2:], "kv": KEYS}
    assert all(transfer.device_indices is None for transfer in lookup)
    assert {t.name: t.hit_policy for t in load} == {
        "swa": HitPolicy.TRAILING_PAGES,
        "kv": HitPolicy.ALL_PAGES,
    }
    assert {t.name: np.asarray(t.device_indices).tolist()[-1] for t in load} == {
        "swa": 39,
        "kv": 15,
    }
    assert pools.slots("swa", [2]).tolist() == [8, 9, 10, 11]


def test_a_mamba_state_is_one_slot() -> None:
    pools = fake_group(Family.MAMBA)

    assert pools.slots("mamba", [5, 2]).tolist() == [5, 2]
    assert dict(pools.windows) == {"mamba": 1}


@pytest.mark.parametrize("memory", MEMORIES)
def test_snapshots_show_padding_and_poison_covers_it(memory: type[PoolMemory]) -> None:
    pool = memory()
    span = pool.allocate(2, 3, row_stride=5, label="padded")
    pool.allocate(1, 4)

    pool.write(span, 1, b"abc")
    written = pool.snapshot()["padded"]
    pool.poison(0x00)

    assert written == b"\xa5" * 5 + b"abc" + b"\xa5" * 2
    assert pool.snapshot()["padded"] == bytes(10)
    assert pool.read(span, 0, 2) == bytes(6)
    assert len(pool.snapshot()) == 2


@pytest.mark.parametrize("memory", MEMORIES)
def test_grouped_rows_are_read_and_written_as_rows(memory: type[PoolMemory]) -> None:
    pool = memory()
    ring = pool.allocate(9, 2, label="ring")
    grouped = ring.group_rows(4)

    pool.write(grouped, 1, b"12345678")

    assert pool.read(grouped, 1) == b"12345678"
    assert pool.read(ring, 4, 4) == b"12345678"


def test_a_group_needs_pages() -> None:
    with pytest.raises(ContractError, match="at least one page, got 0"):
        fake_group(pages=0)

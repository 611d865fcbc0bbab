"""Compression: what becomes shorter, what is read of it, and what is refused to be unpacked."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from kv_like import values
from numpy.typing import NDArray

from kvlinker.device import DeviceAccess, HostAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError, StoreContractError, StoreError, UnsupportedOperationError
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import Integrity, ReadRequest, ReadStatus, Store, WriteBatch, WriteStatus
from kvlinker.stores.compressed import CompressedStore
from kvlinker.stores.compression import (
    RAW_EXTRA_BYTES,
    StreamTable,
)
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.stores.host_pages import plan_of_rows
from kvlinker.stores.tiered import TieredStore
from kvlinker.testing import (
    Call,
    Family,
    FaultAccess,
    FaultStore,
    MemoryStore,
    Miscount,
    Raise,
    Rule,
    page_keys,
)
from kvlinker.testing.shelves import Shelf, allow, object_keys
from kvlinker.testing.small_linkers import SmallLinker

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
WRITTEN, EXISTS = WriteStatus.WRITTEN, WriteStatus.EXISTS
LAYERS, RANGE = 6, 40 << 10
PAGE = LAYERS * RANGE


class Pool:
    """Pages of KV-like values in host memory, a range of K or V each layer, beside a store."""

    def __init__(self, store: Store, *, pages: int = 4) -> None:
        self.store = store
        rows = [values(pages * RANGE // 2, seed=i).reshape(pages, RANGE) for i in range(LAYERS)]
        self.source = [row.copy() for row in rows]
        self.target = [np.zeros_like(row) for row in rows]
        self.access = HostAccess()

    def plan(
        self, memory: list[NDArray[np.uint8]], pages: range, layer: int | None = None
    ) -> TransferPlan:
        spans = [
            BufferSpan(base_ptr=m.ctypes.data, rows=len(m), row_bytes=RANGE, row_stride=RANGE)
            for m in memory
        ]
        entry = DevicePoolEntry(
            name="kv",
            indices_from_pool="kv",
            components=[spans],
            layer_mapping={i: i for i in range(LAYERS)},
            page_size=1,
            rows_are_pages=True,
        )
        locations = entry.prepare_locations(list(pages))
        plan = entry.page_plan(locations) if layer is None else entry.layer_plan(locations, layer)
        assert plan is not None
        return plan

    def write(self, keys: tuple[bytes, ...]) -> tuple[WriteStatus, ...]:
        plan = self.plan(self.source, range(len(keys)))
        batch = WriteBatch(keys=keys, plan=plan, fingerprint=b"layout")
        return self.store.write([batch], self.access, may_publish=allow)[0]

    def request(self, keys: tuple[bytes, ...]) -> ReadRequest:
        return ReadRequest(keys=keys, object_bytes=PAGE, fingerprint=b"layout")

    def read(self, keys: tuple[bytes, ...], layer: int | None = None) -> tuple[ReadStatus, ...]:
        """Read, and check every byte of what is OK."""
        for memory in self.target:
            memory[:] = 0
        with self.store.open_read(self.request(keys)) as session:
            statuses = session.read(self.plan(self.target, range(len(keys)), layer), self.access)
        for i, status in enumerate(statuses):
            for number in range(LAYERS) if layer is None else [layer]:
                same = np.array_equal(self.target[number][i], self.source[number][i])
                assert same or status is not OK
        return statuses


# ---- what becomes shorter -------------------------------------------------------------------------


def test_values_take_a_quarter_less_and_come_back_whole_and_by_layer() -> None:
    inner = MemoryStore()
    pool = Pool(CompressedStore(inner))
    keys = object_keys(4)

    assert pool.write(keys) == (WRITTEN,) * 4

    assert inner.stats().used_bytes < 0.76 * 4 * PAGE
    assert pool.read(keys) == (OK,) * 4
    for layer in range(LAYERS):
        assert pool.read(keys, layer) == (OK,) * 4
    counters = pool.store.stats().counters
    assert counters["bytes_in"] == 4 * PAGE
    assert counters["bytes_out"] == inner.stats().used_bytes


def test_what_does_not_become_shorter_is_kept_as_it_is() -> None:
    inner = MemoryStore()
    pool = Pool(CompressedStore(inner))
    random = np.random.default_rng(1)
    for memory in pool.source:
        memory[:] = random.integers(0, 256, memory.shape, dtype=np.uint8)
    keys = object_keys(2)

    pool.write(keys)

    assert inner.stats().used_bytes == 2 * (PAGE + RAW_EXTRA_BYTES)
    assert pool.store.stats().counters["kept_as_they_are"] == 2
    assert pool.read(keys) == (OK, OK)
    assert pool.read(keys, 3) == (OK, OK)


def test_objects_of_unlike_lengths_are_written_in_order_and_read_together() -> None:
    inner = MemoryStore()
    pool = Pool(CompressedStore(inner))
    for number, memory in enumerate(pool.source):
        memory[0] = 0
        memory[2] = values(RANGE // 2, seed=number, spread=1e-3) & 0x3F
    keys = object_keys(4)

    pool.write(keys)

    assert inner.keys() == keys
    assert len({len(inner.payload(key)) for key in keys}) == 3
    assert pool.read(keys) == (OK,) * 4
    again = Pool(CompressedStore(inner))  # which knows of no lengths yet
    again.source = pool.source
    assert again.read(keys) == (OK,) * 4
    assert again.read(keys, 1) == (OK,) * 4


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_level_and_items_are_the_writer_s_matter_alone(item_bytes: int) -> None:
    inner = MemoryStore()
    keys = object_keys(2)
    Pool(CompressedStore(inner, level=7, item_bytes=item_bytes)).write(keys)

    assert Pool(CompressedStore(inner)).read(keys) == (OK, OK)


def test_compressed_and_plain_objects_are_never_read_as_each_other() -> None:
    inner = MemoryStore()
    plain, compressed = Pool(inner), Pool(CompressedStore(inner))
    first, second = object_keys(1), object_keys(1, chain="second")
    plain.write(first)
    compressed.write(second)

    assert compressed.read(first) == (MISS,)
    assert plain.read(second) == (MISS,)


def test_what_is_there_and_no_stream_is_not_taken_for_the_object_but_written_over() -> None:
    inner = MemoryStore()
    plain, compressed = Pool(inner), Pool(CompressedStore(inner))
    keys = object_keys(2)
    plain.write(keys[:1])

    assert compressed.write(keys) == (WRITTEN, WRITTEN)

    assert compressed.read(keys) == (OK, OK)


class Weighing(MemoryStore):
    """Notes how much memory is in use when it is written to."""

    used_bytes = 0

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        self.used_bytes, _ = tracemalloc.get_traced_memory()
        return super().write(batches, memory, may_publish=may_publish)


@pytest.mark.parametrize("spread", [1.0, None])
def test_l13_host_memory_has_the_streams_of_a_call_once(spread: float | None) -> None:
    inner = Weighing()
    pool = Pool(CompressedStore(inner), pages=16)
    if spread is None:  # noise is kept as it is
        for i, row in enumerate(pool.source):
            row[:] = np.random.default_rng(i).integers(0, 256, row.shape, dtype=np.uint8)
    keys = object_keys(16)
    tracemalloc.start()
    try:
        assert pool.write(keys) == (WRITTEN,) * 16
    finally:
        tracemalloc.stop()

    assert inner.used_bytes < 1.3 * inner.stats().used_bytes


def test_what_is_stored_is_neither_copied_nor_compressed_again() -> None:
    inner = MemoryStore()
    shelf = Shelf(CompressedStore(inner))
    keys = object_keys(3)
    shelf.stock(keys[:2])
    kept = inner.payload(keys[0])
    watched = FaultAccess(shelf.access)

    assert shelf.write(keys, memory=watched) == (EXISTS, EXISTS, WRITTEN)
    assert inner.payload(keys[0]) == kept
    assert [len(copy.rows) for copy in watched.copies] == [1]


def test_objects_that_are_absent_cost_no_search_of_their_lengths() -> None:
    inner = FaultStore(MemoryStore())
    pool = Pool(CompressedStore(inner))
    pool.write(object_keys(1))
    before = inner.count(Call.OPEN_READ)

    assert pool.read(object_keys(4, chain="absent")) == (MISS,) * 4

    assert inner.count(Call.OPEN_READ) == before + 1


def test_the_length_that_was_found_last_is_asked_for_first() -> None:
    inner = FaultStore(MemoryStore())
    keys = object_keys(4)
    Pool(CompressedStore(inner)).write(keys)
    again = Pool(CompressedStore(inner))

    again.read(keys)
    searched = inner.count(Call.OPEN_READ)
    again.read(keys)

    assert inner.count(Call.OPEN_READ) == searched + 1


def test_a_layer_is_read_with_its_own_cells_alone() -> None:
    inner = MemoryStore(integrity=Integrity.LENGTH)
    pool = Pool(CompressedStore(inner))
    keys = object_keys(1)
    pool.write(keys)
    stream = bytearray(inner.payload(keys[0]))
    end = len(bytes(stream).rstrip(b"\0"))
    stream[end - RANGE // 2 - 9 : end] = bytes(RANGE // 2 + 9)  # of the last layer

    inner.tamper(keys[0], bytes(stream))

    assert pool.read(keys, 0) == (OK,)
    assert pool.read(keys, LAYERS - 1) == (CORRUPT,)


def test_a_store_that_reads_whole_objects_alone_is_asked_for_no_part_of_one() -> None:
    pool = Pool(CompressedStore(MemoryStore(ranged_reads=False)))
    keys = object_keys(3)

    assert pool.write(keys) == (WRITTEN,) * 3
    assert pool.read(keys) == (OK,) * 3
    with pytest.raises(UnsupportedOperationError, match="whole objects alone"):
        pool.read(keys, 0)


def test_a_prefetch_goes_through_to_the_tiers_inside() -> None:
    near, far = MemoryStore(), MemoryStore()
    tiers = TieredStore(near, far)
    pool = Pool(CompressedStore(tiers))
    keys = object_keys(2)
    pool.write(keys)
    near.delete(keys)

    assert pool.store.prefetch(pool.request(keys)) == 2

    assert tiers.wait_for_promotions(60)
    assert near.payload(keys[0]) == far.payload(keys[0])


def test_what_is_compressed_can_be_encrypted_behind_that() -> None:
    inner = MemoryStore(integrity=Integrity.LENGTH)
    pool = Pool(CompressedStore(EncryptedStore(inner, bytes(32))))
    keys = object_keys(3)

    pool.write(keys)

    assert inner.stats().used_bytes < 0.76 * 3 * PAGE
    assert pool.read(keys) == (OK,) * 3
    assert pool.read(keys, 2) == (OK,) * 3


# ---- what is not right ------------------------------------------------------------------------------


def test_t1_a_stream_that_cannot_be_unpacked_is_corrupt_dropped_and_counted() -> None:
    inner = MemoryStore(integrity=Integrity.LENGTH)
    pool = Pool(CompressedStore(inner))
    keys = object_keys(3)
    pool.write(keys)
    inner.tamper(keys[0], bytes(len(inner.payload(keys[0]))))
    damaged = bytearray(inner.payload(keys[1]))
    table = StreamTable.decode(
        np.frombuffer(bytes(damaged), dtype=np.uint8), object_bytes=PAGE, stream_bytes=len(damaged)
    )
    assert table is not None
    at = int(table.starts[0]) + int(table.sizes[0, 0])  # the frame of the first high bytes
    damaged[at : at + 4] = b"none"
    inner.tamper(keys[1], bytes(damaged))

    statuses = pool.read(keys)

    assert statuses == (CORRUPT, CORRUPT, OK)
    assert pool.store.exists(keys) == (False, False, True)
    assert pool.store.stats().counters["undecodable"] == 2


def test_a_stream_that_cannot_be_unpacked_is_dropped_once_however_often_its_session_reads() -> None:
    inner = MemoryStore(integrity=Integrity.LENGTH)
    pool = Pool(CompressedStore(inner))
    keys = object_keys(2)
    pool.write(keys)
    damaged = bytearray(inner.payload(keys[0]))
    table = StreamTable.decode(
        np.frombuffer(bytes(damaged), dtype=np.uint8), object_bytes=PAGE, stream_bytes=len(damaged)
    )
    assert table is not None
    at = int(table.starts[0]) + int(table.sizes[0, 0])
    damaged[at : at + 4] = b"none"
    inner.tamper(keys[0], bytes(damaged))

    with pool.store.open_read(pool.request(keys)) as session:
        plan = pool.plan(pool.target, range(2))
        statuses = [session.read(plan, pool.access) for _ in range(2)]

    assert statuses == [(CORRUPT, OK)] * 2
    assert pool.store.stats().counters["undecodable"] == 1


def test_t1_a_table_that_cannot_be_keeps_no_other_object_from_being_read() -> None:
    size = 16 << 20
    inner = MemoryStore(integrity=Integrity.LENGTH)
    store = CompressedStore(inner)
    source = np.tile(values(4096, seed=5), (2, size // 8192))
    sizes = np.full(size // 8192, 8192, dtype=np.int64)
    offsets = np.cumsum(sizes) - sizes
    plan, keys = plan_of_rows("kv", source, offsets, sizes), object_keys(2)
    batch = WriteBatch(keys=keys, plan=plan, fingerprint=b"layout")
    assert store.write([batch], HostAccess(), may_publish=allow) == ((WRITTEN, WRITTEN),)
    damaged = bytearray(inner.payload(keys[0]))
    damaged[12:16] = b"\xff" * 4  # blocks of a table that is longer than its stream
    inner.tamper(keys[0], bytes(damaged))
    assert (StreamTable.size_of(np.frombuffer(inner.payload(keys[1]), np.uint8)) or 0) > 16 << 10

    target = np.zeros_like(source)
    request = ReadRequest(keys=keys, object_bytes=size, fingerprint=b"layout")
    with store.open_read(request) as session:
        statuses = session.read(plan_of_rows("kv", target, offsets, sizes), HostAccess())

    assert statuses == (CORRUPT, OK)
    assert np.array_equal(target[1], source[1])


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("call", [Call.WRITE, Call.READ, Call.EXISTS])
def test_t4_a_store_that_answers_with_another_count_is_refused(call: Call, change: int) -> None:
    faulty = FaultStore(MemoryStore())
    shelf = Shelf(CompressedStore(faulty))
    keys, others = object_keys(2), object_keys(2, chain="more")
    shelf.stock(keys)
    faulty.script.add(Rule(call=call, fault=Miscount(change=change)))

    if call is not Call.READ:
        with pytest.raises(StoreContractError, match="FaultStore"):
            shelf.write(others)
    if call is not Call.WRITE:
        with pytest.raises(StoreContractError, match="FaultStore"):
            shelf.read(keys if call is Call.READ else others)


def test_what_cannot_be_dropped_is_counted_and_the_rest_is_read() -> None:
    inner = MemoryStore(integrity=Integrity.LENGTH)
    faulty = FaultStore(inner)
    faulty.script.add(Rule(call=Call.DELETE, fault=Raise(error=StoreError("no"))))
    pool = Pool(CompressedStore(faulty))
    keys = object_keys(2)
    pool.write(keys)
    inner.tamper(keys[0], bytes(len(inner.payload(keys[0]))))

    assert pool.read(keys) == (CORRUPT, OK)
    assert pool.store.stats().counters["undeleted"] == 1


@pytest.mark.parametrize(
    "store", [MemoryStore(registers_memory=True), MemoryStore(max_ranges_per_call=9)]
)
def test_a_store_that_moves_pool_memory_or_bounds_ranges_is_refused(store: MemoryStore) -> None:
    with pytest.raises(ContractError, match="compress another store"):
        CompressedStore(store)


@pytest.mark.parametrize(
    ("level", "item_bytes", "why"),
    [(0, 2, "level"), (20, 2, "level"), (1, 3, "item_bytes must be one of 1, 2, 4, 8, got 3")],
)
def test_values_out_of_bounds_are_refused(level: int, item_bytes: int, why: str) -> None:
    with pytest.raises(ContractError, match=why):
        CompressedStore(MemoryStore(), level=level, item_bytes=item_bytes)


# ---- under a linker ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [Family.MHA, Family.DSA])
def test_a_linker_stores_and_loads_through_a_codec_layer_by_layer(family: Family) -> None:
    store = CompressedStore(EncryptedStore(MemoryStore(), bytes(32)))
    keys = page_keys(3)

    with SmallLinker(store, family=family) as linker:
        assert linker.offload(keys)
        assert linker.lookup(keys) == [1, 2, 3]
        assert linker.load(keys)

    store.close()

"""Encryption: what the store inside sees, what opens, and what does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import pytest

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.errors import ContractError, StoreContractError, StoreError
from kvlinker.plans import TransferPlan
from kvlinker.store import (
    Integrity,
    ReadRequest,
    ReadSession,
    ReadStatus,
    Store,
    WriteBatch,
    WriteStatus,
)
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.stores.opening import OpeningAccess
from kvlinker.stores.sealing import BLOCK_BYTES, FRAME_EXTRA_BYTES, BlockLayout, Sealer
from kvlinker.stores.tiered import TieredStore
from kvlinker.stores.wrapped import WrappedStore
from kvlinker.testing import Call, FaultAccess, FaultStore, MemoryStore, Miscount, Raise, Rule
from kvlinker.testing.shelves import LAYERS, Shelf, allow, made_up_batch, object_keys

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
SECRET, OTHER = bytes(range(32)), bytes(32)
PAGE = 5 * 8192
"""Three blocks, the last one half as long."""
FRAME = BLOCK_BYTES + FRAME_EXTRA_BYTES


class Sealed:
    """An encrypted store, the one in it, and pages beside it."""

    def __init__(self) -> None:
        self.inner = MemoryStore(integrity=Integrity.LENGTH)
        self.store = EncryptedStore(self.inner, SECRET)
        self.shelf = Shelf(self.store, page_bytes=PAGE)


def test_what_the_store_inside_keeps_has_nothing_of_the_object() -> None:
    sealed = Sealed()
    (key,) = object_keys(1)
    sealed.shelf.stock([key])

    payload, kept = sealed.shelf.payload(key), sealed.inner.payload(key)

    assert len(kept) == PAGE + 3 * FRAME_EXTRA_BYTES
    assert not any(payload[at : at + 16] in kept for at in range(0, PAGE, 16))


def test_two_objects_of_one_content_have_no_block_alike() -> None:
    sealed = Sealed()
    (key,) = object_keys(1)
    sealed.shelf.stock([key])
    first = sealed.inner.payload(key)
    sealed.store.delete([key])
    sealed.shelf.stock([key])
    second = sealed.inner.payload(key)

    assert not any(first[at : at + 16] in second for at in range(0, len(first) - 16, 16))


def test_another_secret_finds_nothing_and_can_write_its_own() -> None:
    sealed = Sealed()
    keys = object_keys(2)
    sealed.shelf.stock(keys)
    other = Shelf(EncryptedStore(sealed.inner, OTHER), page_bytes=PAGE)

    statuses = other.read(keys)

    other.stock(keys)
    assert statuses == (MISS, MISS)
    assert other.read(keys) == (OK, OK)
    assert sealed.shelf.read(keys) == (MISS, MISS)


@pytest.mark.parametrize("place", [0, 16, FRAME - 1, FRAME, 3 * FRAME - 8192 - 1])
def test_e3_a_bit_that_changes_anywhere_is_noticed_and_the_object_dropped(place: int) -> None:
    sealed = Sealed()
    first, second = object_keys(2)
    sealed.shelf.stock([first, second])
    kept = sealed.inner.payload(first)
    sealed.inner.tamper(first, kept[:place] + bytes([kept[place] ^ 1]) + kept[place + 1 :])

    statuses = sealed.shelf.read([first, second])

    assert statuses == (CORRUPT, OK)
    assert sealed.store.exists([first, second]) == (False, True)
    assert sealed.store.stats().counters["unsealable"] == 1


def test_an_object_in_another_s_place_does_not_open() -> None:
    sealed = Sealed()
    first, second = object_keys(2)
    sealed.shelf.stock([first, second])
    sealed.inner.tamper(first, sealed.inner.payload(second))

    assert sealed.shelf.read([first, second]) == (CORRUPT, OK)


def test_blocks_that_change_places_do_not_open() -> None:
    sealed = Sealed()
    (key,) = object_keys(1)
    sealed.shelf.stock([key])
    kept = sealed.inner.payload(key)
    sealed.inner.tamper(key, kept[FRAME : 2 * FRAME] + kept[:FRAME] + kept[2 * FRAME :])

    assert sealed.shelf.read([key]) == (CORRUPT,)


def test_l4_a_layer_is_read_with_its_blocks_alone() -> None:
    sealed = Sealed()
    (key,) = object_keys(1)
    sealed.shelf.stock([key])
    kept = sealed.inner.payload(key)
    sealed.inner.tamper(key, kept[:-1] + bytes([kept[-1] ^ 1]))  # of the last layer's V

    with sealed.shelf.open([key]) as session:
        assert sealed.shelf.read([key], session=session, layer=0) == (OK,)
        assert sealed.shelf.read([key], session=session, layer=LAYERS - 1) == (CORRUPT,)
        assert sealed.shelf.read([key], session=session, layer=0) == (CORRUPT,)
        assert sealed.shelf.read([key], session=session, layer=LAYERS - 1) == (CORRUPT,)
    assert (
        sealed.store.stats().counters["unsealable"] == 1
    )  # dropped once, however often it is read


def test_what_is_stored_is_neither_copied_nor_sealed_again() -> None:
    sealed = Sealed()
    keys = object_keys(2)
    sealed.shelf.stock(keys)
    kept = sealed.inner.payload(keys[0])
    watched = FaultAccess(sealed.shelf.access)

    statuses = sealed.shelf.write(keys, memory=watched)

    assert statuses == (WriteStatus.EXISTS, WriteStatus.EXISTS)
    assert sealed.inner.payload(keys[0]) == kept
    assert not watched.copies


def test_a_secret_of_another_length_is_refused_without_being_shown() -> None:
    with pytest.raises(ContractError, match="a secret has 32 bytes, got 7"):
        EncryptedStore(MemoryStore(), b"hunter2")


@pytest.mark.parametrize(
    "store", [MemoryStore(registers_memory=True), MemoryStore(max_ranges_per_call=9)]
)
def test_a_store_that_moves_pool_memory_or_bounds_ranges_is_refused(store: MemoryStore) -> None:
    with pytest.raises(ContractError, match="encrypt another store"):
        EncryptedStore(store, SECRET)


@pytest.mark.parametrize(
    "limit", [FRAME_EXTRA_BYTES + 1, FRAME, FRAME + 33, 3 * FRAME - 1, 1 << 20]
)
def test_the_longest_object_is_the_one_whose_frames_still_fit(limit: int) -> None:
    able = EncryptedStore(MemoryStore(max_object_bytes=limit), SECRET).capabilities

    longest = able.max_object_bytes
    assert longest is not None
    assert BlockLayout(object_bytes=longest).sealed_bytes <= limit
    assert BlockLayout(object_bytes=longest + 1).sealed_bytes > limit


def test_a_frame_opens_for_its_object_and_block_alone() -> None:
    layout, content = BlockLayout(object_bytes=BLOCK_BYTES + 8), np.arange(8, dtype=np.uint8)
    sealer = Sealer(SECRET)
    sealed = sealer.seal(b"k" * 32, b"layout", layout)
    frame = np.frombuffer(sealed.frame(1, content), dtype=np.uint8)
    salt = frame[:16].tobytes()

    assert sealer.open(b"k" * 32, b"layout", layout, salt).content(1, frame) == content.tobytes()
    longer = BlockLayout(object_bytes=BLOCK_BYTES + 9)
    for key, fingerprint, shape in (
        (b"x" * 32, b"layout", layout),
        (b"k" * 32, b"other", layout),
        (b"k" * 32, b"layout", longer),
    ):
        assert sealer.open(key, fingerprint, shape, salt).content(1, frame) is None
    assert Sealer(OTHER).open(b"k" * 32, b"layout", layout, salt).content(1, frame) is None


def test_objects_are_in_the_clear_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("encrypted", "opening"):
        monkeypatch.setattr(f"kvlinker.stores.{module}.CHUNK_BYTES", 2 * PAGE)
    sealed = Sealed()
    keys = object_keys(5)
    watched = FaultAccess(sealed.shelf.access)

    assert sealed.shelf.write(keys, memory=watched) == (WriteStatus.WRITTEN,) * 5
    assert sealed.shelf.read(keys, memory=watched) == (OK,) * 5

    assert [len(copy.rows) for copy in watched.copies] == [2, 2, 1, 2, 2, 1]


def test_an_object_of_more_frames_than_a_store_takes_ranges_is_refused() -> None:
    sealed = Sealed()
    limit = sealed.store.capabilities.max_object_bytes
    assert limit == 65536 * BLOCK_BYTES
    keys, others = object_keys(1), object_keys(1, chain="others")
    batches = [made_up_batch(keys, page_bytes=limit + 1), sealed.shelf.batch(others)]

    statuses = sealed.store.write(batches, sealed.shelf.access, may_publish=allow)

    assert statuses == ((WriteStatus.FAILED,), (WriteStatus.WRITTEN,))


@pytest.mark.parametrize("call", [Call.WRITE, Call.READ])
def test_t4_a_store_that_answers_with_another_count_is_refused(call: Call) -> None:
    faulty = FaultStore(MemoryStore())
    shelf = Shelf(EncryptedStore(faulty, SECRET))
    keys = object_keys(2)
    shelf.stock(keys)
    faulty.script.add(Rule(call=call, fault=Miscount(change=1)))

    with pytest.raises(StoreContractError, match="FaultStore"):
        shelf.read(keys) if call is Call.READ else shelf.write(object_keys(2, chain="more"))


def test_what_cannot_be_dropped_is_counted_and_the_rest_is_read() -> None:
    sealed = Sealed()
    faulty = FaultStore(sealed.inner)
    faulty.script.add(Rule(call=Call.DELETE, fault=Raise(error=StoreError("no"))))
    shelf = Shelf(EncryptedStore(faulty, SECRET), page_bytes=PAGE)
    first, second = object_keys(2)
    shelf.stock([first, second])
    sealed.inner.tamper(first, bytes(len(sealed.inner.payload(first))))

    assert shelf.read([first, second]) == (CORRUPT, OK)
    assert shelf.store.stats().counters["undeleted"] == 1


def test_two_copies_of_one_object_have_no_block_alike() -> None:
    near, far = MemoryStore(), MemoryStore()
    shelf = Shelf(EncryptedStore(TieredStore(near, far), SECRET), page_bytes=PAGE)
    (key,) = object_keys(1)

    shelf.stock([key])  # the store inside copies it twice, and memory may have changed in between

    first, second = near.payload(key), far.payload(key)
    assert not any(first[at : at + 16] in second for at in range(0, len(first) - 16, 16))


def test_a_prefetch_goes_through_to_the_tiers_inside() -> None:
    near, far = MemoryStore(), MemoryStore()
    tiers = TieredStore(near, far)
    shelf = Shelf(EncryptedStore(tiers, SECRET), page_bytes=PAGE)
    keys = object_keys(2)
    shelf.stock(keys)
    near.delete(keys)

    assert shelf.store.prefetch(shelf.request(keys)) == 2

    assert tiers.wait_for_promotions(60)
    assert near.payload(keys[0]) == far.payload(keys[0])


# ---- stores that copy objects in pieces ---------------------------------------------------------------


class _Pieces(DeviceAccess):
    """Copies some spans of some pages at a time, the last ones first, as stores of large objects do."""

    def __init__(self, access: DeviceAccess, *, spans: int) -> None:
        self._access, self._spans = access, spans

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        self._each(plan, lambda part: self._access.copy_out(part, host))

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        self._each(plan, lambda part: self._access.copy_in(part, host))

    def _each(self, plan: TransferPlan, copy: Callable[[TransferPlan], None]) -> None:
        count = len(plan.spans.base)
        for first in reversed(range(0, count, self._spans)):
            copy(plan.select_spans(np.arange(first, min(first + self._spans, count))))


class _PiecewiseSession(ReadSession):
    def __init__(self, session: ReadSession, *, spans: int) -> None:
        self._session, self._spans = session, spans

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        return self._session.read(plan, _Pieces(memory, spans=self._spans))

    def close(self) -> None:
        self._session.close()


class _PiecewiseStore(WrappedStore):
    """A store whose every copy is of so many spans at a time."""

    def __init__(self, store: Store, *, spans: int) -> None:
        super().__init__(store)
        self._spans = spans

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        pieces = _Pieces(memory, spans=self._spans)
        return super().write(batches, pieces, may_publish=may_publish)

    def open_read(self, request: ReadRequest) -> ReadSession:
        return _PiecewiseSession(super().open_read(request), spans=self._spans)


def test_two_copies_in_pieces_have_no_block_alike_and_both_open() -> None:
    near, far = MemoryStore(), MemoryStore()
    tiers = TieredStore(_PiecewiseStore(near, spans=2), _PiecewiseStore(far, spans=2))
    shelf = Shelf(EncryptedStore(tiers, SECRET), page_bytes=PAGE)
    keys = object_keys(2)

    shelf.stock(keys)

    for key in keys:
        first, second = near.payload(key), far.payload(key)
        assert not any(first[at : at + 16] in second for at in range(0, len(first) - 16, 16))
    assert shelf.read(keys) == (OK, OK)
    near.delete(keys)
    assert shelf.read(keys) == (OK, OK)


@pytest.mark.parametrize("spans", [1, 2, 3])
def test_ranges_that_a_store_copies_in_pieces_are_filled_once_all_of_their_blocks_opened(
    spans: int,
) -> None:
    inner = MemoryStore(integrity=Integrity.LENGTH)
    store = EncryptedStore(_PiecewiseStore(inner, spans=spans), SECRET)
    shelf = Shelf(store, page_bytes=8 * 40960)  # 2.5 blocks a range
    keys = object_keys(3)
    shelf.stock(keys)

    assert shelf.read(keys) == (OK,) * 3
    with shelf.open(keys) as session:
        for layer in range(LAYERS):
            assert shelf.read(keys, session=session, layer=layer) == (OK,) * 3

    kept = inner.payload(keys[1])
    at = 3 * FRAME + 100
    inner.tamper(keys[1], kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :])
    assert shelf.read(keys) == (OK, CORRUPT, OK)


class _WatchedSession(_PiecewiseSession):
    """Notes how much of the objects is kept in the clear after each piece of three spans."""

    kept: ClassVar[list[int]] = []

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        assert isinstance(memory, OpeningAccess)
        statuses: tuple[ReadStatus, ...] = ()
        for first in range(0, len(plan.spans.base), 3):
            part = plan.select_spans(np.arange(first, min(first + 3, len(plan.spans.base))))
            statuses = self._session.read(part, memory)
            self.kept.append(memory.kept_bytes)
        return statuses


class _WatchedStore(WrappedStore):
    def open_read(self, request: ReadRequest) -> ReadSession:
        return _WatchedSession(super().open_read(request), spans=3)


def test_blocks_are_kept_in_the_clear_until_their_ranges_are_filled_and_no_others() -> None:
    shelf = Shelf(EncryptedStore(_WatchedStore(MemoryStore()), SECRET), page_bytes=8 * 40960)
    keys = object_keys(2)
    shelf.stock(keys)
    _WatchedSession.kept.clear()

    assert shelf.read(keys) == (OK, OK)

    # Ranges of 2.5 blocks: of each piece at most its last block is begun by a range that goes on, or two.
    assert max(_WatchedSession.kept) <= len(keys) * 2 * BLOCK_BYTES
    assert _WatchedSession.kept[-1] == 0


class _SecondThoughtsStore(WrappedStore):
    """A store that reads an older object first, and then over it the one that it has, both in pieces."""

    def __init__(self, older: Store, store: Store) -> None:
        super().__init__(store)
        self._older = older

    def open_read(self, request: ReadRequest) -> ReadSession:
        return _SecondThoughts(self._older.open_read(request), super().open_read(request))


class _SecondThoughts(_PiecewiseSession):
    def __init__(self, older: ReadSession, session: ReadSession) -> None:
        super().__init__(session, spans=1)
        self._older = _PiecewiseSession(older, spans=1)

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        self._older.read(plan, memory)
        return super().read(plan, memory)

    def close(self) -> None:
        self._older.close()
        super().close()


def test_ranges_that_a_store_copies_again_in_pieces_have_the_bytes_of_the_last_copy() -> None:
    older, newer = MemoryStore(), MemoryStore()
    keys = object_keys(2)
    size = 8 * 40960
    Shelf(EncryptedStore(older, SECRET), page_bytes=size, seed=b"older").stock(keys)
    Shelf(EncryptedStore(newer, SECRET), page_bytes=size).stock(keys)

    shelf = Shelf(EncryptedStore(_SecondThoughtsStore(older, newer), SECRET), page_bytes=size)

    assert shelf.read(keys) == (OK, OK)  # and the shelf compares every byte


class _Skipping(DeviceAccess):
    """Copies everything but the last span."""

    def __init__(self, access: DeviceAccess) -> None:
        self._access = access

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        self._access.copy_out(plan, host)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        self._access.copy_in(plan.select_spans(np.arange(len(plan.spans.base) - 1)), host)


class _ForgetfulSession(_PiecewiseSession):
    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        return self._session.read(plan, _Skipping(memory))


class _ForgetfulStore(WrappedStore):
    """A store that says it has read what it did not copy."""

    def open_read(self, request: ReadRequest) -> ReadSession:
        return _ForgetfulSession(super().open_read(request), spans=1)


def test_l5_what_a_store_says_it_read_and_did_not_copy_is_not_reported_as_filled() -> None:
    sealed = Sealed()
    (key,) = object_keys(1)
    sealed.shelf.stock([key])

    shelf = Shelf(EncryptedStore(_ForgetfulStore(sealed.inner), SECRET), page_bytes=PAGE)

    assert shelf.read([key]) == (ReadStatus.FAILED,)

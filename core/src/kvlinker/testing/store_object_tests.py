"""Tests of the kit for stores: what happens to objects that are written, found, read and removed."""

from __future__ import annotations

import pytest

from kvlinker.errors import ContractError, KVLinkerError
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.selftest import self_test
from kvlinker.store import Integrity, ReadStatus, WriteStatus
from kvlinker.testing.fault_access import FaultAccess
from kvlinker.testing.faults import Raise
from kvlinker.testing.script import Call, Rule
from kvlinker.testing.shelves import LAYERS, Shelf, allow, made_up_batch, object_keys
from kvlinker.testing.store_fixtures import (
    Damage,
    OpenStore,
    StoreFixtures,
    answer_of,
)
from kvlinker.testing.verdicts import expect, fail

__all__ = ["StoreObjectTests"]

OK, MISS = ReadStatus.OK, ReadStatus.MISS


class StoreObjectTests(StoreFixtures):
    """What holds for objects, one call after the other."""

    # ---- capabilities -------------------------------------------------------------------------

    def test_capabilities_stay_the_same(self, shelf: Shelf) -> None:
        """A linker asks once, and plans for the whole life of the store."""
        before = shelf.store.capabilities
        shelf.stock(object_keys(2))
        expect("capabilities, after a write,", shelf.store.capabilities, before)

    def test_t5_the_self_test_passes_and_leaves_nothing(self, shelf: Shelf) -> None:
        """One object is put, found, read and deleted."""
        shelf.store.unregister()
        before = shelf.store.stats().objects
        report = self_test(shelf.store)
        if not report.has_passed:
            fail(f"the self-test found {[str(step) for step in report.problems]}")
        expect("stats, after the self-test,", shelf.store.stats().objects, before)

    # ---- writing and reading ------------------------------------------------------------------

    def test_what_is_written_comes_back_at_other_pages(self, shelf: Shelf) -> None:
        """Every byte, and no other byte of pool memory changes."""
        keys = object_keys(5)
        shelf.stock(keys)
        expect("read", shelf.read(keys), (OK,) * 5)
        expect("read, in another order,", shelf.read(keys[::-1]), (OK,) * 5)

    def test_l4_a_ranged_read_fills_one_layer_alone(self, shelf: Shelf) -> None:
        """Layers can be read in any order, or the store says that it reads whole objects only."""
        keys = object_keys(3)
        shelf.stock(keys)
        with shelf.open(keys) as session:
            for layer in reversed(range(LAYERS)):
                if shelf.store.capabilities.ranged_reads:
                    statuses = shelf.read(keys, session=session, layer=layer)
                    expect(f"a read of layer {layer}", statuses, (OK,) * 3)
                else:
                    with pytest.raises(KVLinkerError):
                        shelf.read(keys, session=session, layer=layer)

    def test_t4_every_answer_stands_at_the_position_of_its_key(self, shelf: Shelf) -> None:
        """Present, absent and repeated keys get one answer each, in order."""
        first, second, third, absent = object_keys(4)
        shelf.stock([second])
        expect("a read before the write", shelf.read([first]), (MISS,))
        written = shelf.write([first, second, third])
        wanted = WriteStatus.WRITTEN if shelf.store.capabilities.overwrite else WriteStatus.EXISTS
        expect("write", written, (WriteStatus.WRITTEN, wanted, WriteStatus.WRITTEN))
        asked = [absent, third, absent, first, third]
        expect("exists", shelf.store.exists(asked), (False, True, False, True, True))
        expect("read", shelf.read([absent, third, first]), (MISS, OK, OK))

    def test_t4_empty_calls_get_empty_answers(self, shelf: Shelf) -> None:
        """No keys, no batches, no objects: nothing is no error."""
        store = shelf.store
        expect("exists([])", store.exists([]), ())
        expect("delete([])", store.delete([]), ())
        expect("write([])", store.write([], shelf.access, may_publish=allow), ())
        expect("write of an empty batch", shelf.write([]), ())
        expect("read of no objects", shelf.read([]), ())

    def test_an_object_that_exists_is_kept_or_replaced_as_the_store_says(
        self, shelf: Shelf
    ) -> None:
        """Two writers of one key are the rule: engines compute the same prefix."""
        keys = object_keys(2)
        other = shelf.beside(seed=b"other")
        shelf.stock(keys)
        replaced = shelf.store.capabilities.overwrite
        wanted = WriteStatus.WRITTEN if replaced else WriteStatus.EXISTS
        expect("a second write", other.write(keys), (wanted, wanted))
        expect("read", (other if replaced else shelf).read(keys), (OK, OK))

    def test_t2_a_key_that_is_named_twice_in_one_call_is_stored_once(self, shelf: Shelf) -> None:
        """Two requests of one batch may share a prefix."""
        key, other = object_keys(2)
        statuses = shelf.write([key, other, key])
        if not all(status.is_stored for status in statuses):
            fail(f"write of a key twice answered {statuses}; both hold the object afterwards")
        expect("read", shelf.read([key, other]), (OK, OK))

    def test_a_session_reads_again_and_no_more_once_it_is_closed(self, shelf: Shelf) -> None:
        """A load reads layer by layer, and closing twice is no error."""
        keys = object_keys(2)
        shelf.stock(keys)
        session = shelf.open(keys)
        expect("a first read", shelf.read(keys, session=session), (OK, OK))
        expect("a second read", shelf.read(keys, session=session), (OK, OK))
        session.close()
        session.close()
        with pytest.raises(KVLinkerError):
            shelf.read(keys, session=session)

    def test_a_plan_that_does_not_fit_the_request_is_refused(self, shelf: Shelf) -> None:
        """Objects of one request would land in the pages of others."""
        keys = object_keys(2)
        shelf.stock(keys)
        with shelf.open(keys) as session, pytest.raises(ContractError):
            session.read(shelf.plan([40]), shelf.access)

    # ---- publishing ---------------------------------------------------------------------------

    def test_t2_nothing_is_visible_before_the_permission_that_is_asked_once(
        self, shelf: Shelf
    ) -> None:
        """Bytes are copied, the permission is asked, and then the batches become visible."""
        keys = object_keys(4)
        seen: list[tuple[bool, ...]] = []

        def may_publish() -> bool:
            seen.append(shelf.store.exists(keys))
            return True

        batches = [shelf.batch(keys[:2]), shelf.batch(keys[2:], first_page=2)]
        statuses = shelf.store.write(batches, shelf.access, may_publish=may_publish)
        expect("write", statuses, ((WriteStatus.WRITTEN,) * 2,) * 2)
        expect("exists, whenever may_publish was asked,", seen, [(False,) * 4])
        expect("read", shelf.read(keys), (OK,) * 4)

    def test_l7_without_permission_nothing_of_the_call_stays(self, shelf: Shelf) -> None:
        """An offload that a reset overtook is never published; what was there before stays."""
        kept, *new = object_keys(3)
        shelf.stock([kept])
        statuses = shelf.write([kept, *new], may_publish=lambda: False)
        if any(status is not WriteStatus.DISCARDED for status in statuses[1:]):
            fail(
                f"a write without permission answered {statuses}, expected discarded for new objects"
            )
        expect("exists", shelf.store.exists([kept, *new]), (True, False, False))
        expect("read", shelf.read([kept, *new]), (OK, MISS, MISS))
        shelf.stock(new)
        expect("read, after the next write,", shelf.read(new), (OK, OK))

    def test_a_permission_that_raises_leaves_nothing_behind(self, shelf: Shelf) -> None:
        """Whatever the caller's question raises, the store goes on."""
        keys = object_keys(2)

        def may_publish() -> bool:
            msg = "the question failed"
            raise RuntimeError(msg)

        with pytest.raises(RuntimeError, match="the question failed"):
            shelf.write(keys, may_publish=may_publish)
        expect("exists", shelf.store.exists(keys), (False, False))
        shelf.stock(keys)

    # ---- integrity ----------------------------------------------------------------------------

    def test_t1_an_object_of_another_length_is_a_miss(self, shelf: Shelf) -> None:
        """A short or long object would tear a page; the next write puts the right one in its place."""
        keys = object_keys(1)
        longer = shelf.beside(page_bytes=2 * shelf.page_bytes)
        shorter = longer.beside(page_bytes=shelf.page_bytes - 32)
        shelf.stock(keys)
        for other in (longer, shorter):
            what = f"an object of {shelf.page_bytes} B as one of {other.page_bytes} B"
            expect(f"a read of {what}", other.read(keys), (MISS,))
            expect("read, after one of another length,", shelf.read(keys), (OK,))
        longer.stock(keys)
        expect("read, after a write of that length,", longer.read(keys), (OK,))

    def test_t1_an_object_of_another_layout_is_a_miss(self, shelf: Shelf) -> None:
        """Stores with headers keep the layout's fingerprint; for others, keys alone tell layouts apart."""
        keys = object_keys(1)
        shelf.stock(keys)
        foreign = shelf.beside(fingerprint=b"another layout.")
        statuses = foreign.read(keys)
        if shelf.store.capabilities.integrity is Integrity.CHECKSUM:
            expect("a read as another layout", statuses, (MISS,))
        elif statuses[0] not in (OK, MISS):
            fail(f"a read as another layout answered {statuses}; it is a miss, or the object")

    def test_t1_e3_a_changed_byte_is_noticed_counted_and_dropped(
        self, shelf: Shelf, request: pytest.FixtureRequest
    ) -> None:
        """A store that promises checksums never serves it; one that promises lengths alone says so."""
        if shelf.store.capabilities.integrity is not Integrity.CHECKSUM:
            expect("integrity", shelf.store.capabilities.integrity, Integrity.LENGTH)
            return
        damage: Damage = request.getfixturevalue("damage")
        damaged, sound = object_keys(2)
        shelf.stock([damaged, sound])
        before = sum(shelf.store.stats().counters.values())
        damage(shelf.store, damaged, shelf.payload(damaged))
        statuses = shelf.read([damaged, sound])
        if statuses[0] is OK or statuses[1] is not OK:
            fail(
                f"a read of a damaged and a sound object answered {statuses}, expected corrupt and ok"
            )
        expect("exists, after it was read,", shelf.store.exists([damaged, sound]), (False, True))
        if sum(shelf.store.stats().counters.values()) <= before:
            fail(
                "no counter of stats() tells of the damaged object; count it, such as under `corrupt`"
            )

    # ---- removing -----------------------------------------------------------------------------

    def test_deleting_says_which_objects_there_were(self, shelf: Shelf) -> None:
        """Removing an absent object is no error."""
        first, second, absent = object_keys(3)
        shelf.stock([first, second])
        expect("delete", shelf.store.delete([absent, first]), (False, True))
        expect("exists", shelf.store.exists([first, second]), (False, True))
        expect("read", shelf.read([first, second]), (MISS, OK))
        expect("a write of a deleted object", shelf.write([first]), (WriteStatus.WRITTEN,))

    def test_an_object_that_is_deleted_while_it_is_read_is_whole_or_a_miss(
        self, shelf: Shelf
    ) -> None:
        """Its bytes are not given to another object under the reader's hands."""
        keys, others = object_keys(2), object_keys(8, chain="others")
        shelf.stock(keys)
        with shelf.open(keys) as session:
            shelf.store.delete(keys)
            shelf.stock(others)
            statuses = shelf.read(keys, session=session)
        if unknown := set(statuses) - {OK, MISS}:
            fail(f"a read of deleted objects answered {unknown}; they are whole, or a miss")

    def test_k4_clearing_touches_one_namespace_alone(self, shelf: Shelf) -> None:
        """Other models and tenants keep their objects."""
        mine, other = object_keys(3), object_keys(2, model="other")
        shelf.stock([*mine, *other])
        expect("clear", shelf.store.clear(mine[0][:NAMESPACE_BYTES]), 3)
        expect("exists", shelf.store.exists([*mine, *other]), (False,) * 3 + (True,) * 2)
        expect("a second clear", shelf.store.clear(mine[0][:NAMESPACE_BYTES]), 0)

    # ---- figures, limits, life time -----------------------------------------------------------

    def test_stats_count_objects(self, shelf: Shelf) -> None:
        """What is written counts, what is deleted does not."""
        keys = object_keys(3)
        before = shelf.store.stats().objects
        shelf.stock(keys)
        expect("stats, after a write,", shelf.store.stats().objects, before + 3)
        if shelf.store.stats().used_bytes < 3 * shelf.page_bytes:
            fail(f"stats().used_bytes is less than the {3 * shelf.page_bytes} B of three objects")
        shelf.store.delete(keys[:2])
        expect("stats, after a removal,", shelf.store.stats().objects, before + 1)

    def test_an_object_over_the_limit_is_not_stored_and_no_error(self, shelf: Shelf) -> None:
        """A store that takes objects of any length says so; another one answers without copying."""
        limit = shelf.store.capabilities.max_object_bytes
        if limit is None:
            return
        keys = object_keys(1)
        batch = made_up_batch(keys, page_bytes=limit + 1)
        untouched = FaultAccess(
            shelf.access, [Rule(call=Call.COPY_OUT, fault=Raise(error=MemoryError("copied")))]
        )
        statuses = shelf.store.write([batch], untouched, may_publish=allow)
        if statuses[0][0].is_stored:
            fail(
                f"a write of an object of {limit + 1} B answered {statuses}, over the limit of {limit} B"
            )
        expect("exists", shelf.store.exists(keys), (False,))

    def test_closing_is_idempotent_and_ends_every_use(self, reopen: OpenStore) -> None:
        """Whoever still has a reference gets an error that says so, and no crash."""
        shelf = Shelf(reopen())
        keys = object_keys(2)
        shelf.stock(keys)
        session = shelf.open(keys)
        shelf.store.close()
        shelf.store.close()
        calls = {
            "exists": lambda: shelf.store.exists(keys),
            "write": lambda: shelf.write(keys),
            "open_read": lambda: shelf.open(keys),
            "a read of an open session": lambda: shelf.read(keys, session=session),
            "delete": lambda: shelf.store.delete(keys),
        }
        for name, call in calls.items():
            if not (answer := answer_of(call)):
                fail(f"{name} works after close(); raise StoreClosedError")
            if "Closed" not in answer and "closed" not in answer:
                fail(f"{name} after close() raises {answer}; raise StoreClosedError")
        session.close()

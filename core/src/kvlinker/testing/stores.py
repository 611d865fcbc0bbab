"""The conformance kit for stores: subclass `StoreTests`, or `PersistentStoreTests`, in the store's own tests.

Tests adapt to what the store says of itself, and hold it to it.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvlinker.errors import KVLinkerError, StoreError
from kvlinker.store import Integrity, ReadStatus, WriteStatus
from kvlinker.testing.killed_writer import KillMoment, run_writer
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker.testing.store_capacity_tests import (
    StoreCapacityTests,
    check_capacity,
    fill,
    roomy_shelf,
)
from kvlinker.testing.store_fault_tests import StoreFaultTests
from kvlinker.testing.store_fixtures import (
    Damage,
    OpenStore,
    StoreModule,
    flip_byte_in_files,
)
from kvlinker.testing.store_object_tests import StoreObjectTests
from kvlinker.testing.store_row_tests import StoreRowTests
from kvlinker.testing.verdicts import expect, fail

__all__ = [
    "Damage",
    "OpenStore",
    "PersistentStoreTests",
    "StoreModule",
    "StoreTests",
    "flip_byte_in_files",
]

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT


class StoreTests(StoreObjectTests, StoreCapacityTests, StoreFaultTests, StoreRowTests):
    """What holds for every store.

    A subclass is named Test..., and gives `plugin` and the fixture `config`, or the fixture `open_store`;
    where the store promises checksums, the fixture `damage` too.
    """

    def test_a_persistent_store_is_tested_across_processes(self, shelf: Shelf) -> None:
        """A store that says that its objects outlive the process is held to it."""
        if shelf.store.capabilities.persistent and not isinstance(self, PersistentStoreTests):
            fail(
                f"the store is persistent: let {type(self).__name__} be a subclass of PersistentStoreTests"
            )


class PersistentStoreTests(StoreTests):
    """What holds for every store whose objects outlive the process that wrote them; it needs `config`."""

    # ---- restart --------------------------------------------------------------------------------

    def test_t2_objects_outlive_a_restart(self, reopen: OpenStore) -> None:
        """They are there under the same keys, byte for byte, and nothing else is."""
        kept, deleted, discarded = (object_keys(4, chain=chain) for chain in "abc")
        shelf = Shelf(reopen())
        shelf.stock([*kept, *deleted])
        shelf.write(discarded, may_publish=lambda: False)
        shelf.store.delete(deleted)
        objects = shelf.store.stats().objects
        shelf.store.close()
        again = Shelf(reopen())
        expect("stats, after a restart,", again.store.stats().objects, objects)
        expect("read, after a restart,", again.read(kept), (OK,) * 4)
        expect(
            "read of what was deleted or discarded", again.read([*deleted, *discarded]), (MISS,) * 8
        )
        expect("a write of what is stored", again.write(kept), self._rewritten(again) * 4)

    @staticmethod
    def _rewritten(shelf: Shelf) -> tuple[WriteStatus]:
        overwrites = shelf.store.capabilities.overwrite
        return (WriteStatus.WRITTEN if overwrites else WriteStatus.EXISTS,)

    def test_t3_b78_capacity_holds_across_restarts(self, reopen: OpenStore) -> None:
        """What lies there from before counts."""
        for number in range(2):
            shelf = roomy_shelf(reopen())
            check_capacity(shelf.store)
            fill(shelf, rounds=1, chain=f"run {number}")
            shelf.store.close()
        shelf = roomy_shelf(reopen())
        check_capacity(shelf.store)
        fill(shelf, rounds=1, chain="last run")

    def test_t1_a_byte_that_changes_between_two_runs_is_noticed(
        self, reopen: OpenStore, request: pytest.FixtureRequest
    ) -> None:
        """Disks fail while nobody looks."""
        damaged, sound = object_keys(2)
        shelf = Shelf(reopen())
        if shelf.store.capabilities.integrity is not Integrity.CHECKSUM:
            return
        damage: Damage = request.getfixturevalue("damage")
        shelf.stock([damaged, sound])
        shelf.store.close()
        damage(shelf.store, damaged, shelf.payload(damaged))
        again = Shelf(reopen())
        statuses = again.read([damaged, sound])
        if statuses[0] is OK or statuses[1] is not OK:
            fail(
                f"a read of a damaged and a sound object answered {statuses}, expected corrupt and ok"
            )
        again.stock([damaged])
        expect("read, after the next write,", again.read([damaged, sound]), (OK, OK))

    def test_b87_what_was_handed_out_before_a_restart_is_refused_after_it(
        self, reopen: OpenStore
    ) -> None:
        """Its descriptors name room that may hold other objects by now."""
        shelf, keys = Shelf(reopen()), object_keys(2)
        shelf.stock(keys)
        session = shelf.open(keys)
        has_leases = shelf.store.capabilities.leases
        hold = shelf.store.hold(keys, seconds=600) if has_leases else None
        shelf.store.close()
        again = Shelf(reopen(), seed=b"after the restart")
        again.store.delete(keys)
        again.stock(keys)
        with pytest.raises(KVLinkerError):
            shelf.read(keys, session=session)
        session.close()
        if hold is not None:
            hold.release()
        expect("read, after old handles were closed,", again.read(keys), (OK, OK))

    # ---- processes ------------------------------------------------------------------------------

    def test_a_second_opener_shares_the_objects_or_is_refused(self, reopen: OpenStore) -> None:
        """Two owners that do not know of each other would write over each other's objects."""
        shelf = Shelf(reopen())
        keys = object_keys(2)
        shelf.stock(keys)
        if not shelf.store.capabilities.shared:
            with pytest.raises(StoreError):
                reopen()
            expect("read, after another opener was refused,", shelf.read(keys), (OK, OK))
            return
        beside = Shelf(reopen())
        expect("read by a second opener", beside.read(keys), (OK, OK))
        others = object_keys(2, chain="others")
        beside.stock(others)
        expect("read of what a second opener wrote", shelf.read(others), (OK, OK))

    @pytest.mark.parametrize("moment", KillMoment, ids=lambda moment: moment.value)
    def test_t2_b72_a_killed_writer_leaves_whole_objects_alone(
        self, reopen: OpenStore, config: Mapping[str, object], moment: KillMoment
    ) -> None:
        """What it was told is stored is there; of its last write, all or nothing of each object."""
        killed = run_writer(self.plugin.__name__, config, moment)
        shelf = Shelf(reopen())
        count = len(killed.stored)
        expect("read of what a killed writer had stored", shelf.read(killed.stored), (OK,) * count)
        statuses = shelf.read(killed.interrupted)
        if unknown := set(statuses) - {OK, MISS}:
            fail(f"objects of a killed writer are {unknown}; they are whole, or a miss")
        if shelf.store.capabilities.atomic_batches and len(set(statuses)) > 1:
            fail(
                f"of one killed write, some objects are visible: {statuses}; batches are atomic here"
            )
        if OK in statuses:
            fail(f"objects are visible that nobody permitted to publish: {statuses}")
        expect("stats", shelf.store.stats().objects, count)
        shelf.stock(killed.interrupted)
        everything = (*killed.stored, *killed.interrupted)
        expect("read, after the next write,", shelf.read(everything), (OK,) * len(everything))
        check_capacity(shelf.store)

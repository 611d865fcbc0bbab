"""For each test of the stores' kit, a store that is wrong in just that way, and is told so."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import folder_store
import pytest
import wrong_stores as wrong

from kvlinker.errors import KVLinkerError
from kvlinker.store import Integrity, ObjectKey, ReadStatus, Store
from kvlinker.testing import Call, Fault, FaultStore, FlipBytes, Lie, MemoryStore, Report, Rule
from kvlinker.testing.kit import kit_tests
from kvlinker.testing.shelves import Shelf
from kvlinker.testing.stores import (
    Damage,
    OpenStore,
    PersistentStoreTests,
    StoreTests,
    flip_byte_in_files,
)

CAPACITY = 32 << 10
MakeStore = Callable[[], Store]


class Fixtures:
    """What pytest would hand to a test that asks for its request."""

    def __init__(self, damage: Damage) -> None:
        self.damage = damage

    def getfixturevalue(self, name: str) -> Damage:
        assert name == "damage"
        return self.damage


@contextmanager
def reopening(make: MakeStore) -> Iterator[OpenStore]:
    """Give what opens the store, and close what was opened."""
    with ExitStack() as opened:

        def open_once_more() -> Store:
            store = make()
            opened.callback(store.close)
            return store

        yield open_once_more


def cases(test: object) -> list[dict[str, object]]:
    """Return the arguments that a test is parametrized with."""
    marks: list[pytest.Mark] = vars(test).get("pytestmark", [])
    axes = [[{str(m.args[0]): value} for value in m.args[1]] for m in marks]
    return [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*axes)]


def run(
    kit: type[StoreTests],
    test: str,
    make: MakeStore,
    damage: Damage,
    config: Mapping[str, object] | None = None,
) -> None:
    """Run one test of the kit on a store, with each of its parameters."""
    subject = type("TestSubject", (kit,), {"plugin": folder_store})
    method = inspect.getattr_static(subject, test)
    wanted = inspect.signature(method).parameters
    for case in cases(method):
        with reopening(make) as reopen:
            given = case | {"reopen": reopen, "config": config, "request": Fixtures(damage)}
            if "shelf" in wanted:
                given["shelf"] = Shelf(reopen())
            method(subject(), **{name: given[name] for name in wanted if name != "self"})


def change_a_byte(store: Store, key: ObjectKey, payload: bytes) -> None:
    """Change an object in memory."""
    assert isinstance(store, MemoryStore)
    store.tamper(key, payload[:-1] + bytes([payload[-1] ^ 1]))


# ---- stores of one process --------------------------------------------------------------------


def faulty(call: Call, fault: Fault) -> MakeStore:
    """Return what makes a store to which something happens at every such call."""
    return lambda: FaultStore(MemoryStore(capacity_bytes=CAPACITY), [Rule(call=call, fault=fault)])


def small(kind: Callable[..., Store]) -> MakeStore:
    return lambda: kind(capacity_bytes=CAPACITY)


CLAIMS = Report(status=ReadStatus.OK)
CLAIMS_WHAT_WAS_READ = Report(status=ReadStatus.OK, done=True)

WRONG: list[tuple[str, MakeStore, str]] = [
    ("capabilities_stay", small(wrong.ChangesItsMind), "capabilities, after a write, answered"),
    ("t5_the_self_test", faulty(Call.EXISTS, Lie(exists=False)), "the self-test found .*exists"),
    ("what_is_written", faulty(Call.READ, FlipBytes()), r"left wrong bytes in \['k\[0\]'"),
    ("l4_a_ranged_read", faulty(Call.READ, CLAIMS), r"left wrong bytes in \['k\[3\]', 'v\[3\]'\]"),
    ("t4_every_answer", small(wrong.AnswersBackwards), "exists answered .* expected"),
    ("t4_empty_calls", small(wrong.RefusesNothing), r"exists\(\[\]\) answered \(False,\)"),
    (
        "an_object_that_exists",
        lambda: wrong.ReplacesInSilence(overwrite=True),
        "a second write answered .*WRITTEN.*expected .*EXISTS",
    ),
    ("t2_a_key_that_is_named", small(wrong.FailsTwins), "write of a key twice answered .*FAILED"),
    ("a_session_reads_again", small(wrong.ReadsOnce), "session was closed"),
    ("a_plan_that_does_not", small(wrong.ReadsWhateverFits), "DID NOT RAISE"),
    ("t2_nothing_is_visible", small(wrong.AsksTooLate), "whenever may_publish was asked"),
    ("l7_without_permission", small(wrong.NeedsNoPermission), "without permission answered"),
    ("a_permission_that_raises", small(wrong.TakesAnErrorForYes), "DID NOT RAISE"),
    ("t1_an_object_of_another_length", faulty(Call.READ, CLAIMS_WHAT_WAS_READ), "left wrong bytes"),
    ("t1_an_object_of_another_layout", small(wrong.IgnoresLayouts), "as another layout answered"),
    (
        "t1_e3_a_changed_byte",
        lambda: wrong.PromisesChecksums(integrity=Integrity.LENGTH),
        "left wrong bytes",
    ),
    ("deleting_says", small(wrong.DeletesEverything), "delete answered .*True, True.*"),
    ("an_object_that_is_deleted", faulty(Call.READ, CLAIMS), "left wrong bytes"),
    ("k4_clearing", small(wrong.ClearsEverything), "clear answered 5, expected 3"),
    ("stats_count", small(wrong.CountsNothing), "stats, after a write, answered 0, expected 3"),
    ("an_object_over_the_limit", small(wrong.ForgetsItsLimit), "copied"),
    ("closing_is_idempotent", small(wrong.StaysOpen), r"exists works after close\(\)"),
    ("a_persistent_store", small(wrong.SaysItPersists), "subclass of PersistentStoreTests"),
    ("t3_b78_capacity_is_never", small(wrong.HoldsMoreThanItMay), "over its capacity of 16384 B"),
    ("l3_a_hold_names", faulty(Call.HOLD, Lie(exists=True)), r"present answered \(True, True\)"),
    ("t3_l3_held_objects", small(wrong.ReleasesAtOnce), "after others filled the store, answered"),
    ("t3_a_store_full", small(wrong.ReleasesAtOnce), "held objects fit into a store for 24"),
    ("l3_a_hold_ends", small(wrong.HoldsForever), "held for 0.05 s are still kept after 1.0 s"),
    ("t3_objects_that_are", small(wrong.KeepsNothingForReaders), "read of an open session, after"),
    ("t2_a_write_whose_copy", small(wrong.BelievesWhatFailed), "that it stored everything"),
    ("l5_a_read_whose_copy", small(wrong.BelievesWhatFailed), "left wrong bytes"),
    ("t6_a_copy_that_hangs", wrong.OneAtATime, "exists while another write's copy hangs did not"),
    (
        "t2_b73_two_writers",
        small(wrong.FailsTheSecondWriter),
        "two writers of one key were answered",
    ),
    ("b71_what_is_removed", small(wrong.RemembersWhatIsGone), "exist that were removed"),
    ("b72_a_reader", small(wrong.PublishesPageByPage), "reads before the permission answered"),
    ("b73_a_writer_that", small(wrong.CleansUpByKey), "and the other's objects are gone"),
    ("b75_a_device", small(wrong.DiesOfAnError), "a write is lost"),
    ("b76_a_lookup", small(wrong.ListsAFolder), r"listed for a lookup answered \['/'\]"),
    ("b80_of_an_object", small(wrong.KeepsPartsOfWhatIsGone), "left wrong bytes"),
    ("b81_an_absent", faulty(Call.READ, CLAIMS), "left wrong bytes"),
    ("b82_lengths", small(wrong.CutsLengths), "an object of 640 B was read as one of 4294967936 B"),
    ("b84_memory", small(wrong.ForgetsRegions), "lies in no registered region"),
    ("b88_what_exists", small(wrong.ClaimsRanges), "reads whole objects alone"),
    ("b71_threads", faulty(Call.READ, CLAIMS), "left wrong bytes"),
]


@pytest.mark.parametrize(("test", "make", "problem"), WRONG, ids=[test for test, *_ in WRONG])
def test_a_wrong_store_is_told_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, test: str, make: MakeStore, problem: str
) -> None:
    for module in ("store_fixtures", "store_capacity_tests"):
        monkeypatch.setattr(f"kvlinker.testing.{module}.DEADLINE_S", 1.0)
    expected = (AssertionError, pytest.fail.Exception, MemoryError, OSError, KVLinkerError)

    with pytest.raises(expected, match=problem):
        run(StoreTests, full_name(test), make, change_a_byte)


# ---- stores across processes ------------------------------------------------------------------

WRONG_PERSISTENT: list[tuple[str, str, str]] = [
    ("t2_objects_outlive", "nothing is saved", "stats, after a restart, answered 0, expected 4"),
    ("t3_b78_capacity_holds", "evicted objects come back", "over its capacity of 32768 B"),
    ("t1_a_byte_that_changes", "no checksum", "left wrong bytes"),
    ("b87_what_was_handed_out", "old handles", "DID NOT RAISE"),
    ("a_second_opener", "no lock", "DID NOT RAISE"),
    ("t2_b72_a_killed_writer", "files before permission", "left wrong bytes"),
]


@pytest.mark.parametrize(
    ("test", "mistake", "problem"), WRONG_PERSISTENT, ids=[test for test, *_ in WRONG_PERSISTENT]
)
def test_a_wrong_persistent_store_is_told_what_is_wrong(
    tmp_path: Path, test: str, mistake: str, problem: str
) -> None:
    config = {"path": str(tmp_path), "capacity": CAPACITY, "wrong": mistake}

    def damage(store: Store, key: ObjectKey, payload: bytes) -> None:
        with suppress(AssertionError, KeyError):
            change_a_byte(store, key, payload)
        flip_byte_in_files(tmp_path, payload)

    with pytest.raises((AssertionError, pytest.fail.Exception), match=problem):
        run(
            PersistentStoreTests,
            full_name(test),
            lambda: folder_store.open_store(config),
            damage,
            config,
        )


def test_every_test_of_the_kit_catches_a_store() -> None:
    caught = {full_name(test) for test, *_ in (*WRONG, *WRONG_PERSISTENT)}

    assert caught == set(kit_tests(PersistentStoreTests))


def full_name(test: str) -> str:
    """Return the kit test's name of which these are the first words."""
    names: Sequence[str] = kit_tests(PersistentStoreTests)
    (name,) = (name for name in names if name.startswith(f"test_{test}"))
    return name

"""What must hold after a soak: everything happened, what is left is right, and it can all be removed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

from kvlinker.errors import StoreError
from kvlinker.store import ReadStatus, Store
from kvlinker.testing.shelves import shelves_of
from kvlinker.testing.soak import SoakPlan, SoakReport
from kvlinker.testing.soak_keys import Family, SoakKeys
from kvlinker.testing.verdicts import fail

__all__ = ["USUAL_ANSWERS", "check_report", "check_what_is_left"]

USUAL_ANSWERS = ("written", "exists", "discarded", "removed", "read ok", "read miss")
"""Answers that someone has had in every soak that was long enough."""
_READ_AT_ONCE = 32
_RETURN_SECONDS = 30.0


def check_report(
    report: SoakReport, plan: SoakPlan, *, answers: Collection[str] = USUAL_ANSWERS
) -> None:
    """Fail if something was not as it must be, or if it was no soak.

    Args:
        report: of the soak.
        plan: how rough it was to be.
        answers: those that someone must have had.

    Raises:
        AssertionError: the text says what was wrong.
    """
    if report.violations:
        fail("\n".join(report.violations[:10]))
    if never := [one for one in answers if not report.counts[one]]:
        fail(f"nobody was ever answered {never}: {report}")
    if report.kills < plan.kills or report.outages.total() < plan.outages:
        fail(f"there were to be {plan.kills} kills and {plan.outages} outages: {report}")


def check_what_is_left(open_store: Callable[[], Store], report: SoakReport, plan: SoakPlan) -> int:
    """Read everything that everybody knows, remove everything, and return how many objects were right.

    Raises:
        AssertionError: a byte is wrong, or something is left that belongs to nobody.
    """
    keys = SoakKeys(kinds=len(plan.page_bytes), numbers=plan.numbers)
    store = _opened(open_store)
    try:
        right = sum(_right_ones(store, keys, plan))
        for namespace in keys.namespaces(report.owners):
            store.clear(namespace)
        if left := store.stats().objects:
            fail(f"{left} objects are left in a store from which everything was removed")
    finally:
        store.close()
    return right


def _opened(open_store: Callable[[], Store]) -> Store:
    """Open the store, whose server may just have come back."""
    end = time.monotonic() + _RETURN_SECONDS
    while True:
        try:
            return open_store()
        except StoreError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _right_ones(store: Store, keys: SoakKeys, plan: SoakPlan) -> Iterator[int]:
    """Yield how many objects are there, some at a time; the shelf compares every byte."""
    for kind, shelf in enumerate(shelves_of(store, plan.page_bytes)):
        for family in (Family.STABLE, Family.VOLATILE):
            known = keys.shared(family, kind)
            for start in range(0, len(known), _READ_AT_ONCE):
                statuses = shelf.read(known[start : start + _READ_AT_ONCE])
                if unknown := set(statuses) - {ReadStatus.OK, ReadStatus.MISS}:
                    fail(f"what is left after a soak was read as {unknown}")
                yield statuses.count(ReadStatus.OK)

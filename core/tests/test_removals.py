"""Removals: which copies may still become visible beside one, and what is known at its end."""

from __future__ import annotations

from kvlinker.stores.removals import Removals


def test_a_copy_that_is_begun_during_a_removal_is_refused_until_that_is_over() -> None:
    removals = Removals()

    with removals.removing():
        since = removals.count
        with removals.copying(since) as may_publish:
            assert not may_publish()

    with removals.copying(since) as may_publish:
        assert not may_publish()
    with removals.copying(removals.count) as may_publish:
        assert may_publish()


def test_a_removal_knows_its_end_only_where_it_was_alone() -> None:
    removals = Removals()

    with removals.removing() as alone:
        pass
    with removals.removing() as outer, removals.removing() as inner:
        pass

    assert (alone.since, outer.since, inner.since) == (2, None, None)
    assert removals.count == 6

"""Long forms that need one process: calls in random order, and a million objects; `test_load.py` has the others."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

import pytest
from file_shelf import OpenStore

from kvlinker.testing.many_objects import ManyObjects
from kvlinker.testing.shelves import Shelf
from kvlinker.testing.store_row_tests import interleave

_log = logging.getLogger(__name__)


@pytest.mark.soak
def test_b71_ten_thousand_calls_in_random_order_see_whole_objects_or_none(
    open_store: OpenStore,
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)

    interleave(Shelf(open_store()), calls=10_000, seed=seed)


@pytest.mark.parametrize(
    ("count", "capacity"),
    [
        pytest.param(16_384, "64MiB", id="short"),
        pytest.param(1_000_000, "4GiB", id="million", marks=pytest.mark.soak),
    ],
)
def test_b76_a_million_objects_are_found_read_and_cleared_after_a_restart(
    open_store: OpenStore, disk_bytes: Callable[[], int], count: int, capacity: str
) -> None:
    objects = ManyObjects()
    calls = list(objects.calls(count))
    store = open_store(capacity=capacity)
    for keys in calls:
        objects.write(store, keys)
    store.close()

    began = time.perf_counter()
    store = open_store(capacity=capacity)
    opened = time.perf_counter()
    assert all(all(store.exists(keys)) for keys in calls)
    rate = count / (time.perf_counter() - opened)

    figures = count, opened - began, disk_bytes() / count, rate
    _log.info(
        "%d objects: opened in %.2f s, %.0f B each on the disk, %.0f found in a second", *figures
    )
    assert store.stats().objects == count
    for keys in (calls[0], calls[-1]):
        objects.check(store, keys)
    assert store.clear(objects.namespace) == count
    assert store.stats().objects == 0

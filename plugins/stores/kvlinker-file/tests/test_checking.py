"""Objects that are checked while they are copied: any wrong byte is noticed before the read answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from file_shelf import OpenStore, Shelf

from kvlinker.device import DeviceAccess, HostAccess, HostObjects
from kvlinker.errors import ContractError
from kvlinker.moving import Mover, using_mover
from kvlinker.plans import TransferPlan
from kvlinker.store import ReadStatus
from kvlinker.testing import PythonMover
from kvlinker_file.segments import checksum

Key = Callable[..., bytes]
OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
LAYERS, ROW = 3, 16_384
HEADER = 256
"""Bytes in front of the payload: 128 + 3 * 24, rounded up to 64."""
SLOT = HEADER + LAYERS * ROW
OBJECTS = 40
"""More than fit into one block of 256 KiB of a layer."""


class Told(DeviceAccess):
    """Host access that counts of how many copies it was to tell."""

    def __init__(self, *, tells_copied: bool = True) -> None:
        self._access = HostAccess()
        self._tells = tells_copied
        self.asked = 0

    @property
    def tells_copied(self) -> bool:
        """See DeviceAccess."""
        return self._tells

    @property
    def makes_sums(self) -> bool:
        """See DeviceAccess."""
        return self._tells and self._access.makes_sums

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        self._access.copy_out(plan, host)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        self.asked += host.copied is not None or host.sums is not None
        self._access.copy_in(plan, host)


class Silent(Told):
    """Host access that promises to tell of what it copied, and leaves a span out."""

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        copied = host.copied
        assert copied is not None

        def tell(span: int, pages: slice) -> None:
            if span:
                copied(span, pages)

        super().copy_in(plan, replace(host, copied=tell))


@pytest.fixture(autouse=True, params=["by Python", "by a mover"])
def mover(request: pytest.FixtureRequest) -> Iterator[Mover | None]:
    """Let objects be checked in both ways, whatever is installed."""
    chosen = PythonMover(checksum) if request.param == "by a mover" else None
    with using_mover(chosen):
        yield chosen


@pytest.fixture
def wide_shelf(make_shelf: type[Shelf]) -> Shelf:
    """Give pools whose pages have three ranges of 16 KiB."""
    shelf = make_shelf(layers=LAYERS, row_bytes=ROW, pages=2 * OBJECTS)
    shelf.access = Told()
    return shelf


def flip(folder: Path, slot: int, offset: int) -> None:
    """Change a byte of a payload in the only segment."""
    (slab,) = (folder / "segments").glob("*.slab")
    with slab.open("r+b") as file:
        file.seek(slot * SLOT + HEADER + offset)
        value = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([value ^ 0x10]))


def statuses(bad: Sequence[int], wrong: ReadStatus = CORRUPT) -> tuple[ReadStatus, ...]:
    return tuple(wrong if number in bad else OK for number in range(OBJECTS))


@pytest.fixture
def open_wide(open_store: OpenStore) -> OpenStore:
    """Give a store with one segment that has room for all objects."""

    def open_it(**options: object) -> object:
        return open_store(**{"capacity": "16MiB", "segment_size": "4MiB", **options})

    return open_it  # type: ignore[return-value]  # what open_store returns


@pytest.mark.parametrize("layer", range(LAYERS))
def test_t1_a_wrong_byte_in_any_block_is_noticed_and_the_other_objects_are_right(
    open_wide: OpenStore, wide_shelf: Shelf, folder: Path, key: Key, layer: int
) -> None:
    """The first and last byte of a range, the first and last object of a block, and ones in between."""
    keys = [key(number) for number in range(OBJECTS)]
    store = open_wide()
    wide_shelf.put(store, keys)
    bad = {0: 0, 15: ROW - 1, 16: 0, 20: 8191, 31: 1, 32: ROW - 1, 39: 77}
    for number, offset in bad.items():
        flip(folder, number, layer * ROW + offset)

    assert wide_shelf.get(store, keys) == statuses([*bad])
    assert store.stats().counters["corrupt"] == len(bad)
    assert wide_shelf.get(store, keys) == statuses([*bad], MISS)
    assert isinstance(wide_shelf.access, Told)
    assert wide_shelf.access.asked == 2


def test_t1_wrong_bytes_in_several_layers_of_one_block_are_all_kept_in_mind(
    open_wide: OpenStore, wide_shelf: Shelf, folder: Path, key: Key
) -> None:
    keys = [key(number) for number in range(OBJECTS)]
    store = open_wide()
    wide_shelf.put(store, keys)
    for number, layer in ((2, 2), (4, 0), (6, 1)):
        flip(folder, number, layer * ROW)

    assert wide_shelf.get(store, keys) == statuses([2, 4, 6])


def test_t1_every_byte_of_an_object_is_checked_while_it_is_copied(
    open_wide: OpenStore, wide_shelf: Shelf, folder: Path, key: Key
) -> None:
    keys = [key(number) for number in range(8)]
    store = open_wide()
    for offset in np.random.default_rng(0).integers(0, LAYERS * ROW, 30).tolist():
        wide_shelf.put(store, keys)
        flip(folder, 5, offset)

        answers = wide_shelf.get(store, keys)

        assert [number for number, answer in enumerate(answers) if answer is not OK] == [5]
        store.delete(keys)


def test_t1_a_layer_is_right_or_reported_and_a_bad_object_stays_out_of_later_layers(
    open_wide: OpenStore, wide_shelf: Shelf, folder: Path, key: Key
) -> None:
    keys = [key(number) for number in range(OBJECTS)]
    store = open_wide()
    wide_shelf.put(store, keys)
    flip(folder, 3, ROW + 5)  # layer 1
    wide_shelf.memory.poison()

    with store.open_read(wide_shelf.request(keys)) as session:
        found = [
            session.read(wide_shelf.layer_plan(OBJECTS, layer), wide_shelf.access)
            for layer in range(LAYERS)
        ]

    assert found == [statuses([]), statuses([3]), statuses([3])]
    held = [wide_shelf.holds(page, each) for page, each in enumerate(keys)]
    assert held == [number != 3 for number in range(OBJECTS)]
    last = wide_shelf.memory.read(wide_shelf.spans[2], 3)
    assert last == b"\xff" * ROW


def test_objects_in_scattered_slots_are_checked_like_others(
    open_wide: OpenStore, wide_shelf: Shelf, folder: Path, key: Key
) -> None:
    keys = [key(number) for number in range(OBJECTS)]
    store = open_wide()
    wide_shelf.put(store, keys)
    flip(folder, 9, 2 * ROW)
    asked = [keys[number] for number in np.random.default_rng(1).permutation(OBJECTS)]

    answers = wide_shelf.get(store, asked)

    assert [each for each, answer in zip(asked, answers, strict=True) if answer is not OK] == [
        keys[9]
    ]


def test_an_access_that_does_not_tell_gets_only_what_was_checked_before(
    open_wide: OpenStore, wide_shelf: Shelf, folder: Path, key: Key
) -> None:
    keys = [key(number) for number in range(OBJECTS)]
    store = open_wide()
    wide_shelf.put(store, keys)
    flip(folder, 7, 0)
    access = wide_shelf.access = Told(tells_copied=False)

    assert wide_shelf.get(store, keys) == statuses([7])
    assert access.asked == 0
    assert {wide_shelf.memory.read(span, 7) for span in wide_shelf.spans} == {b"\xff" * ROW}


def test_an_access_that_leaves_out_what_it_promised_to_tell_is_refused(
    open_wide: OpenStore, wide_shelf: Shelf, key: Key
) -> None:
    keys = [key(number) for number in range(OBJECTS)]
    store = open_wide()
    wide_shelf.put(store, keys)
    wide_shelf.access = Silent()

    told = "told of 80 ranges out of 120; let its tells_copied"
    with using_mover(None), pytest.raises(ContractError, match=told):
        wide_shelf.get(store, keys)

    wide_shelf.access = HostAccess()
    assert wide_shelf.get(store, keys) == statuses([])

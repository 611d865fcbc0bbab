"""Tests of framed objects: headers tell what lies under a name, and plans are cut where objects can be read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from kvlinker.device import HostAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.framed_objects import (
    FoundObjects,
    Look,
    WantedObjects,
    are_ranges_right,
    cut_plan,
    frame_pages,
    sort_values,
    which_rows_are_right,
)
from kvlinker.frames import FrameLayout
from kvlinker.moving import using_mover
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import WriteBatch
from kvlinker.testing import PythonMover
from kvlinker.testing.shelves import object_keys

LAYERS = 6
SIZE = 32
KEYS = object_keys(4)
FINGERPRINT = b"layout"


def checksum(data: memoryview) -> int:
    return zlib.crc32(data) << 32 | zlib.adler32(data)


@pytest.fixture(autouse=True, params=["by numpy", "by a mover"])
def copied_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let copies and checksums be made in both ways, whatever is installed."""
    with using_mover(PythonMover(checksum) if request.param == "by a mover" else None):
        yield


class Pool:
    """A pool of six layers, and its pages as framed values."""

    def __init__(self, layers: int = LAYERS) -> None:
        rng = np.random.default_rng(0)
        self.memory = rng.integers(0, 255, (layers, len(KEYS), SIZE), dtype=np.uint8)
        spans = [
            BufferSpan(
                base_ptr=layer.ctypes.data,
                rows=len(KEYS),
                row_bytes=SIZE,
                row_stride=SIZE,
                label=f"l{i}",
            )
            for i, layer in enumerate(self.memory)
        ]
        self.entry = DevicePoolEntry(
            name="kv",
            indices_from_pool="kv",
            components=[spans],
            layer_mapping={layer: layer for layer in range(layers)},
            page_size=1,
            rows_are_pages=True,
        )
        self.locations = self.entry.prepare_locations(range(len(KEYS)))
        self.plan = self.entry.page_plan(self.locations)
        self.layout = FrameLayout.of_ranges(self.plan.spans.offset, self.plan.range_bytes)

    def values(self, positions: list[int]) -> list[bytes]:
        size = self.layout.header_bytes + self.layout.payload_bytes
        rows = np.zeros((len(positions), size), dtype=np.uint8)
        batch = WriteBatch(keys=KEYS, plan=self.plan, fingerprint=FINGERPRINT)
        where = np.array(positions, dtype=np.int64)
        frame_pages(batch, self.layout, where, rows, HostAccess(), checksum=checksum)
        return [row.tobytes() for row in rows]

    def look(self, values: list[bytes | None]) -> Look:
        wanted = WantedObjects(
            keys=KEYS, object_bytes=self.layout.payload_bytes, fingerprint=FINGERPRINT
        )
        lengths = [0 if value is None else len(value) for value in values]
        return sort_values(wanted, values, lengths, checksum=checksum)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def found(pool: Pool) -> FoundObjects:
    (part,) = pool.look([*pool.values([0, 1, 2, 3])]).parts
    return part


def test_pages_are_framed_in_the_order_of_their_positions(pool: Pool) -> None:
    values = pool.values([2, 0])

    header = pool.layout.header_bytes
    assert [value[header:] for value in values] == [
        pool.memory[:, page].tobytes() for page in (2, 0)
    ]
    assert pool.look([values[1], None, values[0], None]).found == [0, 2]


def test_t1_b81_each_value_is_found_absent_damaged_or_anothers(pool: Pool) -> None:
    whole = pool.values([0, 1, 2, 3])
    other = Pool(layers=3).values([3])[0]

    look = pool.look([whole[0], None, whole[2][:-1], other])
    again = pool.look([b"", whole[0], whole[2][:100], bytes(500)])

    assert (look.found, look.absent, look.damaged, look.others) == ([0], [1], [2], [3])
    assert (again.found, again.absent, again.damaged, again.others) == ([], [0], [2, 3], [1])


def test_a_value_that_is_longer_than_its_object_is_damaged(pool: Pool) -> None:
    whole = pool.values([0, 1, 2, 3])

    look = pool.look([whole[0] + b"x", *whole[1:]])

    assert (look.found, look.damaged) == ([1, 2, 3], [0])


def test_neighbouring_ranges_are_one_piece(pool: Pool, found: FoundObjects) -> None:
    (piece,) = cut_plan(found.headers, 0, pool.plan, 1 << 20)

    assert (piece.start, piece.size) == (0, LAYERS * SIZE)
    assert piece.frames == slice(0, LAYERS)
    assert piece.plan is pool.plan


@pytest.mark.parametrize("layer", [0, 3, LAYERS - 1])
def test_l4_a_layer_is_a_piece_of_its_own(pool: Pool, found: FoundObjects, layer: int) -> None:
    plan = pool.entry.layer_plan(pool.locations, layer)
    assert plan is not None

    (piece,) = cut_plan(found.headers, 0, plan, 1 << 20)

    assert (piece.start, piece.size) == (layer * SIZE, SIZE)
    view = memoryview(pool.memory[layer, 2].tobytes())
    assert are_ranges_right(found.headers, 2, piece, view, checksum=checksum)


def test_pieces_are_no_longer_than_the_limit_where_ranges_end(
    pool: Pool, found: FoundObjects
) -> None:
    pieces = list(cut_plan(found.headers, 0, pool.plan, 2 * SIZE + 5))

    assert [(piece.start, piece.size) for piece in pieces] == [
        (2 * SIZE * number, 2 * SIZE) for number in range(LAYERS // 2)
    ]
    assert [list(piece.plan.spans.offset) for piece in pieces] == [
        [piece.start, piece.start + SIZE] for piece in pieces
    ]


def test_t1_a_changed_byte_and_a_wrong_length_are_noticed(pool: Pool, found: FoundObjects) -> None:
    (piece,) = cut_plan(found.headers, 0, pool.plan, 1 << 20)
    payload = pool.memory[:, 1].tobytes()
    changed = payload[:70] + bytes([payload[70] ^ 1]) + payload[71:]

    right = [
        are_ranges_right(found.headers, 1, piece, memoryview(value), checksum=checksum)
        for value in (payload, changed, payload[:-1], payload + b"x", b"")
    ]

    assert right == [True, False, False, False, False]


def test_t1_rows_are_told_right_from_wrong_wherever_they_lie(
    pool: Pool, found: FoundObjects
) -> None:
    (piece,) = cut_plan(found.headers, 0, pool.plan, 1 << 20)
    block = np.full((len(KEYS), piece.size + 5), 0xA5, dtype=np.uint8)
    rows = block[:, 2 : 2 + piece.size]
    rows[:] = pool.memory.transpose(1, 0, 2).reshape(len(KEYS), piece.size)
    rows[2, 70] ^= 1
    chosen = np.array([3, 2, 1])

    is_right = [
        which_rows_are_right(found.headers, chosen, piece, some, checksum=checksum).tolist()
        for some in (rows[[3, 2, 1]], rows[:0:-1], rows[:0:-1, :-1])
    ]

    assert is_right == [[True, False, True], [True, False, True], [False, False, False]]


def test_checksums_stand_beside_their_ranges_in_whatever_order_a_plan_has_them(pool: Pool) -> None:
    in_order = pool.values([0, 1, 2, 3])
    plan = pool.plan

    backwards = plan.spans.select(np.arange(LAYERS)[::-1])
    pool.plan = TransferPlan(pages=plan.pages, spans=backwards, part_bytes=plan.part_bytes)

    assert pool.values([0, 1, 2, 3]) == in_order


def test_objects_with_different_tables_are_told_apart(pool: Pool) -> None:
    coarse = FrameLayout(offsets=(0,), sizes=(LAYERS * SIZE,))
    rows = np.zeros((1, coarse.header_bytes + coarse.payload_bytes), dtype=np.uint8)
    batch = WriteBatch(keys=KEYS, plan=pool.plan, fingerprint=FINGERPRINT)
    frame_pages(batch, coarse, np.array([1]), rows, HostAccess(), checksum=checksum)
    fine = pool.values([0, 2, 3])

    look = pool.look([fine[0], rows[0].tobytes(), fine[1], fine[2]])

    groups = [numbers.tolist() for part in look.parts for numbers in part.alike()]
    assert sorted(part.positions.tolist() for part in look.parts) == [[0, 2, 3], [1]]
    assert sorted(groups) == [[0], [0, 1, 2]]

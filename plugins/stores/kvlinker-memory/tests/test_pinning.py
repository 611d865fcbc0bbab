"""A device loads pages from the store's memory itself, which is pinned as long as it is mapped."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from memory_user import KEYS

from kvlinker.device import HostAccess, HostObjects
from kvlinker.errors import StoreTimeoutError
from kvlinker.pinning import HostPins
from kvlinker.staged_chunks import StagedChunk
from kvlinker.staging import PendingCopy
from kvlinker.store import ReadStatus
from kvlinker.testing import Gate, OpaqueAccess, OpaqueMemory
from kvlinker.testing.pool_memory import HostStagingBuffer
from kvlinker.testing.shelves import Shelf
from kvlinker_memory import MemoryStoreOptions, open_memory_store

OK = ReadStatus.OK
CAPACITY = 8 << 20
PAGE = 64 << 10
SEGMENT = 512 << 10
SLOT = PAGE + 320
"""With the header of 8 ranges."""
PAGES_IN_SEGMENT = SEGMENT // SLOT
FILE = -(-PAGES_IN_SEGMENT * SLOT // mmap.PAGESIZE) * mmap.PAGESIZE


def is_mapped(address: int) -> bool:
    """Return whether a page of this process is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return "/segments/" in line
    return False


class Driver:
    """A device's driver: what is pinned must be mapped from then on until it is let go of."""

    def __init__(self, *, refuses: bool = False, keeps: bool = False) -> None:
        self.pinned: dict[int, int] = {}
        self.asked: list[int] = []
        self.while_unpinning: Callable[[], object] = lambda: None
        self._refuses = refuses
        self._keeps = keeps

    def register(self, address: int, size: int) -> None:
        self.asked.append(address)
        assert size % mmap.PAGESIZE == address % mmap.PAGESIZE == 0
        self._check(address, size)
        if self._refuses:
            msg = "error 2 of the CUDA runtime"
            raise RuntimeError(msg)
        self.pinned[address] = size

    def unregister(self, address: int) -> None:
        self._check(address, self.pinned[address])
        self.while_unpinning()
        if self._keeps:
            msg = "error 999 of the CUDA runtime"
            raise RuntimeError(msg)
        del self.pinned[address]

    def _check(self, address: int, size: int) -> None:
        assert is_mapped(address)
        assert is_mapped(address + size - 1)


class Pinned:
    """A store with a pool on a device beside it."""

    def __init__(
        self,
        folder: Path,
        driver: Driver,
        *,
        pin_bytes: int | None = None,
        close_seconds: float = 30,
    ) -> None:
        options = MemoryStoreOptions(
            path=folder / "store",
            capacity=CAPACITY,
            segment_size=SEGMENT,
            pin_bytes=pin_bytes,
            close_seconds=close_seconds,
        )
        self.store = open_memory_store(options)
        self.shelf = Shelf(self.store, page_bytes=PAGE)
        self.access = self.open_access(driver)

    def open_access(self, driver: Driver) -> OpaqueAccess:
        """Open a further access to the pool."""
        pins = HostPins(driver.register, driver.unregister)
        return OpaqueAccess(
            self.device_memory, staging_bytes=1 << 20, pins=pins, pinned_run_bytes=1
        )

    @property
    def device_memory(self) -> OpaqueMemory:
        """Where the pool lies."""
        memory = self.shelf.pools.memory
        assert isinstance(memory, OpaqueMemory)
        return memory

    def put(self, count: int) -> None:
        """Store objects."""
        assert all(
            status.is_stored for status in self.shelf.write(KEYS[:count], memory=self.access)
        )

    def get(self, count: int, *, first: int = 0) -> tuple[ReadStatus, ...]:
        """Read objects, every byte of which is checked, and a layer of them."""
        keys = KEYS[first : first + count]
        with self.shelf.open(keys) as session:
            layer = self.shelf.read(keys, session=session, layer=2, memory=self.access)
            assert layer == self.shelf.read(keys, session=session, memory=self.access)
        return layer

    def counted(self) -> tuple[int, int]:
        """Return how many segments were pinned, and how many could not be."""
        counters = self.store.stats().counters
        return counters["files_pinned"], counters["files_not_pinned"]

    def close(self) -> None:
        """Close the store, then the access."""
        self.store.close()
        self.access.close()


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def pinned(in_memory: Path, driver: Driver) -> Iterator[Pinned]:
    opened = Pinned(in_memory, driver)
    yield opened
    opened.close()
    assert driver.pinned == {}


def test_l13_loads_come_straight_from_the_memory_of_the_store(
    pinned: Pinned, driver: Driver
) -> None:
    pinned.put(16)
    before = pinned.access.pinned_copies
    assert len(driver.pinned) == 3  # by the writes, so that the first load need not

    assert pinned.get(16) == (OK,) * 16

    assert before == 0  # what is stored goes through buffers
    assert pinned.access.pinned_copies >= 2
    assert sorted(driver.pinned.values()) == [FILE] * -(-16 // PAGES_IN_SEGMENT)
    assert pinned.counted() == (len(driver.pinned), 0)


def test_a_segment_is_pinned_once_for_each_access(pinned: Pinned, driver: Driver) -> None:
    pinned.put(4)
    for _ in range(3):
        pinned.get(4)
    once = list(driver.asked)
    other = Driver()
    second = pinned.open_access(other)

    assert pinned.shelf.read(KEYS[:4], memory=second) == (OK,) * 4
    pinned.shelf.write(KEYS[4:5], memory=second)

    assert driver.asked == once == other.asked
    assert len(once) == 1
    assert pinned.counted() == (1, 0)
    pinned.store.close()
    assert other.pinned == driver.pinned == {}


def test_who_finds_objects_that_others_have_stored_pins_them_when_they_are_read(
    in_memory: Path, pinned: Pinned
) -> None:
    pinned.put(8)
    own = Driver()
    reader = Pinned(in_memory, own)

    assert reader.get(8) == (OK,) * 8

    assert reader.access.pinned_copies > 0
    assert sorted(own.pinned.values()) == [FILE] * -(-8 // PAGES_IN_SEGMENT)
    reader.close()
    assert own.pinned == {}


def test_a_segment_that_others_delete_is_let_go_of_before_it_is_unmapped(
    in_memory: Path, pinned: Pinned, driver: Driver
) -> None:
    pinned.put(21)
    taken = dict(driver.pinned)
    other = Shelf(
        open_memory_store(
            MemoryStoreOptions(
                path=in_memory / "store", capacity=CAPACITY, segment_size=SEGMENT, pin_bytes=0
            )
        ),
        page_bytes=PAGE,
    )

    driver.while_unpinning = other.store.stats  # which waits for whoever has locked the tables

    other.store.delete(KEYS[:21])
    assert driver.pinned == taken  # nobody has looked since
    pinned.store.stats()

    left = dict(driver.pinned)
    assert len(taken) == 3
    assert len(left) == 1
    assert [is_mapped(address) for address in sorted(taken)] == [
        address in left for address in sorted(taken)
    ]
    driver.while_unpinning = lambda: None
    other.store.close()


@pytest.mark.parametrize("pin_bytes", [0, FILE - 1, FILE, 2 * FILE + 1])
def test_no_more_is_pinned_than_may_be(in_memory: Path, driver: Driver, pin_bytes: int) -> None:
    pinned = Pinned(in_memory, driver, pin_bytes=pin_bytes)
    pinned.put(21)

    statuses = pinned.get(21)

    assert statuses == (OK,) * 21
    assert len(driver.pinned) == pin_bytes // FILE
    assert pinned.get(PAGES_IN_SEGMENT) == (OK,) * PAGES_IN_SEGMENT
    assert (pinned.access.pinned_copies > 0) == (pin_bytes >= FILE)
    pinned.close()
    assert driver.pinned == {}


def test_what_cannot_be_pinned_is_counted_and_loaded_as_ever(
    in_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(refuses=True)
    pinned = Pinned(in_memory, driver)

    with caplog.at_level(logging.WARNING):
        pinned.put(16)
        statuses = [pinned.get(16) for _ in range(2)]

    assert statuses == [(OK,) * 16] * 2
    assert len(driver.asked) == 1
    assert [record for record in caplog.records if "cannot be pinned" in record.getMessage()]
    assert len(caplog.records) == 1
    assert pinned.counted() == (0, -(-16 // PAGES_IN_SEGMENT))
    assert pinned.access.pinned_copies == 0
    pinned.close()


def test_pools_in_host_memory_pin_nothing(pinned: Pinned, driver: Driver) -> None:
    assert not HostAccess().pins_host
    pinned.shelf.stock(KEYS[:4])

    assert pinned.shelf.read(KEYS[:4]) == (OK,) * 4

    assert driver.asked == []
    assert pinned.counted() == (0, 0)


def test_an_access_that_is_closed_first_lets_go_and_the_store_goes_on(
    pinned: Pinned, driver: Driver
) -> None:
    pinned.put(4)
    pinned.access.close()
    assert driver.pinned == {}

    pinned.access = pinned.open_access(driver)

    assert pinned.get(4) == (OK,) * 4
    assert pinned.access.pinned_copies > 0


def test_memory_that_the_device_does_not_let_go_of_stays_mapped(in_memory: Path) -> None:
    driver = Driver(keeps=True)
    pinned = Pinned(in_memory, driver)
    pinned.put(4)
    (address,) = driver.pinned

    pinned.store.close()

    assert is_mapped(address)
    assert not list((in_memory / "store" / "segments").iterdir())


class SlowAccess(OpaqueAccess):
    """Its copies from pinned slots begin when a gate is open."""

    gate: Gate

    def start_pinned_scatter(
        self, chunk: StagedChunk, buffer: HostStagingBuffer, host: HostObjects
    ) -> PendingCopy:
        self.gate.pass_through()
        return super().start_pinned_scatter(chunk, buffer, host)


def test_l5_memory_that_a_device_reads_is_neither_let_go_of_nor_unmapped(
    in_memory: Path, driver: Driver
) -> None:
    pinned = Pinned(in_memory, driver, close_seconds=0.05)
    pinned.put(4)
    slow = SlowAccess(
        pinned.device_memory,
        staging_bytes=1 << 20,
        pins=HostPins(driver.register, driver.unregister),
        pinned_run_bytes=1,
    )
    slow.gate = Gate()
    pinned.access.close()

    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(pinned.shelf.read, KEYS[:4], memory=slow)
        slow.gate.wait_for_arrivals()
        taken = dict(driver.pinned)
        with pytest.raises(StoreTimeoutError, match="1 calls still run"):
            pinned.store.close()
        assert driver.pinned == taken
        assert len(taken) == 1
        assert all(map(is_mapped, taken))
        slow.gate.open()
        assert read.result() == (OK,) * 4
    pinned.store.close()

    assert driver.pinned == {}
    assert not any(map(is_mapped, taken))


def test_a_session_that_is_open_when_the_store_is_closed_reads_no_more_and_nothing_is_pinned(
    pinned: Pinned, driver: Driver
) -> None:
    pinned.put(4)
    session = pinned.shelf.open(KEYS[:4])
    assert pinned.shelf.read(KEYS[:4], session=session, memory=pinned.access) == (OK,) * 4

    pinned.store.close()

    assert driver.pinned == {}
    session.close()

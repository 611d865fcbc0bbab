"""A value store does what the contract asks around the few methods of a subclass; the kit runs on one here."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from kvlinker.errors import ContractError, StoreClosedError, StoreError
from kvlinker.store import ObjectKey, ReadStatus, WriteStatus
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker.testing.stores import Damage, OpenStore, StoreTests
from kvlinker.value_store import ValueStore

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
WRITTEN, EXISTS = WriteStatus.WRITTEN, WriteStatus.EXISTS
CAPACITY = 2 << 20


class Jar(ValueStore):
    """Values in a dictionary, the oldest evicted first."""

    def __init__(self, *, max_object_bytes: int = 1 << 20, kept_bytes: int = 4 << 20) -> None:
        super().__init__(
            "jar",
            persistent=False,
            shared=False,
            capacity_bytes=CAPACITY,
            max_object_bytes=max_object_bytes,
            kept_bytes=kept_bytes,
        )
        self.values: dict[ObjectKey, bytes] = {}
        self.breaks = False
        """Whether the next call finds the jar broken."""
        self.intruders: dict[ObjectKey, bytes] = {}
        """What others put while a write looks away."""
        self._lock = threading.Lock()

    def first(self, key: ObjectKey, size: int) -> tuple[bytes, int] | None:
        if self.breaks:
            message = "the jar is broken"
            raise OSError(message)
        value = self.values.get(key)
        return None if value is None else (value[:size], len(value))

    def get(self, key: ObjectKey, start: int, size: int) -> bytes | None:
        value = self.values.get(key)
        return None if value is None else value[start : start + size]

    def put(self, key: ObjectKey, value: memoryview, *, replace: bool) -> WriteStatus:
        with self._lock:
            self.values.update(self.intruders)
            self.intruders.clear()
            if key in self.values and not replace:
                return EXISTS
            self.values.pop(key, None)
            victims = iter([other for other in self.values if not self.is_in_use(other)])
            while self._used() + len(value) > CAPACITY:
                victim = next(victims, None)
                if victim is None:
                    return WriteStatus.FULL
                del self.values[victim]
                self.count("evicted")
            self.values[key] = bytes(value)
            return WRITTEN

    def _used(self) -> int:
        return sum(map(len, self.values.values()))

    def remove(self, key: ObjectKey) -> bool:
        with self._lock:
            return self.values.pop(key, None) is not None

    def keys(self, namespace: bytes) -> Sequence[ObjectKey]:
        return [key for key in [*self.values] if key.startswith(namespace)]

    def usage(self) -> tuple[int, int]:
        with self._lock:
            return len(self.values), self._used()

    def shut(self) -> None:
        self.values.clear()


class TestJar(StoreTests):
    """The whole kit."""

    @pytest.fixture
    def open_store(self) -> OpenStore:
        return Jar

    @pytest.fixture
    def damage(self) -> Damage:
        def flip_last_byte(store: object, key: ObjectKey, payload: bytes) -> None:
            del payload
            assert isinstance(store, Jar)
            value = store.values[key]
            store.values[key] = value[:-1] + bytes([value[-1] ^ 1])

        return flip_last_byte


def test_what_a_subclass_raises_is_an_error_of_the_store_that_names_it() -> None:
    jar = Jar()
    jar.breaks = True

    with pytest.raises(StoreError, match="jar: OSError: the jar is broken") as caught:
        jar.exists(object_keys(1))

    assert isinstance(caught.value.__cause__, OSError)
    assert jar.stats().counters["errors"] == 1


def test_what_is_closed_under_a_call_says_so_whatever_the_call_raises() -> None:
    jar = Jar()

    def close_and_fail() -> None:
        jar.close()
        message = "no such table"
        raise OSError(message)

    with pytest.raises(StoreClosedError, match="jar: the store was closed; open it again"):
        jar.ask(close_and_fail)


def test_shut_is_called_once() -> None:
    calls = []

    class Counting(Jar):
        def shut(self) -> None:
            calls.append(1)

    jar = Counting()
    jar.close()
    jar.close()

    assert calls == [1]


def test_an_object_that_another_writer_stored_meanwhile_exists() -> None:
    shelf = Shelf(jar := Jar())
    (key,) = object_keys(1)
    shelf.stock([key])
    jar.intruders = dict(jar.values)
    jar.values.clear()

    assert shelf.write([key]) == (EXISTS,)
    assert shelf.read([key]) == (OK,)


def test_something_else_that_was_put_under_the_key_meanwhile_is_replaced() -> None:
    shelf = Shelf(jar := Jar())
    (key,) = object_keys(1)
    jar.intruders = {key: b"nobody's object"}

    assert shelf.write([key]) == (WRITTEN,)
    assert shelf.read([key]) == (OK,)


def test_an_object_is_in_use_from_the_opening_of_a_read_to_its_end() -> None:
    shelf = Shelf(jar := Jar())
    keys = object_keys(2)
    shelf.stock(keys)

    first, second = shelf.open(keys), shelf.open(keys[:1])
    first.close()
    first.close()

    assert [jar.is_in_use(key) for key in keys] == [True, False]
    second.close()
    assert not jar.is_in_use(keys[0])


def test_what_finds_no_room_in_host_memory_is_full_and_counted() -> None:
    shelf = Shelf(jar := Jar(kept_bytes=2048))

    statuses = shelf.write(object_keys(4))

    assert statuses == (WRITTEN, WRITTEN, WriteStatus.FULL, WriteStatus.FULL)
    assert jar.stats().counters["no_room"] == 2


def test_k4_what_is_no_namespace_clears_nothing() -> None:
    shelf = Shelf(jar := Jar())
    keys = object_keys(2)
    shelf.stock(keys)

    with pytest.raises(ContractError, match="a namespace has 12 bytes"):
        jar.clear(b"")

    assert jar.exists(keys) == (True, True)


def test_t1_a_value_that_is_no_object_is_corrupt_and_removed() -> None:
    shelf = Shelf(jar := Jar())
    keys = object_keys(2)
    shelf.stock(keys)
    jar.values[keys[0]] = b"nobody's object"

    assert shelf.read(keys) == (CORRUPT, OK)
    assert jar.exists(keys) == (False, True)

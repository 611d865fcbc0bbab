"""The shared tables can be lost, cut or overwritten: they are made again, and never lead to a wrong byte."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from file_shelf import OpenStore, Shelf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlinker.errors import StoreTimeoutError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker_file import recovery, verify
from kvlinker_file.index import ObjectIndex
from kvlinker_file.table_layout import Word

Key = Callable[..., bytes]
OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
FILES = ("index.shared", "index.buckets")


@pytest.fixture
def rebuilds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give a list that grows whenever the tables are made again."""
    made: list[int] = []
    fill_rows = recovery.record_of

    def note(*arguments: object) -> object:
        made.append(1)
        return fill_rows(*arguments)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(recovery, "record_of", note)
    return made


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


# ---- opening ----------------------------------------------------------------------------------


def test_a_store_that_was_closed_is_opened_without_reading_the_catalog(
    open_store: OpenStore, shelf: Shelf, key: Key, rebuilds: list[int]
) -> None:
    keys = [key(i) for i in range(30)]
    for _ in range(3):
        store = open_store()
        shelf.put(store, keys)
        assert shelf.get(store, keys) == (OK,) * 30
        rebuilds_before = len(rebuilds)
        store.close()
        assert shelf.get(open_store(), keys) == (OK,) * 30
        assert len(rebuilds) == rebuilds_before
        open_store().close()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "header", "middle", "symlink"])
def test_tables_that_changed_while_nobody_was_there_are_made_again(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, name: str, damage: str
) -> None:
    keys = [key(i) for i in range(30)]
    store = open_store()
    shelf.put(store, keys)
    store.close()
    path = folder / name
    if damage in ("missing", "symlink"):
        path.unlink()
    if damage == "symlink":
        path.symlink_to(folder / "lock")
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        os.truncate(path, path.stat().st_size - 4096)
    elif damage == "header":
        overwrite(path, 0, b"\xa5" * 64)
    elif damage == "middle":
        overwrite(path, path.stat().st_size // 2, random.Random(1).randbytes(2000))  # noqa: S311 - garbage

    store = open_store()

    assert shelf.get(store, keys) == (OK,) * 30
    assert store.stats().objects == 30
    assert store.stats().counters["lost_at_open"] == 0
    assert shelf.put(store, [key(99)]) == (WriteStatus.WRITTEN,)
    store.close()
    assert verify(folder).intact == 31


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 1 << 30), size=st.integers(1, 9000), where=st.floats(0, 1))
@pytest.mark.parametrize("name", FILES)
def test_garbage_that_is_written_over_tables_in_use_serves_no_wrong_byte(
    open_store: OpenStore,
    folder: Path,
    key: Key,
    name: str,
    seed: int,
    size: int,
    where: float,
) -> None:
    shelf, keys = Shelf(), [key(i) for i in range(30)]
    first, second = open_store(), open_store()
    first.clear(key(0)[:12])
    shelf.put(first, keys)
    path = folder / name
    length = path.stat().st_size
    offset = min(int(where * length), length - size)
    overwrite(path, max(0, offset), random.Random(seed).randbytes(min(size, length)))  # noqa: S311 - garbage

    for store in (second, first):
        statuses = shelf.get(store, keys)  # checks the bytes of what is OK
        assert set(statuses) <= {OK, MISS, CORRUPT}
        store.hold(keys, seconds=1).release()
        shelf.put(store, keys)
    first.close()
    second.close()

    for path in (folder / name for name in FILES):
        path.unlink()
    assert verify(folder).foreign == 0


def test_a_header_that_was_overwritten_is_written_again_by_the_next_who_looks(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key, rebuilds: list[int]
) -> None:
    keys = [key(i) for i in range(30)]
    first, second = open_store(), open_store()
    shelf.put(first, keys)
    hold = first.hold(keys, seconds=60)
    session = second.open_read(shelf.request(keys))
    before = len(rebuilds)
    overwrite(folder / "index.shared", 0, b"\0" * 512)

    assert shelf.get(second, keys) == (OK,) * 30

    assert len(rebuilds) > before
    assert shelf.read(session, keys) == (OK,) * 30
    assert first.exists(keys) == (True,) * 30
    hold.release()
    session.close()
    assert first.delete(keys) == (True,) * 30
    assert second.stats().objects == 0


# ---- making again -----------------------------------------------------------------------------


def test_openers_that_live_keep_holds_pins_and_taken_slots_when_the_tables_are_made_again(
    open_store: OpenStore, make_shelf: type[Shelf], folder: Path, key: Key, rebuilds: list[int]
) -> None:
    first, second = open_store(), open_store()
    shelf, other = (make_shelf(layers=1, row_bytes=1 << 19, pages=4) for _ in range(2))
    shelf.put(first, [key(i) for i in range(3)])
    hold = first.hold([key(0)], seconds=60)
    session = first.open_read(shelf.request([key(1)]))
    first.delete([key(1)])

    def break_tables() -> bool:
        overwrite(folder / "index.shared", 8 * Word.TABLES_MARK, b"\x01")
        seen.append(other.put(second, [key(10), key(11)]))
        return True

    seen: list[tuple[WriteStatus, ...]] = []
    before = len(rebuilds)
    (answer,) = first.write([shelf.batch([key(5)])], shelf.access, may_publish=break_tables)

    assert len(rebuilds) > before
    assert answer == (WriteStatus.WRITTEN,)
    assert shelf.get(second, [key(0), key(5)]) == (OK, OK)
    assert shelf.read(session, [key(1)]) == (OK,)
    assert second.exists([key(1)]) == (False,)
    session.close()
    hold.release()
    for store in (first, second):
        assert set(other.put(store, [key(20 + i) for i in range(4)])) <= {
            WriteStatus.WRITTEN,
            WriteStatus.EXISTS,
        }


def test_a_folder_in_the_place_of_a_segment_file_costs_its_objects_alone(
    open_store: OpenStore, shelf: Shelf, folder: Path, key: Key
) -> None:
    keys = [key(i) for i in range(30)]
    store = open_store()
    shelf.put(store, keys)
    store.close()
    slab = folder / "segments" / "00000001.slab"
    slab.unlink()
    slab.mkdir()
    (slab / "note").write_text("dear")

    store = open_store()

    present = store.exists(keys)
    assert 0 < present.count(False) < 30
    assert shelf.get(store, keys) == tuple(OK if there else MISS for there in present)
    assert set(shelf.put(store, keys)) <= {WriteStatus.WRITTEN, WriteStatus.EXISTS}
    assert shelf.get(store, keys) == (OK,) * 30
    aside = folder / "segments" / "00000001.slab.aside0"
    assert (aside / "note").read_text() == "dear"


def test_objects_that_are_saved_and_cannot_be_shown_are_shown_by_the_next_who_commits(
    open_store: OpenStore,
    shelf: Shelf,
    key: Key,
    rebuilds: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store()
    shelf.put(store, [key(0)])

    def fail(*_: object) -> None:
        msg = "process 7 has been changing its tables for 30 s"
        raise StoreTimeoutError(msg)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectIndex, "add", fail)
        assert shelf.put(store, [key(1), key(2)]) == (WriteStatus.FAILED,) * 2
    assert store.exists([key(0), key(1), key(2)]) == (True, False, False)
    before = len(rebuilds)

    assert shelf.put(store, [key(3)]) == (WriteStatus.WRITTEN,)

    assert len(rebuilds) > before
    assert shelf.get(store, [key(i) for i in range(4)]) == (OK,) * 4
    assert store.stats().objects == 4

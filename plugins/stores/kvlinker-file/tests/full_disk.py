"""Fills the disk under a store and reports what happened; run by test_no_space.py where the disk is small.

Arguments: folder on a disk of some MiB, and `grow`, `far`, `much`, `fill` or `open`.
Prints one line with what was seen.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from file_shelf import Shelf, make_key

from kvlinker.errors import StoreError, StoreFullError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker_file import FileStore, FileStoreOptions

MIB = 1 << 20


def say(*words: object) -> None:
    """Tell the test."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def open_store(folder: Path) -> FileStore:
    """Open a store that may be far larger than the disk."""
    return FileStore(FileStoreOptions(path=folder, capacity=64 * MIB, segment_size=MIB))


def fill_disk(folder: Path) -> None:
    """Leave no space to anybody."""
    with (folder.parent / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"\xee" * size):
                    pass
            except OSError:
                continue


def grow(folder: Path) -> None:
    """Store more than the disk holds; the store must live with what there is."""
    shelf, store = Shelf(row_bytes=64 << 10, pages=1), open_store(folder)
    stored = []
    for i in range(80):
        if shelf.put(store, [make_key(i)]) == (WriteStatus.WRITTEN,):
            stored.append(make_key(i))
        present = [key for key in stored if store.exists([key])[0]]
        for key in present[-3:]:
            assert shelf.get(store, [key]) == (ReadStatus.OK,)
    counters = store.stats().counters
    store.close()
    store = open_store(folder)
    say(len(stored), counters["disk_full"] > 0, counters["evicted"] > 0, store.stats().objects > 3)
    store.close()


def fill(folder: Path) -> None:
    """Let somebody else fill the disk; what is stored can be read, and nothing dies."""
    shelf, store = Shelf(row_bytes=64 << 10, pages=1), open_store(folder)
    keys = [make_key(i) for i in range(6)]
    for key in keys:
        shelf.put(store, [key])
    fill_disk(folder)
    for key in keys:
        assert shelf.get(store, [key], by_layer=True) == (ReadStatus.OK,)
    small = Shelf(row_bytes=100, pages=100)
    seen: set[WriteStatus] = set()
    for i in range(1000, 6000, 100):
        seen.update(small.put(store, [make_key(j) for j in range(i, i + 100)]))
    try:
        store.delete(keys[:1])
    except StoreError as error:
        text = str(error)
        assert "store index" in text
        assert "free space" in text
    assert store.exists(keys[:1]) == (False,)
    (folder.parent / "ballast").unlink()
    assert store.exists(keys[1:]) == (True,) * 5, "nothing is evicted in vain"
    assert small.put(store, [make_key(7)])[0].is_stored
    store.close()
    store = open_store(folder)
    bad = [
        key
        for key in keys[1:]
        if store.exists([key])[0] and shelf.get(store, [key]) != (ReadStatus.OK,)
    ]
    say(sorted(status.value for status in seen), len(bad), store.exists(keys[:1])[0])
    store.close()


def grow_far_below_the_capacity(folder: Path) -> None:
    """Store more than the disk holds where a usual segment is larger than all of it."""
    shelf = Shelf(row_bytes=64 << 10, pages=1)
    store = FileStore(FileStoreOptions(path=folder, capacity=1 << 40))
    keys = [make_key(i) for i in range(200)]
    seen = {shelf.put(store, [key]) for key in keys}
    recent = [key for key in keys[-20:] if shelf.get(store, [key]) == (ReadStatus.OK,)]
    index = sum(
        (folder / name).stat().st_blocks * 512 for name in ("index.shared", "index.buckets")
    )
    counters = store.stats().counters
    say(seen == {(WriteStatus.WRITTEN,)}, len(recent), index < MIB, counters["evicted"] > 0)
    store.close()


def write_too_much(folder: Path) -> None:
    """Write more in one call than the disk has room for; it stores nothing, and evicts nothing for it."""
    shelf, store = Shelf(row_bytes=64 << 10, pages=1), open_store(folder)
    keys = [make_key(i) for i in range(3)]
    for key in keys:
        shelf.put(store, [key])
    many = Shelf(row_bytes=64 << 10, pages=64)
    seen = set(many.put(store, [make_key(i) for i in range(100, 164)]))
    say(
        seen == {WriteStatus.FULL},
        store.exists(keys) == (True,) * 3,
        store.stats().counters["evicted"],
    )
    store.close()


def open_on_full(folder: Path) -> None:
    """Open a store where there is no space at all."""
    fill_disk(folder)
    try:
        open_store(folder)
    except StoreFullError as error:
        say("StoreFullError", error)


def main() -> None:
    """Do what was asked for."""
    folder, what = Path(sys.argv[1]) / "store", sys.argv[2]
    if what == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, MIB // 2))
        what = "grow"
    acts = {
        "grow": grow,
        "far": grow_far_below_the_capacity,
        "fill": fill,
        "much": write_too_much,
        "open": open_on_full,
    }
    acts[what](folder)


if __name__ == "__main__":
    main()

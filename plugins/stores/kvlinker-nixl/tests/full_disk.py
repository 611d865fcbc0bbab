"""Fills the disk under a store, and says what happened; run by test_files.py where the disk is small.

Argument: a folder on a disk of 3 MiB.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker_nixl import Backend, NixlStoreOptions, open_nixl_store


def main(disk: Path) -> str:
    """Return `ok`, or what was wrong."""
    options = NixlStoreOptions(backend=Backend.POSIX, path=disk / "store", capacity=64 << 20)
    store = open_nixl_store(options)
    shelf = Shelf(store, page_bytes=64 << 10)
    shelf.stock(object_keys(8))
    (disk / "others").write_bytes(bytes(2 << 20))
    keys = object_keys(16, chain="more")

    statuses = [shelf.write([key])[0] for key in keys]
    found = shelf.read(keys)

    if not set(statuses) <= {WriteStatus.WRITTEN, WriteStatus.FULL}:
        return f"writes were answered {statuses}"
    if (found[-1] is ReadStatus.OK) != (statuses[-1] is WriteStatus.WRITTEN):
        return f"the last write was answered {statuses[-1]}, its read {found[-1]}"
    if not store.stats().counters["disk_full"]:
        return "nobody noticed that the disk is full"
    store.close()
    return "ok"


if __name__ == "__main__":
    sys.stdout.write(main(Path(sys.argv[1])))

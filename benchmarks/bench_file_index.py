"""Time the file store's index with a million keys: opening it in three ways, a lookup with a hold, and its memory.

Memory is what a process has for itself beside what all share: the mapped files of the tables.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from measuring import Ratio, Row, Scale, duration, in_turn, run_script
from pages import MIB, PagePool

from kvlinker.device import HostAccess
from kvlinker.store import WriteBatch
from kvlinker_file import FileStore, FileStoreOptions

TOPIC = "File store with a million keys"
KEYS, LOOKED_UP = 1_000_000, 4096
LIMIT_SECONDS = 0.005
LIMIT_BYTES = 250
"""Bytes of a key in the memory of one process, when each process had its own index."""
_OBJECT_BYTES = 64
_BATCH = 8192
_TABLES = ("index.shared", "index.buckets")


def options(folder: Path) -> FileStoreOptions:
    """Return how the store is opened."""
    return FileStoreOptions(path=folder / "store", capacity=1024 * MIB)


def keys_of(first: int, count: int) -> tuple[bytes, ...]:
    """Return keys that are spread as digests are."""
    numbers = range(first, first + count)
    return tuple(b"%012d" % 0 + (n * 0x9E3779B97F4A7C15).to_bytes(20, "little") for n in numbers)


def fill(folder: Path, count: int) -> None:
    """Make a store with so many small objects.

    Raises:
        RuntimeError: not all of them are stored.
    """
    pool = PagePool.make("kv", [_OBJECT_BYTES], _BATCH)
    plan = pool.plan
    with closing(FileStore(options(folder))) as store:
        for first in range(0, count, _BATCH):
            batch = WriteBatch(keys=keys_of(first, _BATCH), plan=plan, fingerprint=b"benchmark")
            store.write([batch], HostAccess(), may_publish=lambda: True)
        if store.stats().objects < count:
            msg = f"{store.stats().objects} of {count} objects are stored"
            raise RuntimeError(msg)


def open_and_close(folder: Path, *, is_other: bool = False) -> float:
    """Return the seconds of an opening.

    Args:
        folder: of the store.
        is_other: change the time of the catalog first, so that the tables are made again from it.
    """
    if is_other:
        os.utime(folder / "store" / "index.sqlite")
    start = time.perf_counter()
    store = FileStore(options(folder))
    seconds = time.perf_counter() - start
    store.close()
    return seconds


def own_bytes() -> int:
    """Return the bytes of this process that no file backs."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    return 0


def look_up(store: FileStore, keys: Sequence[bytes]) -> float:
    """Return the seconds of a hold on keys that are all there.

    Raises:
        RuntimeError: they are not.
    """
    start = time.perf_counter()
    hold = store.hold(keys, seconds=60)
    seconds = time.perf_counter() - start
    if not all(hold.present):
        msg = "not every key was found"
        raise RuntimeError(msg)
    hold.release()
    return seconds


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows."""
    count = scale.choose(KEYS, 2 * _BATCH)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        fill(folder, count)
        yield from _openings(folder, count, scale)
        yield from _use(folder, count, scale)


def _openings(folder: Path, count: int, scale: Scale) -> Iterator[Row]:
    alone = in_turn(
        {
            "again": lambda: open_and_close(folder, is_other=True),
            "sound": lambda: open_and_close(folder),
        },
        rounds=scale.rounds,
    )
    with closing(FileStore(options(folder))):
        beside = in_turn({"beside": lambda: open_and_close(folder)}, rounds=scale.rounds)
    seconds = {**alone.seconds, **beside.seconds}
    against = "making the tables again from the catalog"
    for name, how in (("sound", "after a clean end"), ("beside", "beside another process")):
        pairs = zip(seconds["again"], seconds[name], strict=True)
        yield Row(
            topic=TOPIC,
            what=f"opening {count:,} keys {how}",
            against=against,
            ratio=Ratio.of(theirs / ours for theirs, ours in pairs),
            figures=f"{duration(alone.median('again'))} / {duration(sorted(seconds[name])[len(seconds[name]) // 2])}",
        )


def _use(folder: Path, count: int, scale: Scale) -> Iterator[Row]:
    before = own_bytes()
    with closing(FileStore(options(folder))) as store:
        places = range(0, count, max(1, count // LOOKED_UP))
        keys = [keys_of(place, 1)[0] for place in places][:LOOKED_UP]
        times = in_turn({"hold": lambda: look_up(store, keys)}, rounds=3 * scale.rounds, warm_ups=3)
        every = keys_of(0, count)
        for first in range(0, count, _BATCH):
            look_up(store, every[first : first + _BATCH])
        del every
        own = max(0, own_bytes() - before)
        shared = sum((folder / "store" / name).stat().st_size for name in _TABLES)
    yield Row(
        topic=TOPIC,
        what=f"`hold` of {len(keys)} of {count:,} keys",
        against=f"the limit of {LIMIT_SECONDS * 1000:g} ms",
        ratio=Ratio.of(LIMIT_SECONDS / seconds for seconds in times.seconds["hold"]),
        figures=duration(times.median("hold")),
        target=1.0,
    )
    yield Row(
        topic=TOPIC,
        what=f"memory of a process for each of {count:,} keys, once all were held",
        against=f"the {LIMIT_BYTES} B of an index of its own",
        ratio=Ratio.of([LIMIT_BYTES / max(1.0, own / count)]),
        figures=f"{own / count:.0f} B, and {shared / count:.0f} B that all processes share",
        target=1.0,
    )


if __name__ == "__main__":
    run_script(__doc__, measure)

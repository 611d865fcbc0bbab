"""Compare the file store with a plain copy in memory: pages of real models, offloaded and restored.

Each ratio is the speed of the store divided by the speed of copying the same bytes, both measured in turn
in the same run; the table shows medians. The first ratio is to one memcpy of all bytes, the second to a
copy range by range, which is what any store of pages does at least: short copies cannot bypass the caches.
"First" is an offload into files that were just made, whose pages the kernel must still find and clear;
"again" is one into slots of objects that are evicted for it.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvlinker.device import HostAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import ReadRequest, ReadStatus, WriteBatch, WriteStatus
from kvlinker_file import FileStore, FileStoreOptions

FINGERPRINT = b"benchmark"
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Pages of one model: bytes of a page's range in each span, pool by pool."""

    name: str
    pools: Sequence[Sequence[int]]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all pools."""
        return sum(sum(pool) for pool in self.pools)


SHAPES = (
    Shape(name="DSA 61 x 41984 B", pools=[[41984] * 61]),
    Shape(name="GQA 8B 64 x 128 KiB", pools=[[131072] * 64]),
    Shape(
        name="V4 Flash, all pools",
        pools=[
            [149760] * 43,
            [65536] * 21,
            [16384] * 21,
            [37440] * 21,
            [8448] * 21,
            [1728] * 20,
        ],
    ),
    Shape(name="V4 C128 20 x 1728 B", pools=[[1728] * 20]),
)


class Bench:
    """Pools with random content, and a store to move their pages to."""

    def __init__(self, shape: Shape, folder: Path, *, total: int) -> None:
        """Make pools that hold so many bytes."""
        self.pages = max(2, total // shape.page_bytes)
        self.bytes = self.pages * shape.page_bytes
        self.capacity = self.bytes * 5 // 4 + 64 * MIB
        self.folder = folder
        rng = np.random.default_rng(0)
        self.source = rng.integers(0, 255, self.bytes, dtype=np.uint8)
        self.target = np.zeros(self.bytes, dtype=np.uint8)
        self.plans: list[TransferPlan] = []
        self.layers: list[list[TransferPlan]] = []
        self.buffers: list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = []
        for number, pool in enumerate(shape.pools):
            self._add_pool(f"pool{number}", pool, rng)

    def _add_pool(self, name: str, sizes: Sequence[int], rng: np.random.Generator) -> None:
        spans = []
        for i, size in enumerate(sizes):
            rows = 2 * self.pages
            buffer = rng.integers(0, 255, rows * size, dtype=np.uint8)
            self.buffers.append(buffer)
            base = buffer.ctypes.data
            spans.append(
                BufferSpan(
                    base_ptr=base, rows=rows, row_bytes=size, row_stride=size, label=f"{name}[{i}]"
                )
            )
        entry = DevicePoolEntry(
            name=name,
            indices_from_pool="kv",
            components=[spans],
            layer_mapping={i: i for i in range(len(spans))},
            page_size=1,
            rows_are_pages=True,
        )
        pages = entry.prepare_locations(rng.permutation(2 * self.pages)[: self.pages])
        self.plans.append(entry.page_plan(pages))
        layers = [entry.layer_plan(pages, layer) for layer in range(len(spans))]
        self.layers.append([plan for plan in layers if plan is not None])

    def keys(self, salt: int, pool: int) -> tuple[bytes, ...]:
        """Return one key for each page."""
        return tuple(b"%4d%4d%024d" % (salt, pool, page) for page in range(self.pages))

    def open(self, *, verify: bool) -> FileStore:
        """Open the store."""
        options = FileStoreOptions(path=self.folder, capacity=self.capacity, verify=verify)
        return FileStore(options)

    def memcpy(self) -> float:
        """Return the seconds of a plain copy."""
        source, target = self.source.ctypes.data, self.target.ctypes.data
        start = time.perf_counter()
        ctypes.memmove(target, source, self.bytes)
        return time.perf_counter() - start

    def copy_ranges(self) -> float:
        """Return the seconds of a copy from the pools, range by range."""
        seconds, target = 0.0, self.target.ctypes.data
        for plan in self.plans:
            ranges = plan.expand()
            ends = target + np.cumsum(ranges.size) - ranges.size
            columns = ends.tolist(), ranges.address.tolist(), ranges.size.tolist()
            start = time.perf_counter()
            deque(map(ctypes.memmove, *columns), maxlen=0)
            seconds += time.perf_counter() - start
        return seconds

    def offload(self, store: FileStore, salt: int) -> float:
        """Return the seconds of an offload of all pages."""
        batches = [
            WriteBatch(keys=self.keys(salt, pool), plan=plan, fingerprint=FINGERPRINT)
            for pool, plan in enumerate(self.plans)
        ]
        start = time.perf_counter()
        answers = store.write(batches, HostAccess(), may_publish=lambda: True)
        seconds = time.perf_counter() - start
        wrong = {status for answer in answers for status in answer} - {WriteStatus.WRITTEN}
        if wrong:
            message = f"not everything was written: {wrong}"
            raise RuntimeError(message)
        return seconds

    def restore(self, store: FileStore, salt: int, *, by_layer: bool) -> float:
        """Return the seconds of a restore of all pages, whole or layer by layer."""
        memory = HostAccess()
        start = time.perf_counter()
        for pool, whole in enumerate(self.plans):
            request = ReadRequest(
                keys=self.keys(salt, pool),
                object_bytes=whole.object_bytes,
                fingerprint=FINGERPRINT,
            )
            with store.open_read(request) as session:
                for plan in self.layers[pool] if by_layer else [whole]:
                    if set(session.read(plan, memory)) != {ReadStatus.OK}:
                        message = "not everything was read"
                        raise RuntimeError(message)
        return time.perf_counter() - start


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The medians of one action."""

    to_memcpy: float
    to_ranges: float
    gigabytes_per_second: float


def compare(bench: Bench, action: Callable[[], float], rounds: int) -> Row:
    """Measure an action and both copies in turn."""
    to_memcpy, to_ranges, speeds = [], [], []
    for _ in range(rounds):
        whole, by_range, seconds = bench.memcpy(), bench.copy_ranges(), action()
        to_memcpy.append(whole / seconds)
        to_ranges.append(by_range / seconds)
        speeds.append(bench.bytes / seconds / 1e9)
    medians = map(statistics.median, (to_memcpy, to_ranges, speeds))
    return Row(
        **dict(zip(("to_memcpy", "to_ranges", "gigabytes_per_second"), medians, strict=True))
    )


def measure(shape: Shape, folder: Path, *, total: int, rounds: int) -> None:
    """Print the rows of one shape."""
    bench = Bench(shape, folder, total=total)
    bench.memcpy()
    bench.copy_ranges()
    store = bench.open(verify=True)
    salts = itertools.count()
    first = store

    def offload() -> float:
        return bench.offload(first, next(salts))

    report(shape, bench, "offload, first", compare(bench, offload, 1))
    offload()  # fills what is left of the capacity
    report(shape, bench, "offload, again", compare(bench, offload, rounds))
    last = next(salts) - 1
    for verify in (True, False):
        store.close()
        store = bench.open(verify=verify)
        for by_layer in (False, True):
            restore = functools.partial(bench.restore, store, last, by_layer=by_layer)
            restore()
            how = f"{'by layer' if by_layer else 'whole'}, {'' if verify else 'not '}verified"
            report(shape, bench, f"restore, {how}", compare(bench, restore, rounds))
    store.close()


def report(shape: Shape, bench: Bench, action: str, row: Row) -> None:
    """Print one row."""
    print(
        f"{shape.name:21} {bench.pages:6} pages  {action:32} {row.to_memcpy:6.2f} {row.to_ranges:9.2f}"
        f"  {row.gigabytes_per_second:7.2f} GB/s"
    )


def main() -> None:
    """Run all shapes, or those whose name contains a word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="word in a shape's name")
    parser.add_argument("--mib", type=int, default=256, help="bytes moved at a time, in MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="where the store lies")
    arguments = parser.parse_args()
    print(f"{'ratio to copying the same bytes:':71} memcpy range by range")
    for number, shape in enumerate(SHAPES):
        if arguments.only.lower() in shape.name.lower():
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                path = Path(folder) / f"store{number}"
                measure(shape, path, total=arguments.mib * MIB, rounds=arguments.rounds)


if __name__ == "__main__":
    main()

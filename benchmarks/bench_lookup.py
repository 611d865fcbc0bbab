"""Time a lookup: 4096 pages with an object in each of two pools, all of them there, and a hold on all of them.

It blocks an engine's scheduler, so that it has a limit in time and not only a peer.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from measuring import Ratio, Row, Scale, duration, in_turn, missing_peer, run_script, timed
from pages import MIB, PagePool
from peers import PeerUnavailableError
from stores import HiCacheFiles

from kvlinker.device import HostAccess
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker
from kvlinker.pools import DevicePoolGroup
from kvlinker.transfers import PoolTransfer
from kvlinker_file import FileStore, FileStoreOptions

TOPIC = "Lookup"
PAGES = 4096
LIMIT_SECONDS = 0.025
POOLS = {"kv": 256, "indexer": 128}
"""Bytes of an object: a lookup costs the same whatever it is."""


class Ours:
    """A linker over a file store that has all pages."""

    def __init__(self, folder: Path, keys: tuple[str, ...]) -> None:
        """Store all pages."""
        self._transfers = [PoolTransfer(name="kv", keys=keys)]
        self._pages = len(keys)
        self._pools = [PagePool.make(name, [size], len(keys)) for name, size in POOLS.items()]
        self._store = FileStore(FileStoreOptions(path=folder, capacity=256 * MIB))
        self._linker = Linker(
            DevicePoolGroup([pool.entry for pool in self._pools], 1, 1, layout="benchmark/1"),
            self._store,
            KeyNamespace(model_id="model", producer="benchmark"),
            device=HostAccess(),
        )
        self._requests = (f"request {number}" for number in itertools.count())
        self._fill(keys)

    def _fill(self, keys: tuple[str, ...]) -> None:
        slots = self._pools[0].chosen
        self._linker.offload([PoolTransfer(name="kv", keys=keys, device_indices=slots)])
        while not self._linker.num_completed_offloads():
            time.sleep(0.01)
        if not self._linker.pop_completed_offload():
            msg = "not every page was stored"
            raise RuntimeError(msg)

    def look_up(self) -> float:
        """Ask for all pages as a new request; return the seconds."""
        request = next(self._requests)
        start = time.perf_counter()
        boundaries = self._linker.lookup(request, self._transfers)
        seconds = time.perf_counter() - start
        self._linker.reset()  # forgets the request and releases its hold
        if len(boundaries) != self._pages:
            msg = f"{len(boundaries)} of {self._pages} boundaries were found"
            raise RuntimeError(msg)
        return seconds

    def close(self) -> None:
        """Close both."""
        self._linker.close()
        self._store.close()


def page_keys(count: int) -> tuple[str, ...]:
    """Return chained page keys as SGLang makes them: 64 hexadecimal digits."""
    parent = b""
    keys = []
    for _ in range(count):
        parent = hashlib.sha256(parent).digest()
        keys.append(parent.hex())
    return tuple(keys)


def _open_peer(folder: Path, keys: tuple[str, ...]) -> Callable[[], object]:
    """Return the lookup of SGLang's file backend, over files of which it reads no byte."""
    store = HiCacheFiles(folder)
    every = [*keys, *(f"{key}.indexer" for key in keys)]
    store.put(every, store.pieces(len(every), 8))
    return lambda: store.look_up(keys, ["indexer"])


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows."""
    keys = page_keys(scale.choose(PAGES, 256))
    what = f"`Linker.lookup` of {len(keys)} pages in two pools, held"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ours = Ours(Path(folder) / "ours", keys)
        stack.callback(ours.close)
        runs = {"ours": ours.look_up}
        reason = ""
        try:
            runs["peer"] = timed(_open_peer(Path(folder) / "theirs", keys))
        except PeerUnavailableError as error:
            reason = str(error)
        times = in_turn(runs, rounds=3 * scale.rounds, warm_ups=3)
    yield Row(
        topic=TOPIC,
        what=what,
        against=f"the limit of {LIMIT_SECONDS * 1000:g} ms",
        ratio=Ratio.of(LIMIT_SECONDS / seconds for seconds in times.seconds["ours"]),
        figures=duration(times.median("ours")),
        target=1.0,
    )
    against = f"{HiCacheFiles.name}, which holds nothing"
    if reason:
        yield missing_peer(TOPIC, what, against, reason)
        return
    yield Row(
        topic=TOPIC,
        what=what,
        against=against,
        ratio=times.ratio("peer", "ours"),
        figures=times.figures("peer", "ours"),
    )


if __name__ == "__main__":
    run_script(__doc__, measure)

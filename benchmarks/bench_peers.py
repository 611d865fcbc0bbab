"""Compare the file store with other projects' stores of pages on a local disk.

The whole job: pages lie scattered over the buffers of all layers, go to the store, and come back into the
buffers. Others take pages in one piece; they are gathered and scattered with our own copy, the fastest that
we know. "In one piece" leaves that out for them, though not for us. All files are in the page cache, but for
the rows that say "cold".
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from measuring import Row, Scale, Times, duration, in_turn, missing_peer, run_script
from pages import MIB, PagePool, object_keys
from peers import PeerUnavailableError
from stores import HiCacheFiles, LMCacheDisk, PageStore, TorchFiles, slots_of

from kvlinker.device import HostAccess
from kvlinker.store import ReadRequest, ReadStatus, WriteBatch, WriteStatus
from kvlinker_file import FileStore, FileStoreOptions

TOPIC = "File store against other stores on a local disk"
FINGERPRINT = b"benchmark"
TARGET = 3.0
PEER, IN_ONE_PIECE = "peer", "in one piece"
WHY_MISSED = (
    "A page of some MB is one system call for a peer, at the speed at which a kernel copies memory, and nothing checks "
    "the bytes. Ours copies once where a peer copies twice, and makes checksums of what is still in the cache: there "
    "is no room for a factor of 3, unless pages are small, so that a peer's file for each page shows."
)
MOST_ROUNDS, COLD_ROUNDS = 5, 3
SETS = 3
"""How often all pages that move fit into our store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Pages of one model."""

    name: str
    sizes: Sequence[int]
    """Bytes of a page in each layer's buffer."""
    total_mib: int
    """How much is moved at a time."""


SHAPES = (
    Shape(name="DSA pages of 2.6 MB", sizes=[41984] * 61, total_mib=96),
    Shape(name="GQA pages of 8.4 MB", sizes=[131072] * 64, total_mib=96),
    Shape(name="V4 C128 pages of 35 kB", sizes=[1728] * 20, total_mib=12),
)


class Ours:
    """The file store, from pool to disk and back, as full as a store is after a while."""

    name = "kvlinker"

    def __init__(self, pool: PagePool, folder: Path, *, verify: bool) -> None:
        """Open the store in the folder and fill it: every later offload takes the room of older pages."""
        self._pool = pool
        self._keys: tuple[bytes, ...] = ()
        self._offloads = 0
        self._options = FileStoreOptions(
            path=folder, capacity=SETS * pool.plan.total_bytes + 32 * MIB, verify=verify
        )
        self._store = FileStore(self._options)
        for _ in range(SETS + 1):
            self.offload()

    def offload(self) -> float:
        """Store all pages under new keys; return the seconds, those of evicting older ones included."""
        self._offloads += 1
        self._keys = object_keys(len(self._pool.chosen), salt=self._offloads)
        batch = WriteBatch(keys=self._keys, plan=self._pool.plan, fingerprint=FINGERPRINT)
        start = time.perf_counter()
        answers = self._store.write([batch], HostAccess(), may_publish=lambda: True)
        seconds = time.perf_counter() - start
        _expect(answers[0], WriteStatus.WRITTEN)
        return seconds

    def restore(self) -> float:
        """Bring all pages back; return the seconds."""
        plan = self._pool.plan
        request = ReadRequest(
            keys=self._keys, object_bytes=plan.object_bytes, fingerprint=FINGERPRINT
        )
        start = time.perf_counter()
        with self._store.open_read(request) as session:
            answer = session.read(plan, HostAccess())
        seconds = time.perf_counter() - start
        _expect(answer, ReadStatus.OK)
        return seconds

    def cool(self) -> None:
        """Let the kernel forget what it keeps of the files."""
        self._store.close()
        _forget(self._options.path)
        self._store = FileStore(self._options)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def _expect(answer: Sequence[object], status: object) -> None:
    if wrong := set(answer) - {status}:
        msg = f"not every page went through: {wrong}"
        raise RuntimeError(msg)


class Theirs:
    """A peer's store, from pool to disk and back."""

    def __init__(self, pool: PagePool, store: PageStore, folder: Path) -> None:
        """Prepare the host memory that pages pass through."""
        self.name = store.name
        self._pool = pool
        self._store = store
        self._folder = folder
        self._keys = [str(number) for number in range(len(pool.chosen))]
        self._pieces = store.pieces(len(self._keys), pool.plan.object_bytes)
        self._slots = slots_of(self._pieces)
        self._stored = False

    def offload(self, *, gather: bool = True) -> float:
        """Store all pages; return the seconds."""
        if self._stored:
            self._store.remove(self._keys)
        plan = self._pool.plan
        start = time.perf_counter()
        if gather:
            HostAccess().copy_out(plan, self._slots)
        self._store.put(self._keys, self._pieces)
        self._stored = True
        return time.perf_counter() - start

    def restore(self, *, scatter: bool = True) -> float:
        """Bring all pages back; return the seconds."""
        plan = self._pool.plan
        start = time.perf_counter()
        pieces = self._store.get(self._keys)
        if scatter:
            HostAccess().copy_in(plan, slots_of(pieces))
        seconds = time.perf_counter() - start
        self._store.release()
        return seconds

    def cool(self) -> None:
        """Let the kernel forget what it keeps of the files."""
        _forget(self._folder)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def _forget(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows of all shapes and peers."""
    for shape in SHAPES:
        total = scale.choose(shape.total_mib, 8) * MIB
        pool = PagePool.make("kv", shape.sizes, max(3, total // sum(shape.sizes)))
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            ours = [
                Ours(pool, Path(folder) / name, verify=verify)
                for name, verify in (("verified", True), ("unverified", False))
            ]
            for store in ours:
                stack.callback(store.close)
            for peer in _peers(pool):
                yield from _against(shape.name, peer, pool, Path(folder), ours, scale)


@dataclass(frozen=True, slots=True)
class _Peer:
    name: str
    open: Callable[[Path], PageStore]


def _peers(pool: PagePool) -> list[_Peer]:
    lmcache = functools.partial(LMCacheDisk, host_bytes=4 * pool.plan.total_bytes)
    return [
        _Peer(TorchFiles.name, TorchFiles),
        _Peer(HiCacheFiles.name, HiCacheFiles),
        _Peer(LMCacheDisk.name, lmcache),
    ]


def _against(
    shape: str, peer: _Peer, pool: PagePool, folder: Path, ours: Sequence[Ours], scale: Scale
) -> Iterator[Row]:
    place = folder / peer.name.replace(" ", "-")
    try:
        theirs = Theirs(pool, peer.open(place), place)
    except PeerUnavailableError as error:
        yield missing_peer(TOPIC, shape, peer.name, str(error))
        return
    try:
        yield from _compare(shape, theirs, ours[0], ours[1], scale)
    finally:
        theirs.close()
        shutil.rmtree(place)


def _compare(
    shape: str, theirs: Theirs, verified: Ours, unverified: Ours, scale: Scale
) -> Iterator[Row]:
    offloads = in_turn(
        {
            "offload": verified.offload,
            PEER: theirs.offload,
            IN_ONE_PIECE: functools.partial(theirs.offload, gather=False),
        },
        rounds=min(MOST_ROUNDS, scale.rounds),
    )
    restores = in_turn(
        {
            "restore, verified": verified.restore,
            "restore, not verified": unverified.restore,
            PEER: theirs.restore,
            IN_ONE_PIECE: functools.partial(theirs.restore, scatter=False),
        },
        rounds=min(MOST_ROUNDS, scale.rounds),
    )
    cold = in_turn(
        {"restore, verified, cold": _cooled(verified), PEER: _cooled(theirs)},
        rounds=min(COLD_ROUNDS, scale.rounds),
        warm_ups=0,
    )
    for times in (offloads, restores, cold):
        for ours in times.seconds:
            if ours not in {PEER, IN_ONE_PIECE}:
                yield _row(shape, theirs.name, times, ours)


def _row(shape: str, peer: str, times: Times, ours: str) -> Row:
    figures = times.figures(PEER, ours)
    if IN_ONE_PIECE in times.seconds:
        figures += f"; {IN_ONE_PIECE} {duration(times.median(IN_ONE_PIECE))}"
    return Row(
        topic=TOPIC,
        what=f"{shape}: {ours}",
        against=peer,
        ratio=times.ratio(PEER, ours),
        figures=figures,
        target=TARGET,
        why_missed=WHY_MISSED,
    )


def _cooled(store: Ours | Theirs) -> Callable[[], float]:
    def restore() -> float:
        store.cool()
        return store.restore()

    return restore


if __name__ == "__main__":
    run_script(__doc__, measure)

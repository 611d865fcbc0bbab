"""What can be asked of a store in a folder: what it holds, whether it is right, to make it smaller.

Others may have it open meanwhile: `inspect` reads the catalog, and the other two open the store beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.errors import ContractError, StoreError, StoreFormatError
from kvlinker.frames import FrameStatus, decode_headers
from kvlinker.keys import NAMESPACE_BYTES, checked_namespace
from kvlinker_file.ages import now_micros
from kvlinker_file.blocks import blocks_of
from kvlinker_file.catalog import Catalog, split_places
from kvlinker_file.directory import FORMAT_VERSION, StoreDirectory
from kvlinker_file.opening import open_state
from kvlinker_file.options import Durability, FileStoreOptions
from kvlinker_file.segments import SlotBlock, checksum
from kvlinker_file.state import StoreState
from kvlinker_file.tables import SharedTables

__all__ = [
    "NamespaceReport",
    "PruneReport",
    "SegmentReport",
    "StoreReport",
    "VerifyReport",
    "inspect",
    "prune",
    "verify",
]

_MICROS = 1_000_000
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReport:
    """One slab file."""

    number: int
    file_bytes: int
    object_bytes: int
    """Payload of each of its objects."""
    ranges: int
    """Ranges of each object that have a checksum of their own."""
    slots: int
    objects: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceReport:
    """The objects of one namespace, known by its digest."""

    namespace: bytes
    objects: int
    payload_bytes: int
    last_used: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """What a store holds."""

    path: Path
    format_version: int
    capacity_bytes: int | None
    """The capacity it was opened with last; None for a store that was never opened."""
    disk_bytes: int
    """Bytes of all its files."""
    objects: int
    payload_bytes: int
    segments: tuple[SegmentReport, ...]
    namespaces: tuple[NamespaceReport, ...]
    """Largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What became of reading everything."""

    objects: int
    intact: int
    foreign: int
    """Objects whose slot holds something else, or nothing."""
    corrupt: int
    """Objects with changed bytes."""
    dropped: int
    """Objects that were removed for that."""
    payload_bytes: int

    @property
    def is_clean(self) -> bool:
        """Whether every object is what was written."""
        return self.intact == self.objects


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What pruning removed and left."""

    removed: int
    objects: int
    """Objects that are left."""
    freed_bytes: int
    """Bytes that the disk got back: only files whose last object went are deleted, and the index may grow meanwhile."""
    disk_bytes: int


# ---- inspect ----------------------------------------------------------------------------------


def inspect(path: str | PathLike[str]) -> StoreReport:
    """Return what a store holds, from its catalog alone; it may be open, and is asked between two changes.

    Raises:
        StoreFormatError: there is no store of this version.
        StoreError: it cannot be read.
    """
    return _inspect(path)[0]


def _inspect(path: str | PathLike[str]) -> tuple[StoreReport, Durability]:
    """Return what a store holds, and how durable it was opened last."""
    with (
        closing(StoreDirectory(Path(path).absolute(), create=False)) as directory,
        directory.openers.committing(),
    ):
        directory.check_not_inherited()
        index_bytes, stamp = directory.index_bytes(), directory.index_stamp()
        with closing(Catalog(directory.index_path, durability=Durability.PROCESS)) as catalog:
            report, facts = _report(directory.path, catalog, index_bytes), catalog.facts()
        SharedTables.note_new_stamp(directory, stamp)
    is_durable = facts.get("durability") == Durability.DISK.value
    return report, Durability.DISK if is_durable else Durability.PROCESS


def _report(path: Path, catalog: Catalog, index_bytes: int) -> StoreReport:
    segments, places, ticks, keys = _catalog_columns(catalog)
    numbers, _ = split_places(places)
    sizes = np.zeros(len(places), dtype=np.int64)
    for segment in segments:
        sizes[numbers == segment.number] = segment.object_bytes
    capacity = catalog.facts().get("capacity")
    return StoreReport(
        path=path,
        format_version=FORMAT_VERSION,
        capacity_bytes=capacity if isinstance(capacity, int) else None,
        disk_bytes=index_bytes + sum(segment.file_bytes for segment in segments),
        objects=len(keys),
        payload_bytes=int(sizes.sum()),
        segments=segments,
        namespaces=_namespaces(keys, sizes, ticks),
    )


def _catalog_columns(
    catalog: Catalog,
) -> tuple[tuple[SegmentReport, ...], IndexArray, IndexArray, list[bytes]]:
    """Return segments, and place, time of use and key of each object in them."""
    records = catalog.segments()
    known = {record.number for record in records}
    found = [(place, used, key) for part in catalog.objects() for place, _, used, key in part]
    places = np.array([place for place, _, _ in found], dtype=np.int64)
    numbers, _ = split_places(places)
    is_known = np.isin(numbers, np.array(sorted(known), dtype=np.int64))
    chosen = np.flatnonzero(is_known).tolist()
    segments = tuple(
        SegmentReport(
            number=record.number,
            file_bytes=record.file_bytes,
            object_bytes=record.kind.payload_bytes,
            ranges=record.kind.ranges,
            slots=record.slots,
            objects=int((numbers == record.number).sum()),
        )
        for record in records
    )
    ticks = np.array([found[i][1] for i in chosen], dtype=np.int64)
    return segments, places[is_known], ticks, [found[i][2] for i in chosen]


def _namespaces(
    keys: list[bytes], sizes: IndexArray, ticks: IndexArray
) -> tuple[NamespaceReport, ...]:
    members: dict[bytes, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key[:NAMESPACE_BYTES], []).append(i)
    reports = [
        NamespaceReport(
            namespace=namespace,
            objects=len(chosen),
            payload_bytes=int(sizes[chosen].sum()),
            last_used=int(ticks[chosen].max()) / _MICROS,
        )
        for namespace, chosen in members.items()
    ]
    return tuple(sorted(reports, key=lambda report: (-report.payload_bytes, report.namespace)))


# ---- verify -----------------------------------------------------------------------------------


@contextmanager
def _open(path: str | PathLike[str]) -> Iterator[StoreState]:
    """Open the store with the capacity that it was opened with last."""
    report, durability = _inspect(path)
    if report.capacity_bytes is None:
        msg = f"file store {report.path}: its index does not say how large it may be; open it with a capacity first"
        raise StoreFormatError(msg)
    options = FileStoreOptions(
        path=report.path, capacity=report.capacity_bytes, durability=durability
    )
    with closing(open_state(options, create=False)) as state:
        yield state


def verify(path: str | PathLike[str], *, drop: bool = False) -> VerifyReport:
    """Read every object and compare every checksum.

    Args:
        path: of the store.
        drop: remove the objects that are not right.

    Raises:
        StoreFormatError: there is no store of this version.
        StoreError: it cannot be read.
    """
    foreign: list[int] = []
    corrupt: list[int] = []
    objects = size = 0
    with _open(path) as state:
        with state.changing():
            every = state.index.all_rows()
            state.marks.pin(every)
        layouts = state.tables.rows.layout[every]
        objects, is_unread = len(every), np.ones(len(every), dtype=np.bool_)
        for layout, fingerprint in state.catalog.layouts().items():
            positions = np.flatnonzero(layouts == layout)
            rows = every[positions]
            blocks, failed = blocks_of(state, rows)
            if len(failed):
                msg = f"file store {state.options.path}: {len(failed)} objects cannot be read now; see the log"
                raise StoreError(msg)
            for chosen, block in blocks:
                is_unread[positions[chosen]] = False
                size += len(chosen) * block.kind.payload_bytes
                step = max(1, _CHUNK_BYTES // block.kind.slot_bytes)
                for start in range(0, len(chosen), step):
                    part = slice(start, start + step)
                    status = _status(state, rows[chosen[part]], block.select(part), fingerprint)
                    foreign.extend(rows[chosen[part]][status == FrameStatus.FOREIGN].tolist())
                    corrupt.extend(rows[chosen[part]][status == FrameStatus.BROKEN].tolist())
        foreign.extend(every[is_unread].tolist())  # their file is gone
        wrong = np.array(foreign + corrupt, dtype=np.int64)
        if drop and len(wrong):
            state.drop_corrupt(wrong)
        state.let_go(every)
    return VerifyReport(
        objects=objects,
        intact=objects - len(wrong),
        foreign=len(foreign),
        corrupt=len(corrupt),
        dropped=len(wrong) if drop else 0,
        payload_bytes=size,
    )


def _status(
    state: StoreState, rows: IndexArray, block: SlotBlock, fingerprint: bytes
) -> IndexArray:
    """[objects] FrameStatus of each object, its payload included."""
    headers = decode_headers(
        block.read_headers(),
        ranges=block.kind.ranges,
        keys=state.index.keys_of(rows),
        fingerprint=fingerprint,
        payload_bytes=block.kind.payload_bytes,
        checksum=checksum,
    )
    status = headers.status.astype(np.int64)
    for i in np.flatnonzero(status == FrameStatus.INTACT).tolist():
        found = block.select(slice(i, i + 1)).checksums(headers.offsets[i], headers.sizes[i])
        if not np.array_equal(found[0], headers.checksums[i]):
            status[i] = FrameStatus.BROKEN
    return status


# ---- prune ------------------------------------------------------------------------------------


def prune(
    path: str | PathLike[str],
    *,
    to_bytes: int | None = None,
    older_than: float | None = None,
    namespace: bytes | None = None,
) -> PruneReport:
    """Remove objects from a store.

    Args:
        path: of the store.
        to_bytes: remove what was used least recently, file by file, until the store takes no more on disk.
        older_than: remove what was not used for so many seconds; with `namespace`, only there.
        namespace: alone: remove all of it.

    Raises:
        ContractError: nothing to prune by, or `to_bytes` together with a namespace.
        StoreFormatError: there is no store of this version.
        StoreError: it cannot be read or written.
    """
    if to_bytes is None and older_than is None and namespace is None:
        msg = "prune needs something to prune by: to_bytes, older_than or namespace"
        raise ContractError(msg)
    if to_bytes is not None and namespace is not None:
        msg = (
            "prune cannot make a store smaller within one namespace; files hold objects of several"
        )
        raise ContractError(msg)
    if namespace is not None:
        checked_namespace(namespace)
    before = inspect(path).disk_bytes
    with _open(path) as state:
        objects = len(state.index)
        if older_than is not None or namespace is not None:
            _remove(state, now_micros() - int((older_than or 0) * _MICROS), namespace or b"")
        if to_bytes is not None:
            _shrink(state, to_bytes)
        state.save_removals(keep=0)
        left = len(state.index)
    after = inspect(path).disk_bytes
    return PruneReport(
        removed=objects - left,
        objects=left,
        freed_bytes=max(0, before - after),
        disk_bytes=after,
    )


def _remove(state: StoreState, before: int, prefix: bytes) -> None:
    with state.changing():
        rows = state.ages.older_than(before + 1)
        keys = state.index.keys_of(rows)
        chosen = rows[[key.startswith(prefix) for key in keys]]
        state.index.remove(chosen)
    state.save_removals()


def _shrink(state: StoreState, to_bytes: int) -> None:
    for segment in sorted(state.space, key=state.space.mean_tick):
        state.truncate_log()
        if state.used_bytes() <= to_bytes:
            return
        with state.changing():
            if segment in list(state.space):  # others delete files and cut them anew meanwhile
                state.index.remove(state.index.rows_in(segment))
        state.save_removals(keep=0)

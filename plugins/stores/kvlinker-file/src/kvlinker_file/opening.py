"""Opening a store: beside those who have it open, from tables that are sound, or from what the catalog names."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvlinker.errors import StoreBusyError
from kvlinker_file.catalog import (
    BASE_BYTES,
    Catalog,
    CatalogChange,
    DamagedCatalogError,
    SegmentRecord,
)
from kvlinker_file.directory import StoreDirectory
from kvlinker_file.options import Durability, FileStoreOptions
from kvlinker_file.os_errors import NO_SPACE, typed_os_errors
from kvlinker_file.recovery import (
    Saved,
    clear_seats,
    commits_of,
    fill_tables,
    record_of,
    sensible,
    without,
)
from kvlinker_file.space import SlabSpace
from kvlinker_file.state import StoreState
from kvlinker_file.table_layout import MAX_SEATS, TableConfig, Word, table_bytes
from kvlinker_file.tables import DamagedTablesError, SharedTables

__all__ = ["open_state"]

_log = logging.getLogger(__name__)

_EVERY_SEAT = (1 << MAX_SEATS) - 1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def open_state(
    options: FileStoreOptions,
    *,
    create: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> StoreState:
    """Open a store and return its state.

    Args:
        options: where, and how much.
        create: make the store where there is none.
        clock: seconds, for the expiry of holds; the same one for all who have it open.

    Raises:
        StoreBusyError: another opener has it open with another capacity or durability, or 64 have it open.
        StoreTimeoutError: another process keeps its lock.
        StoreFormatError: it holds no store of this version.
        StoreFullError: the disk is full.
        StoreError: it cannot be read or written.
    """
    directory = StoreDirectory(options.path, create=create)
    try:
        with typed_os_errors(f"file store {options.path}"):
            with directory.openers.committing():
                directory.check_not_inherited()
                _warn_of_small_disk(directory, options)
                if others := directory.openers.take_seat():
                    state = _attach(options, directory, others, clock)
                else:
                    state = _open_alone(options, directory, clock)
            try:
                state.take_part()
            except BaseException:
                state.abandon()
                raise
            return state
    except BaseException:
        directory.close()
        raise


def _warn_of_small_disk(directory: StoreDirectory, options: FileStoreOptions) -> None:
    """Say that the capacity can never be reached: whoever chose it expects more than there will be."""
    size, _ = directory.disk_bytes()
    if size < options.capacity:
        _log.warning(
            "%s: the capacity is %d B and its whole file system has %d B: objects are evicted when that is "
            "full, and nothing else has room on it then; set a capacity that fits",
            options.path,
            options.capacity,
            size,
        )


def _config(options: FileStoreOptions) -> TableConfig:
    boot = uuid.UUID(_boot_id()).bytes if _boot_id() else bytes(16)
    is_durable = options.durability is Durability.DISK
    return TableConfig(capacity=options.capacity, is_durable=is_durable, boot=boot)


def _boot_id() -> str:
    with suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return ""


# ---- beside others ----------------------------------------------------------------------------


def _attach(
    options: FileStoreOptions,
    directory: StoreDirectory,
    others: Sequence[int],
    clock: Callable[[], float],
) -> StoreState:
    found = TableConfig.of_words(SharedTables.read_words(directory))
    _check_agreement(options, directory.openers.pid_of(others[0]), found)
    tables = SharedTables(directory, _config(options))
    catalog = Catalog(directory.index_path, durability=options.durability)
    try:
        if not _is_proven(catalog.facts()):
            options = replace(
                options, verify=True
            )  # what they verify at each read, nobody else did
    except BaseException:
        catalog.close()
        raise
    return _state(options, directory, catalog, tables, clock)


def _state(
    options: FileStoreOptions,
    directory: StoreDirectory,
    catalog: Catalog,
    tables: SharedTables,
    clock: Callable[[], float],
) -> StoreState:
    try:
        return StoreState(
            options=options,
            directory=directory,
            catalog=catalog,
            tables=tables,
            clock=clock,
        )
    except BaseException:
        catalog.close()
        raise


def _check_agreement(options: FileStoreOptions, pid: str, found: TableConfig | None) -> None:
    """Raise StoreBusyError where this opener and the others do not want the same."""
    where = f"file store {options.path}: is in use by process {pid}"
    if found is None:
        msg = f"{where}, and its shared tables cannot be read; close it there"
        raise StoreBusyError(msg)
    config = _config(options)
    if found.boot != config.boot:
        msg = f"{where} of another machine; one directory serves the processes of one machine"
        raise StoreBusyError(msg)
    if found.capacity != config.capacity:
        msg = (
            f"{where} with a capacity of {found.capacity} B, this opener wants {config.capacity} B; "
            f"open it with the same one, or close it there"
        )
        raise StoreBusyError(msg)
    if found.is_durable != config.is_durable:
        theirs = Durability.DISK if found.is_durable else Durability.PROCESS
        msg = (
            f"{where} with durability {theirs.value!r}, this opener wants {options.durability.value!r}; "
            f"open it with the same one, or close it there"
        )
        raise StoreBusyError(msg)


# ---- alone ------------------------------------------------------------------------------------


def _open_alone(
    options: FileStoreOptions,
    directory: StoreDirectory,
    clock: Callable[[], float],
) -> StoreState:
    try:
        return _open_catalog(options, directory, clock)
    except DamagedCatalogError as error:
        _log.warning("%s: begins empty, its index is damaged: %s", options.path, error)
    directory.remove_index()
    state = _open_catalog(options, directory, clock)
    state.count("index_lost")
    return state


def _open_catalog(
    options: FileStoreOptions,
    directory: StoreDirectory,
    clock: Callable[[], float],
) -> StoreState:
    stamp = directory.index_stamp()
    catalog = Catalog(directory.index_path, durability=options.durability)
    try:
        facts = catalog.facts()
        is_trusted = _is_proven(facts) or options.verify
        tables = _sound_tables(directory, _config(options), facts, stamp) if is_trusted else None
        is_sound = tables is not None
        if not is_sound:
            catalog.check()
        tables = tables or SharedTables.make(directory, _config(options))
        tables.words[Word.COMMIT_MARK] |= np.uint64(1)
        was_closed = bool(tables.words[Word.CHECKSUM])
        tables.words[Word.CHECKSUM] = 0
        state = _state(options, directory, catalog, tables, clock)
    except BaseException:
        catalog.close()
        raise
    try:
        if is_sound:
            state.space.refresh()
            if not was_closed:  # whatever seats its openers had, none of them lives
                clear_seats(tables, state.space, state.index, _EVERY_SEAT)
            _note_opening(state, facts)
        else:
            _fill(state, facts, is_trusted=is_trusted)
    except BaseException:
        state.release()
        raise
    tables.words[Word.COMMIT_MARK] += np.uint64(1)
    return state


def _sound_tables(
    directory: StoreDirectory, config: TableConfig, facts: Mapping[str, object], stamp: int
) -> SharedTables | None:
    """Return the tables that the last openers left, if they are what the catalog and the files are."""
    words = SharedTables.read_words(directory)
    found = TableConfig.of_words(words)
    is_whole = (
        found is not None
        and found.capacity == config.capacity
        and not words[Word.TABLES_MARK] % 2
        and not words[Word.COMMIT_MARK] % 2
        and words[Word.STAMP] == stamp
        and words[Word.COMMITS] == facts.get("commits")
        and (words[Word.CHECKSUM] or found.boot == config.boot)
    )
    if found is None or not is_whole:
        return None
    try:
        tables = SharedTables(directory, found)
        SlabSpace(tables, directory, segment_size=0).refresh()
    except DamagedTablesError:
        return None
    if words[Word.CHECKSUM] and tables.checksum() != words[Word.CHECKSUM]:
        return None
    table = tables.segments[tables.segments["incarnation"] > 0]
    sizes = dict(zip(table["number"].tolist(), table["file_bytes"].tolist(), strict=True))
    if directory.segment_numbers() != sizes.keys():
        return None
    if not all(directory.is_whole(number, size) for number, size in sizes.items()):
        return None
    tables.adopt(config)
    return tables


def _is_proven(facts: Mapping[str, object]) -> bool:
    """Whether the bytes on the disk must be what was written: the machine has not restarted, or all were synced."""
    return facts.get("synced") == 1 or (facts.get("boot") == _boot_id() != "")


def _fill(state: StoreState, facts: Mapping[str, object], *, is_trusted: bool) -> None:
    """Make the tables from the catalog and the files, and let the catalog forget the rest."""
    catalog, directory = state.catalog, state.directory
    saved, places = sensible(catalog)
    kept = _within_capacity(catalog.segments(), saved, state) if is_trusted else ()
    for number in directory.segment_numbers() - {record.number for record in kept}:
        directory.remove_segment(number)
    kept = _numbered(record for record in kept if _is_there(state, record))
    objects = saved.select(record_of(saved.places, kept) >= 0)
    state.tables.reserve(sum(record.slots for record in kept))
    state.tables.words[Word.COMMITS] = commits_of(facts)
    fill_tables(state.tables, state.space, state.index, records=kept, saved=objects, living=0)
    state.counters["lost_at_open"] += len(places) - len(objects.places)
    numbers = {record.number for record in kept}
    _note_opening(
        state,
        facts,
        removed=without(places, objects.places),
        removed_segments=[n for n in catalog.segment_numbers() if n not in numbers],
        segments=kept,
    )


def _numbered(records: Iterable[SegmentRecord]) -> tuple[SegmentRecord, ...]:
    """Return segments with rows that follow each other; nobody else has marks in the old ones."""
    found: list[SegmentRecord] = []
    for record in records:
        found.append(replace(record, first_row=found[-1].end_row if found else 0))
    return tuple(found)


def _within_capacity(
    records: Sequence[SegmentRecord], saved: Saved, state: StoreState
) -> tuple[SegmentRecord, ...]:
    """Return the segments that fit into the capacity, those used most recently first."""
    chosen = record_of(saved.places, records)
    is_in = chosen >= 0
    objects = np.bincount(chosen[is_in], minlength=len(records))
    ticks = np.bincount(chosen[is_in], weights=saved.ticks[is_in], minlength=len(records))
    mean = ticks / np.maximum(objects, 1)
    config = state.tables.config
    left, rows = config.capacity - BASE_BYTES, 0
    kept: list[SegmentRecord] = []
    for i in np.argsort(-mean, kind="stable").tolist():
        needed = records[i].cost + table_bytes(config, rows + records[i].slots)
        if needed <= left and len(kept) < config.segment_limit:
            kept.append(records[i])
            left -= records[i].cost
            rows += records[i].slots
    return tuple(kept)


def _is_there(state: StoreState, record: SegmentRecord) -> bool:
    """Whether a segment's file is what was made; holes in it are filled, and it is deleted where that cannot be."""
    try:
        descriptor = state.directory.open_segment(record.number, record.file_bytes)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        descriptor = None
    if descriptor is None:
        _log.warning("%s: segment %d is damaged", state.options.path, record.number)
        state.directory.remove_segment(record.number)
        return False
    os.close(descriptor)
    return True


def _note_opening(
    state: StoreState,
    facts: Mapping[str, object],
    *,
    removed: Sequence[int] = (),
    removed_segments: Sequence[int] = (),
    segments: Sequence[SegmentRecord] = (),
) -> None:
    synced = facts.get("synced") == 1
    if state.is_durable and not synced and (_is_proven(facts) or not list(state.space)):
        for segment in state.space:
            segment.sync()
        synced = True
    is_proven = synced or _is_proven(facts) or not list(state.space)
    # Objects from before a restart, which are verified at each read, stay a doubt for who does not verify.
    boot = _boot_id() if is_proven else str(facts.get("boot", ""))
    state.save(
        CatalogChange(
            removed=removed,
            removed_segments=removed_segments,
            segments=segments,
            facts=(
                ("boot", boot),
                ("synced", int(synced)),
                ("capacity", state.options.capacity),
                ("durability", state.options.durability.value),
            ),
        )
    )
    state.catalog.truncate_log()
    state.note_stamp()

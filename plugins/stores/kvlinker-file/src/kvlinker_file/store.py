"""The file store: the contract's methods, each a few lines over the state of the open directory."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from kvlinker.device import DeviceAccess
from kvlinker.errors import ContractError
from kvlinker.keys import check_keys, checked_namespace
from kvlinker.store import (
    Hold,
    ObjectKey,
    ReadRequest,
    ReadSession,
    Store,
    StoreCapabilities,
    StoreStats,
    WriteBatch,
    WriteStatus,
)
from kvlinker_file.catalog import layout_number
from kvlinker_file.holds import FileHold
from kvlinker_file.index import ABSENT
from kvlinker_file.opening import open_state
from kvlinker_file.options import FileStoreOptions
from kvlinker_file.pinning import PIN_COUNTERS
from kvlinker_file.selftest import run_self_test
from kvlinker_file.sessions import FileReadSession
from kvlinker_file.writing import write_batches

__all__ = ["FileStore"]

_log = logging.getLogger(__name__)

_CLEAR_KEYS = 4096
"""Keys that `clear` removes under one lock, so that nobody waits long."""


class FileStore(Store):
    """Objects in slab files of one directory, which other stores may have open too."""

    def __init__(
        self,
        options: FileStoreOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        is_temporary: bool = False,
        pin_bytes: int = 0,
    ) -> None:
        """Open the directory, or make it.

        Args:
            options: see FileStoreOptions.
            clock: seconds, for the expiry of holds and whatever else is done from time to time.
            is_temporary: remove every object when this one closes the store and nobody else has it open.
            pin_bytes: for a directory in memory: bytes of its files that are pinned for devices at once.

        Raises:
            StoreBusyError: another process has it open with another capacity or durability, or 64 have it open.
            StoreTimeoutError: another process keeps its lock; the message names it.
            StoreFormatError: it is no store of this version.
            StoreFullError: the disk is full.
            StoreError: it cannot be read or written.
        """
        self._state = open_state(options, clock=clock)
        self._state.is_temporary = is_temporary
        if pin_bytes:
            self._state.pins.limit_bytes = pin_bytes
            self._state.counters.update(dict.fromkeys(PIN_COUNTERS, 0))
        _log.info(
            "kvlinker: file store in %s, with a capacity of %d B and durability %s",
            options.path,
            options.capacity,
            options.durability.value,
        )
        # Runs at exit too, so that a store that nobody closed is saved all the same.
        self._finalizer = weakref.finalize(self, self._state.close)
        self._capabilities = StoreCapabilities(
            persistent=not is_temporary,
            shared=True,
            ranged_reads=True,
            atomic_batches=True,
            leases=True,
            max_object_bytes=self._state.space.largest_payload(),
        )
        if options.self_test:
            try:
                run_self_test(self)
            except BaseException:
                self.close()
                raise

    @property
    def capabilities(self) -> StoreCapabilities:
        """See Store."""
        return self._capabilities

    # ---- looking ------------------------------------------------------------------------------

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; a look into memory, no system call unless the tables change at that moment."""
        state = self._state
        with state.using():
            found = state.index.contains(keys)
            if found is None:
                with state.changing():
                    found = tuple((state.index.find(keys) != ABSENT).tolist())
        return found

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        """See Store.

        Raises:
            ContractError: `seconds` is no positive number.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            msg = f"a hold lasts a positive number of seconds, got {seconds}"
            raise ContractError(msg)
        state = self._state
        with state.using(), state.changing():
            state.holds.expire()
            rows = state.index.find(keys)
            is_present = rows != ABSENT
            state.ages.touch(rows[is_present])
            number = state.holds.add(rows[is_present], seconds)
        return FileHold(tuple(is_present.tolist()), partial(self._release, number))

    def _release(self, number: int) -> None:
        with self._state.letting_go() as is_open:
            if is_open:
                with self._state.changing():
                    self._state.holds.remove(number)

    def stats(self) -> StoreStats:
        """See Store; the bytes are those of all files on the disk, reserved ones included."""
        state = self._state
        with state.using():
            used_bytes = state.used_bytes()
            objects, counters = len(state.index), dict(state.counters)
        return StoreStats(
            objects=objects,
            used_bytes=used_bytes,
            capacity_bytes=state.options.capacity,
            counters=counters,
        )

    def namespace_bytes(self, namespace: bytes) -> int:
        """See Store; what every process has written that has the directory open, or had."""
        state = self._state
        with state.using(), state.changing():
            return state.index.payload_bytes_of(namespace)

    # ---- moving -------------------------------------------------------------------------------

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store; nothing is written where not everything finds room."""
        for batch in batches:
            check_keys(batch.keys)
        with self._state.using():
            return write_batches(self._state, batches, memory, may_publish)

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store."""
        check_keys(request.keys)
        state = self._state
        with state.using():
            with state.changing():
                rows = state.index.find(request.keys)
                fits = state.index.matches(
                    rows,
                    payload_bytes=request.object_bytes,
                    layout=layout_number(request.fingerprint),
                )
                rows[~fits] = ABSENT
                found = rows[fits]
                state.ages.touch(found)
                state.marks.pin(found)
            state.count("missed", len(rows) - len(found))
        return FileReadSession(state, request, rows, owner=self)

    # ---- removing -----------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; held objects go too, for a hold is only against eviction.

        Raises:
            StoreError: the removal cannot be saved; the objects are gone until the store is opened again.
        """
        with self._state.using():
            removed = self._remove(keys)
            self._state.save_removals(keep=1)
        return removed

    def clear(self, namespace: bytes) -> int:
        """See Store.

        Raises:
            ContractError: that is no namespace.
            StoreError: see `delete`.
        """
        checked_namespace(namespace)
        count = 0
        with self._state.using():
            with self._state.changing():
                keys = self._state.index.keys_of(self._state.index.all_rows())
            keys = [key for key in keys if key.startswith(namespace)]
            for start in range(0, len(keys), _CLEAR_KEYS):
                count += sum(self._remove(keys[start : start + _CLEAR_KEYS]))
                self._state.save_removals()
            self._state.save_removals(keep=1)
        return count

    def _remove(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        index = self._state.index
        with self._state.changing():
            rows = index.find(keys)
            index.remove(index.living(rows[rows != ABSENT]))
        return tuple((rows != ABSENT).tolist())

    def close(self) -> None:
        """See Store.

        Raises:
            StoreTimeoutError: calls still run after `close_seconds`; the store stays open.
        """
        self._state.close()
        self._finalizer.detach()

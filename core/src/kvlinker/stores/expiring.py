"""An expiring store finds no object that is older than it may be, and removes what has expired.

Time is cut into periods of half an object's life. An object lies in the store in it under a name that is a digest
of its key and the period in which it was written, and is looked for under the names of this period and the one before.
So no byte of it changes, every process and every restart knows its age, and it lives for half of its time to all of it.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvlinker.device import DeviceAccess
from kvlinker.errors import ContractError
from kvlinker.event_counts import EventCounts
from kvlinker.keys import NAMESPACE_BYTES, OBJECT_KEY_BYTES, encode_fields
from kvlinker.store import (
    Hold,
    ObjectKey,
    ReadRequest,
    ReadSession,
    Store,
    StoreStats,
    WriteBatch,
    WriteStatus,
)
from kvlinker.stores.leftovers import Leftovers
from kvlinker.stores.wrapped import WrappedStore, counting

__all__ = ["ExpiringStore"]

_EVENTS = ("expired", "expiry_failed")
_MIN_SECONDS, _MAX_SECONDS = 1.0, 10 * 365 * 86_400.0
_MARGIN_SECONDS = 60.0
"""What is found is there for as long at least: a load comes some time behind its lookup."""
_MAX_KNOWN = 1 << 16
_MICROSECONDS = 1_000_000


class ExpiringStore(WrappedStore):
    """A store whose objects end some time after they were written, however often they are read."""

    def __init__(
        self, store: Store, *, seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        """Take over an open store.

        Args:
            store: keeps the objects under names of this one's.
            seconds: how old an object may become, of which it lives for half at least. Stores with another number
                share no objects.
            clock: seconds since the epoch, the same for all who share the store. Where it is set forward, objects
                end early; where it is set back, those that were written before it was are not found until that
                time comes again, and then live as long as it was ahead beyond their time.

        Raises:
            ContractError: `seconds` is no number from a second to ten years.
        """
        if not (math.isfinite(seconds) and _MIN_SECONDS <= seconds <= _MAX_SECONDS):
            msg = f"objects may become 1 second to 10 years old, got {seconds!r} seconds"
            raise ContractError(msg)
        super().__init__(store)
        self._period = seconds / 2
        self._margin = min(_MARGIN_SECONDS, self._period / 2)
        self._clock = clock
        self._counts = EventCounts(_EVENTS)
        self._leftovers = Leftovers(store, self._counts)
        self._lock = threading.Lock()
        self._known: OrderedDict[ObjectKey, int] = OrderedDict()
        """Keys to the periods that their objects were found in."""

    # ---- periods and names --------------------------------------------------------------------

    def _now(self) -> int:
        """Return the number of this period, and let what has expired be removed."""
        now = self._number(self._clock())
        self._leftovers.remove_before(now - 1)
        return now

    def _number(self, seconds: float) -> int:
        return int(seconds // self._period)

    def _lasting(self) -> tuple[int, ...]:
        """Return the periods whose objects do not end at once, newest first."""
        now, then = self._now(), self._number(self._clock() + self._margin)
        return tuple(period for period in (now, now - 1) if period >= then - 1)

    def _named(self, keys: Sequence[ObjectKey], periods: Sequence[int]) -> list[ObjectKey]:
        """Return what each object is called in the store that was written in a period, one for each key."""
        states = {period: self._state(period) for period in set(periods)}
        return [
            key[:NAMESPACE_BYTES] + _digest(states[period], key)
            for key, period in zip(keys, periods, strict=True)
        ]

    def _state(self, period: int) -> hashlib.blake2b:
        fields = ("kvlinker.expiring/1", round(self._period * _MICROSECONDS), period)
        size = OBJECT_KEY_BYTES - NAMESPACE_BYTES
        return hashlib.blake2b(encode_fields(fields), digest_size=size)

    def _names(self, keys: Sequence[ObjectKey], period: int) -> list[ObjectKey]:
        return self._named(keys, [period] * len(keys))

    def _find(self, keys: Sequence[ObjectKey], periods: Sequence[int]) -> list[int | None]:
        """Ask in which period each object was written, the newest where there are several."""
        if not keys or not periods:
            return [None] * len(keys)
        names = [name for period in periods for name in self._names(keys, period)]
        flags = self._inner_exists(names)
        found: list[int | None] = [None] * len(keys)
        placed: list[ObjectKey] = list(keys)
        for i, period in reversed(list(enumerate(periods))):
            first = i * len(keys)
            for at in range(len(keys)):
                if flags[first + at]:
                    found[at], placed[at] = period, names[first + at]
        self._remember(keys, found, placed)
        return found

    def _remember(
        self, keys: Sequence[ObjectKey], found: Sequence[int | None], names: Sequence[ObjectKey]
    ) -> None:
        """Note in which period each object is, under which name; None where it is in none."""
        kept: dict[int, list[ObjectKey]] = {}
        with self._lock:
            for key, period, name in zip(keys, found, names, strict=True):
                self._known.pop(key, None)
                if period is not None:
                    self._known[key] = period
                    kept.setdefault(period, []).append(name)
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        for period, own in kept.items():
            self._leftovers.note(period, own)

    def _recalled(self, keys: Sequence[ObjectKey], periods: Sequence[int]) -> list[int | None]:
        """Return in which of some periods each object was found last; None where it was not."""
        with self._lock:
            found = [self._known.get(key) for key in keys]
        return [period if period in periods else None for period in found]

    def _placed(self, keys: Sequence[ObjectKey], periods: Sequence[int]) -> list[ObjectKey]:
        """Return the names that objects have, asking for those that were not found before."""
        places = self._recalled(keys, periods)
        open_keys = [key for key, period in zip(keys, places, strict=True) if period is None]
        asked = iter(self._find(open_keys, periods))
        places = [next(asked) if period is None else period for period in places]
        now = self._now()
        return self._named(keys, [now if period is None else period for period in places])

    # ---- the store ----------------------------------------------------------------------------

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; what ends within a minute is not there any more, since its load would come too late."""
        if not keys:
            return self._inner.exists(keys)
        return tuple(period is not None for period in self._find(keys, self._lasting()))

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store; an object that was found lately keeps its name and its age."""
        now, lasting = self._now(), self._lasting()
        named, places = [], []
        for batch in batches:
            own = [now if p is None else p for p in self._recalled(batch.keys, lasting)]
            named.append(replace(batch, keys=tuple(self._named(batch.keys, own))))
            places.append(own)
        statuses = self._inner_write(named, memory, may_publish)
        for batch, own, placed, answer in zip(batches, places, named, statuses, strict=True):
            stored = [p if s.is_stored else None for p, s in zip(own, answer, strict=True)]
            self._remember(batch.keys, stored, placed.keys)
        return statuses

    def open_read(self, request: ReadRequest) -> ReadSession:
        """See Store; what expires while the session is open can be read until it is removed."""
        now = self._now()
        names = self._placed(request.keys, (now, now - 1))
        return self._inner.open_read(replace(request, keys=tuple(names)))

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        """See Store; a hold keeps nothing from expiring."""
        return self._inner.hold(self._placed(keys, self._lasting()), seconds=seconds)

    def prefetch(self, request: ReadRequest, *, range_bytes: Sequence[int] = ()) -> int:
        """See Store."""
        now = self._now()
        names = self._placed(request.keys, (now, now - 1))
        return self._inner.prefetch(replace(request, keys=tuple(names)), range_bytes=range_bytes)

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        now = self._now()
        self._remember(keys, [None] * len(keys), keys)
        names = [name for period in (now, now - 1) for name in self._names(keys, period)]
        removed = self._inner_delete(names)
        count = len(keys)
        return tuple(a or b for a, b in zip(removed[:count], removed[count:], strict=True))

    def clear(self, namespace: bytes) -> int:
        """See Store; what has expired and is still there is removed and counted too."""
        with self._lock:
            self._known.clear()
        return self._inner.clear(namespace)

    def stats(self) -> StoreStats:
        """See Store; objects that have expired count until they are removed, and then in `expired`."""
        return counting(self._inner.stats(), self._counts.snapshot())

    def wait_for_removals(self, seconds: float) -> bool:
        """Wait until what had expired before is removed; False when the time is over first."""
        self._now()
        return self._leftovers.wait(seconds)

    def close(self) -> None:
        """See Store; what has not expired yet is left to other processes, or to the store's own eviction."""
        self._leftovers.close()
        self._inner.close()


def _digest(state: hashlib.blake2b, key: ObjectKey) -> bytes:
    own = state.copy()
    own.update(key)
    return own.digest()

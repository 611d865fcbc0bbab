"""Object keys of a whole group: one builder per entry and part, and the keys that are quarantined."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvlinker.entries import DevicePoolEntry
from kvlinker.keys import KeyBuilder, KeyNamespace
from kvlinker.pools import DevicePoolGroup
from kvlinker.store import ObjectKey
from kvlinker.transfers import PageKey

__all__ = ["GroupKeys", "Quarantine"]


class GroupKeys:
    """Turns an engine's page keys into the object keys of each entry."""

    def __init__(self, group: DevicePoolGroup, namespace: KeyNamespace) -> None:
        """Prepare the builders; the fingerprint, the stage and the entry's rank axes enter every key."""
        self.namespace = namespace
        self._builders = {
            entry.name: tuple(
                self._builder(group, entry, part) for part in range(len(entry.part_bytes))
            )
            for entry in group.entries
        }

    def _builder(self, group: DevicePoolGroup, entry: DevicePoolEntry, part: int) -> KeyBuilder:
        return KeyBuilder(
            self.namespace,
            fingerprint=group.fingerprint,
            layer_range=group.layer_range,
            pool=entry.name,
            rank_axes=entry.rank_axes,
            part=part,
        )

    def of_part(self, pool: str, part: int, page_keys: Sequence[PageKey]) -> tuple[ObjectKey, ...]:
        """Return the keys of one of the pages' objects, in page order."""
        return self._builders[pool][part].object_keys(page_keys)

    def parts(self, pool: str) -> int:
        """Return how many objects one page of the pool is."""
        return len(self._builders[pool])


class Quarantine:
    """Keys that were promised and could not be read: missing for a while, so that a retry recomputes."""

    def __init__(self, *, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Make an empty quarantine whose keys stay `seconds`."""
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[ObjectKey, float] = {}

    def add(self, keys: Iterable[ObjectKey]) -> None:
        """Put keys in, from now, and let go of expired ones."""
        now = self._clock()
        with self._lock:
            self._until = {key: until for key, until in self._until.items() if until > now}
            self._until.update(dict.fromkeys(keys, now + self._seconds))

    def lift(self, keys: Iterable[ObjectKey]) -> None:
        """Take keys out: they were written anew."""
        with self._lock:
            for key in keys:
                self._until.pop(key, None)

    def __len__(self) -> int:
        return len(self._until)

    def flags(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Return which keys are in quarantine."""
        if not self._until:
            return (False,) * len(keys)
        now = self._clock()
        with self._lock:
            return tuple(self._until.get(key, now) > now for key in keys)

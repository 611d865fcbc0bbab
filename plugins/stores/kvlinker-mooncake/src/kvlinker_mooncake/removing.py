"""Removals wait for leases: whoever found or read an object may be reading it now, from memory that must stay its own.

The client can remove such an object by force, and its memory is then given to the next one, under the reader's hands:
nothing is forced here. What is still leased after a while is hidden from this store's users until it can be removed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvlinker_mooncake.client import Client
from kvlinker_mooncake.codes import Code
from kvlinker_mooncake.options import MooncakeStoreOptions

__all__ = ["Removals"]

_PAUSE_SECONDS = 0.05
_RETRY_SECONDS = 0.25
MAX_HIDDEN = 65536


class Removals:
    """Objects that are to go, and those that are hidden until they can."""

    def __init__(self, client: Client, options: MooncakeStoreOptions) -> None:
        self._client = client
        self._wait = options.contended_seconds
        self._lease = options.lease_seconds
        self._lock = threading.Lock()
        self._hidden: dict[str, None] = {}
        self._next_try = 0.0

    @property
    def hidden(self) -> int:
        """How many objects are hidden."""
        return len(self._hidden)

    def are_hidden(self, names: Sequence[str]) -> list[bool]:
        """Return which objects count as removed, though they are there."""
        if not self._hidden:
            return [False] * len(names)
        self._try_hidden()
        return [name in self._hidden for name in names]

    def hide(self, name: str) -> None:
        """Let an object count as removed, until it is; its lease is not renewed by readers of this store any more."""
        with self._lock:
            if len(self._hidden) < MAX_HIDDEN:
                self._hidden[name] = None

    def show(self, names: Sequence[str]) -> None:
        """Let objects count that were written anew: what was hidden under their names is gone."""
        with self._lock:
            for name in names:
                self._hidden.pop(name, None)

    def remove(self, names: Sequence[str], *, wait: bool = True) -> list[bool]:
        """Remove objects, and return which there were; those that stay leased are hidden.

        Args:
            names: of the objects.
            wait: for leases to end, as long as for another writer.

        Raises:
            StoreError: the master cannot be asked, or refuses.
        """
        hidden = self.are_hidden(names)
        unique = list(dict.fromkeys(names))
        until = time.monotonic() + (self._wait if wait else 0.0)
        codes = self._remove(unique)
        while Code.LEASED in codes.values() and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)
            codes |= self._remove([name for name in unique if codes[name] == Code.LEASED])
        first = {name: at for at, name in reversed(list(enumerate(names)))}
        return [
            first[name] == at and not was_hidden and self._is_gone(name, codes[name])
            for at, (name, was_hidden) in enumerate(zip(names, hidden, strict=True))
        ]

    def _is_gone(self, name: str, code: int) -> bool:
        """Whether an object does not count any more: there is a limit to what is hidden."""
        return code == Code.DONE or (code == Code.LEASED and name in self._hidden)

    def try_again(self, names: Sequence[str]) -> None:
        """Try to remove what is hidden of these, since others are to be written in their place.

        Raises:
            StoreError: the master cannot be asked.
        """
        if chosen := [name for name in names if name in self._hidden]:
            self._remove(chosen)

    def clear(self, pattern: str) -> int:
        """Remove what matches, wait for leases, remove the rest, and return how many went.

        Raises:
            StoreError: the master cannot be asked; some may have been removed.
        """
        count = self._client.remove_matching(pattern)
        time.sleep(self._lease)
        return count + self._client.remove_matching(pattern)

    def _remove(self, names: Sequence[str]) -> dict[str, int]:
        """Remove objects; what is leased is hidden, and what is gone is not any more."""
        codes = dict(zip(names, self._client.remove(names, force=False), strict=True))
        for name, code in codes.items():
            if code == Code.LEASED:
                self.hide(name)
            else:
                with self._lock:
                    self._hidden.pop(name, None)
        return codes

    def _try_hidden(self) -> None:
        """Now and then, try to remove what is hidden."""
        with self._lock:
            if not self._hidden or time.monotonic() < self._next_try:
                return
            self._next_try = time.monotonic() + _RETRY_SECONDS
            names = list(self._hidden)
        self._remove(names)

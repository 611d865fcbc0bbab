"""Figures are what a listing counted: a request for each thousand objects, so that long ones are kept for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Figures", "ListedFigures"]

_FEW = 10_000
"""Objects that are listed anew each time."""
_MOST = 200_000
"""Objects that are counted; more take more requests than a figure is worth."""
_SECONDS = 300.0
"""How long figures of more than a few objects are kept: whoever asks for them asks again every few seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a listing counted."""

    objects: int
    used_bytes: int
    is_complete: bool
    """Whether that is all there is."""


class ListedFigures:
    """The figures of one store."""

    def __init__(
        self,
        list_pages: Callable[[], Iterable[Sequence[int]]],
        *,
        few: int = _FEW,
        most: int = _MOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Count nothing yet.

        Args:
            list_pages: lists the bytes of all objects, some at a time.
            few: objects that are listed anew each time.
            most: objects that are counted.
            clock: seconds.
        """
        self._list_pages = list_pages
        self._few = few
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: tuple[float, Figures] | None = None

    def read(self) -> Figures:
        """Return figures: of now, or up to five minutes old where there are more than a few objects."""
        with self._lock:  # of many that ask at once, one lists
            if self._kept is not None and self._clock() < self._kept[0] + _SECONDS:
                return self._kept[1]
            figures = self._count()
            is_long = figures.objects > self._few
            self._kept = (self._clock(), figures) if is_long else None
            return figures

    def _count(self) -> Figures:
        objects = used = 0
        for sizes in self._list_pages():
            objects += len(sizes)
            used += sum(sizes)
            if objects >= self._most:
                return Figures(objects=objects, used_bytes=used, is_complete=False)
        return Figures(objects=objects, used_bytes=used, is_complete=True)

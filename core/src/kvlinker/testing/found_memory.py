"""Finds the memory that an engine's pool refers to, so that what an adapter forgot to describe shows.

It follows attributes, slots and containers, and neither calls anything nor looks into closures.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType

import numpy as np

from kvlinker.spans import BufferSpan

__all__ = ["FoundMemory", "find_memory"]

_LEAVES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    type,
    FunctionType,
    MethodType,
    ModuleType,
)
_HIDDEN_SLOTS = {"__dict__", "__weakref__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMemory:
    """One allocation, and the ways to it."""

    base_ptr: int
    size_bytes: int
    device: str
    paths: tuple[str, ...]
    """Dotted ways to it, such as `c128.2.scratch`."""

    def holds(self, span: BufferSpan) -> bool:
        """Return whether all rows of a span lie in it."""
        end = self.base_ptr + self.size_bytes
        inside = self.base_ptr <= span.base_ptr and span.end_ptr <= end
        return span.device == self.device and inside

    def uncovered(self, spans: Iterable[BufferSpan]) -> int:
        """Return how many of its bytes are in no span, padding between rows not counted."""
        end = self.base_ptr + self.size_bytes
        left, at = 0, self.base_ptr
        parts = sorted((s.base_ptr, s.base_ptr + s.rows * s.row_stride) for s in spans if s.rows)
        for start, stop in parts:
            left += max(0, min(start, end) - at)
            at = max(at, min(stop, end))
        return left + end - at


def find_memory(root: object) -> tuple[FoundMemory, ...]:
    """Return every allocation of a tensor or an array that can be reached, by address."""
    paths: dict[tuple[str, int, int], list[str]] = {}
    for path, found in _reachable(root):
        place = _place_of(found)
        if place is not None and place[2]:
            paths.setdefault(place, []).append(path)
    return tuple(
        FoundMemory(device=device, base_ptr=base, size_bytes=size, paths=tuple(ways))
        for (device, base, size), ways in sorted(paths.items())
    )


def _reachable(root: object) -> Iterator[tuple[str, object]]:
    pending: deque[tuple[str, object]] = deque([("", root)])
    seen: dict[int, object] = {}  # keeps what is made on the way alive, so that no id is used twice
    while pending:
        path, found = pending.popleft()
        if id(found) in seen or isinstance(found, _LEAVES):
            continue
        seen[id(found)] = found
        if _place_of(found) is not None:
            yield path, found
            continue
        prefix = f"{path}." if path else ""
        pending.extend((f"{prefix}{name}", child) for name, child in _children(found))


def _children(found: object) -> Iterator[tuple[object, object]]:
    if isinstance(found, Mapping):
        yield from found.items()
    elif isinstance(found, list | tuple | set | frozenset | deque):
        yield from enumerate(found)
    yield from _attributes(found).items()


def _attributes(found: object) -> dict[str, object]:
    attributes: dict[str, object] = {}
    for kind in type(found).__mro__:
        slots: object = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(_names(slots)):
            hidden = name.startswith("__") and not name.endswith("__")
            stored = f"_{kind.__name__.lstrip('_')}{name}" if hidden else name
            if name not in _HIDDEN_SLOTS and hasattr(found, stored):
                attributes[name] = getattr(found, stored)
    if hasattr(found, "__dict__"):
        attributes.update(vars(found))
    return attributes


def _names(slots: object) -> Iterator[str]:
    if isinstance(slots, Iterable):
        yield from (name for name in slots if isinstance(name, str))


def _place_of(found: object) -> tuple[str, int, int] | None:
    """Return device, address and bytes of the allocation behind a tensor or an array; None for others."""
    if isinstance(found, np.ndarray):
        owner = found
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return "cpu", owner.ctypes.data, owner.nbytes
    if "torch" not in sys.modules:
        return None
    import torch

    if isinstance(found, torch.Tensor):
        return _storage_place(found.untyped_storage())
    return _storage_place(found) if isinstance(found, torch.UntypedStorage) else None


def _storage_place(storage: object) -> tuple[str, int, int] | None:
    import torch

    if not isinstance(storage, torch.UntypedStorage) or storage.device.type == "meta":
        return None
    return str(storage.device), storage.data_ptr(), storage.nbytes()

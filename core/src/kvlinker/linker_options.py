"""Options of a linker: deadlines and bounds, each with the reason to change it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kvlinker.errors import ContractError

__all__ = ["LinkerOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkerOptions:
    """Bounds within which a linker answers, whatever its store does."""

    lookup_seconds: float = 1.0
    """A lookup that takes longer is a miss; it blocks the engine's scheduler meanwhile."""
    load_seconds: float = 30.0
    """From the start of a batch; what has not landed then fails and is never written."""
    offload_seconds: float = 60.0
    """From the offer; what is not stored then completes False."""
    hold_seconds: float = 30.0
    """How long an answer stays remembered, and its boundaries held, when nobody loads them."""
    miss_seconds: float = 1.0
    """How long an answer without boundaries stays remembered: a waiting request asks at every step,
    and should find what others stored meanwhile."""
    quarantine_seconds: float = 60.0
    """How long a key that could not be read counts as missing."""
    quiesce_seconds: float = 5.0
    """How long reset and close wait for store calls that no longer touch pool memory."""
    register_seconds: float = 120.0
    """How long a store may take to register the pools' memory; the engine does not start meanwhile."""
    breaker_seconds: float = 5.0
    """How long a store that timed out, or failed several times in a row, is left alone."""
    max_queued_offloads: int = 64
    """Offers beyond this complete False without being read."""
    max_remembered_lookups: int = 4096
    min_hit_tokens: int = 1
    """Boundaries of fewer tokens are not offered: loading them would take longer than computing them."""
    min_read_bytes: int = 1
    """Layers are read together until a read moves so many bytes, so that what a call costs is small beside it;
    the engine waits for all of them. By default each layer is read alone."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value: object = getattr(self, item.name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 < value < math.inf
            ):
                msg = f"linker option {item.name} must be a number above 0, got {value!r}"
                raise ContractError(msg)

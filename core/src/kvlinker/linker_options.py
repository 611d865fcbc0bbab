"""Options of a linker: deadlines and bounds, each with the reason to change it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvlinker.errors import ContractError
from kvlinker.integers import as_integer

__all__ = ["COUNTS", "MAX_COUNT", "MAX_SECONDS", "LinkerOptions"]

MAX_SECONDS = 86_400
"""A day: no deadline of a server needs more, and waits of threads end in an error far above it."""
MAX_COUNT = (1 << 62) - 1
"""Far above any queue or read, and still a number of 64 bits."""


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
    """Layers are read together until a read moves so many bytes, or twice as many behind the first read of a load, so
    that what a call costs is small beside it; the engine waits for all of them. By default each layer is read alone."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value: object = getattr(self, item.name)
            what = f"linker option {item.name}"
            if item.name in COUNTS:
                object.__setattr__(
                    self, item.name, as_integer(value, what, at_least=1, at_most=MAX_COUNT)
                )
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 < value <= MAX_SECONDS
            ):
                msg = f"{what} must be a number of seconds above 0, at most {MAX_SECONDS} (a day), got {value!r}"
                raise ContractError(msg)


COUNTS = frozenset(item.name for item in fields(LinkerOptions) if item.type == "int")
"""Names of the options that are whole numbers; all others are seconds."""

"""What a measured linker notes: one line of JSON for each event, written in the engine and read by the benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pydantic import BaseModel, ConfigDict

__all__ = ["Event", "EventFile", "RequestName", "What", "pending_offloads"]

_ALONE, _OVERLAPPED = "alone", "overlapped"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestName:
    """What the id of a request tells the linkers in the engine."""

    variant: str
    """Whose turn it is; a name that no linker has stands for none."""
    is_alone: bool
    """Whether the forward waits until the load is done, so that the load has the machine to itself."""
    number: int

    def __str__(self) -> str:
        return f"{self.variant} {_ALONE if self.is_alone else _OVERLAPPED} {self.number}"

    @classmethod
    def parse(cls, rid: str) -> RequestName:
        """Return the name that an id tells."""
        variant, how, number = rid.rsplit(" ", 2)
        return cls(variant=variant, is_alone=how == _ALONE, number=int(number))


class What(Enum):
    """What happened."""

    LOOKUP = "lookup"
    LOAD = "load"
    """From the request for it until all layers have landed."""
    OFFER = "offer"
    """How long the engine was held up by an offload."""
    OFFLOAD = "offload"
    """From the offer until it has ended."""
    LOST = "lost"
    """An offload that ended without being stored: its time, noted before, says nothing."""


class Event(BaseModel):
    """One of them."""

    model_config = ConfigDict(frozen=True)

    what: What
    seconds: float
    pages: int
    is_ok: bool = True


class EventFile:
    """Reads events while they are written."""

    def __init__(self, path: Path) -> None:
        """Begin at the start of the file, which need not be there yet."""
        self._path = path
        self._read = 0

    def take(self) -> list[Event]:
        """Return what was written since the last call, whole lines only."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        return [Event.model_validate_json(line) for line in whole.splitlines()]


def pending_offloads(events: Iterable[Event]) -> int:
    """Return how many offers have not ended."""
    kinds = [event.what for event in events]
    return kinds.count(What.OFFER) - kinds.count(What.OFFLOAD)

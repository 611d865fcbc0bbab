"""Keys of the objects of a soak: which of them everybody knows, and which belong to one thread alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import ObjectKey
from kvlinker.testing.shelves import object_keys

__all__ = ["OWN_NUMBERS", "Family", "SoakKeys"]

OWN_NUMBERS = 8
"""Own objects of each kind."""


class Family(Enum):
    """What may become of an object."""

    STABLE = "stable"
    """Everybody writes and reads it, and nobody deletes it."""
    VOLATILE = "volatile"
    """Everybody writes it, deletes it, and writes it as another kind of object."""
    OWN = "own"
    """One thread alone knows it: what it deleted, or was not allowed to publish, must never be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakKeys:
    """The keys of a soak, by kind of object."""

    kinds: int
    numbers: int
    """Objects of each kind that everybody knows, and again as many that come and go."""

    def shared(self, family: Family, kind: int) -> tuple[ObjectKey, ...]:
        """Return the keys of a family that everybody knows."""
        return object_keys(self.numbers, model=f"soak {family.value}", chain=f"kind {kind}")

    def own(self, owner: str, kind: int, generation: int) -> tuple[ObjectKey, ...]:
        """Return keys of one owner; another generation has others, in the same namespace."""
        chain = f"kind {kind} generation {generation}"
        return object_keys(OWN_NUMBERS, model=f"soak own {owner}", chain=chain)

    def namespaces(self, owners: Sequence[str]) -> Iterator[bytes]:
        """Yield every namespace that objects lie in."""
        for family in (Family.STABLE, Family.VOLATILE):
            yield self.shared(family, 0)[0][:NAMESPACE_BYTES]
        for owner in owners:
            yield self.own(owner, 0, 0)[0][:NAMESPACE_BYTES]

"""Store tools look after a store that lies in a folder: they inspect, verify and prune it.

What they return is read by the command line, so that every store's tools look alike there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

__all__ = ["NamespaceContents", "Pruned", "StoreContents", "StoreTools", "Verified"]


class NamespaceContents(Protocol):
    """The objects of one namespace."""

    @property
    def namespace(self) -> bytes:
        """Digest that every key of the namespace begins with."""

    @property
    def objects(self) -> int:
        """How many there are."""

    @property
    def payload_bytes(self) -> int:
        """Bytes in them."""

    @property
    def last_used(self) -> float:
        """When the last of them was written or read, in seconds since the epoch."""


class StoreContents(Protocol):
    """What a store holds."""

    @property
    def path(self) -> Path:
        """Where it is."""

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes that it may take on disk, where it knows."""

    @property
    def disk_bytes(self) -> int:
        """Bytes that it takes on disk."""

    @property
    def objects(self) -> int:
        """How many it holds."""

    @property
    def payload_bytes(self) -> int:
        """Bytes in them, without headers and free space."""

    @property
    def namespaces(self) -> Sequence[NamespaceContents]:
        """Whose objects they are, largest first."""


class Verified(Protocol):
    """What became of reading every object."""

    @property
    def objects(self) -> int:
        """How many were read."""

    @property
    def intact(self) -> int:
        """How many are what was written."""

    @property
    def foreign(self) -> int:
        """How many are something else, or nothing."""

    @property
    def corrupt(self) -> int:
        """How many have changed bytes."""

    @property
    def dropped(self) -> int:
        """How many were removed because they are not right."""

    @property
    def payload_bytes(self) -> int:
        """Bytes that were read."""


class Pruned(Protocol):
    """What pruning removed and left."""

    @property
    def removed(self) -> int:
        """Objects that were removed."""

    @property
    def objects(self) -> int:
        """Objects that are left."""

    @property
    def freed_bytes(self) -> int:
        """Bytes that the disk got back."""

    @property
    def disk_bytes(self) -> int:
        """Bytes that the store still takes on disk."""


class StoreTools(ABC):
    """Tools for one store; every call raises StoreBusyError while a process has it open that does not share it."""

    @abstractmethod
    def inspect(self) -> StoreContents:
        """Return what the store holds, without reading objects.

        Raises:
            StoreError: it is in use, or cannot be read.
        """

    @abstractmethod
    def verify(self, *, drop: bool = False) -> Verified:
        """Read every object and compare every checksum.

        Args:
            drop: remove the objects that are not right.

        Raises:
            StoreError: it is in use, or cannot be read.
        """

    @abstractmethod
    def prune(
        self,
        *,
        to_bytes: int | None = None,
        older_than: float | None = None,
        namespace: bytes | None = None,
    ) -> Pruned:
        """Remove objects.

        Args:
            to_bytes: remove what was used least recently, until the store takes no more on disk.
            older_than: remove what was not used for so many seconds; with `namespace`, only there.
            namespace: alone: remove all of it.

        Raises:
            ContractError: nothing to prune by, or a combination that the store does not offer.
            StoreError: it is in use, or cannot be read or written.
        """

"""Options of a memory store: those of a file store that memory leaves a choice of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from kvlinker.quantities import as_bytes
from kvlinker.store_options import as_flag, check_names
from kvlinker_file import FileStoreOptions

__all__ = ["MemoryStoreOptions"]


def _default_path() -> Path:
    return Path("/dev/shm") / f"kvlinker-{os.getuid()}"  # noqa: S108  # a folder of this user's alone


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStoreOptions:
    """How a memory store is opened."""

    capacity: int | str
    """Bytes of memory that are never exceeded, index included; a number, or a text such as `8GiB`."""
    path: str | os.PathLike[str] | None = None
    """Folder in a tmpfs, which names the store for all who share it; by default one of the user in `/dev/shm`."""
    keep: bool = False
    """Whether objects stay when the last process closes the store, until the machine starts again."""
    verify: bool = True
    """Whether every range's checksum is compared before a read answers."""
    self_test: bool = False
    """Whether opening writes, looks up, reads and deletes one small object first."""
    segment_size: int | str = 0
    """Bytes of one of the files; 0 for a 64th of the capacity."""
    pin_bytes: int | str | None = None
    """Bytes of its files that are pinned at once where pages lie on a GPU, so that it copies them itself; as much as
    the capacity by default, 0 for none. What is pinned is not swapped, and not given back while it is."""
    close_seconds: float = 30.0
    """How long `close` waits for calls that still run."""

    def __post_init__(self) -> None:
        as_flag(self.keep, "memory store: keep")

    @classmethod
    def of_config(cls, config: Mapping[str, object]) -> Self:
        """Return the options that a configuration names.

        Raises:
            ContractError: an option is unknown or missing.
        """
        known = [item.name for item in fields(cls)]
        check_names("memory store", config, known, needed={"capacity": "'8GiB'"})
        return cls(**config)  # type: ignore[arg-type]  # the file store's options check every value

    def pinned_bytes(self) -> int:
        """Return how many bytes of files are pinned at most.

        Raises:
            ContractError: an option has a wrong value.
        """
        if self.pin_bytes is None:
            return self.file_options().capacity
        return as_bytes(self.pin_bytes, "memory store: pin_bytes", at_least=0)

    def file_options(self) -> FileStoreOptions:
        """Return the options of the file store that it is.

        Raises:
            ContractError: an option has a wrong value.
        """
        return FileStoreOptions.of_config(
            {
                "path": _default_path() if self.path is None else self.path,
                "capacity": self.capacity,
                "verify": self.verify,
                "self_test": self.self_test,
                "segment_size": self.segment_size,
                "close_seconds": self.close_seconds,
            }
        )

"""Options of a memory store: those of a file store that memory leaves a choice of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from kvlinker.errors import ContractError
from kvlinker.spelling import nearest_names
from kvlinker_file import FileStoreOptions, parse_size

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
        if not isinstance(self.keep, bool):
            msg = f"memory store: keep must be true or false, got {self.keep!r}"
            raise ContractError(msg)

    @classmethod
    def of_config(cls, config: Mapping[str, object]) -> Self:
        """Return the options that a configuration names.

        Raises:
            ContractError: an option is unknown or missing.
        """
        known = [item.name for item in fields(cls)]
        for name in config:
            if name not in known:
                close = " or ".join(map(repr, nearest_names(str(name), known)))
                hint = f"did you mean {close}?" if close else f"known are {sorted(known)}"
                msg = f"memory store: unknown option {name!r}; {hint}"
                raise ContractError(msg)
        if "capacity" not in config:
            msg = "memory store: option 'capacity' is needed, such as capacity='8GiB'"
            raise ContractError(msg)
        return cls(**config)  # type: ignore[arg-type]  # the file store's options check every value

    def pinned_bytes(self) -> int:
        """Return how many bytes of files are pinned at most.

        Raises:
            ContractError: an option has a wrong value.
        """
        if self.pin_bytes is None:
            return self.file_options().capacity
        size = parse_size(self.pin_bytes, option="pin_bytes")
        if size < 0:
            msg = f"memory store: pin_bytes must be 0 or more, got {size}"
            raise ContractError(msg)
        return size

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

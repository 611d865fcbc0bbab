"""The store plugin `memory`: pages in the memory of one machine, which its processes share.

It is a file store in a tmpfs, whose files are memory: processes share it, it keeps to its capacity, and
whoever dies leaves whole objects alone. It holds them as long as some process has it open.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from kvlinker.errors import ContractError
from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.spelling import nearest_names
from kvlinker.store import Store
from kvlinker_file.options import FileStoreOptions
from kvlinker_file.store import FileStore
from kvlinker_file.tmpfs import check_owner, check_room, check_tmpfs

__all__ = ["MemoryStoreOptions", "describe_plugin", "open_memory_store", "open_store"]


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


def open_memory_store(options: MemoryStoreOptions) -> FileStore:
    """Open the store, or make it.

    Raises:
        ContractError: an option has a wrong value, the folder is in no tmpfs, or there is less memory than that.
        StoreError: the user's folder is another user's; or as FileStore raises it.
    """
    own = options.file_options()
    check_tmpfs(own.path)
    check_room(own.path, own.capacity)
    if options.path is None:
        check_owner(own.path)
    return FileStore(own, is_temporary=not options.keep)


@hookimpl
def describe_plugin() -> PluginInfo:
    """See kvlinker.hookspecs."""
    return PluginInfo(api_version=1, summary="memory of one machine that its processes share")


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    """See kvlinker.hookspecs; the options are those of MemoryStoreOptions."""
    return open_memory_store(MemoryStoreOptions.of_config(config))

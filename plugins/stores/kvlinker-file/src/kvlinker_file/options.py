"""Options of a file store: validated once, before anything on disk is touched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Self

from kvlinker.errors import ContractError
from kvlinker.quantities import as_bytes
from kvlinker.store_options import as_flag, as_seconds, check_names

__all__ = ["Durability", "FileStoreOptions"]

_MIN_CAPACITY = 2 << 20
_MAX_CAPACITY = 1 << 60
_MIN_SEGMENT = 64 << 10
_AUTO_SEGMENTS = 64
"""Segments that a full store has by default: small enough to move between object classes, few enough to map."""
_MAX_SEGMENTS = 4096
"""Each one costs a mapping and a descriptor."""
_PAGE = 4096
_MAX_CLOSE_SECONDS = 86_400.0
_NEEDED = {"path": "'/var/cache/kv'", "capacity": "'20GiB'"}


class Durability(Enum):
    """What a written object survives."""

    PROCESS = "process"
    """The end of the process, `kill -9` included; a power loss may cost what was written last."""
    DISK = "disk"
    """A power loss too: the bytes are on the disk before the object becomes visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStoreOptions:
    """How a file store is opened."""

    path: Path
    """Directory of the store; made with mode 0700 where it is missing. `~` is the user's home, and a relative path is
    one of the working directory."""
    capacity: int
    """Bytes on disk that are never exceeded, index included; a text such as `20GiB` is taken too."""
    segment_size: int = field(default=0)
    """Bytes of a slab file; 0 for a 64th of the capacity. Longer objects get files of their own."""
    durability: Durability = Durability.PROCESS
    verify: bool = True
    """Whether every range's checksum is compared before a read answers."""
    self_test: bool = False
    """Whether opening writes, looks up, reads and deletes one small object first."""
    close_seconds: float = 30.0
    """How long `close` waits for calls that still run."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _path(self.path))
        object.__setattr__(self, "capacity", as_bytes(self.capacity, "capacity"))
        size = as_bytes(self.segment_size, "segment_size")
        if self.capacity < _MIN_CAPACITY:
            msg = f"capacity must be at least {_MIN_CAPACITY} B (2 MiB), got {self.capacity}"
            raise ContractError(msg)
        if self.capacity > _MAX_CAPACITY:
            msg = f"capacity must be at most {_MAX_CAPACITY} B (1024 PiB), got {self.capacity}"
            raise ContractError(msg)
        size = size or max(_MIN_SEGMENT, self.capacity // _AUTO_SEGMENTS)
        if not _MIN_SEGMENT <= size <= self.capacity or self.capacity // size > _MAX_SEGMENTS:
            low = max(_MIN_SEGMENT, self.capacity // _MAX_SEGMENTS)
            msg = f"segment_size must be 0 or between {low} B and the capacity {self.capacity} B, got {size}"
            raise ContractError(msg)
        object.__setattr__(self, "segment_size", size // _PAGE * _PAGE)
        object.__setattr__(self, "durability", _durability(self.durability))
        for name, value in (("verify", self.verify), ("self_test", self.self_test)):
            as_flag(value, name)
        as_seconds(self.close_seconds, "close_seconds", at_most=_MAX_CLOSE_SECONDS)

    @classmethod
    def of_config(cls, config: Mapping[str, object]) -> Self:
        """Return the options that a configuration names.

        Raises:
            ContractError: an option is unknown, missing, or has a wrong value.
        """
        known = [item.name for item in fields(cls)]
        check_names("file store", config, known, needed=_NEEDED)
        return cls(**config)  # type: ignore[arg-type]  # __post_init__ checks every value


def _path(value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        msg = f"path must name a directory, got {value!r}"
        raise ContractError(msg)
    text = os.fsdecode(value)
    if "\0" in text:
        msg = f"path must name a directory, and {text!r} holds a zero byte"
        raise ContractError(msg)
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        msg = (
            f"path {text!r} begins with the home of a user whom this machine does not know: {error}"
        )
        raise ContractError(msg) from error


def _durability(value: object) -> Durability:
    try:
        return Durability(value)
    except ValueError as error:
        msg = f"durability must be one of {[item.value for item in Durability]}, got {value!r}"
        raise ContractError(msg) from error

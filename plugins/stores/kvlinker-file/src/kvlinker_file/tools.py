"""The tools of `kvlinker store` for a file store: `offline`, with the folder given once."""

from __future__ import annotations

from pathlib import Path

from kvlinker.store_tools import StoreTools
from kvlinker_file.offline import (
    PruneReport,
    StoreReport,
    VerifyReport,
    inspect,
    prune,
    verify,
)

__all__ = ["FileStoreTools"]


class FileStoreTools(StoreTools):
    """Tools for the file store in one folder."""

    def __init__(self, path: Path) -> None:
        """Take the folder; nothing is opened yet."""
        self._path = path

    def inspect(self) -> StoreReport:
        """See `offline.inspect`."""
        return inspect(self._path)

    def verify(self, *, drop: bool = False) -> VerifyReport:
        """See `offline.verify`."""
        return verify(self._path, drop=drop)

    def prune(
        self,
        *,
        to_bytes: int | None = None,
        older_than: float | None = None,
        namespace: bytes | None = None,
    ) -> PruneReport:
        """See `offline.prune`."""
        return prune(self._path, to_bytes=to_bytes, older_than=older_than, namespace=namespace)

"""A store in memory that cannot be reached while a file exists, as a plugin that the processes of a soak open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvlinker.device import DeviceAccess
from kvlinker.errors import StoreTimeoutError
from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.store import ObjectKey, ReadRequest, ReadSession, Store, WriteBatch, WriteStatus
from kvlinker.testing import MemoryStore

__all__ = ["describe_plugin", "open_store"]

CAPACITY = 512 << 10


class RemoteMemory(MemoryStore):
    """Memory behind a server, which is away as long as a file exists."""

    def __init__(self, away: Path) -> None:
        """Make an empty store."""
        self.away = away
        self._reach()
        super().__init__(capacity_bytes=CAPACITY)

    def _reach(self) -> None:
        if self.away.exists():
            msg = "the server is away"
            raise StoreTimeoutError(msg)

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        self._reach()
        return super().exists(keys)

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        self._reach()
        return super().write(batches, memory, may_publish=may_publish)

    def open_read(self, request: ReadRequest) -> ReadSession:
        self._reach()
        return super().open_read(request)


@hookimpl
def describe_plugin() -> PluginInfo:
    return PluginInfo(api_version=1, summary="memory behind a server, for tests of the soak")


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    return RemoteMemory(Path(str(config["away"])))

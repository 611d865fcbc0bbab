"""File stores that core has wrapped, as plugins that a child process can open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.store import Store
from kvlinker.stores.compressed import CompressedStore
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.stores.tiered import TieredStore
from kvlinker.stores.write_back import WriteBackLimits
from kvlinker_file import FileStore, FileStoreOptions

__all__ = ["SECRET", "describe_plugin", "open_files", "open_store"]

SECRET = bytes(range(32))


def open_files(path: object, *, capacity: str = "4MiB") -> FileStore:
    """Return the store of files in a folder."""
    return FileStore(FileStoreOptions.of_config({"path": str(path), "capacity": capacity}))


def _written_back(path: object) -> Store:
    near = open_files(Path(str(path)) / "near", capacity="2MiB")
    far = open_files(Path(str(path)) / "far")
    return TieredStore(near, far, write_back=WriteBackLimits(max_bytes=1 << 20))


_WRAPPERS: Mapping[str, Callable[[object], Store]] = {
    "compressed": lambda path: CompressedStore(open_files(path)),
    "encrypted": lambda path: EncryptedStore(open_files(path), SECRET),
    "written back": _written_back,
}


@hookimpl
def describe_plugin() -> PluginInfo:
    return PluginInfo(api_version=1, summary="files, wrapped")


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    return _WRAPPERS[str(config["wrapper"])](config["path"])

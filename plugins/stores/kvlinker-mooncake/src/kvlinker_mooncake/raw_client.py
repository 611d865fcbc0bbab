"""The raw client is Mooncake's own: what is called of it, by name, and how it is found or refused."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

from kvlinker.errors import StoreError, UnsupportedOperationError
from kvlinker_mooncake.options import MooncakeStoreOptions

__all__ = ["NEEDED_CALLS", "RawClient", "RawReplica", "make_raw_client", "replicate_config"]

MODULE = "mooncake.store"
_CLIENT = "MooncakeDistributedStore"
_CONFIG = "ReplicateConfig"
_DISTRIBUTIONS = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")


class _MemoryBuffer(Protocol):
    @property
    def size(self) -> int: ...

    @property
    def buffer_address(self) -> int: ...

    @property
    def transport_endpoint(self) -> str: ...


class _MemoryPlace(Protocol):
    @property
    def buffer_descriptor(self) -> _MemoryBuffer: ...


class _Status(Protocol):
    @property
    def name(self) -> str: ...

    def __int__(self) -> int: ...


class RawReplica(Protocol):
    """One copy of an object, as the client describes it."""

    @property
    def status(self) -> _Status:
        """Its state; `COMPLETE` where it can be read."""
        ...

    def is_memory_replica(self) -> bool:
        """Whether it lies in the memory of a segment."""
        ...

    def get_memory_descriptor(self) -> _MemoryPlace:
        """Return where in memory it lies."""
        ...


class RawClient(Protocol):
    """Mooncake's client, as far as this store calls it; every list of results is by position."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int:
        """Join a cluster."""
        ...

    def close(self) -> int:
        """Leave it; any call after that is a fault of memory."""
        ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Let transfers touch memory."""
        ...

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """End that."""
        ...

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Return 1, 0 or an error for each."""
        ...

    def batch_get_replica_desc(self, keys: list[str]) -> Mapping[str, list[RawReplica]]:
        """Return the copies of those that there are."""
        ...

    def get_size(self, key: str) -> int:
        """Return the bytes of one object."""
        ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        """Read whole objects, and return their bytes."""
        ...

    def batch_get_session_start(self, keys: list[str]) -> list[int]:
        """Take a lease, and remember where objects are."""
        ...

    def batch_get_session_end(self, keys: list[str]) -> int:
        """Forget that, for all who started the same key."""
        ...

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_src_offsets: list[list[int]],
    ) -> list[int]:
        """Read ranges of objects that a session was started for."""
        ...

    def batch_put_session_start(
        self, keys: list[str], sizes: list[int], config: object
    ) -> list[int]:
        """Reserve room for objects that nobody has."""
        ...

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_dst_offsets: list[list[int]],
    ) -> list[int]:
        """Write ranges of them, and return their bytes."""
        ...

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        """Let them be read."""
        ...

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        """Give them up."""
        ...

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:  # noqa: FBT001  # the client's own signature
        """Remove objects; `force` does so under a reader's hands."""
        ...

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int:  # noqa: FBT001  # the client's own signature
        """Remove what matches, and return how many."""
        ...


NEEDED_CALLS = (
    "batch_get_into_multi_buffer_ranges",
    "batch_get_into_multi_buffers",
    "batch_get_replica_desc",
    "batch_get_session_end",
    "batch_get_session_start",
    "batch_is_exist",
    "batch_put_from_multi_buffer_ranges",
    "batch_put_session_end",
    "batch_put_session_revoke",
    "batch_put_session_start",
    "batch_remove",
    "close",
    "get_size",
    "register_buffer",
    "remove_by_regex",
    "setup",
    "unregister_buffer",
)


def make_raw_client() -> RawClient:
    """Return a client that has joined no cluster yet.

    Raises:
        StoreError: it is not installed, or a library that it needs is not there.
        UnsupportedOperationError: it lacks calls that this store needs.
    """
    kind = _class_of(_module(), _CLIENT)
    missing = sorted(set(NEEDED_CALLS) - set(dir(kind)))
    if missing:
        msg = (
            f"mooncake store: the client {_version()} has no {', '.join(missing)}; "
            f"install mooncake-transfer-engine 0.3.13.post1 or newer"
        )
        raise UnsupportedOperationError(msg)
    client: RawClient = kind()
    return client


def replicate_config(options: MooncakeStoreOptions) -> object:
    """Return how objects are kept, in the client's own form.

    Raises:
        UnsupportedOperationError: the client knows no such setting.
    """
    module = _module()
    settings: dict[str, object] = {"replica_num": options.replicas}
    if options.segments:
        settings["preferred_segments"] = list(options.segments)
    if options.hard_pin:
        settings["with_hard_pin"] = True
    if options.soft_pin_seconds:
        settings["soft_pin_action"] = vars(_class_of(module, "SoftPinAction"))["ENABLE"]
        settings["soft_pin_ttl_ms"] = round(options.soft_pin_seconds * 1000)
    config = _class_of(module, _CONFIG)()
    for name, value in settings.items():
        if name not in dir(config):
            msg = f"mooncake store: the client {_version()} has no setting {name}; install a newer one"
            raise UnsupportedOperationError(msg)
        setattr(config, name, value)
    return config


def _module() -> ModuleType:
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        msg = (
            f"mooncake store: the client cannot be loaded ({error}); pip install mooncake-transfer-engine, or "
            f"mooncake-transfer-engine-non-cuda on machines without CUDA, and Debian's libibverbs1"
        )
        raise StoreError(msg) from error


def _class_of(module: ModuleType, name: str) -> type:
    found: object = vars(module).get(name)
    if not isinstance(found, type):
        msg = (
            f"mooncake store: {MODULE} {_version()} has no {name}; "
            f"install mooncake-transfer-engine 0.3.13.post1 or newer"
        )
        raise UnsupportedOperationError(msg)
    return found


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"

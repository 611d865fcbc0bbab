"""Options of a NIXL store: which backend, what it needs, and how long to wait."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Self, TypeVar

from kvlinker.errors import ContractError
from kvlinker.integers import as_integer
from kvlinker.quantities import as_bytes
from kvlinker.secret_references import RevealedSecret, SecretReference
from kvlinker.store_options import as_seconds, check_names

__all__ = ["Backend", "FileIo", "NixlStoreOptions"]

_MIN_CAPACITY = 2 << 20
_MAX_CAPACITY = 8 << 40
_MIN_CALL = 1 << 20
_MAX_BYTES = 1 << 40
_MAX_REGIONS = 1 << 16
_SERVER = re.compile(r"(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):(?P<port>\d{1,5})")
_MAX_PORT = 65535
_PREFIX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")


class Backend(Enum):
    """What moves bytes, by NIXL's name."""

    POSIX = "POSIX"
    """A file, through the kernel's asynchronous calls."""
    GDS = "GDS"
    """A file, straight to and from GPU memory."""
    GDS_MT = "GDS_MT"
    """The same with threads of its own."""
    UCX = "UCX"
    """The memory of another process."""
    OBJ = "OBJ"
    """Object storage of S3's kind."""

    @property
    def is_file(self) -> bool:
        """Whether objects lie in a file."""
        return self in (Backend.POSIX, Backend.GDS, Backend.GDS_MT)

    @property
    def is_gds(self) -> bool:
        """Whether it needs NVIDIA's cuFile."""
        return self in (Backend.GDS, Backend.GDS_MT)


class FileIo(Enum):
    """The kernel's calls that POSIX uses."""

    AIO = "aio"
    URING = "uring"
    POSIX_AIO = "posix_aio"

    @property
    def param(self) -> str:
        """The backend's parameter."""
        return f"use_{self.value}"


_NEEDED: Mapping[Backend, tuple[str, ...]] = {
    Backend.POSIX: ("path", "capacity"),
    Backend.GDS: ("path", "capacity"),
    Backend.GDS_MT: ("path", "capacity"),
    Backend.UCX: ("server",),
    Backend.OBJ: ("bucket",),
}
_TAKEN: Mapping[Backend, tuple[str, ...]] = {
    Backend.POSIX: ("io", "direct_io"),
    Backend.GDS: ("direct_io",),
    Backend.GDS_MT: ("direct_io",),
    Backend.UCX: ("connect_seconds",),
    Backend.OBJ: (
        "prefix",
        "endpoint",
        "region",
        "access_key",
        "secret_key",
        "connect_seconds",
        "write_bytes",
    ),
}
_OWN = frozenset(name for names in (*_NEEDED.values(), *_TAKEN.values()) for name in names)
"""Options that some backends have and others do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlStoreOptions:
    """How a NIXL store is opened."""

    backend: Backend
    path: Path | None = None
    """POSIX, GDS: folder of the store, which one process has open at a time."""
    capacity: int = 0
    """POSIX, GDS: bytes on disk that are never exceeded; a text such as `20GiB` is taken too."""
    io: FileIo = FileIo.AIO
    """POSIX: the kernel's calls."""
    direct_io: bool = False
    """POSIX: whether transfers go past the page cache; a file system that refuses is used through it."""
    server: str = ""
    """UCX: `host:port` of a `python -m kvlinker_nixl serve`."""
    bucket: str = ""
    """OBJ: where objects are."""
    prefix: str = "kvlinker"
    """OBJ: the folder that all objects are in."""
    endpoint: str = ""
    """OBJ: URL of a server of one's own."""
    region: str = "us-east-1"
    """OBJ: of the bucket."""
    access_key: str | SecretReference = ""
    """OBJ: the key's name, or where it is to be read; without, the libraries' own chains look for a key."""
    secret_key: SecretReference | RevealedSecret | None = None
    """OBJ: where the secret is to be read, `${env:NAME}` or `{"env": NAME}`, or of a file, `${file:/path}`."""
    staged: bool | None = None
    """Whether pages go through host memory of the store. Without, they are read and written where they are, which
    needs their memory registered. By default only GDS goes without."""
    transfer_seconds: float = 30.0
    """How long one transfer may take."""
    connect_seconds: float = 2.0
    """UCX and OBJ: how long a server may take to answer a question."""
    pause_seconds: float = 10.0
    """How long no transfer is begun after one was late."""
    close_seconds: float = 10.0
    """How long `close` waits for transfers."""
    call_bytes: int = 64 << 20
    """Bytes of one transfer, and of host memory for it."""
    write_bytes: int = 1 << 30
    """OBJ: bytes of objects that one write has in host memory until it may publish."""
    max_regions: int = _MAX_REGIONS
    """Regions of pool memory that may be registered."""
    max_region_bytes: int = _MAX_BYTES
    """Bytes of each of them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", _member(Backend, self.backend, "backend"))
        object.__setattr__(self, "io", _member(FileIo, self.io, "io"))
        given: Mapping[str, object] = {
            "path": self.path,
            "capacity": self.capacity,
            "server": self.server,
            "bucket": self.bucket,
        }
        for name in _NEEDED[self.backend]:
            if not given[name]:
                msg = f"nixl store: backend {self.backend.value} needs option {name!r}"
                raise ContractError(msg)
        self._check_texts()
        self._check_numbers()
        for name, value in {"direct_io": self.direct_io, "staged": self.staged}.items():
            if not isinstance(value, bool) and (name != "staged" or value is not None):
                msg = f"nixl store: {name} must be true or false, got {value!r}"
                raise ContractError(msg)
        self._check_ways()

    def _check_ways(self) -> None:
        if self.staged is None:
            object.__setattr__(self, "staged", not self.backend.is_gds)
        if self.backend is Backend.OBJ and not self.staged:
            msg = "nixl store: backend OBJ writes an object as one piece: staged must be true"
            raise ContractError(msg)
        if self.direct_io and not self.staged and not self.backend.is_gds:
            msg = "nixl store: direct_io moves whole blocks of 4096 B, which pages are not: it needs staged: true"
            raise ContractError(msg)

    def _check_texts(self) -> None:
        object.__setattr__(self, "path", _path(self.path))
        texts: Mapping[str, object] = {
            "server": self.server,
            "bucket": self.bucket,
            "prefix": self.prefix,
            "endpoint": self.endpoint,
            "region": self.region,
        }
        for name, value in texts.items():
            if not isinstance(value, str):
                msg = f"nixl store: {name} must be a text, got a {type(value).__name__}"
                raise ContractError(msg)
        if self.server:
            _split(self.server)
        if not _PREFIX.fullmatch(self.prefix):
            msg = f"nixl store: prefix must be folders of letters, digits, '.', '_' and '-', got {self.prefix!r}"
            raise ContractError(msg)
        object.__setattr__(self, "access_key", _access_key(self.access_key))
        object.__setattr__(self, "secret_key", _secret(self.secret_key))

    def _check_numbers(self) -> None:
        least = _MIN_CAPACITY if self.backend.is_file else 0
        sizes = {
            "capacity": (self.capacity, least, _MAX_CAPACITY),
            "call_bytes": (self.call_bytes, _MIN_CALL, _MAX_BYTES),
            "write_bytes": (self.write_bytes, _MIN_CALL, _MAX_BYTES),
            "max_region_bytes": (self.max_region_bytes, 1, _MAX_BYTES),
        }
        for name, (given, low, high) in sizes.items():
            size = as_bytes(given, f"nixl store: {name}", at_least=low, at_most=high)
            object.__setattr__(self, name, size)
        what = "nixl store: max_regions"
        count = as_integer(self.max_regions, what, at_least=1, at_most=_MAX_REGIONS)
        object.__setattr__(self, "max_regions", count)
        seconds = {
            "transfer_seconds": self.transfer_seconds,
            "connect_seconds": self.connect_seconds,
            "pause_seconds": self.pause_seconds,
            "close_seconds": self.close_seconds,
        }
        for name, value in seconds.items():
            as_seconds(value, f"nixl store: {name}")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the server."""
        return _split(self.server)

    @property
    def is_staged(self) -> bool:
        """Whether pages go through host memory of the store."""
        return self.staged is True

    def read_keys(self) -> tuple[str, str]:
        """Return the name of the key and its secret as they are now, each empty where it is not given.

        Raises:
            StoreError: a reference leads to nothing.
        """
        name, secret = self.access_key, self.secret_key
        if isinstance(name, SecretReference):
            name = name.read("nixl store: access_key")
        if isinstance(secret, SecretReference):
            secret = RevealedSecret(secret.read("nixl store: secret_key"))
        return name, secret or ""

    @property
    def place(self) -> str:
        """Where objects are, for messages."""
        if self.backend is Backend.UCX:
            return f"UCX {self.server}"
        if self.backend is Backend.OBJ:
            return f"OBJ {self.bucket}/{self.prefix}"
        return f"{self.backend.value} {self.path}"

    @classmethod
    def of_config(cls, config: Mapping[str, object]) -> Self:
        """Return the options that a configuration names.

        Raises:
            ContractError: an option is unknown, missing, another backend's, or has a wrong value.
        """
        known = [item.name for item in fields(cls)]
        backends = f"one of {[one.value for one in Backend]}"
        check_names("nixl store", config, known, needed={"backend": backends})
        backend = _member(Backend, config["backend"], "backend")
        for name in _OWN.intersection(config).difference(_NEEDED[backend], _TAKEN[backend]):
            msg = f"nixl store: backend {backend.value} has no option {name!r}"
            raise ContractError(msg)
        return cls(**config)  # type: ignore[arg-type]  # __post_init__ checks every value


_Kind = TypeVar("_Kind", bound=Enum)


def _member(kind: type[_Kind], value: object, name: str) -> _Kind:
    try:
        return kind(value)
    except ValueError as error:
        msg = f"nixl store: {name} must be one of {[one.value for one in kind]}, got {value!r}"
        raise ContractError(msg) from error


def _path(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        msg = f"nixl store: path must name a folder, got {value!r}"
        raise ContractError(msg)
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:
        msg = f"nixl store: path {value!r} begins with the home of a user whom this machine does not know"
        raise ContractError(msg) from error


def _split(server: str) -> tuple[str, int]:
    match = _SERVER.fullmatch(server)
    if match is None or not 0 < int(match["port"]) <= _MAX_PORT:
        msg = f"nixl store: server must be like '10.0.0.5:7301', got {server!r}"
        raise ContractError(msg)
    return match["host"].strip("[]"), int(match["port"])


def _access_key(value: object) -> str | SecretReference:
    if isinstance(value, SecretReference):
        return value
    found = SecretReference.of_value(value) or value
    if not isinstance(found, str | SecretReference):
        msg = f"nixl store: access_key must be a text, or say where one is, got a {type(value).__name__}"
        raise ContractError(msg)
    return found


def _secret(value: object) -> SecretReference | RevealedSecret | None:
    if value is None or isinstance(value, SecretReference | RevealedSecret):
        return value
    reference = SecretReference.of_value(value)
    if reference is None:
        msg = (
            "nixl store: secret_key must say where the secret is, ${env:NAME} or ${file:/path}: "
            "in plain text, process lists and logs would show it"
        )
        raise ContractError(msg)
    return reference

"""Options of a Redis store: where the server is, what it may keep, and how long to wait for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self

from kvlinker.errors import ContractError
from kvlinker.quantities import as_bytes
from kvlinker.store_options import as_flag, as_seconds, check_names
from kvlinker_redis.address import Address

__all__ = ["RedisStoreOptions"]

_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_MIN_CALL_BYTES = 64 << 10
_MAX_CALL_BYTES = 512 << 20
_MAX_TTL_SECONDS = 10 * 365 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisStoreOptions:
    """How a Redis store is opened."""

    url: str
    """`redis://`, `rediss://` (TLS) or `unix://`; a password is written as `${env:NAME}` or `${file:/path}`."""
    cluster: bool = False
    """Whether the server is a node of a cluster; the others are found through it."""
    prefix: str = "kvlinker"
    """What every key begins with; stores with different prefixes share a database and no objects."""
    ttl_seconds: int | None = None
    """How long an object lives after its last write or read; the server's limit on memory alone decides if None."""
    ca_file: Path | None = None
    """Certificates that a server's may be signed with; those of the system if None."""
    cert_file: Path | None = None
    """The client's own certificate, for servers that ask for one."""
    key_file: Path | None = None
    """Key of the client's own certificate."""
    connect_seconds: float = 2.0
    """How long one attempt to connect may take."""
    answer_seconds: float = 5.0
    """How long the server may be silent within an answer, and how long each MiB may take."""
    retry_seconds: float = 2.0
    """How long a call tries again after a connection was lost."""
    pause_seconds: float = 10.0
    """How long a server is not asked again after a call was given up."""
    call_bytes: int = 8 << 20
    """Bytes of values that a call has on their way, which a text such as `8MiB` may say; what is longer goes alone."""
    address: Address = field(init=False)
    """The URL, taken apart."""

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            msg = f"url must be a text, got a {type(self.url).__name__}"
            raise ContractError(msg)
        address = Address.of_url(self.url)
        object.__setattr__(self, "address", address)
        # From here on nothing shows how the URL spelt its user.
        object.__setattr__(self, "url", str(address))
        as_flag(self.cluster, "cluster")
        if self.cluster and (address.database or address.socket_path):
            msg = f"a cluster has host, port and database 0 alone, got {address}"
            raise ContractError(msg)
        if not isinstance(self.prefix, str) or not _PREFIX.fullmatch(self.prefix):
            msg = (
                f"prefix must be 1 to 64 letters, digits, '.', '_', ':' or '-', got {self.prefix!r}"
            )
            raise ContractError(msg)
        self._check_files()
        self._check_numbers()

    def _check_files(self) -> None:
        for name in ("ca_file", "cert_file", "key_file"):
            value: object = {"ca_file": self.ca_file, "cert_file": self.cert_file}.get(
                name, self.key_file
            )
            if value is None:
                continue
            if not isinstance(value, str | Path) or not Path(value).is_file():
                msg = f"{name} must name a file, got {value!r}"
                raise ContractError(msg)
            if not self.address.has_tls:
                msg = f"{name} is for TLS alone; begin the url with rediss://, got {self.url}"
                raise ContractError(msg)
            object.__setattr__(self, name, Path(value))
        if self.key_file is not None and self.cert_file is None:
            msg = f"key_file {self.key_file} is the key of no certificate; give cert_file too"
            raise ContractError(msg)

    def _check_numbers(self) -> None:
        seconds = {
            "connect_seconds": self.connect_seconds,
            "answer_seconds": self.answer_seconds,
            "retry_seconds": self.retry_seconds,
            "pause_seconds": self.pause_seconds,
        }
        for name, value in seconds.items():
            as_seconds(value, name)
        ttl: object = self.ttl_seconds
        if ttl is not None and not (_is_whole(ttl) and 0 < int(str(ttl)) <= _MAX_TTL_SECONDS):
            msg = f"ttl_seconds must be a whole positive number of at most ten years, got {ttl!r}"
            raise ContractError(msg)
        size = as_bytes(
            self.call_bytes, "call_bytes", at_least=_MIN_CALL_BYTES, at_most=_MAX_CALL_BYTES
        )
        object.__setattr__(self, "call_bytes", size)

    @property
    def tls_paths(self) -> Mapping[str, str]:
        """The files for TLS, under the names that redis-py has for them; those that are given."""
        files = {
            "ssl_ca_certs": self.ca_file,
            "ssl_certfile": self.cert_file,
            "ssl_keyfile": self.key_file,
        }
        return {name: str(path) for name, path in files.items() if path is not None}

    @classmethod
    def of_config(cls, config: Mapping[str, object]) -> Self:
        """Return the options that a configuration names.

        Raises:
            ContractError: an option is unknown, missing, or has a wrong value.
        """
        known = [item.name for item in fields(cls) if item.init]
        needed = {"url": "'redis://cache.example:6379/0'"}
        check_names("redis store", config, known, needed=needed)
        try:
            return cls(**config)  # type: ignore[arg-type]  # __post_init__ checks every value
        except ContractError as error:
            msg = f"redis store: {error}"
            raise ContractError(msg) from error


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

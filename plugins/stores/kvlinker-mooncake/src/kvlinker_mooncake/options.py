"""Options of a Mooncake store: where its master is, how pages are copied and kept, and how long to wait."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Self

from kvlinker.errors import ContractError
from kvlinker.integers import as_integer
from kvlinker.quantities import as_bytes
from kvlinker.store_options import as_flag, as_seconds, check_names

__all__ = ["MooncakeStoreOptions"]

_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}")
_READS = ("auto", "ranged", "whole")
_PROTOCOLS = ("tcp", "rdma")
_MAX_PORT = 65535
_MAX_REPLICAS = 16
_MAX_BYTES = 1 << 44
_MIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeStoreOptions:
    """How a Mooncake store is opened."""

    master: str
    """`host:port` of the master."""
    host: str = "127.0.0.1"
    """How other machines reach this one; needed as soon as the cluster is more than one."""
    metadata: str = field(default="P2PHANDSHAKE", repr=False)
    """Where clients find each other: the handshake of peers, or the URL of a metadata server; it is shown nowhere."""
    protocol: str = "tcp"
    """`tcp` or `rdma`."""
    devices: str = ""
    """RDMA devices, separated by commas; empty for the client's own choice."""
    segment_bytes: int = 0
    """Memory that this process gives to the cluster; what lies there goes when the process does."""
    buffer_bytes: int = 16 << 20
    """Memory of the client's own, which objects that are on disk alone are read through."""
    prefix: str = "kvlinker"
    """What all names begin with; stores with different prefixes share no objects."""
    staged: bool = False
    """Whether pages go through host memory with a header and checksums, instead of straight from and to the pools."""
    reads: str = "auto"
    """`ranged`: layer by layer; `whole`: whole objects; `auto`: what is quicker when the store is opened."""
    replicas: int = 1
    """Copies of each object, on different segments."""
    segments: tuple[str, ...] = ()
    """Segments to prefer, as `host:port`."""
    soft_pin_seconds: float = 0.0
    """How long objects are evicted after all others; 0 for no such preference."""
    hard_pin: bool = False
    """Whether objects are never evicted: who asks for it has to delete them."""
    lease_seconds: float = 10.0
    """The master's `--default_kv_lease_ttl`: for so long nothing is removed that somebody has found or read."""
    metrics: str = ""
    """`host:port` of the master's metrics server, which counts objects; without it, `stats` knows its own writes."""
    connect_seconds: float = 10.0
    """How long joining the cluster may take."""
    answer_seconds: float = 2.0
    """How long the master may take to answer; the client itself waits for more than four seconds."""
    transfer_seconds: float = 20.0
    """How long the bytes of one read or write may take; no further part is begun after that."""
    contended_seconds: float = 1.0
    """How long to wait for another writer of the same key, and for leases of what is to be removed."""
    pause_seconds: float = 10.0
    """How long a master is not asked again that did not answer."""
    call_bytes: int = 64 << 20
    """Bytes of one transfer; an object that is longer goes alone."""
    write_bytes: int = 1 << 30
    """Staged: bytes of objects that one write has in host memory; what is more is not stored."""

    def __post_init__(self) -> None:
        self._check_places()
        self._check_choices()
        _set_numbers(self)
        segments: object = self.segments
        is_list = isinstance(segments, Sequence) and not isinstance(segments, str)
        if not is_list or not all(isinstance(name, str) and name for name in self.segments):
            msg = f"segments must be a list of names such as 'node-7:12345', got {segments!r}"
            raise ContractError(msg)
        object.__setattr__(self, "segments", tuple(self.segments))

    def _check_places(self) -> None:
        for name, value in (("master", self.master), ("metrics", self.metrics)):
            if name == "metrics" and value == "":
                continue
            found = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
            if found is None or not 0 < int(found["port"]) <= _MAX_PORT:
                msg = f"{name} must be host:port, such as 'mooncake-master:50051', got {value!r}"
                raise ContractError(msg)
        for name, value in (("host", self.host), ("metadata", self.metadata)):
            if not isinstance(value, str) or not value or value.split() != [value]:
                got = f", got {value!r}" if name == "host" else ""  # a URL may hold a password
                msg = f"{name} must be a name without spaces{got}"
                raise ContractError(msg)
        if not isinstance(self.devices, str):
            msg = f"devices must be a text such as 'mlx5_0,mlx5_1', got {self.devices!r}"
            raise ContractError(msg)
        if not isinstance(self.prefix, str) or not _PREFIX.fullmatch(self.prefix):
            msg = f"prefix must be 1 to 64 letters, digits, '_' and '-', got {self.prefix!r}"
            raise ContractError(msg)

    def _check_choices(self) -> None:
        for name, value, known in (
            ("protocol", self.protocol, _PROTOCOLS),
            ("reads", self.reads, _READS),
        ):
            if value not in known:
                msg = f"{name} must be one of {', '.join(known)}, got {value!r}"
                raise ContractError(msg)
        for name, flag in (("staged", self.staged), ("hard_pin", self.hard_pin)):
            as_flag(flag, name)
        if self.staged and self.reads == "ranged":
            msg = "reads must be 'whole' or 'auto' where staged is true: checksums are compared object by object"
            raise ContractError(msg)

    @property
    def label(self) -> str:
        """What the store is called in messages."""
        return f"mooncake store {self.master}/{self.prefix}"

    @classmethod
    def of_config(cls, config: Mapping[str, object]) -> Self:
        """Return the options that a configuration names.

        Raises:
            ContractError: an option is unknown, missing, or has a wrong value.
        """
        known = [item.name for item in fields(cls)]
        check_names("mooncake store", config, known, needed={"master": "'mooncake-master:50051'"})
        try:
            return cls(**config)  # type: ignore[arg-type]  # __post_init__ checks every value
        except ContractError as error:
            msg = f"mooncake store: {error}"
            raise ContractError(msg) from error


def _set_numbers(options: MooncakeStoreOptions) -> None:
    copies = as_integer(options.replicas, "replicas", at_least=1, at_most=_MAX_REPLICAS)
    object.__setattr__(options, "replicas", copies)
    sizes = {
        "segment_bytes": (options.segment_bytes, 0),
        "buffer_bytes": (options.buffer_bytes, 0),
        "call_bytes": (options.call_bytes, _MIN_BYTES),
        "write_bytes": (options.write_bytes, _MIN_BYTES),
    }
    for name, (given, smallest) in sizes.items():
        size = as_bytes(given, name, at_least=smallest, at_most=_MAX_BYTES)
        object.__setattr__(options, name, size)
    seconds = {
        "soft_pin_seconds": options.soft_pin_seconds,
        "lease_seconds": options.lease_seconds,
        "connect_seconds": options.connect_seconds,
        "answer_seconds": options.answer_seconds,
        "transfer_seconds": options.transfer_seconds,
        "contended_seconds": options.contended_seconds,
        "pause_seconds": options.pause_seconds,
    }
    for name, value in seconds.items():
        may_be_zero = name in {"soft_pin_seconds", "contended_seconds"}
        object.__setattr__(options, name, as_seconds(value, name, may_be_zero=may_be_zero))

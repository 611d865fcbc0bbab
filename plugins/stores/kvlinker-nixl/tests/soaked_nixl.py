"""NIXL stores under a soak: a file whose only process is killed, a peer that dies and hangs, and a bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bucket_server import BUCKET, BucketServer
from peer_process import PeerProcess

from kvlinker.testing.soak import Outage

__all__ = ["SoakedBucket", "SoakedFile", "SoakedPeer"]


@dataclass(frozen=True, kw_only=True)
class SoakedFile:
    """The adapter of a file, which one process has open at a time, for `kvlinker.testing.soak`."""

    folder: Path
    options: Mapping[str, object]
    module: str = "kvlinker_nixl"
    grace_seconds: float = 2.0
    lets_go_late: bool = True
    outages: Sequence[Outage] = ()

    @property
    def config(self) -> Mapping[str, object]:
        """So small that objects are evicted."""
        place = {"backend": "POSIX", "path": str(self.folder), "capacity": "4MiB"}
        return {**place, **self.options}


@dataclass(frozen=True, kw_only=True)
class SoakedPeer:
    """The adapter of the memory of a peer server."""

    server: PeerProcess
    options: Mapping[str, object]
    module: str = "kvlinker_nixl"
    grace_seconds: float = 8.0
    lets_go_late: bool = True

    @property
    def config(self) -> Mapping[str, object]:
        """Impatient."""
        patience = {"connect_seconds": 1.0, "transfer_seconds": 3.0, "pause_seconds": 0.1}
        return {"backend": "UCX", "server": self.server.server, **patience, **self.options}

    @property
    def outages(self) -> Sequence[Outage]:
        """Death, and a freeze within and beyond the deadline."""
        server = self.server
        return (
            Outage(name="killed", begin=server.kill, end=server.start, seconds=(0.5, 1.5)),
            Outage(name="frozen", begin=server.stop, end=server.go_on, seconds=(0.3, 4.0)),
        )


@dataclass(frozen=True, kw_only=True)
class SoakedBucket:
    """The adapter of object storage."""

    server: BucketServer
    module: str = "kvlinker_nixl"
    grace_seconds: float = 8.0
    lets_go_late: bool = True
    outages: Sequence[Outage] = ()

    @property
    def config(self) -> Mapping[str, object]:
        """A prefix of its own."""
        return {
            "backend": "OBJ",
            "bucket": BUCKET,
            "prefix": "soak",
            "endpoint": self.server.endpoint,
            "access_key": "kv",
            "secret_key": "${env:KV_NIXL_TEST_SECRET}",
        }

"""NIXL stores under a soak: a file whose only process is killed, a peer that dies and hangs, and a bucket."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bucket_server import BUCKET, BucketServer
from peer_process import PeerProcess

from kvlinker.testing.soak import Outage, SoakTarget

__all__ = ["soaked_bucket", "soaked_file", "soaked_peer"]


def soaked_file(folder: Path, options: Mapping[str, object]) -> SoakTarget:
    """Return a store in a file, which one process has open at a time; so small that objects are evicted."""
    config = {"backend": "POSIX", "path": str(folder), "capacity": "4MiB", **options}
    return SoakTarget(module="kvlinker_nixl", config=config, grace_seconds=2.0, lets_go_late=True)


def soaked_peer(server: PeerProcess, options: Mapping[str, object]) -> SoakTarget:
    """Return a store in the memory of a peer, which dies, and freezes within and beyond the deadline."""
    patience = {"connect_seconds": 1.0, "transfer_seconds": 3.0, "pause_seconds": 0.1}
    return SoakTarget(
        module="kvlinker_nixl",
        config={"backend": "UCX", "server": server.server, **patience, **options},
        outages=(
            Outage(name="killed", begin=server.kill, end=server.start, seconds=(0.5, 1.5)),
            Outage(name="frozen", begin=server.stop, end=server.go_on, seconds=(0.3, 4.0)),
        ),
        grace_seconds=8.0,
        lets_go_late=True,
    )


def soaked_bucket(server: BucketServer) -> SoakTarget:
    """Return a store in object storage."""
    config = {
        "backend": "OBJ",
        "bucket": BUCKET,
        "prefix": "soak",
        "endpoint": server.endpoint,
        "access_key": "kv",
        "secret_key": "${env:KV_NIXL_TEST_SECRET}",
    }
    return SoakTarget(module="kvlinker_nixl", config=config, grace_seconds=8.0, lets_go_late=True)

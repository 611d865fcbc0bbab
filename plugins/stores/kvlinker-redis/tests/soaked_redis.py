"""A Redis server under a soak: what happens to it, and to the connections to it."""

from __future__ import annotations

from redis.exceptions import RedisError
from redis_server import RedisServer

from kvlinker.testing.soak import Outage, SoakTarget

__all__ = ["soaked_redis"]

_CUTS = 5


def soaked_redis(server: RedisServer) -> SoakTarget:
    """Return a store that needs several calls for some values, and what happens to its server.

    The server dies, freezes within and beyond the deadline, cuts connections, and has no memory.
    """
    return SoakTarget(
        module="kvlinker_redis",
        config={
            "url": server.url,
            "prefix": "soak",
            "connect_seconds": 1.0,
            "answer_seconds": 2.0,
            "retry_seconds": 0.4,
            "pause_seconds": 0.1,
            "call_bytes": 64 << 10,
        },
        outages=(
            Outage(name="killed", begin=server.kill, end=server.start, seconds=(0.8, 2.0)),
            Outage(name="frozen", begin=server.freeze, end=server.thaw, seconds=(0.5, 4.0)),
            Outage(name="cut", begin=lambda: _cut(server), end=lambda: _cut(server)),
            Outage(
                name="out of memory",
                begin=lambda: _limit(server, "1mb"),
                end=lambda: _limit(server, server.option("--maxmemory")),
            ),
        ),
        # More than a call's deadline, its tries and the pause after them.
        grace_seconds=6.0,
    )


def _cut(server: RedisServer) -> None:
    with server.client() as client:
        for _ in range(_CUTS):
            client.client_kill_filter(_type="normal", skipme=True)


def _limit(server: RedisServer, memory: str) -> None:
    with server.client() as client:
        try:
            client.config_set("maxmemory", memory)
        except RedisError as error:
            message = f"the server on port {server.port} takes no limit of {memory}"
            raise RuntimeError(message) from error

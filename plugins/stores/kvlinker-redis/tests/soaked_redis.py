"""A Redis server under a soak: what happens to it, and to the connections to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError
from redis_server import RedisServer

from kvlinker.testing.soak import Outage

__all__ = ["SoakedRedis"]

_CUTS = 5


@dataclass(frozen=True, kw_only=True)
class SoakedRedis:
    """The adapter of the Redis store for `kvlinker.testing.soak`."""

    server: RedisServer
    module: str = "kvlinker_redis"
    grace_seconds: float = 6.0
    """More than a call's deadline, its tries and the pause after them."""
    lets_go_late: bool = False

    @property
    def config(self) -> Mapping[str, object]:
        """Impatient, and with values that need several calls."""
        return {
            "url": self.server.url,
            "prefix": "soak",
            "connect_seconds": 1.0,
            "answer_seconds": 2.0,
            "retry_seconds": 0.4,
            "pause_seconds": 0.1,
            "call_bytes": 64 << 10,
        }

    @property
    def outages(self) -> Sequence[Outage]:
        """Death, a freeze within and beyond the deadline, cut connections, and a server without memory."""
        server = self.server
        return (
            Outage(name="killed", begin=server.kill, end=server.start, seconds=(0.8, 2.0)),
            Outage(name="frozen", begin=server.freeze, end=server.thaw, seconds=(0.5, 4.0)),
            Outage(name="cut", begin=self._cut, end=self._cut),
            Outage(name="out of memory", begin=self._fill, end=self._empty),
        )

    def _cut(self) -> None:
        client = self.server.client()
        for _ in range(_CUTS):
            client.client_kill_filter(_type="normal", skipme=True)
        client.close()

    def _fill(self) -> None:
        self._limit("1mb")

    def _empty(self) -> None:
        self._limit(self.server.option("--maxmemory"))

    def _limit(self, memory: str) -> None:
        with self.server.client() as client:
            try:
                client.config_set("maxmemory", memory)
            except RedisError as error:
                message = f"the server on port {self.server.port} takes no limit of {memory}"
                raise RuntimeError(message) from error

"""Faults that other stores had, where a Redis server is what they would happen to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from redis_server import RedisServer

from kvlinker.store import ReadStatus, Store, WriteStatus
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker_redis import RedisStore

LIMIT = 6 << 20
PAGE_BYTES = 256 << 10
ROUNDING = 256 << 10
"""What buffers of clients take besides objects, between two evictions."""


def commands_of(server: RedisServer, call: Callable[[], object]) -> Mapping[str, int]:
    """Return how often each command came in a call."""
    with server.client() as client:
        client.config_resetstat()
        call()
        stats: object = client.info("commandstats")
    assert isinstance(stats, dict)
    counts = {name.removeprefix("cmdstat_"): int(one["calls"]) for name, one in stats.items()}
    return {name: count for name, count in counts.items() if not name.startswith("config")}


def test_b76_a_lookup_and_a_load_ask_the_same_however_much_the_server_holds(
    make_server: Callable[..., RedisServer], open_store: Callable[..., RedisStore]
) -> None:
    server = make_server()
    shelf = Shelf(open_store(server))
    keys = object_keys(8)
    shelf.stock(keys)

    def look_and_load() -> None:
        assert all(shelf.store.exists(keys))
        assert shelf.read(keys) == (ReadStatus.OK,) * 8

    alone = commands_of(server, look_and_load)
    with server.client() as client:
        client.mset({f"other:{number}": b"value" for number in range(20_000)})
    among_many = commands_of(server, look_and_load)

    assert among_many == alone
    assert alone["exists"] == 8
    assert not {"keys", "scan"} & alone.keys()


def test_b78_a_server_with_a_limit_stays_below_it_when_stores_come_and_go(
    make_server: Callable[..., RedisServer], open_store: Callable[..., RedisStore]
) -> None:
    server = make_server("--maxmemory", str(LIMIT), "--maxmemory-policy", "allkeys-lru")
    written = 0

    for run in range(3):
        store: Store = open_store(server)
        shelf = Shelf(store, page_bytes=PAGE_BYTES)
        for key in object_keys(30, chain=f"run {run}"):
            written += shelf.write([key]) == (WriteStatus.WRITTEN,)
            stats = store.stats()
            assert stats.capacity_bytes == LIMIT
            assert stats.used_bytes <= LIMIT + ROUNDING
        store.close()

    assert written * PAGE_BYTES > 3 * LIMIT

"""Ahead: the server has something to do while answers are used, and a connection that breaks loses nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import OpenStore
from interrupted import Interrupted
from redis import Redis
from redis_server import RedisServer

from kvlinker.host_blocks import HostBlocks
from kvlinker.store import ObjectKey, ReadStatus, WriteStatus
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker_redis import RedisStoreOptions
from kvlinker_redis.lanes import RedisLane
from kvlinker_redis.names import Names
from kvlinker_redis.values import RedisValues

_CALL_BYTES = 64 << 10
_PATIENCE_SECONDS = 10.0


@pytest.fixture
def own_server(make_server: Callable[..., RedisServer]) -> RedisServer:
    return make_server()


def calls_of(client: Redis, command: str) -> int:
    figures: object = client.info("commandstats")
    assert isinstance(figures, dict)
    return int(figures.get(f"cmdstat_{command}", {"calls": 0})["calls"])


def comes_to(count: Callable[[], int], expected: int) -> int:
    """Return a count once it is what is expected, or what it still is after a long while."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while count() != expected and time.monotonic() < end:
        time.sleep(0.005)
    return count()


def stock(client: Redis, names: Names, keys: Sequence[ObjectKey], size: int) -> None:
    for number, name in enumerate(names.of_objects(keys)):
        client.set(name, bytes([number]) * size)


@pytest.mark.parametrize("size", [8 << 10, 32 << 10])
def test_the_next_answers_are_asked_for_before_the_first_ones_are_used(
    own_server: RedisServer, size: int
) -> None:
    options = RedisStoreOptions(url=own_server.url, call_bytes=_CALL_BYTES)
    lane, names, client = RedisLane(options, "loads"), Names(options.prefix), own_server.client()
    values = RedisValues(lane, names, options, HostBlocks(_CALL_BYTES))
    keys = object_keys(12)
    stock(client, names, keys, size)

    fetching = values.fetch(keys, [(0, size)])
    first = next(fetching)
    asked = comes_to(lambda: calls_of(client, "getrange"), _CALL_BYTES // size)
    rest = [view for fetched in fetching for view in map(bytes, map(_there, fetched.views))]
    lane.close()

    assert len(first.numbers) == _CALL_BYTES // size // 2
    assert asked == _CALL_BYTES // size
    assert rest == [bytes([number]) * size for number in range(len(first.numbers), len(keys))]


def test_the_next_drafts_are_made_while_the_server_takes_those_before(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_server, call_bytes=_CALL_BYTES, answer_seconds=60))
    shelf = shelf.beside(page_bytes=40 << 10)  # each goes alone
    keys, client = object_keys(6), own_server.client()
    counted = Interrupted(shelf.access, lambda: None)
    client.client_pause(60_000, all=False)

    with ThreadPoolExecutor(1) as pool:
        write = pool.submit(shelf.write, keys, memory=counted)
        made = comes_to(lambda: counted.copies, 2)
        client.client_unpause()
        assert write.result() == (WriteStatus.WRITTEN,) * 6

    assert made == 2
    assert counted.copies == 6
    assert shelf.read(keys) == (ReadStatus.OK,) * 6


def test_drafts_that_were_sent_ahead_are_sent_again_on_another_connection(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(
        open_store(own_server, call_bytes=_CALL_BYTES, answer_seconds=60, retry_seconds=60)
    )
    shelf = shelf.beside(page_bytes=40 << 10)
    keys, client = object_keys(4), own_server.client()
    counted = Interrupted(shelf.access, lambda: None)
    client.client_pause(60_000, all=False)

    with ThreadPoolExecutor(1) as pool:
        write = pool.submit(shelf.write, keys, memory=counted)
        comes_to(lambda: counted.copies, 2)
        client.client_kill_filter(_type="normal", skipme=True)
        client.client_unpause()
        assert write.result() == (WriteStatus.WRITTEN,) * 4

    assert counted.copies == 4
    assert shelf.read(keys) == (ReadStatus.OK,) * 4


def _there(view: memoryview | None) -> memoryview:
    assert view is not None
    return view

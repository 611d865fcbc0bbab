"""Contents: what lies in the server under an object's name is that object, or a miss."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import OpenStore
from redis import Redis
from redis_server import RedisServer

from kvlinker.device import HostAccess
from kvlinker.errors import ContractError
from kvlinker.frames import header_bytes
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.layered_pages import LayeredPages
from kvlinker.testing.shelves import Shelf, allow, made_up_batch, object_keys
from kvlinker_redis.writing import DRAFT_SECONDS, MAX_OBJECT_BYTES

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
WRITTEN, EXISTS, FULL = WriteStatus.WRITTEN, WriteStatus.EXISTS, WriteStatus.FULL

Change = Callable[[Redis, str, bytes], object]


def value_of(client: Redis, name: str) -> bytes:
    value: object = client.get(name)
    assert isinstance(value, bytes)
    return value


@pytest.fixture
def client(server: RedisServer) -> Redis:
    return server.client()


@pytest.fixture
def name_of(prefix: str) -> Callable[[bytes], str]:
    return lambda key: f"{prefix}:{{{key.hex()}}}"


def other_type(client: Redis, name: str, value: bytes) -> None:
    client.delete(name)
    client.rpush(name, value)


DAMAGES: dict[str, tuple[Change, ReadStatus]] = {
    "empty": (lambda client, name, _: client.set(name, b""), MISS),
    "gone": (lambda client, name, _: client.delete(name), MISS),
    "one byte": (lambda client, name, value: client.set(name, value[:1]), CORRUPT),
    "half of the header": (lambda client, name, value: client.set(name, value[:160]), CORRUPT),
    "no payload": (lambda client, name, value: client.set(name, value[:-640]), CORRUPT),
    "one byte short": (lambda client, name, value: client.set(name, value[:-1]), CORRUPT),
    "one byte long": (lambda client, name, _: client.append(name, b"x"), CORRUPT),
    "zeros": (lambda client, name, value: client.set(name, bytes(len(value))), CORRUPT),
    "a text of somebody": (lambda client, name, _: client.set(name, b"hello" * 100), CORRUPT),
    "another type": (other_type, CORRUPT),
    "a changed header": (lambda client, name, _: client.setrange(name, 40, b"?"), CORRUPT),
    "many ranges": (
        lambda client, name, _: client.setrange(name, 20, b"\xff\xff\x00\x00"),
        CORRUPT,
    ),
    "a changed payload": (
        lambda client, name, value: client.setrange(name, len(value) - 3, b"??"),
        CORRUPT,
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_t1_b81_whatever_is_not_the_whole_object_is_never_read_and_can_be_written_again(
    server: RedisServer,
    open_store: OpenStore,
    client: Redis,
    name_of: Callable[[bytes], str],
    damage: str,
) -> None:
    shelf = Shelf(open_store(server))
    damaged, sound = object_keys(2)
    shelf.stock([damaged, sound])
    change, status = DAMAGES[damage]

    change(client, name_of(damaged), value_of(client, name_of(damaged)))

    assert shelf.read([damaged, sound]) == (status, OK)
    assert shelf.store.stats().counters.get("corrupt", 0) == (status is CORRUPT)
    assert shelf.store.exists([sound]) == (True,)
    assert not client.exists(name_of(damaged)) or status is MISS
    shelf.stock([damaged])
    assert shelf.read([damaged, sound]) == (OK, OK)


def test_every_event_is_counted_from_the_start(server: RedisServer, open_store: OpenStore) -> None:
    """Who asks for a rate sees the first one of a kind too."""
    store = open_store(server)
    shelf = Shelf(store)
    before = store.stats().counters

    shelf.stock(object_keys(2))

    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in readme.splitlines() if line.startswith("`stats()` counts ")]
    assert before == dict.fromkeys(re.findall(r"`(\w+)`", line), 0)
    assert store.stats().counters == {**before, "written": 2}


def test_forged_headers_fill_no_memory(
    make_server: Callable[..., RedisServer],
    open_store: OpenStore,
    prefix: str,
) -> None:
    """Each says that it has 60,000 ranges, in a value that is as long as it would be then."""
    server = make_server()
    shelf = Shelf(open_store(server))
    keys = object_keys(8)
    shelf.stock(keys)
    client = server.client()
    for key in keys[:-1]:
        name = f"{prefix}:{{{key.hex()}}}"
        client.setrange(name, 20, (60_000).to_bytes(4, "little"))
        client.setrange(name, header_bytes(60_000) + shelf.page_bytes - 1, b"x")
    before = answered_bytes(client)

    assert shelf.read(keys) == (CORRUPT,) * 7 + (OK,)

    assert answered_bytes(client) - before < 64 << 10


def test_figures_of_a_large_database_are_the_servers_own(
    make_server: Callable[..., RedisServer], open_store: OpenStore
) -> None:
    server = make_server()
    shelf = Shelf(open_store(server))
    shelf.stock(object_keys(3))
    client = server.client()

    few = shelf.store.stats().objects
    client.mset({f"somebody's:{number}": b"" for number in range(10_000)})
    before = calls_of(client, "scan")

    assert few == 3
    assert shelf.store.stats().objects == 10_003
    assert calls_of(client, "scan") == before


@pytest.mark.parametrize("damage", ["a text of somebody", "another type", "zeros", "empty"])
def test_a_write_replaces_what_is_no_object(
    server: RedisServer,
    open_store: OpenStore,
    client: Redis,
    name_of: Callable[[bytes], str],
    damage: str,
) -> None:
    shelf = Shelf(open_store(server))
    (key,) = object_keys(1)
    DAMAGES[damage][0](client, name_of(key), bytes(1000))

    assert shelf.write([key]) == (WRITTEN,)
    assert shelf.read([key]) == (OK,)


def test_t1_the_object_of_another_key_is_a_miss(
    server: RedisServer, open_store: OpenStore, client: Redis, name_of: Callable[[bytes], str]
) -> None:
    shelf = Shelf(open_store(server))
    first, second = object_keys(2)
    shelf.stock([first, second])

    client.copy(name_of(first), name_of(second), replace=True)

    assert shelf.read([first, second]) == (OK, MISS)


def test_an_object_that_goes_or_is_replaced_between_two_layers_is_a_miss_and_stays_what_it_is(
    server: RedisServer, open_store: OpenStore, client: Redis, name_of: Callable[[bytes], str]
) -> None:
    shelf = Shelf(open_store(server))
    rival = shelf.beside(seed=b"rival")
    gone, replaced, odd, _kept = keys = object_keys(4)
    shelf.stock(keys)

    with shelf.open(keys) as session:
        before = shelf.read(keys, session=session, layer=0)
        client.delete(name_of(gone), name_of(replaced))
        rival.stock([replaced])
        other_type(client, name_of(odd), b"somebody's")
        after = shelf.read(keys, session=session, layer=1)

    assert (before, after) == ((OK,) * 4, (MISS, MISS, MISS, OK))
    assert rival.read([replaced]) == (OK,)
    assert shelf.store.stats().counters["vanished"] == 3


def test_b80_an_object_is_one_key_and_nothing_else_is_left(
    server: RedisServer, open_store: OpenStore, client: Redis, prefix: str
) -> None:
    shelf = Shelf(open_store(server))
    keys, refused = object_keys(5), object_keys(3, chain="refused")

    shelf.stock(keys)
    shelf.write(refused, may_publish=lambda: False)

    names: object = client.keys(f"{prefix}*")
    assert isinstance(names, list)
    assert {name.decode() for name in names} == {f"{prefix}:{{{key.hex()}}}" for key in keys}


def test_t2_a_draft_ends_by_itself_and_is_no_object(
    server: RedisServer, open_store: OpenStore, client: Redis, prefix: str
) -> None:
    shelf = Shelf(open_store(server))
    keys = object_keys(3)
    seen: list[tuple[int, list[int]]] = []

    def may_publish() -> bool:
        names: object = client.keys(f"{prefix}*")
        assert isinstance(names, list)
        lives = [int(str(client.ttl(name))) for name in names]
        seen.append((shelf.store.stats().objects, lives))
        return True

    assert shelf.write(keys, may_publish=may_publish) == (WRITTEN,) * 3
    ((objects, lives),) = seen
    assert objects == 0
    assert len(lives) == 3
    assert all(0 < life <= DRAFT_SECONDS for life in lives)
    assert client.ttl(f"{prefix}:{{{keys[0].hex()}}}") == -1


def test_b73_a_writer_that_comes_second_hears_that_the_object_exists_and_leaves_no_draft(
    server: RedisServer, open_store: OpenStore, client: Redis, prefix: str
) -> None:
    shelf = Shelf(open_store(server))
    rival = shelf.beside(seed=b"rival")
    keys = object_keys(2)

    def may_publish() -> bool:
        rival.stock(keys[:1])
        return True

    assert shelf.write(keys, may_publish=may_publish) == (EXISTS, WRITTEN)
    assert rival.read(keys[:1]) == (OK,)
    assert shelf.store.stats().objects == 2
    assert client.keys(f"{prefix}~*") == []  # a draft that nobody needs takes no room


def test_a_draft_that_is_evicted_before_it_is_renamed_is_no_object(
    server: RedisServer, open_store: OpenStore, client: Redis, prefix: str
) -> None:
    shelf = Shelf(open_store(server))
    keys = object_keys(3)

    def may_publish() -> bool:
        client.delete(*client.keys(f"{prefix}~{{{keys[1].hex()}*"))
        return True

    assert shelf.write(keys, may_publish=may_publish) == (WRITTEN, FULL, WRITTEN)
    assert shelf.read(keys) == (OK, MISS, OK)
    assert shelf.store.stats().counters["drafts_evicted"] == 1


def test_an_object_lives_for_its_time_after_its_last_use(
    server: RedisServer, open_store: OpenStore, client: Redis, name_of: Callable[[bytes], str]
) -> None:
    shelf = Shelf(open_store(server, ttl_seconds=1000))
    used, unused = object_keys(2)
    shelf.stock([used, unused])
    written = client.ttl(name_of(used))
    for key in (used, unused):
        client.expire(name_of(key), 500)

    shelf.read([used])

    assert written == 1000
    assert (client.ttl(name_of(used)), client.ttl(name_of(unused))) == (1000, 500)
    client.pexpire(name_of(used), 1)
    while client.exists(name_of(used)):
        pass
    assert shelf.read([used, unused]) == (MISS, OK)


def test_k4_stores_with_different_prefixes_share_a_database_and_no_objects(
    server: RedisServer, open_store: OpenStore, prefix: str
) -> None:
    shelf = Shelf(open_store(server))
    others = [Shelf(open_store(server, prefix=f"{prefix}{end}")) for end in (":", ".x", "0")]
    keys = object_keys(3)
    shelf.stock(keys)
    for other in others:
        assert other.read(keys[:1]) == (MISS,)
        other.stock(keys[:1])

    assert shelf.store.stats().objects == 3
    assert shelf.store.clear(keys[0][:NAMESPACE_BYTES]) == 3
    assert [other.read(keys[:1]) for other in others] == [(OK,)] * 3
    assert [other.store.stats().objects for other in others] == [1] * 3


def test_clear_takes_a_namespace_and_nothing_shorter(
    server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(server))
    keys = object_keys(2)
    shelf.stock(keys)

    with pytest.raises(ContractError, match="a namespace has 12 bytes, got 1"):
        shelf.store.clear(keys[0][:1])
    with pytest.raises(ContractError, match="an object key has 32 bytes, got 12"):
        shelf.store.exists([keys[0][:12]])

    assert shelf.read(keys) == (OK, OK)


def test_b82_an_object_of_more_than_a_value_holds_fails_and_is_not_copied(
    server: RedisServer, open_store: OpenStore
) -> None:
    batch = made_up_batch(object_keys(1), page_bytes=MAX_OBJECT_BYTES + 64)

    statuses = open_store(server).write([batch], HostAccess(), may_publish=allow)

    assert statuses == ((WriteStatus.FAILED,),)


# ---- calls ----------------------------------------------------------------------------------


def calls_of(client: Redis, command: str) -> int:
    figures: object = client.info("commandstats")
    assert isinstance(figures, dict)
    found: object = figures.get(f"cmdstat_{command}", {"calls": 0})
    assert isinstance(found, dict)
    return int(found["calls"])


def answered_bytes(client: Redis) -> int:
    figures: object = client.info("stats")
    assert isinstance(figures, dict)
    return int(figures["total_net_output_bytes"])


@pytest.mark.parametrize("spans", [1, 160, 600])
def test_objects_of_any_number_of_ranges_come_back(
    server: RedisServer, open_store: OpenStore, spans: int
) -> None:
    pages = LayeredPages(spans, 256)
    (key,) = object_keys(1)
    open_store(server).write([pages.batch(key)], HostAccess(), may_publish=allow)

    # Another process, which has seen no header of this length yet.
    with open_store(server).open_read(pages.request(key)) as session:
        status = session.read(pages.target, HostAccess())

    assert status == (OK,)
    assert (pages.memory[:, 1] == pages.memory[:, 0]).all()


def test_no_call_carries_more_than_it_may(
    make_server: Callable[..., RedisServer], open_store: OpenStore
) -> None:
    server = make_server()
    pages = LayeredPages(8, 30 << 10)
    (key,) = object_keys(1)
    store = open_store(server, call_bytes=64 << 10)
    store.write([pages.batch(key)], HostAccess(), may_publish=allow)
    client = server.client()
    before = calls_of(client, "getrange")

    with store.open_read(pages.request(key)) as session:
        assert session.read(pages.target, HostAccess()) == (OK,)

    assert (pages.memory[:, 1] == pages.memory[:, 0]).all()
    assert (
        calls_of(client, "getrange") - before == 1 + 3
    )  # two ranges at a time, the first with the header


def test_l4_a_layer_is_read_without_the_others(
    make_server: Callable[..., RedisServer], open_store: OpenStore
) -> None:
    server = make_server()
    pages = LayeredPages(8, 30 << 10)
    (key,) = object_keys(1)
    store = open_store(server)
    store.write([pages.batch(key)], HostAccess(), may_publish=allow)
    client = server.client()

    with store.open_read(pages.request(key)) as session:
        before = answered_bytes(client)
        assert session.read(pages.layer(5), HostAccess()) == (OK,)
        answered = answered_bytes(client) - before

    assert 30 << 10 < answered < 60 << 10
    assert (pages.memory[5, 1] == pages.memory[5, 0]).all()
    assert not (pages.memory[4, 1] == pages.memory[4, 0]).all()

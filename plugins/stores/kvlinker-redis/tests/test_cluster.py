"""Clusters: objects are spread over three servers, and a store on any one of them finds all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import OpenStore
from redis import Redis
from redis.exceptions import ResponseError
from redis_server import RedisServer, free_port, make_cluster

from kvlinker.errors import StoreError
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.shelves import Shelf, object_keys

OK, MISS = ReadStatus.OK, ReadStatus.MISS
WRITTEN, EXISTS, FULL = WriteStatus.WRITTEN, WriteStatus.EXISTS, WriteStatus.FULL


@pytest.fixture(scope="module")
def nodes(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    folder = tmp_path_factory.mktemp("cluster")
    nodes = [
        RedisServer(
            binary,
            folder / f"node{number}",
            *("--cluster-enabled", "yes", "--cluster-port", str(free_port())),
        )
        for number in range(3)
    ]
    make_cluster(nodes)
    yield nodes
    for node in nodes:
        node.stop()


@pytest.fixture
def shelf(nodes: list[RedisServer], open_store: OpenStore) -> Shelf:
    return Shelf(open_store(nodes[0], cluster=True))


def test_objects_are_spread_over_all_servers_and_found_from_each(
    nodes: list[RedisServer], open_store: OpenStore, shelf: Shelf
) -> None:
    keys, absent = object_keys(24), object_keys(2, chain="absent")
    shelf.stock(keys)

    for node in nodes:
        beside = Shelf(open_store(node, cluster=True))
        assert beside.read([*keys, *absent]) == (OK,) * 24 + (MISS,) * 2
        assert beside.store.exists([absent[0], *keys]) == (False,) + (True,) * 24
    assert all(int(str(node.client().dbsize())) > 0 for node in nodes)


def test_t4_answers_stand_at_the_positions_of_their_keys_wherever_those_are(shelf: Shelf) -> None:
    keys = object_keys(16, chain="positions")
    shelf.stock(keys[::2])
    there = tuple(number % 2 == 0 for number in range(16))

    assert shelf.store.exists(keys) == there
    assert shelf.read(keys) == tuple(OK if found else MISS for found in there)
    assert shelf.write(keys) == tuple(EXISTS if found else WRITTEN for found in there)
    assert shelf.store.delete(keys[::3]) == (True,) * 6
    assert shelf.read(keys) == tuple(MISS if number % 3 == 0 else OK for number in range(16))


def test_objects_are_counted_and_cleared_on_all_servers(
    open_store: OpenStore, nodes: list[RedisServer], prefix: str, shelf: Shelf
) -> None:
    mine, other = object_keys(12), object_keys(6, model="other")
    shelf.stock([*mine, *other])
    beside = Shelf(open_store(nodes[1], cluster=True, prefix=f"{prefix}beside"))
    beside.stock(mine[:3])

    assert shelf.store.stats().objects == 18
    assert shelf.store.clear(mine[0][:NAMESPACE_BYTES]) == 12
    assert shelf.store.stats().objects == 6
    assert beside.read(mine[:3]) == (OK,) * 3


def test_l7_without_permission_no_server_keeps_anything(
    nodes: list[RedisServer], shelf: Shelf
) -> None:
    sizes = [node.client().dbsize() for node in nodes]

    statuses = shelf.write(object_keys(12, chain="refused"), may_publish=lambda: False)

    assert statuses == (WriteStatus.DISCARDED,) * 12
    assert [node.client().dbsize() for node in nodes] == sizes


def test_slots_that_moved_to_another_server_are_found_there(
    nodes: list[RedisServer], shelf: Shelf, prefix: str
) -> None:
    keys = object_keys(12, chain="moved")
    shelf.stock(keys)
    clients = [node.client() for node in nodes]
    ids: list[object] = [client.execute_command("CLUSTER MYID") for client in clients]
    name = f"{prefix}:{{{keys[0].hex()}}}"
    slot: object = clients[0].execute_command("CLUSTER KEYSLOT", name)
    (owner,) = [number for number, client in enumerate(clients) if owns(client, name)]
    target = (owner + 1) % 3

    clients[target].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[owner])
    clients[owner].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
    clients[owner].execute_command("MIGRATE", "127.0.0.1", nodes[target].port, name, 0, 5000)
    during = shelf.read(keys)
    for client in (clients[target], clients[owner]):
        client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target])

    assert during == (OK,) * 12
    assert shelf.read(keys) == (OK,) * 12
    assert owns(clients[target], name)


def owns(client: Redis, name: str) -> bool:
    try:
        return bool(client.exists(name))
    except ResponseError:
        return False


def test_a_cluster_is_no_single_server_and_a_server_no_cluster(
    nodes: list[RedisServer], server: RedisServer, open_store: OpenStore
) -> None:
    with pytest.raises(StoreError, match=r"cluster support disabled|Cluster mode is not enabled"):
        open_store(server, cluster=True)
    with pytest.raises(StoreError, match="is a node of a cluster; set cluster to true"):
        open_store(nodes[0])


def test_a_user_who_may_not_ask_for_the_clusters_nodes_is_told_what_to_allow(
    nodes: list[RedisServer], open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KV_TEST_PASSWORD", "sesame")
    rights = "on >sesame ~* +@read +@write +@connection +info"
    for node in nodes:
        node.client().execute_command("ACL SETUSER", "kv", *rights.split())
    url = nodes[0].url.replace("redis://", "redis://kv:${env:KV_TEST_PASSWORD}@")

    with pytest.raises(StoreError, match=r"allow its user \+cluster\|slots"):
        open_store(nodes[0], url=url, cluster=True)
    for node in nodes:
        node.client().execute_command("ACL SETUSER", "kv", "+cluster|slots")
    keys = object_keys(12)
    shelf = Shelf(open_store(nodes[0], url=url, cluster=True))

    assert shelf.write(keys) == (WRITTEN,) * 12
    assert shelf.read(keys) == (OK,) * 12
    assert all(shelf.store.delete(keys))

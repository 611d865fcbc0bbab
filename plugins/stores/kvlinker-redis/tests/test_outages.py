"""Outages: servers that die, hang, run full or answer nonsense cost time and misses, and never a wrong byte."""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import OpenStore
from interrupted import Interrupted
from proxy import Proxy, proxy_to
from redis_server import RedisServer, free_port

from kvlinker.device import HostAccess
from kvlinker.errors import StoreClosedError, StoreError, StoreTimeoutError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.layered_pages import LayeredPages
from kvlinker.testing.shelves import Shelf, allow, object_keys
from kvlinker_redis import RedisStoreOptions
from kvlinker_redis.lanes import RedisLane

OK, MISS = ReadStatus.OK, ReadStatus.MISS
WRITTEN, EXISTS, FULL = WriteStatus.WRITTEN, WriteStatus.EXISTS, WriteStatus.FULL

MakeServer = Callable[..., RedisServer]
NEVER = 1000.0


@pytest.fixture
def own_server(make_server: MakeServer) -> RedisServer:
    return make_server()


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    with proxy_to(server.port) as proxy:
        yield proxy


# ---- death and restart ------------------------------------------------------------------------


def test_b87_a_server_that_was_killed_and_restarted_has_lost_its_objects_and_takes_new_ones(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_server))
    keys = object_keys(3)
    shelf.stock(keys)

    with shelf.open(keys) as session:
        assert shelf.read(keys, session=session, layer=0) == (OK,) * 3
        own_server.kill()
        own_server.start()
        assert shelf.read(keys, session=session, layer=1) == (MISS,) * 3

    assert shelf.store.exists(keys) == (False,) * 3
    shelf.stock(keys)
    assert shelf.read(keys) == (OK,) * 3


@pytest.mark.parametrize("moment", ["copy", "permission"])
def test_b87_a_server_that_restarts_in_a_write_leaves_no_object_that_is_not_whole(
    own_server: RedisServer, open_store: OpenStore, moment: str
) -> None:
    shelf = Shelf(open_store(own_server, retry_seconds=5))
    keys = object_keys(3)

    def restart() -> bool:
        own_server.kill()
        own_server.start()
        return True

    if moment == "copy":
        statuses = shelf.write(keys, memory=Interrupted(shelf.access, restart))
        assert statuses == (WRITTEN,) * 3
        assert shelf.read(keys) == (OK,) * 3
    else:
        assert shelf.write(keys, may_publish=restart) == (FULL,) * 3
        assert shelf.read(keys) == (MISS,) * 3


def test_t6_a_dead_server_costs_one_wait_for_loads_and_one_for_offloads(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_server, pause_seconds=NEVER, retry_seconds=0.1))
    keys = object_keys(2)
    shelf.stock(keys)
    own_server.kill()

    with pytest.raises(StoreTimeoutError, match="loads: the server cannot be reached"):
        shelf.read(keys)
    own_server.start()
    for _ in range(100):
        with pytest.raises(StoreTimeoutError, match=r"loads: .* is not asked again yet"):
            shelf.store.exists(keys)

    # The other direction has not been told, and finds the server.
    assert shelf.write(keys) == (WRITTEN, WRITTEN)


def test_after_the_pause_a_server_that_is_back_is_used_again(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_server, pause_seconds=0.01, retry_seconds=0.05))
    keys = object_keys(2)
    own_server.kill()
    for call in (lambda: shelf.read(keys), lambda: shelf.write(keys)):
        with pytest.raises(StoreTimeoutError, match="cannot be reached"):
            call()

    own_server.start()
    time.sleep(0.02)

    assert shelf.write(keys) == (WRITTEN, WRITTEN)
    assert shelf.read(keys) == (OK, OK)


def test_a_server_that_is_back_within_the_retries_is_not_noticed(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_server, retry_seconds=30))
    keys = object_keys(2)
    own_server.kill()

    with ThreadPoolExecutor(1) as pool:
        write = pool.submit(shelf.write, keys)
        time.sleep(0.1)
        own_server.start()
        assert write.result() == (WRITTEN, WRITTEN)


def test_a_server_that_dies_before_the_names_are_given_fails_those_objects_alone(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_server, retry_seconds=0.05))
    keys = object_keys(2)

    def may_publish() -> bool:
        own_server.kill()
        return True

    assert shelf.write(keys, may_publish=may_publish) == (WriteStatus.FAILED,) * 2
    own_server.start()
    time.sleep(0.06)
    assert shelf.store.exists(keys) == (False, False)


def test_opening_a_store_without_a_server_says_where_it_was_looked_for(
    open_store: OpenStore,
) -> None:
    class Nobody:
        url = f"redis://127.0.0.1:{free_port()}/0"

    with pytest.raises(
        StoreTimeoutError, match=f"{Nobody.url}, loads: the server cannot be reached"
    ):
        open_store(Nobody, retry_seconds=0.05)


def test_a_lost_connection_is_made_anew_with_growing_pauses(open_store: OpenStore) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    attempts: list[str] = []

    def hang_up() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            attempts.append("again")
            connection.close()

    class Flighty:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"

    thread = threading.Thread(target=hang_up, daemon=True)
    thread.start()
    with pytest.raises(StoreTimeoutError, match="the server cannot be reached"):
        open_store(Flighty, retry_seconds=0.7)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()

    assert 2 <= len(attempts) <= 12  # without pauses it would be thousands


def test_a_server_that_leaves_the_cluster_while_it_is_asked_is_an_error_that_says_so(
    server: RedisServer,
) -> None:
    lane = RedisLane(RedisStoreOptions(url=server.url), "loads")

    with pytest.raises(StoreError, match=r"10\.0\.0\.7:7000 left the cluster meanwhile; try again"):
        lane.run_on("10.0.0.7:7000", [("PING",)])
    lane.close()


# ---- hanging ------------------------------------------------------------------------------------


def test_t6_a_frozen_server_costs_the_deadline(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_server, answer_seconds=0.2, retry_seconds=0.1))
    keys = object_keys(2)
    shelf.stock(keys)

    own_server.freeze()
    try:
        with pytest.raises(StoreTimeoutError, match="cannot be reached"):
            shelf.read(keys)
    finally:
        own_server.thaw()

    time.sleep(0.06)
    assert shelf.read(keys) == (OK, OK)


def test_l9_loads_go_on_while_the_server_takes_no_writes(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_server, answer_seconds=60))
    beside = shelf.beside()
    stored, others = object_keys(2), object_keys(2, chain="others")
    shelf.stock(stored)
    client = own_server.client()
    client.client_pause(60_000, all=False)

    with ThreadPoolExecutor(1) as pool:
        write = pool.submit(shelf.write, others)
        for _ in range(50):
            assert beside.read(stored) == (OK, OK)
            assert shelf.store.exists(others) == (False, False)
        assert not write.done()
        client.client_unpause()
        assert write.result() == (WRITTEN, WRITTEN)


def test_lookups_and_loads_have_connections_of_their_own(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_server))
    shelf.stock(object_keys(1))

    clients: object = own_server.client().client_list()

    assert isinstance(clients, list)
    names = [client["name"] for client in clients if client["name"]]
    assert sorted(names) == ["kvlinker-loads", "kvlinker-offloads"]


def test_closing_a_store_ends_a_call_that_hangs(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_server, answer_seconds=300, retry_seconds=300))
    keys = object_keys(1)
    own_server.freeze()

    with ThreadPoolExecutor(1) as pool:
        lookup = pool.submit(shelf.store.exists, keys)
        time.sleep(0.1)
        shelf.store.close()
        with pytest.raises(StoreClosedError):
            lookup.result(timeout=30)


# ---- connections that break -------------------------------------------------------------------


def test_connections_that_are_killed_in_the_middle_of_a_read_or_a_write_are_made_anew(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_server, call_bytes=64 << 10, retry_seconds=5))
    large = shelf.beside(page_bytes=40 << 10)
    keys = object_keys(8)
    client = own_server.client()

    def kill() -> None:
        client.client_kill_filter(_type="normal", skipme=True)

    out = Interrupted(large.access, kill)
    assert large.write(keys, memory=out) == (WRITTEN,) * 8
    back = Interrupted(large.access, kill)
    assert large.read(keys, memory=back) == (OK,) * 8

    assert (out.copies, back.copies) == (8, 8)


def test_connections_that_are_killed_all_the_time_change_no_byte(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(own_server, retry_seconds=30))
    large = shelf.beside(page_bytes=320 << 10)
    client = own_server.client()
    is_over = threading.Event()

    def kill() -> None:
        while not is_over.is_set():
            client.client_kill_filter(_type="normal", skipme=True)
            time.sleep(0.03)

    with ThreadPoolExecutor(1) as pool:
        killer = pool.submit(kill)
        try:
            for number in range(4):
                keys = object_keys(4, chain=f"round {number}")
                written = large.write(keys)
                assert {WRITTEN, EXISTS} >= set(written)
                assert large.read(keys) == (OK,) * 4
        finally:
            is_over.set()
        killer.result()


@pytest.mark.parametrize("answered", [0, 1, 100, 3000, 30_000])
def test_t1_an_answer_that_is_cut_off_is_asked_for_again(
    open_store: OpenStore, proxy: Proxy, answered: int
) -> None:
    shelf = Shelf(open_store(proxy, retry_seconds=10))
    large = shelf.beside(page_bytes=40 << 10)
    keys = object_keys(2)
    large.stock(keys)
    proxy.answer_bytes = answered

    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(large.read, keys)
        while proxy.answer_bytes:
            time.sleep(0.001)
        proxy.answer_bytes = None
        assert read.result() == (OK, OK)


def test_t1_a_byte_that_changes_on_the_way_never_reaches_a_page(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy))
    changed, sound = object_keys(2)
    shelf.stock([changed, sound])
    proxy.flips = shelf.payload(changed)[100:120]

    statuses = shelf.read([changed, sound])

    assert statuses == (ReadStatus.CORRUPT, OK)


def test_a_long_object_may_take_longer_to_be_sent_than_the_server_may_be_silent(
    open_store: OpenStore, proxy: Proxy
) -> None:
    pages = LayeredPages(1, 24 << 20)
    (key,) = object_keys(1)
    # 384 pieces: far longer than the deadline together, and each far shorter, on a busy machine too.
    store = open_store(proxy, answer_seconds=2, retry_seconds=0.01)
    proxy.sent_pause_seconds = 0.01

    statuses = store.write([pages.batch(key)], HostAccess(), may_publish=allow)

    assert statuses == ((WRITTEN,),)


def test_answers_that_stall_cost_the_deadline_and_the_next_ones_are_right(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy, answer_seconds=0.2, retry_seconds=0.1))
    keys = object_keys(2)
    shelf.stock(keys)

    proxy.stall()
    with pytest.raises(StoreTimeoutError):
        shelf.read(keys)
    proxy.go_on()
    time.sleep(0.06)

    # The late answers came on connections that nobody uses any more.
    assert shelf.store.exists([*object_keys(2, chain="absent"), *keys]) == (
        False,
        False,
        True,
        True,
    )
    assert shelf.read(keys) == (OK, OK)


def test_t4_the_late_answer_to_a_read_is_not_taken_for_the_next_ones(
    open_store: OpenStore, proxy: Proxy
) -> None:
    shelf = Shelf(open_store(proxy, answer_seconds=0.3, retry_seconds=0.1))
    keys = object_keys(2)
    shelf.stock(keys)

    with shelf.open(keys) as session:
        assert shelf.read(keys, session=session, layer=0) == (OK, OK)
        proxy.stall()
        with pytest.raises(StoreTimeoutError):
            shelf.read(keys, session=session, layer=1)
        time.sleep(0.06)
        threading.Timer(0.1, proxy.go_on).start()
        assert shelf.read(keys, session=session, layer=2) == (OK, OK)

    assert shelf.read(keys) == (OK, OK)


@pytest.mark.parametrize(
    "greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-5\r\n", b"\x00" * 64]
)
def test_what_is_no_redis_server_is_refused(open_store: OpenStore, greeting: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def greet() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(4096)
                connection.sendall(greeting)

    class Stranger:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    with pytest.raises(StoreError, match=Stranger.url):
        open_store(Stranger, retry_seconds=0.05)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


# ---- memory -----------------------------------------------------------------------------------


def test_t3_without_eviction_a_full_server_is_said_to_be_full_and_keeps_what_it_has(
    make_server: MakeServer, open_store: OpenStore
) -> None:
    server = make_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    shelf = Shelf(open_store(server), page_bytes=256 << 10)
    keys = object_keys(24)

    statuses = [shelf.write([key])[0] for key in keys]

    stored = [key for key, status in zip(keys, statuses, strict=True) if status is WRITTEN]
    assert 4 <= len(stored) < 24
    assert set(statuses) == {WRITTEN, FULL}
    assert shelf.read(stored) == (OK,) * len(stored)
    assert shelf.store.exists(keys) == tuple(status is WRITTEN for status in statuses)
    stats = shelf.store.stats()
    assert stats.capacity_bytes == 4 << 20
    assert stats.counters["full"] == statuses.count(FULL)
    shelf.store.delete(stored[:4])
    assert shelf.write(keys[-1:]) == (WRITTEN,)


def test_t3_with_eviction_the_objects_that_go_are_misses(
    make_server: MakeServer, open_store: OpenStore
) -> None:
    server = make_server("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    shelf = Shelf(open_store(server), page_bytes=256 << 10)
    keys = object_keys(24)

    for key in keys:
        assert shelf.write([key])[0] in (WRITTEN, FULL)

    statuses = shelf.read(keys)
    assert set(statuses) == {OK, MISS}
    assert shelf.store.stats().counters.get("corrupt", 0) == 0
    shelf.stock(keys[:1])
    assert shelf.read(keys[:1]) == (OK,)


def test_a_write_that_the_server_is_too_small_for_is_full_and_no_error(
    make_server: MakeServer, open_store: OpenStore
) -> None:
    server = make_server("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    shelf = Shelf(open_store(server, call_bytes=256 << 10), page_bytes=512 << 10)

    statuses = shelf.write(object_keys(16))

    assert FULL in statuses
    assert set(statuses) <= {WRITTEN, FULL}


# ---- who may ----------------------------------------------------------------------------------


def test_a_password_is_read_from_where_the_url_says_and_shown_nowhere(
    make_server: MakeServer, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server("--requirepass", "sesame")
    url = server.url.replace("redis://", "redis://:${env:KV_TEST_PASSWORD}@")

    monkeypatch.setenv("KV_TEST_PASSWORD", "wrong-sesame")
    with pytest.raises(
        StoreError, match=r"the server refuses: .*; look at user, password"
    ) as wrong:
        open_store(server, url=url)
    monkeypatch.delenv("KV_TEST_PASSWORD")
    with pytest.raises(StoreError, match="KV_TEST_PASSWORD is not set"):
        open_store(server, url=url)
    with pytest.raises(StoreError, match="the server refuses: Authentication required"):
        open_store(server)
    monkeypatch.setenv("KV_TEST_PASSWORD", "sesame")
    store = open_store(server, url=url)

    assert "sesame" not in str(wrong.value)
    assert store.exists(object_keys(1)) == (False,)


@pytest.mark.parametrize("cluster", [False, True])
def test_a_password_that_a_server_repeats_since_it_knows_none_is_shown_nowhere(
    make_server: MakeServer,
    open_store: OpenStore,
    monkeypatch: pytest.MonkeyPatch,
    *,
    cluster: bool,
) -> None:
    server = make_server("--rename-command", "AUTH", "NONE")
    url = server.url.replace("redis://", "redis://:${env:KV_TEST_PASSWORD}@")
    monkeypatch.setenv("KV_TEST_PASSWORD", "sesame")

    with pytest.raises(StoreError, match=r"unknown command 'AUTH'|Redis Cluster") as refused:
        open_store(server, url=url, cluster=cluster)

    assert "sesame" not in "".join(traceback.format_exception(refused.value))


def test_a_password_that_was_changed_is_found_by_the_next_connection(
    make_server: MakeServer, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = "first", "second"
    server = make_server("--requirepass", first)
    monkeypatch.setenv("KV_TEST_PASSWORD", first)
    url = server.url.replace("redis://", "redis://:${env:KV_TEST_PASSWORD}@")
    store = open_store(server, url=url)

    client = server.client(password=first)
    client.config_set("requirepass", second)
    monkeypatch.setenv("KV_TEST_PASSWORD", second)
    client.client_kill_filter(_type="normal", skipme=True)

    assert store.exists(object_keys(1)) == (False,)


@pytest.mark.parametrize("call", ["exists", "stats"])
def test_a_password_that_cannot_be_read_for_a_moment_spoils_no_connection(
    make_server: MakeServer, open_store: OpenStore, tmp_path: Path, call: str
) -> None:
    server = make_server("--requirepass", password := "sesame")
    file = tmp_path / "password"
    file.write_text(password)
    url = server.url.replace("redis://", f"redis://:${{file:{file}}}@")
    store = open_store(server, url=url)
    keys = object_keys(1)
    client = server.client(password=password)

    client.client_kill_filter(_type="normal", skipme=True)
    file.unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match=f"the password's file {file} cannot be read"):
            store.exists(keys) if call == "exists" else store.stats()
    file.write_text(password)

    assert store.exists(keys) == (False,)
    assert store.stats().objects == 0


def test_a_user_without_rights_is_told_so(
    own_server: RedisServer,
    open_store: OpenStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own_server.client().acl_setuser(
        "reader",
        enabled=True,
        passwords=["+sesame"],
        keys=["*"],
        commands=["+@read", "+@connection", "+info", "+dbsize"],
    )
    Shelf(open_store(own_server)).stock(object_keys(1))
    monkeypatch.setenv("KV_TEST_PASSWORD", "sesame")
    url = own_server.url.replace("redis://", "redis://reader:${env:KV_TEST_PASSWORD}@")
    shelf = Shelf(open_store(own_server, url=url))

    assert shelf.read(object_keys(1)) == (OK,)
    assert shelf.write(object_keys(5)) == (EXISTS, *[WriteStatus.FAILED] * 4)
    assert caplog.text.count("objects were not stored: ") == 1
    assert shelf.store.stats().counters["errors"] == 4
    with pytest.raises(StoreError, match=r"UNLINK was answered with .*permissions.*; allow"):
        shelf.store.delete(object_keys(1))

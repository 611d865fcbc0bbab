"""Contents: what lies in the bucket under an object's name is that object, or a miss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from obstore.store import S3Store as Client
from s3_server import BUCKET, OpenStore, S3Server, settings_for

from kvlinker.device import HostAccess
from kvlinker.errors import ContractError
from kvlinker.frames import header_bytes
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.layered_pages import LayeredPages
from kvlinker.testing.shelves import Shelf, allow, made_up_batch, object_keys
from kvlinker_s3.client import open_client
from kvlinker_s3.names import Names
from kvlinker_s3.options import S3StoreOptions
from kvlinker_s3.writing import MAX_OBJECT_BYTES

OK, MISS, CORRUPT = ReadStatus.OK, ReadStatus.MISS, ReadStatus.CORRUPT
WRITTEN, EXISTS, FULL = WriteStatus.WRITTEN, WriteStatus.EXISTS, WriteStatus.FULL


class Bucket:
    """What somebody else does with the bucket."""

    def __init__(self, options: S3StoreOptions) -> None:
        client = open_client(options)
        assert isinstance(client, Client)
        self._client = client
        self._names = Names(options.prefix)

    def get(self, key: bytes) -> bytes:
        return bytes(self._client.get(self._names.of_object(key)).buffer())

    def put(self, key: bytes, value: bytes) -> None:
        self._client.put(self._names.of_object(key), value, use_multipart=False)

    def put_beside(self, name: str, value: bytes) -> None:
        self._client.put(f"{self._names.folder}/{name}", value, use_multipart=False)

    def delete(self, *keys: bytes) -> None:
        self._client.delete(self._names.of_objects(keys))

    def list(self) -> set[str]:
        pages = self._client.list(self._names.folder)
        return {item["path"] for page in pages for item in page}


@pytest.fixture
def bucket(server: S3Server, prefix: str) -> Bucket:
    options = {"url": f"s3://{BUCKET}", "prefix": prefix, "settings": settings_for(server.port)}
    return Bucket(S3StoreOptions.of_config(options))


def changed(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], ReadStatus]] = {
    "empty": (lambda _: b"", MISS),
    "one byte": (lambda value: value[:1], CORRUPT),
    "half of the header": (lambda value: value[:160], CORRUPT),
    "no payload": (lambda value: value[:-640], CORRUPT),
    "one byte short": (lambda value: value[:-1], CORRUPT),
    "one byte long": (lambda value: value + b"x", CORRUPT),
    "zeros": (lambda value: bytes(len(value)), CORRUPT),
    "a text of somebody": (lambda _: b"hello" * 100, CORRUPT),
    "a changed header": (lambda value: changed(value, 40), CORRUPT),
    "many ranges": (lambda value: value[:20] + b"\xff\xff\x00\x00" + value[24:], CORRUPT),
    "a changed payload": (lambda value: changed(value, len(value) - 3), CORRUPT),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_t1_b81_whatever_is_not_the_whole_object_is_never_read_and_can_be_written_again(
    server: S3Server, open_store: OpenStore, bucket: Bucket, damage: str
) -> None:
    shelf = Shelf(open_store(server.port))
    damaged, sound = object_keys(2)
    shelf.stock([damaged, sound])
    change, expected = DAMAGES[damage]

    bucket.put(damaged, change(bucket.get(damaged)))

    assert shelf.read([damaged, sound]) == (expected, OK)
    assert shelf.store.exists([damaged, sound]) == (False, True)
    assert shelf.store.stats().counters.get("corrupt", 0) == int(expected is CORRUPT)
    assert shelf.write([damaged]) == (WRITTEN,)
    assert shelf.read([damaged, sound]) == (OK, OK)


@pytest.mark.parametrize("damage", ["zeros", "one byte short", "a text of somebody"])
def test_a_write_replaces_what_is_no_object(
    server: S3Server, open_store: OpenStore, bucket: Bucket, damage: str
) -> None:
    shelf = Shelf(open_store(server.port))
    (key,) = object_keys(1)
    shelf.stock([key])
    bucket.put(key, DAMAGES[damage][0](bucket.get(key)))

    assert shelf.write([key]) == (WRITTEN,)
    assert shelf.read([key]) == (OK,)


def test_an_object_of_another_layout_is_a_miss_and_is_replaced(
    server: S3Server, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(server.port))
    other = shelf.beside(fingerprint=b"another layout")
    longer = shelf.beside(page_bytes=1280)
    keys = object_keys(1)
    shelf.stock(keys)

    assert (other.read(keys), longer.read(keys)) == ((MISS,), (MISS,))
    assert longer.write(keys) == (WRITTEN,)
    assert (longer.read(keys), shelf.read(keys)) == ((OK,), (MISS,))


def test_an_object_under_the_name_of_another_is_a_miss(
    server: S3Server, open_store: OpenStore, bucket: Bucket
) -> None:
    shelf = Shelf(open_store(server.port))
    one, other = object_keys(2)
    shelf.stock([one, other])

    bucket.put(one, bucket.get(other))

    assert shelf.read([one, other]) == (MISS, OK)


def test_b71_what_goes_or_changes_while_it_is_read_is_a_miss(
    server: S3Server, open_store: OpenStore, bucket: Bucket
) -> None:
    shelf = Shelf(open_store(server.port))
    rival = shelf.beside(seed=b"rival")
    gone, replaced, shorter, _kept = keys = object_keys(4)
    shelf.stock(keys)

    with shelf.open(keys) as session:
        before = shelf.read(keys, session=session, layer=0)
        bucket.delete(gone, replaced)
        rival.stock([replaced])
        bucket.put(shorter, b"short")
        after = shelf.read(keys, session=session, layer=1)

    assert (before, after) == ((OK,) * 4, (MISS, MISS, MISS, OK))
    assert rival.read([replaced]) == (OK,)
    assert shelf.store.stats().counters["vanished"] == 3


def test_b71_an_object_that_is_cut_while_layers_are_read_ahead_is_no_object(
    server: S3Server, open_store: OpenStore, bucket: Bucket
) -> None:
    pages = LayeredPages(64, 2 << 10)
    (key,) = object_keys(1)
    store = open_store(server.port)
    store.write([pages.batch(key)], HostAccess(), may_publish=allow)

    with store.open_read(pages.request(key)) as session:
        before = [session.read(pages.layer(at), HostAccess()) for at in range(2)]
        bucket.put(key, bucket.get(key)[: header_bytes(64) + (9 << 10)])
        after = [session.read(pages.layer(at), HostAccess()) for at in range(2, 12)]

    assert before == [(OK,)] * 2
    assert after[-1] in {(MISS,), (CORRUPT,)}


def test_b73_a_writer_that_comes_second_hears_that_the_object_exists(
    server: S3Server, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(server.port))
    rival = shelf.beside(seed=b"rival")
    keys = object_keys(2)

    def may_publish() -> bool:
        rival.stock(keys[:1])
        return True

    assert shelf.write(keys, may_publish=may_publish) == (EXISTS, WRITTEN)
    assert rival.read(keys[:1]) == (OK,)
    assert shelf.store.stats().objects == 2


def test_a_name_that_was_taken_by_something_else_meanwhile_is_written_over(
    server: S3Server, open_store: OpenStore, bucket: Bucket
) -> None:
    shelf = Shelf(open_store(server.port))
    keys = object_keys(2)

    def may_publish() -> bool:
        bucket.put(keys[0], b"something else")
        bucket.put(keys[1], b"")
        return True

    assert shelf.write(keys, may_publish=may_publish) == (WRITTEN, WRITTEN)
    assert shelf.read(keys) == (OK, OK)


def test_b76_b80_an_object_is_one_name_in_two_levels_of_folders_and_nothing_else_is_left(
    server: S3Server, open_store: OpenStore, bucket: Bucket, prefix: str
) -> None:
    shelf = Shelf(open_store(server.port))
    keys, refused = object_keys(5), object_keys(3, chain="refused")

    shelf.stock(keys)
    shelf.write(refused, may_publish=lambda: False)

    digits = [key.hex() for key in keys]
    assert bucket.list() == {f"{prefix}/{one[:24]}/{one[24:26]}/{one[26:]}" for one in digits}


def test_k4_stores_with_different_prefixes_share_a_bucket_and_no_objects(
    server: S3Server, open_store: OpenStore, prefix: str
) -> None:
    shelf = Shelf(open_store(server.port))
    others = [
        Shelf(open_store(server.port, prefix=f"{prefix}{end}")) for end in ("0", ".x", "/deeper")
    ]
    keys = object_keys(3)
    shelf.stock(keys)
    for other in others:
        assert other.read(keys[:1]) == (MISS,)
        other.stock(keys[:1])

    assert shelf.store.stats().objects == 3
    assert shelf.store.clear(keys[0][:NAMESPACE_BYTES]) == 3
    assert [other.read(keys[:1]) for other in others] == [(OK,)] * 3
    assert [other.store.stats().objects for other in others] == [1] * 3


def test_clear_takes_one_namespace_and_leaves_what_is_somebody_elses(
    server: S3Server, open_store: OpenStore, bucket: Bucket
) -> None:
    shelf = Shelf(open_store(server.port))
    keys, others = object_keys(2), object_keys(2, model="other")
    shelf.stock([*keys, *others])
    beside = f"{keys[0][:NAMESPACE_BYTES].hex()}/notes.txt"
    bucket.put_beside(beside, b"notes")

    with pytest.raises(ContractError, match="a namespace has 12 bytes, got 1"):
        shelf.store.clear(keys[0][:1])
    with pytest.raises(ContractError, match="an object key has 32 bytes, got 12"):
        shelf.store.exists([keys[0][:NAMESPACE_BYTES]])
    assert shelf.store.stats().objects == 4
    assert shelf.store.clear(keys[0][:NAMESPACE_BYTES]) == 2

    assert shelf.read([*keys, *others]) == (MISS, MISS, OK, OK)
    assert any(name.endswith("notes.txt") for name in bucket.list())


def test_delete_says_of_each_object_whether_it_was_there(
    server: S3Server, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(server.port))
    one, other, absent = object_keys(3)
    shelf.stock([one, other])

    assert shelf.store.delete([one, absent, other, one]) == (True, False, True, False)
    assert shelf.store.stats().objects == 0


def test_stats_have_no_capacity_and_the_bytes_of_whole_objects(
    server: S3Server, open_store: OpenStore, bucket: Bucket
) -> None:
    shelf = Shelf(open_store(server.port))
    keys = object_keys(3)
    shelf.stock(keys)

    stats = shelf.store.stats()

    assert (stats.objects, stats.capacity_bytes) == (3, None)
    assert stats.used_bytes == 3 * len(bucket.get(keys[0])) > 3 * shelf.page_bytes
    assert stats.counters["written"] == 3


# ---- sizes --------------------------------------------------------------------------------------


def test_b82_an_object_of_more_than_a_request_carries_fails_and_is_not_copied(
    server: S3Server, open_store: OpenStore
) -> None:
    batch = made_up_batch(object_keys(1), page_bytes=MAX_OBJECT_BYTES + 64)

    statuses = open_store(server.port).write([batch], HostAccess(), may_publish=allow)

    assert statuses == ((WriteStatus.FAILED,),)


def test_what_finds_no_room_in_host_memory_is_full_and_the_objects_before_it_are_written(
    server: S3Server, open_store: OpenStore
) -> None:
    shelf = Shelf(open_store(server.port, write_bytes=1 << 20), page_bytes=256 << 10)
    keys = object_keys(6)

    assert shelf.write(keys) == (WRITTEN,) * 3 + (FULL,) * 3
    assert shelf.read(keys) == (OK,) * 3 + (MISS,) * 3
    assert shelf.store.stats().counters["no_room"] == 3
    assert shelf.write(keys) == (EXISTS,) * 3 + (WRITTEN,) * 3


@pytest.mark.parametrize("spans", [1, 160, 600])
def test_objects_of_any_number_of_ranges_come_back(
    server: S3Server, open_store: OpenStore, spans: int
) -> None:
    pages = LayeredPages(spans, 256)
    (key,) = object_keys(1)
    open_store(server.port).write([pages.batch(key)], HostAccess(), may_publish=allow)

    # Another process, which has seen no header of this length yet.
    with open_store(server.port).open_read(pages.request(key)) as session:
        status = session.read(pages.target, HostAccess())

    assert status == (OK,)
    assert (pages.memory[:, 1] == pages.memory[:, 0]).all()

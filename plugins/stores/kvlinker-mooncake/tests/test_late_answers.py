"""What a client does late or by halves: room, bytes and removals that nobody waits for any more."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from fake_mooncake import (
    FakeClient,
    StillClock,
    answers,
    hangs,
    name_of,
    open_fake,
    wait_until,
)

from kvlinker.errors import StoreClosedError, StoreError, UnsupportedOperationError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing import Gate
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker_mooncake import MooncakeStoreOptions, removing
from kvlinker_mooncake.codes import Code
from kvlinker_mooncake.raw_client import NEEDED_CALLS, replicate_config

OK, WRITTEN = ReadStatus.OK, WriteStatus.WRITTEN
pytestmark = pytest.mark.usefixtures("clock")


def test_l5_room_that_bytes_are_still_sent_to_is_given_up_behind_the_last_of_them(
    clock: StillClock,
) -> None:
    fake, gate = FakeClient(), Gate()
    shelf = Shelf(open_fake(fake, reads="auto", staged=True))
    keys = object_keys(2)
    fake.before = hangs(gate, "batch_put_from_multi_buffer_ranges")
    revoke = ("batch_put_session_revoke", 0)

    with gate:
        assert shelf.write(keys) == (WriteStatus.FAILED,) * 2
        clock.sleep(60)  # the master is left alone for a while
        assert shelf.write(keys) == (WriteStatus.FAILED,) * 2
        assert revoke not in fake.calls, "the bytes would land in what is given to others"
    wait_until(lambda: revoke in fake.calls)

    fake.before = lambda _: None
    wait_until(lambda: shelf.write(keys) == (WRITTEN, WRITTEN))
    assert shelf.read(keys) == (OK, OK)


def test_a_put_that_began_for_some_before_the_master_went_is_given_up(
    clock: StillClock,
) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)

    def begin_one(name: str) -> list[int] | None:
        if name == "batch_put_session_start":
            fake.writing[name_of(keys[0])] = bytearray(640)
            return [0, int(Code.NO_ANSWER)]
        return None

    fake.before = begin_one
    assert shelf.write(keys) == (WriteStatus.FAILED,) * 2

    fake.before = lambda _: None
    clock.sleep(60)  # the master is left alone for a while
    assert shelf.write(keys) == (WRITTEN, WRITTEN)


def test_what_is_written_where_something_hidden_was_lost_is_there_and_stays(
    clock: StillClock,
) -> None:
    fake = FakeClient()
    store = open_fake(fake, contended_seconds=0)
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)
    fake.before = answers(batch_remove=[int(Code.LEASED)] * 2)
    assert store.delete(keys) == (True, True)
    assert store.exists(keys) == (False, False)  # which tries again, and not soon after
    fake.before = lambda _: None
    fake.objects.clear()  # as a master that was started anew

    assert shelf.write(keys) == (WRITTEN, WRITTEN)

    clock.sleep(60)  # until what is hidden is tried again
    assert store.exists(keys) == (True, True)
    assert shelf.read(keys) == (OK, OK)


def test_a_removal_of_what_can_be_neither_removed_nor_hidden_is_no_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeClient()
    store = open_fake(fake, contended_seconds=0)
    shelf, keys = Shelf(store), object_keys(3)
    shelf.stock(keys)
    monkeypatch.setattr(removing, "MAX_HIDDEN", 2)
    fake.before = answers(batch_remove=[int(Code.LEASED)] * 3)

    assert store.delete(keys) == (True, True, False)


@pytest.mark.parametrize("layer", [None, 1], ids=["whole", "layer"])
def test_l5_a_store_is_closed_behind_the_last_byte_that_lands_in_the_pools(
    layer: int | None,
) -> None:
    fake, gate = FakeClient(), Gate()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    fake.before = hangs(gate, "batch_get_into_multi_buffers", "batch_get_into_multi_buffer_ranges")

    with ThreadPoolExecutor(2) as pool:
        with gate:
            read = pool.submit(shelf.read, keys, layer=layer)
            gate.wait_for_arrivals()
            closed = pool.submit(shelf.store.close)
            wait_until(lambda: _is_refused(shelf))
            time.sleep(0.1)
            assert not closed.done()
            assert fake.registered, "bytes are on their way there"
        closed.result(60)
        with pytest.raises(StoreClosedError):
            read.result(60)
    assert not fake.registered
    wait_until(lambda: fake.is_closed)


def test_b71_a_session_that_is_closed_under_a_read_ends_that_of_the_client_behind_it() -> None:
    fake, gate = FakeClient(), Gate()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    fake.before = hangs(gate, "batch_get_into_multi_buffer_ranges")
    session = shelf.open(keys)

    with ThreadPoolExecutor(1) as pool, gate:
        read = pool.submit(shelf.read, keys, session=session, layer=1)
        gate.wait_for_arrivals()
        session.close()
        assert fake.sessions == {name_of(key) for key in keys}
        gate.open()
        assert read.result(60) == (OK, OK)

    assert not fake.sessions
    with pytest.raises(StoreClosedError, match="this read session was closed"):
        shelf.read(keys, session=session, layer=1)


def _is_refused(shelf: Shelf) -> bool:
    try:
        shelf.store.exists(object_keys(1))
    except StoreClosedError:
        return True
    return False


@pytest.mark.parametrize(
    "name",
    ["batch_is_exist", "batch_get_replica_desc", "batch_get_into_multi_buffers", "batch_remove"],
)
def test_what_a_client_raises_is_an_error_of_the_store(name: str) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)

    def come(call: str) -> None:
        if call == name:
            message = "std::bad_alloc"
            raise MemoryError(message)

    fake.before = come

    with pytest.raises(StoreError, match=r"the client raised MemoryError: std::bad_alloc"):
        shelf.store.exists(keys) if name == "batch_is_exist" else (
            shelf.store.delete(keys) if name == "batch_remove" else shelf.read(keys)
        )
    fake.before = lambda _: None
    assert shelf.read(keys) == (OK, OK)


@pytest.mark.parametrize(
    ("options", "lacks"),
    [
        ({}, "replica_num"),
        ({"segments": ["a:1"]}, "preferred_segments"),
        ({"hard_pin": True}, "with_hard_pin"),
        ({"soft_pin_seconds": 1}, "soft_pin_ttl_ms"),
        ({"soft_pin_seconds": 1}, "SoftPinAction"),
        ({}, "ReplicateConfig"),
    ],
    ids=str,
)
def test_a_client_that_lacks_a_setting_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], lacks: str
) -> None:
    settings = {
        "replica_num",
        "preferred_segments",
        "with_hard_pin",
        "soft_pin_action",
        "soft_pin_ttl_ms",
    }
    parts = {
        "ReplicateConfig": type("ReplicateConfig", (), dict.fromkeys(settings - {lacks})),
        "SoftPinAction": type("SoftPinAction", (), {"ENABLE": 1}),
    }
    module = ModuleType("mooncake.store")
    vars(module).update({name: part for name, part in parts.items() if name != lacks})
    monkeypatch.setitem(__import__("sys").modules, "mooncake.store", module)
    wanted = MooncakeStoreOptions.of_config({"master": "a:1", **options})

    with pytest.raises(UnsupportedOperationError, match=f"has no (setting )?{lacks}; install"):
        replicate_config(wanted)


def test_the_readme_names_the_calls_that_are_needed() -> None:
    readme = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")

    assert ", ".join(f"`{name}`" for name in NEEDED_CALLS) in readme

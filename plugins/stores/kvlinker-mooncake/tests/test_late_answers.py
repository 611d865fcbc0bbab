"""What a client does late or by halves: room, bytes and removals that nobody waits for any more."""

from __future__ import annotations

import time

import pytest
from fake_mooncake import FakeClient, answers, hangs, name_of, open_fake, wait_until

from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing import Gate
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker_mooncake import removing
from kvlinker_mooncake.codes import Code

OK, WRITTEN = ReadStatus.OK, WriteStatus.WRITTEN


def test_l5_room_that_bytes_are_still_sent_to_is_given_up_behind_the_last_of_them() -> None:
    fake, gate = FakeClient(), Gate()
    shelf = Shelf(open_fake(fake, reads="auto", staged=True, transfer_seconds=0.1))
    keys = object_keys(2)
    fake.before = hangs(gate, "batch_put_from_multi_buffer_ranges")
    revoke = ("batch_put_session_revoke", 0)

    with gate:
        assert shelf.write(keys) == (WriteStatus.FAILED,) * 2
        time.sleep(0.1)  # the master is left alone for a while
        assert shelf.write(keys) == (WriteStatus.FAILED,) * 2
        assert revoke not in fake.calls, "the bytes would land in what is given to others"
    wait_until(lambda: revoke in fake.calls)

    fake.before = lambda _: None
    wait_until(lambda: shelf.write(keys) == (WRITTEN, WRITTEN))
    assert shelf.read(keys) == (OK, OK)


def test_a_put_that_began_for_some_before_the_master_went_is_given_up() -> None:
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
    time.sleep(0.1)  # the master is left alone for a while
    assert shelf.write(keys) == (WRITTEN, WRITTEN)


def test_what_is_written_where_something_hidden_was_lost_is_there_and_stays() -> None:
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

    time.sleep(0.3)  # until what is hidden is tried again
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

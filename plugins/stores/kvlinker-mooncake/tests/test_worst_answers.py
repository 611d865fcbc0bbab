"""Answers that no client should give, and that come all the same: errors of the store, and never wrong bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from fake_mooncake import FakeClient, StillClock, answers, hangs, name_of, open_fake, wait_until

from kvlinker.errors import StoreContractError, StoreError, StoreTimeoutError
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing import Gate
from kvlinker.testing.shelves import Shelf, object_keys
from kvlinker_mooncake import MooncakeStoreOptions
from kvlinker_mooncake.codes import Code

OK, WRITTEN = ReadStatus.OK, WriteStatus.WRITTEN
LOOK, START_READS = "batch_get_replica_desc", "batch_get_session_start"
REVOKE = "batch_put_session_revoke"
pytestmark = pytest.mark.usefixtures("clock")


class LyingClient(FakeClient):
    """Answers one call with anything."""

    answer: object = None
    lies_in: str = ""

    def __getattribute__(self, name: str) -> object:
        if name and name == object.__getattribute__(self, "lies_in"):
            return lambda *_, **__: object.__getattribute__(self, "answer")
        return object.__getattribute__(self, name)


class BeginningLiar(FakeClient):
    """Begins writes, and says something else."""

    def __init__(self) -> None:
        super().__init__()
        self.lies: list[object] = []

    def batch_put_session_start(
        self, keys: list[str], sizes: list[int], config: object
    ) -> list[int]:
        codes = super().batch_put_session_start(keys, sizes, config)
        return self.lies.pop() if self.lies else codes  # type: ignore[return-value]  # it lies


@pytest.mark.parametrize(
    "answer",
    [None, {"": []}, [1], {"*": [None]}, {"*": None}],
    ids=["none", "", "list", "copy", "copies"],
)
@pytest.mark.parametrize("layer", [None, 1], ids=["whole", "layer"])
def test_t4_a_description_that_is_none_is_an_error_of_the_store_or_a_miss(
    answer: object, layer: int | None
) -> None:
    fake = LyingClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    if isinstance(answer, dict):
        answer = {name_of(keys[0]) if name == "*" else name: it for name, it in answer.items()}
    fake.lies_in, fake.answer = LOOK, answer

    with suppress(StoreError):
        assert OK not in shelf.read(keys, layer=layer)

    fake.lies_in = ""
    assert shelf.read(keys, layer=layer) == (OK, OK)


@pytest.mark.parametrize("answer", [None, 0, (), {}, "00"], ids=repr)
@pytest.mark.parametrize(
    "name",
    [
        "batch_is_exist",
        "batch_remove",
        "batch_get_into_multi_buffers",
        START_READS,
        "batch_get_into_multi_buffer_ranges",
    ],
)
def test_t4_results_that_are_no_list_are_refused(name: str, answer: object) -> None:
    fake = LyingClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    calls: dict[str, Callable[[], object]] = {
        "batch_is_exist": lambda: shelf.store.exists(keys),
        "batch_remove": lambda: shelf.store.delete(keys),
        "batch_get_into_multi_buffers": lambda: shelf.read(keys),
    }
    fake.lies_in, fake.answer = name, answer

    with pytest.raises(StoreContractError, match="2 objects was answered with"):
        calls.get(name, lambda: shelf.read(keys, layer=1))()


@pytest.mark.parametrize("code", [Code.NO_ANSWER, Code.ANSWER_LATE])
def test_t6_a_read_to_which_the_master_did_not_answer_leaves_it_alone(code: Code) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    fake.before = answers(batch_get_into_multi_buffers=[int(code)] * 2)

    with pytest.raises(StoreTimeoutError, match=f"the client says {int(code)}"):
        shelf.read(keys)
    with pytest.raises(StoreTimeoutError, match="is not asked again yet"):
        shelf.store.exists(keys)


def test_l5_what_was_given_up_once_is_not_given_up_again_under_its_next_writer(
    clock: StillClock,
) -> None:
    fake = FakeClient()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    fake.before = answers(
        batch_put_session_end=[int(Code.NO_ANSWER)] * 2, batch_put_session_revoke=[]
    )
    assert shelf.write(keys) == (WriteStatus.FAILED,) * 2
    fake.writing.clear()  # as a master that was started anew
    fake.before = answers(batch_put_session_revoke=[int(Code.NOT_FOUND)] * 2)
    clock.sleep(60)  # the master is left alone for a while

    assert shelf.write(keys) == (WRITTEN, WRITTEN)

    fake.calls.clear()
    fake.objects.clear()
    assert shelf.write(keys) == (WRITTEN, WRITTEN)
    assert (REVOKE, 0) not in fake.calls, "it would be the room of one who is writing now"


def test_l6_a_session_that_begins_when_nobody_reads_any_more_is_ended() -> None:
    fake, gate = FakeClient(), Gate()
    shelf, keys = Shelf(open_fake(fake)), object_keys(2)
    shelf.stock(keys)
    fake.before = hangs(gate, START_READS)

    with gate, pytest.raises(StoreTimeoutError, match="session start: no answer within"):
        shelf.read(keys, layer=1)

    wait_until(lambda: len(fake.moved_by("batch_get_session_end")) > 1)
    assert not fake.sessions


@pytest.fixture
def dripping() -> Iterator[str]:
    """Give the address of a server that answers one byte now and then, for ever."""
    ended = threading.Event()

    def drip(listener: socket.socket) -> None:
        with suppress(OSError), listener.accept()[0] as door:
            door.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not ended.wait(0.02):
                door.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=drip, args=(listener,))
        server.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        server.join()


def test_t6_a_metrics_server_that_never_ends_its_answer_is_left_and_the_master_is_not(
    dripping: str,
) -> None:
    fake = FakeClient()
    store = open_fake(fake, metrics=dripping, answer_seconds=0.3)

    with pytest.raises(StoreTimeoutError, match=r"metrics.*no answer within 0\.3 s"):
        store.stats()

    assert store.exists(object_keys(2)) == (False, False)


def test_options_show_no_password_of_a_metadata_server() -> None:
    config = {"master": "a:1", "metadata": "redis://:secret@metadata:6379"}

    assert "secret" not in repr(MooncakeStoreOptions.of_config(config))
    with pytest.raises(ValueError, match="metadata must be a name") as raised:
        MooncakeStoreOptions.of_config({**config, "metadata": "redis://:secret@metadata 6379"})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("call", ["batch_put_from_multi_buffer_ranges", "batch_put_session_end"])
@pytest.mark.parametrize("staged", [True, False])
def test_t4_a_write_that_is_refused_for_a_wrong_count_keeps_no_other_writer_out(
    call: str, *, staged: bool
) -> None:
    fake = LyingClient()
    shelf = Shelf(open_fake(fake, staged=staged, reads="whole" if staged else "ranged"))
    keys = object_keys(2)
    fake.lies_in, fake.answer = call, [0]

    with pytest.raises(StoreContractError, match="2 objects was answered with 1 results"):
        shelf.write(keys)

    assert not fake.writing
    fake.lies_in = ""
    assert shelf.write(keys) == (WRITTEN,) * 2


@pytest.mark.parametrize("answer", [None, [0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("staged", [True, False])
def test_t4_names_that_may_have_been_begun_are_given_up_where_the_answer_does_not_say_which(
    answer: object, *, staged: bool
) -> None:
    fake = BeginningLiar()
    shelf = Shelf(open_fake(fake, staged=staged, reads="whole" if staged else "ranged"))
    keys = object_keys(2)
    fake.lies = [answer]

    with pytest.raises(StoreContractError, match="put start of 2 objects was answered with"):
        shelf.write(keys)

    assert not fake.writing
    assert shelf.write(keys) == (WRITTEN,) * 2

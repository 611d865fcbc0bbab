"""Nothing raises into an engine, and what steers its ranks is the same on all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from linker_rig import NAMESPACE, PATIENT, Rig, Waiter, errors_of, linked, wait_for

from kvlinker.boundaries import common_boundaries
from kvlinker.description import IndexArray
from kvlinker.entries import DevicePoolEntry
from kvlinker.linker import Linker
from kvlinker.pools import KV, DevicePoolGroup
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing import (
    Call,
    FakePools,
    Family,
    Gate,
    Hang,
    Lie,
    MemoryStore,
    OpaqueMemory,
    PagePattern,
    Raise,
    Report,
    Rule,
    fake_group,
    page_keys,
)
from kvlinker.transfers import PoolTransfer

KEYS = page_keys(4)

NONSENSE: dict[str, object] = {
    "none": None,
    "a number": 7,
    "no transfers": [object(), 3],
    "a pool nobody has": [PoolTransfer(name="kvv", keys=KEYS)],
    "one pool twice": [PoolTransfer(name=KV, keys=KEYS)] * 2,
    "slots without keys": [PoolTransfer(name=KV, device_indices=np.arange(8))],
    "too few slots": [PoolTransfer(name=KV, keys=KEYS, device_indices=np.arange(8))],
    "float slots": [PoolTransfer(name=KV, keys=KEYS, device_indices=np.arange(16.0))],
    "bool slots": [PoolTransfer(name=KV, keys=KEYS, device_indices=np.ones(16, dtype=bool))],
    "slots of half pages": [
        PoolTransfer(name=KV, keys=KEYS, device_indices=np.arange(2, 18, dtype=np.int64))
    ],
    "slots out of bounds": [
        PoolTransfer(name=KV, keys=KEYS, device_indices=np.arange(1600, 1616, dtype=np.int64))
    ],
    "one page twice": [
        PoolTransfer(name=KV, keys=KEYS[:2], device_indices=np.tile(np.arange(4), 2))
    ],
    "text for slots": [PoolTransfer(name=KV, keys=KEYS, device_indices="0123")],
    "slots in two dimensions": [
        PoolTransfer(name=KV, keys=KEYS, device_indices=np.zeros((4, 4), dtype=np.int64))
    ],
}


@pytest.mark.parametrize(
    "transfers", NONSENSE.values(), ids=[n.replace(" ", "-") for n in NONSENSE]
)
def test_e1_l1_nonsense_is_a_miss_or_false_and_leaves_nothing(
    transfers: Sequence[PoolTransfer],
) -> None:
    with linked(Family.MHA) as rig:
        rig.keep(KEYS)

        found = rig.linker.lookup("a", transfers)
        loaded = rig.linker.load("a", transfers)
        offered = rig.linker.offload(transfers)

        assert loaded is False
        assert offered is False
        assert found in ([], [1, 2], [1, 2, 3, 4])
        rig.linker.reset()
        rig.assert_at_rest()
        assert rig.access.writes_since(0) == ()


@pytest.mark.parametrize("rid", [[], {}, None, 3])
def test_e1_l1_a_request_id_of_any_kind_raises_nothing(rid: object) -> None:
    with linked() as rig:
        rig.keep(KEYS)

        rig.linker.lookup(rid, rig.asked(KEYS))  # type: ignore[arg-type]  # engines without types
        rig.linker.load(rid, rig.transfers(KEYS, 4))  # type: ignore[arg-type]  # engines without types
        rig.linker.cancel_queued_load(rid)  # type: ignore[arg-type]  # engines without types
        rig.linker.failed_requests(rid)  # type: ignore[arg-type]  # engines without types


def mapped(pools: FakePools, mapper: Callable[[IndexArray], IndexArray]) -> FakePools:
    """Return the same pools, whose slots an engine's map translates."""
    (entry,) = pools.group.entries
    translated = DevicePoolEntry(
        name=entry.name,
        indices_from_pool=entry.indices_from_pool,
        components=entry.components,
        layer_mapping=entry.layer_mapping,
        page_size=entry.page_size,
        rows_are_pages=entry.rows_are_pages,
        index_mapper=mapper,
    )
    group = DevicePoolGroup([translated], 4, entry.page_size, layout=pools.group.layout)
    return FakePools(group, pools.memory, pages=pools.pages, windows={}, pattern=PagePattern())


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit, MemoryError])
def test_e1_l1_an_index_map_that_raises_makes_load_and_offload_false(
    error: type[BaseException],
) -> None:
    def fail(slots: IndexArray) -> IndexArray:
        raise error(len(slots))

    with linked(pools=mapped(fake_group(memory=OpaqueMemory()), fail)) as rig:
        assert rig.linker.load("a", rig.transfers(KEYS)) is False
        assert rig.linker.offload(rig.transfers(KEYS)) is False

        assert errors_of(rig.linker) == {"load_errors": 1, "offload_errors": 1}
        assert rig.linker.pending == 0


def test_an_index_map_is_applied_once() -> None:
    pools = mapped(fake_group(memory=OpaqueMemory()), lambda slots: slots + 8 * 4)
    with linked(pools=pools) as rig:
        rig.keep(KEYS)

        assert rig.restore("a", KEYS)

        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()


def test_an_interrupt_of_the_users_is_not_swallowed() -> None:
    def interrupt(slots: IndexArray) -> IndexArray:
        raise KeyboardInterrupt(len(slots))

    with linked(pools=mapped(fake_group(memory=OpaqueMemory()), interrupt)) as rig:
        with pytest.raises(KeyboardInterrupt):
            rig.linker.offload(rig.transfers(KEYS))

        assert rig.linker.pending == 0


class TextlessError(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        msg = "no text"
        raise ValueError(msg)


@pytest.mark.parametrize(
    "error",
    [OSError("down"), SystemExit(1), KeyboardInterrupt(), TextlessError(), StopIteration()],
    ids=["os", "exit", "interrupt", "textless", "stop"],
)
def test_e1_l1_a_store_that_raises_at_every_call_fails_everything_and_raises_nothing(
    error: BaseException,
) -> None:
    with linked(options=replace(PATIENT, breaker_seconds=0.0001)) as rig:
        rig.keep(KEYS)
        for call in (Call.EXISTS, Call.HOLD, Call.WRITE, Call.OPEN_READ, Call.DELETE):
            rig.store.script.add(Rule(call=call, fault=Raise(error=error)))

        for number in range(10):
            assert rig.linker.lookup(f"r{number}", rig.asked(KEYS)) == []
            assert rig.linker.load(f"r{number}", rig.transfers(KEYS, 4))
            index = rig.linker.start_layer_wise_loading()
            assert index == number
            assert rig.waits_for(index, 0).returns()
            assert not rig.linker.finish_layer_wise_loading(index)
            assert rig.linker.offload(rig.transfers(KEYS))
            assert not rig.completion()
        rig.assert_at_rest()


# ---- ranks ------------------------------------------------------------------------------------


def play(rig: Rig) -> list[object]:
    """Play one engine's calls; return the answers that may steer a rank without a reduction."""
    linker, answers = rig.linker, list[object]()
    other = page_keys(4, chain="other")
    linker.lookup("a", rig.asked(KEYS))
    linker.lookup("b", rig.asked(other))
    answers.append(linker.load("a", rig.transfers(KEYS, 4)))
    answers.append(linker.load("a", rig.transfers(KEYS, 8)))
    answers.append(linker.load("b", rig.transfers(other, 6)))
    answers.append(linker.load("b", rig.transfers(other, 8)))
    answers.append(linker.cancel_queued_load("b"))
    answers.append(linker.cancel_queued_load("b"))
    answers.append(linker.start_layer_wise_loading())
    answers.append(linker.cancel_queued_load("a"))
    linker.finish_layer_wise_loading(0)
    answers.append(linker.load("a", rig.transfers(KEYS, 4)))
    answers.append(linker.start_layer_wise_loading())
    linker.finish_layer_wise_loading(1)
    answers.append(linker.start_layer_wise_loading())
    answers.extend(linker.offload(rig.transfers(KEYS, page)) for page in (0, 4, 8))
    answers.append(linker.offload(()))
    wait_for(lambda: linker.num_completed_offloads() == 3, "three completions")
    answers.append(linker.num_completed_offloads())
    linker.close()
    answers.append(linker.load("c", rig.transfers(KEYS, 4)))
    answers.append(linker.offload(rig.transfers(KEYS)))
    answers.append(linker.cancel_queued_load("c"))
    return answers


STORES: dict[str, tuple[Rule, ...]] = {
    "well": (),
    "down": tuple(
        Rule(call=call, fault=Raise(error=OSError("down")))
        for call in (Call.EXISTS, Call.HOLD, Call.WRITE, Call.OPEN_READ)
    ),
    "lying": (Rule(call=Call.EXISTS, fault=Lie(exists=True)),),
    "forgetful": (Rule(call=Call.READ, fault=Report(status=ReadStatus.MISS)),),
    "full": (Rule(call=Call.WRITE, fault=Report(status=WriteStatus.FULL)),),
}


def test_l1_after_lookup_the_answers_depend_on_arguments_and_earlier_calls_alone() -> None:
    answers = []
    for rules in STORES.values():
        with linked(Family.DSA, options=replace(PATIENT, max_queued_offloads=2)) as rig:
            if not rules:
                rig.keep(KEYS)
            rig.store.script.add(*rules)
            answers.append(play(rig))

    assert answers[0] == [
        *(True, False, False, True),
        *(True, False, 0, False),
        *(True, 1, -1),
        *(True, True, True, False, 3),
        *(False, False, False),
    ]
    assert all(one == answers[0] for one in answers)


class Collective:
    """An all-reduce of two ranks that hangs where one of them does not come."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=20)
        self._values: dict[int, Sequence[int]] = {}

    def intersect(self, rank: int, values: Sequence[int]) -> tuple[int, ...]:
        self._values[rank] = values
        self._barrier.wait()
        common = common_boundaries(self._values.values())
        self._barrier.wait()
        return common


def test_b101_the_linker_leaves_collectives_to_the_engine_whose_ranks_make_the_same_number() -> (
    None
):
    collective = Collective()
    with linked(Family.V4) as full, linked(Family.V4) as empty:
        full.keep(KEYS, lengths=[2])
        empty.keep(KEYS[:2])
        ranks = [full, empty]
        agreed: list[list[tuple[int, ...]]] = [[], []]

        def tick(number: int, rid: str, keys: Sequence[bytes]) -> None:
            rig = ranks[number]
            common = collective.intersect(number, rig.linker.lookup(rid, rig.asked(keys)))
            agreed[number].append(common)
            if common:
                assert rig.linker.load(rid, rig.transfers(keys[: common[-1]], 4))
            rig.linker.start_layer_wise_loading()
            done = collective.intersect(number, range(rig.linker.num_completed_offloads() + 1))
            agreed[number].append(done)

        def run(number: int) -> bool:
            for step in range(5):
                tick(number, f"r{step}", KEYS if step % 2 else page_keys(3, chain=f"{step}"))
                ranks[number].linker.finish_layer_wise_loading(step // 2)
            return True

        waiters = [Waiter(partial(run, number)) for number in range(2)]

        assert all(waiter.returns() for waiter in waiters)
        assert [waiter.answer for waiter in waiters] == [True, True]
        assert agreed[0] == agreed[1]
        assert agreed[0][2] == (1, 2)


def test_b23_ranks_load_what_each_of_them_can_restore() -> None:
    keys = page_keys(6)
    with linked(Family.V4) as first, linked(Family.V4) as second:
        first.keep(keys, lengths=[2])
        second.keep(keys[:5], lengths=[2])
        found = [rig.linker.lookup("a", rig.asked(keys)) for rig in (first, second)]

        assert found == [[1, 2, 6], [1, 2, 5]]
        assert common_boundaries(found) == (1, 2)
        for rig in (first, second):
            assert rig.linker.load("a", rig.transfers(keys[:2], 8))
            index = rig.linker.start_layer_wise_loading()
            assert rig.linker.finish_layer_wise_loading(index)
            assert rig.pools.wrong_pages(rig.transfers(keys[:2], 8)) == ()


# ---- pools that are gone ----------------------------------------------------------------------


def test_c10_l1_with_its_pools_gone_everything_is_a_miss_or_false() -> None:
    with linked() as rig:
        rig.keep(KEYS)
        asked, transfers = rig.asked(KEYS), rig.transfers(KEYS, 4)
        rig.pools.group.close()

        assert rig.linker.lookup("a", asked) == []
        assert rig.linker.load("a", transfers) is False
        assert rig.linker.offload(transfers) is False
        assert rig.linker.start_layer_wise_loading() == -1
        assert errors_of(rig.linker) == {"lookup_errors": 1, "load_errors": 1, "offload_errors": 1}
        rig.linker.reset()


def test_c10_l5_loads_and_offloads_that_were_queued_when_the_pools_went_touch_no_memory() -> None:
    with linked(Family.MHA) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(
            Rule(call=Call.READ, fault=Hang(gate=gate), first=2),
            Rule(call=Call.WRITE, fault=Hang(gate=gate)),
        )
        running = rig.start("a", KEYS)
        rig.offer(page_keys(2, chain="other"), page=12)
        rig.offer(page_keys(2, chain="third"), page=14)
        gate.wait_for_arrivals(2)
        assert rig.linker.load("b", rig.transfers(KEYS, 8))
        queued = rig.linker.start_layer_wise_loading()

        rig.pools.group.close()
        mark = rig.access.mark()
        gate.open()

        assert not rig.linker.finish_layer_wise_loading(running)
        assert not rig.linker.finish_layer_wise_loading(queued)
        assert [rig.completion(), rig.completion()] == [False, False]
        assert rig.access.writes_since(mark) == ()
        assert rig.access.reads_since(mark) == ()
        rig.linker.reset()
        rig.assert_at_rest()


def test_a_linker_over_pools_that_are_gone_cannot_be_made() -> None:
    pools = fake_group(memory=OpaqueMemory())
    device = pools.access()
    pools.group.close()

    with pytest.raises(RuntimeError, match="the group was closed"):
        Linker(pools.group, MemoryStore(), NAMESPACE, device=device)

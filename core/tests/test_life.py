"""A group keeps its memory alive, and once that moved or was given up, nothing planned on it can be used."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from kvlinker.description import IndexArray
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import StalePoolError
from kvlinker.plans import TransferPlan
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan
from kvlinker.transfers import PoolTransfer

PAGE = 4


class Engine:
    """An engine's pools: two layers of KV and one index."""

    def __init__(self) -> None:
        self.kv = [torch.zeros(16, 8, dtype=torch.uint8) for _ in range(2)]
        self.index = torch.zeros(4, 8, dtype=torch.uint8)

    def translate(self, slots: IndexArray) -> IndexArray:
        return slots

    def group(self) -> DevicePoolGroup:
        kv = DevicePoolEntry(
            name="kv",
            indices_from_pool="kv",
            components=[[BufferSpan.from_tensor(t, label=f"kv{i}") for i, t in enumerate(self.kv)]],
            layer_mapping={0: 0, 1: 1},
            page_size=PAGE,
            rows_are_pages=False,
            index_mapper=self.translate,
        )
        index = DevicePoolEntry(
            name="index",
            indices_from_pool="kv",
            components=[[BufferSpan.from_tensor(self.index, label="index0")]],
            layer_mapping={1: 0},
            page_size=PAGE,
            rows_are_pages=True,
        )
        return DevicePoolGroup([kv, index], 2, PAGE, layout="plain/1")


def plan_of(group: DevicePoolGroup) -> TransferPlan:
    entry = group.entry_map["kv"]
    return entry.page_plan(entry.prepare_locations(range(PAGE)))


# ---- owners -----------------------------------------------------------------------------------


def test_c10_a_group_keeps_the_memory_alive_until_it_is_closed() -> None:
    engine = Engine()
    group = engine.group()
    owners = [weakref.ref(tensor) for tensor in (*engine.kv, engine.index)]

    del engine
    gc.collect()
    assert [owner() is not None for owner in owners] == [True] * 3

    group.close()
    gc.collect()
    assert [owner() for owner in owners] == [None] * 3


def test_c10_a_closed_group_lets_go_of_the_engine_behind_its_index_map() -> None:
    engine = Engine()
    group = engine.group()
    gone = weakref.ref(engine)

    group.close()
    del engine
    gc.collect()

    assert gone() is None


def test_c10_plans_keep_no_memory_alive() -> None:
    engine = Engine()
    group = engine.group()
    owner = weakref.ref(engine.kv[0])
    plan = plan_of(group)

    group.close()
    del engine, group
    gc.collect()

    assert owner() is None
    with pytest.raises(StalePoolError):
        plan.expand()


# ---- verification -----------------------------------------------------------------------------


def test_c10_memory_that_stayed_is_verified_any_number_of_times() -> None:
    engine = Engine()
    group = engine.group()

    engine.kv[0].fill_(7)
    group.verify()
    group.verify()

    assert plan_of(group).num_pages == 1


def swap_data(engine: Engine) -> None:
    engine.kv[1].data = torch.zeros(16, 8, dtype=torch.uint8)


def swap_storage(engine: Engine) -> None:
    other = torch.zeros(16, 8, dtype=torch.uint8)
    engine.kv[1].set_(other.untyped_storage(), 0, other.shape, other.stride())


def free_storage(engine: Engine) -> None:
    engine.kv[1].untyped_storage().resize_(0)


def grow_storage(engine: Engine) -> None:
    engine.kv[1].resize_(1 << 16, 8)


@pytest.mark.parametrize("change", [swap_data, swap_storage, free_storage, grow_storage])
def test_c10_w22_a_swapped_buffer_retires_the_whole_group(
    change: Callable[[Engine], None],
) -> None:
    engine = Engine()
    group = engine.group()

    change(engine)

    with pytest.raises(StalePoolError, match="span 'kv1': its buffer moved from 0x"):
        group.verify()
    with pytest.raises(StalePoolError, match="'index': a buffer of pool 'kv' moved; describe the"):
        group.entry_map["index"].prepare_locations(range(PAGE))
    with pytest.raises(
        StalePoolError, match=r"group \['kv', 'index'\]: a buffer of pool 'kv' moved"
    ):
        group.verify()


def test_c10_an_entry_alone_retires_itself() -> None:
    engine = Engine()
    entry = engine.group().entry_map["kv"]

    swap_data(engine)

    with pytest.raises(StalePoolError, match="span 'kv1': its buffer moved"):
        entry.verify()
    with pytest.raises(StalePoolError, match="pool 'kv': the buffer of span 'kv1' moved; describe"):
        entry.verify()


# ---- every later use --------------------------------------------------------------------------

Use = Callable[[DevicePoolGroup, TransferPlan], object]
USES: dict[str, Use] = {
    "group.check_live": lambda group, _: group.check_live(),
    "group.verify": lambda group, _: group.verify(),
    "group.regions": lambda group, _: group.regions,
    "group.resolve_transfers": lambda group, _: group.resolve_transfers([PoolTransfer(name="kv")]),
    "entry.check_live": lambda group, _: group.entry_map["kv"].check_live(),
    "entry.verify": lambda group, _: group.entry_map["kv"].verify(),
    "entry.components": lambda group, _: group.entry_map["kv"].components,
    "entry.spans": lambda group, _: group.entry_map["kv"].spans,
    "entry.translate_indices": lambda group, _: group.entry_map["kv"].translate_indices([]),
    "entry.prepare_locations": lambda group, _: group.entry_map["kv"].prepare_locations([]),
    "entry.page_plan": lambda group, plan: group.entry_map["kv"].page_plan(plan.pages),
    "entry.layer_plan": lambda group, plan: group.entry_map["kv"].layer_plan(plan.pages, 0),
    "entry.get_page_buffer_meta": lambda group, _: group.entry_map["kv"].get_page_buffer_meta([]),
    "entry.get_prepared_layer_range_meta": lambda group, plan: group.entry_map[
        "kv"
    ].get_prepared_layer_range_meta(plan.pages, 0),
    "plan.check_live": lambda _, plan: plan.check_live(),
    "plan.expand": lambda _, plan: plan.expand(),
    "plan.nested_lists": lambda _, plan: plan.nested_lists(packed=True),
    "plan.select": lambda _, plan: plan.select([0]).expand(),
    "plan.by_part": lambda _, plan: plan.by_part()[0].expand(),
}


@pytest.mark.parametrize("use", USES)
def test_c10_w23_every_use_of_a_closed_group_is_refused(use: str) -> None:
    group = Engine().group()
    plan = plan_of(group)
    USES[use](group, plan)

    group.close()

    with pytest.raises(StalePoolError, match="the group was closed; describe the pools again and"):
        USES[use](group, plan)


def test_c10_closing_is_idempotent_and_the_first_reason_stays() -> None:
    engine = Engine()
    group = engine.group()
    swap_data(engine)
    with pytest.raises(StalePoolError):
        group.verify()

    group.close()
    group.close()

    with pytest.raises(StalePoolError, match="a buffer of pool 'kv' moved"):
        group.check_live()


def test_c10_a_new_description_makes_a_new_group_on_the_new_memory() -> None:
    engine = Engine()
    old = engine.group()
    swap_data(engine)
    with pytest.raises(StalePoolError):
        old.verify()

    new = engine.group()

    new.verify()
    assert new.fingerprint == old.fingerprint
    assert new.entry_map["kv"].spans[1].base_ptr == engine.kv[1].data_ptr()

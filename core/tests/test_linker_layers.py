"""Layers may be read together, so that a call's own cost is small beside what it moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from linker_rig import FAMILIES, PATIENT, Rig, linked

from kvlinker.pools import KV
from kvlinker.testing import Call, Family, Gate, Hang, Rule, page_keys

KEYS = page_keys(4)
ALL = replace(PATIENT, min_read_bytes=1 << 30)


def layer_bytes(rig: Rig, pool: str, layer: int) -> int:
    entry = rig.pools.group.entry_map[pool]
    pages = entry.prepare_locations(range(2 * entry.page_size))
    plan = entry.layer_plan(pages, layer)
    return 0 if plan is None else plan.total_bytes * len(KEYS) // 2


def reads(rig: Rig) -> list[str | None]:
    return [record.pool for record in rig.store.records if record.call is Call.READ]


@pytest.mark.parametrize("family", FAMILIES)
def test_l4_layers_that_are_read_together_land_in_their_pages(family: Family) -> None:
    with linked(family, options=ALL) as rig:
        rig.keep(KEYS)

        assert rig.restore("a", KEYS)

        landed = rig.pools.memory.snapshot()
        rig.pools.memory.poison()
        rig.pools.fill(rig.transfers(KEYS, 4))
        assert landed == rig.pools.memory.snapshot()
        assert len(reads(rig)) == sum(len(entry.part_bytes) for entry in rig.pools.group.entries)
        rig.assert_at_rest()


@pytest.mark.parametrize(
    ("layers", "count"),
    [
        (0.5, 4),  # one in each
        (
            0.6,
            2,
        ),  # a later read moves twice as much, and the fourth layer would be too little for one
        (1.0, 2),
        (1.1, 1),  # what two layers would leave is too little for a later read
    ],
)
def test_l4_layers_are_read_together_until_a_read_moves_enough(layers: float, count: int) -> None:
    with linked(Family.MHA) as rig:
        least = int(layers * layer_bytes(rig, KV, 0))

    with linked(Family.MHA, options=replace(PATIENT, min_read_bytes=least)) as rig:
        rig.keep(KEYS)

        assert rig.restore("a", KEYS)

        assert reads(rig) == [KV] * count


def test_l4_b65_none_of_them_counts_before_every_pool_of_all_has_landed() -> None:
    with linked(Family.DSA, options=ALL) as rig, Gate() as gate:
        rig.keep(KEYS)
        rig.store.script.add(Rule(call=Call.READ, fault=Hang(gate=gate), pool="indexer"))
        index = rig.start("a", KEYS)
        gate.wait_for_arrivals()

        waiter = rig.waits_for(index, 0)

        assert waiter.still_waits()
        gate.open()
        assert waiter.returns()
        assert rig.pools.wrong_pages(rig.transfers(KEYS, 4)) == ()
        assert rig.linker.finish_layer_wise_loading(index)


def test_a_store_with_a_limit_of_ranges_reads_layer_by_layer() -> None:
    with linked(Family.MHA, options=ALL, max_ranges_per_call=64) as rig:
        rig.keep(KEYS)

        assert rig.restore("a", KEYS)

        assert reads(rig) == [KV] * rig.pools.group.num_layers


def test_c9_a_plan_of_several_layers_has_each_span_once() -> None:
    with linked(Family.DSA) as rig:
        entry = rig.pools.group.entry_map["indexer"]
        pages = entry.prepare_locations(range(2 * entry.page_size))

        plan = entry.layers_plan(pages, range(rig.pools.group.num_layers))

        assert plan is not None
        whole = entry.page_plan(pages)
        assert sorted(plan.spans.labels) == sorted(whole.spans.labels)
        assert plan.total_bytes == whole.total_bytes
        assert (
            entry.layers_plan(
                pages, [layer for layer in range(4) if layer not in entry.layer_mapping]
            )
            is None
        )

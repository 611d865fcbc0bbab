"""The objects of one offload become visible so that no reader is misled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from linker_rig import linked

from kvlinker.device import DeviceAccess
from kvlinker.pools import KV
from kvlinker.store import WriteBatch, WriteStatus
from kvlinker.testing import Call, Family, MemoryStore, Report, Rule, page_keys

KEYS = page_keys(4)


class Reader(MemoryStore):
    """Looks at what is visible after every single object that becomes visible."""

    def __init__(self, *, atomic_batches: bool) -> None:
        super().__init__(atomic_batches=atomic_batches)
        self.look: Callable[[], object] = tuple
        self.seen: list[object] = []

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store; objects become visible one by one where batches are not atomic."""
        if self.capabilities.atomic_batches:
            self.seen.append(self.look())
            answer = super().write(batches, memory, may_publish=may_publish)
            self.seen.append(self.look())
            return answer
        return tuple(
            tuple(self._write_one(batch, i, memory, may_publish) for i in range(len(batch.keys)))
            for batch in batches
        )

    def _write_one(
        self, batch: WriteBatch, i: int, memory: DeviceAccess, may_publish: Callable[[], bool]
    ) -> WriteStatus:
        one = WriteBatch(
            keys=batch.keys[i : i + 1], plan=batch.plan.select([i]), fingerprint=batch.fingerprint
        )
        ((status,),) = super().write([one], memory, may_publish=may_publish)
        self.seen.append(self.look())
        return status


@pytest.mark.parametrize("family", [Family.DSA, Family.V4, Family.MAMBA, Family.MHA_UNPACKED])
def test_l8_while_objects_become_visible_one_by_one_every_boundary_is_whole(
    family: Family,
) -> None:
    store = Reader(atomic_batches=False)
    with linked(family, memory_store=store) as rig, linked(family, memory_store=store) as other:

        def look() -> list[int]:
            other.linker.reset()
            return other.linker.lookup("reader", other.asked(KEYS))

        store.look = look
        rig.offer(KEYS)
        assert rig.completion()

        objects = len(rig.memory_store.keys())
        assert len(store.seen) == objects
        whole = {Family.V4: [4], Family.MAMBA: [4]}.get(family, [1, 2, 3, 4])
        order = [seen for i, seen in enumerate(store.seen) if i == 0 or seen != store.seen[i - 1]]
        assert order[0] == []
        assert order[-1] == whole
        # Each length appears once all of it is there, shorter ones first.
        assert order == [whole[:n] for n in range(len(whole) + 1)]


def test_l8_pools_other_than_kv_come_first_and_kv_in_ascending_order() -> None:
    with linked(Family.V4, atomic_batches=False) as rig:
        rig.offer(KEYS)
        assert rig.completion()

        visible = list(rig.memory_store.keys())
        states = rig.object_keys("swa", KEYS[-2:]) + rig.object_keys(
            "deepseek_v4_c4_state", KEYS[-2:]
        )
        compressed = rig.object_keys("deepseek_v4_c4", KEYS) + rig.object_keys(
            "deepseek_v4_c128", KEYS
        )
        assert visible == states + compressed

    with linked(Family.DSA, atomic_batches=False) as rig:
        rig.offer(KEYS)
        assert rig.completion()

        keys = rig.object_keys("indexer", KEYS) + rig.object_keys(KV, KEYS)
        assert list(rig.memory_store.keys()) == keys


def test_l8_one_offer_is_one_transaction_where_the_store_has_one() -> None:
    store = Reader(atomic_batches=True)
    with linked(Family.DSA, memory_store=store) as rig:
        store.look = lambda: len(store.keys())
        rig.offer(KEYS)
        assert rig.completion()

        assert rig.store.count(Call.WRITE) == 1
        assert store.seen == [0, 2 * len(KEYS)]


def test_l8_a_full_store_of_transactions_keeps_nothing_of_an_offer_that_does_not_fit() -> None:
    with linked(Family.MHA, capacity_bytes=3 * 16 * 40) as rig:
        rig.offer(KEYS)

        assert not rig.completion()
        assert rig.memory_store.keys() == ()
        assert rig.linker.lookup("a", rig.asked(KEYS)) == []


def test_l8_a_tail_that_did_not_fit_is_offered_again_and_only_the_tail_is_written() -> None:
    with linked(Family.MHA, atomic_batches=False) as rig:
        tail = frozenset(rig.object_keys(KV, KEYS[2:]))
        full = Report(status=WriteStatus.FULL)
        rig.store.script.add(Rule(call=Call.WRITE, fault=full, keys=tail, times=1))
        rig.offer(KEYS)
        assert not rig.completion()
        assert rig.linker.lookup("a", rig.asked(KEYS)) == [1, 2]

        rig.offer(KEYS)
        assert rig.completion()

        assert rig.written()[4:] == rig.object_keys(KV, KEYS[2:])
        assert rig.linker.lookup("b", rig.asked(KEYS)) == [1, 2, 3, 4]

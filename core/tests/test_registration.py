"""Memory is registered whole or not at all, and a refusal says what was refused."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from linker_rig import NAMESPACE

from kvlinker.errors import RegistrationError, UnsupportedOperationError
from kvlinker.linker import Linker
from kvlinker.registration import RegisteredMemory, pools_in, register_within
from kvlinker.spans import MemoryRegion
from kvlinker.store import Store
from kvlinker.testing import (
    Call,
    Family,
    FaultStore,
    Gate,
    Hang,
    MemoryStore,
    OpaqueMemory,
    Raise,
    Rule,
    fake_group,
)

REGIONS = tuple(MemoryRegion(base_ptr=4096 * (i + 1), size_bytes=100 + i) for i in range(3))


class Client:
    """A client that refuses one address, and notes what it holds."""

    def __init__(self, *, refused: int | None = None, code: int = -1) -> None:
        self.held: list[int] = []
        self.released: list[int] = []
        self._refused = refused
        self._code = code

    def register(self, region: MemoryRegion) -> int:
        if region.base_ptr == self._refused:
            return self._code
        self.held.append(region.base_ptr)
        return 0

    def unregister(self, region: MemoryRegion) -> int:
        self.held.remove(region.base_ptr)
        self.released.append(region.base_ptr)
        return 0

    def memory(self) -> RegisteredMemory:
        return RegisteredMemory(self.register, self.unregister)


def test_b84_every_region_is_registered_in_order_and_released_in_reverse() -> None:
    client = Client()
    memory = client.memory()

    memory.register(REGIONS)

    assert memory.regions == REGIONS
    assert client.held == [4096, 8192, 12288]
    memory.unregister()
    memory.unregister()
    assert client.held == []
    assert client.released == [12288, 8192, 4096]


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_b84_a_refused_region_rolls_the_others_back(refused: int) -> None:
    client = Client(refused=REGIONS[refused].base_ptr, code=-800)
    memory = client.memory()

    with pytest.raises(RegistrationError) as caught:
        memory.register(REGIONS)

    assert client.held == []
    assert memory.regions == ()
    text = str(caught.value)
    assert f"region {refused} of 3" in text
    assert f"{100 + refused} B" in text
    assert "code -800" in text


def test_b84_a_second_registration_is_refused_and_changes_nothing() -> None:
    client = Client()
    memory = client.memory()
    memory.register(REGIONS[:2])

    with pytest.raises(RegistrationError, match="2 regions are registered already"):
        memory.register(REGIONS[2:])

    assert client.held == [4096, 8192]


def test_b84_after_a_roll_back_the_memory_can_be_registered_anew() -> None:
    client = Client(refused=8192)
    memory = client.memory()
    with pytest.raises(RegistrationError):
        memory.register(REGIONS)

    memory.register((REGIONS[0], REGIONS[2]))

    assert client.held == [4096, 12288]


def test_b84_a_linker_names_the_pools_whose_memory_was_refused() -> None:
    store = FaultStore(
        MemoryStore(registers_memory=True),
        [Rule(call=Call.REGISTER, fault=Raise(error=RegistrationError("code -1")))],
    )

    with pytest.raises(RegistrationError) as caught:
        linker_over(store)

    text = str(caught.value)
    assert "MemoryStore" in text or "FaultStore" in text
    assert "B of kv" in text
    assert "indexer" in text
    assert "code -1" in text


def test_b84_a_linker_registers_every_region_and_forgets_them_at_its_close() -> None:
    registered: list[Sequence[MemoryRegion]] = []

    class NotingStore(MemoryStore):
        def register(self, regions: Sequence[MemoryRegion]) -> None:
            super().register(regions)
            registered.append(regions)

        def unregister(self) -> None:
            super().unregister()
            registered.clear()

    linker = linker_over(NotingStore(registers_memory=True))

    assert registered == [linker.group.regions]
    linker.close()
    assert registered == []


def test_t6_a_registration_that_hangs_ends_the_start_with_its_reason_and_is_taken_back() -> None:
    with Gate() as gate:
        taken_back = threading.Event()

        class NotingStore(MemoryStore):
            def unregister(self) -> None:
                super().unregister()
                taken_back.set()

        store = NotingStore(registers_memory=True)
        hanging = FaultStore(store, [Rule(call=Call.REGISTER, fault=Hang(gate=gate))])
        with pytest.raises(
            RegistrationError, match=r"no answer within 0.05 s; .* register_seconds"
        ):
            register_within(hanging, REGIONS, seconds=0.05)
        gate.open()

        assert taken_back.wait(30)
        store.register(REGIONS)  # it holds none of the first call's


def test_t6_what_a_registration_raises_is_raised_to_whoever_waits() -> None:
    store = FaultStore(
        MemoryStore(registers_memory=True),
        [Rule(call=Call.REGISTER, fault=Raise(error=RegistrationError("code -1")))],
    )

    with pytest.raises(RegistrationError, match="code -1"):
        register_within(store, REGIONS, seconds=30)


def test_b84_a_region_knows_its_pools() -> None:
    group = fake_group(Family.DSA, memory=OpaqueMemory()).group

    names = {name for region in group.regions for name in pools_in(group, region)}

    assert names == {entry.name for entry in group.entries}
    assert pools_in(group, REGIONS[0]) == ()


def test_a_store_that_registers_no_memory_says_so() -> None:
    with pytest.raises(UnsupportedOperationError, match="MemoryStore cannot take 3 regions"):
        Store.register(MemoryStore(), REGIONS)


def linker_over(store: Store) -> Linker:
    pools = fake_group(Family.DSA, memory=OpaqueMemory())
    return Linker(pools.group, store, NAMESPACE, device=pools.access())

"""A linker over a small group, a store that goes wrong on demand, and an access that writes down every copy."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Unpack

from kvlinker.device import DeviceEvent
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.metrics import TokenOutcome
from kvlinker.pool_keys import GroupKeys
from kvlinker.store import ObjectKey
from kvlinker.testing import (
    Call,
    CapabilityChoices,
    FakePools,
    Family,
    FaultAccess,
    FaultStore,
    MemoryStore,
    OpaqueMemory,
    Rule,
    fake_group,
    page_keys,
)
from kvlinker.testing.waiting import wait_for
from kvlinker.transfers import PageKey, PoolTransfer

__all__ = [
    "FAMILIES",
    "NAMESPACE",
    "PATIENT",
    "Rig",
    "Waiter",
    "errors_of",
    "linked",
    "prompts",
    "threads_named",
    "tokens_of",
    "wait_for",
]

NAMESPACE = KeyNamespace(model_id="tiny", producer="test")
FAMILIES = tuple(Family)
PATIENT = LinkerOptions(
    lookup_seconds=20, load_seconds=20, offload_seconds=20, hold_seconds=60, quiesce_seconds=20
)
"""Deadlines that no test reaches: what a test waits for comes, or the test fails."""
_LIMIT_SECONDS = 30.0
_STAY_SECONDS = 0.05
"""Longer than any short deadline of the tests behind which a call must go on waiting."""


class Waiter:
    """A call that may take long, in a thread of its own."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.answer: object = None
        self._begun = threading.Event()

        def run() -> None:
            self._begun.set()
            self.answer = wait()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def still_waits(self) -> bool:
        """Whether it has not returned, but has come to a place where it stays: a thread that is late is waited for."""
        assert self._begun.wait(_LIMIT_SECONDS)
        wait_for(self._stays, "the end of the call, or a place where it stays")
        return self._thread.is_alive()

    def _stays(self) -> bool:
        before = self._place()
        self._thread.join(_STAY_SECONDS)
        return self._place() == before

    def _place(self) -> tuple[CodeType, int] | None:
        """Return the instruction that the thread is at; None once it has ended."""
        frame = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001  # documented, for debuggers
        return None if frame is None else (frame.f_code, frame.f_lasti)

    def returns(self) -> bool:
        """Whether it returns."""
        self._thread.join(_LIMIT_SECONDS)
        return not self._thread.is_alive()


@dataclass(frozen=True, slots=True)
class Rig:
    """A linker and everything around it."""

    pools: FakePools
    memory_store: MemoryStore
    store: FaultStore
    access: FaultAccess
    linker: Linker

    def transfers(self, keys: Sequence[PageKey], first_page: int = 0) -> tuple[PoolTransfer, ...]:
        """Return the transfers of a prefix whose pages begin at `first_page` in every pool."""
        windows = self.pools.windows
        lengths = {
            name: min(len(keys), windows.get(name, len(keys))) for name in self.pools.logical_pools
        }
        pages = {name: range(first_page, first_page + n) for name, n in lengths.items()}
        return self.pools.page_transfers(keys, pages)

    def asked(self, keys: Sequence[PageKey]) -> tuple[PoolTransfer, ...]:
        """Return the transfers of a lookup."""
        return self.pools.lookup_transfers(keys)

    def keep(self, keys: Sequence[PageKey], *, lengths: Iterable[int] = ()) -> None:
        """Have the prefix stored, and the windows that end at some more lengths; then spoil all memory.

        Another linker does it, so that neither faults nor deadlines of this one matter.
        """
        device = self.pools.access()
        writer = Linker(
            self.pools.group, self.memory_store, NAMESPACE, device=device, options=PATIENT
        )
        for length in (*lengths, len(keys)):
            transfers = self.transfers(keys[:length])
            self.pools.fill(transfers)
            assert writer.offload(transfers)
            wait_for(lambda: writer.num_completed_offloads() == 1, "the offload")
            assert writer.pop_completed_offload()
        writer.close()
        self.pools.memory.poison()

    def offload(self, keys: Sequence[PageKey]) -> None:
        """Store the prefix with this linker; then spoil all memory."""
        self.offer(keys)
        assert self.completion()
        self.pools.memory.poison()

    def offer(self, keys: Sequence[PageKey], page: int = 0) -> None:
        """Fill pages as a model would, and offer them."""
        transfers = self.transfers(keys, page)
        self.pools.fill(transfers)
        assert self.linker.offload(transfers)

    def written(self) -> list[ObjectKey]:
        """Return the keys of all writes, in order."""
        writes = [record for record in self.store.records if record.call is Call.WRITE]
        return [key for record in writes for key in record.keys]

    def completion(self) -> bool:
        """Wait for the oldest completion and take it."""
        wait_for(lambda: self.linker.num_completed_offloads() > 0, "an offload's completion")
        return self.linker.pop_completed_offload()

    def start(
        self, rid: str, keys: Sequence[PageKey], *, ready: Iterable[DeviceEvent] = (), page: int = 4
    ) -> int:
        """Look up, load all of it into other pages, and start; the index of the batch."""
        boundaries = self.linker.lookup(rid, self.asked(keys))
        assert boundaries[-1:] == [len(keys)]
        assert self.linker.load(rid, self.transfers(keys, page))
        return self.linker.start_layer_wise_loading(ready=ready)

    def waits_for(self, index: int, layer: int) -> Waiter:
        """Let a forward wait for a layer of a batch."""
        self.linker.layer_done_counter.set_consumer(index)
        return Waiter(lambda: self.linker.layer_done_counter.wait_until(layer))

    def restore(self, rid: str, keys: Sequence[PageKey], *, page: int = 4) -> bool:
        """Look up, load, start and finish."""
        return self.linker.finish_layer_wise_loading(self.start(rid, keys, page=page))

    def object_keys(self, pool: str, keys: Sequence[PageKey], part: int = 0) -> list[ObjectKey]:
        """Return the object keys of some pages of an entry."""
        return list(GroupKeys(self.pools.group, NAMESPACE).of_part(pool, part, keys))

    def assert_at_rest(self) -> None:
        """Nothing is remembered, nothing is held, and every token is in one reason."""
        wait_for(lambda: self.memory_store.kept() == 0, "the release of every hold and session")
        assert self.linker.pending == 0
        counted = self.linker.metrics.snapshot()
        assert counted.closes
        assert counted.tokens_open == 0
        assert not [copy for copy in self.access.copies if copy.ended is None]


@contextmanager
def linked(
    family: Family = Family.DSA,
    *,
    rules: Iterable[Rule] = (),
    options: LinkerOptions = PATIENT,
    pools: FakePools | None = None,
    memory_store: MemoryStore | None = None,
    revocable: bool = True,
    device_memory: bool = False,
    capacity_bytes: int | None = None,
    **choices: Unpack[CapabilityChoices],
) -> Iterator[Rig]:
    """Give a rig whose pool memory nobody can dereference, and close its linker.

    Args:
        family: shape of the group.
        rules: faults of the store.
        options: deadlines that no test reaches by default.
        pools: 16 pages of the family by default.
        memory_store: what other rigs share; made from `choices` by default.
        revocable: what the store says of its reads and writes.
        device_memory: whether the store says that it moves device memory itself.
        capacity_bytes: of the MemoryStore.
        choices: capabilities of the MemoryStore.
    """
    inner = memory_store or MemoryStore(capacity_bytes=capacity_bytes, **choices)
    said = replace(inner.capabilities, revocable=revocable, device_memory=device_memory)
    store = FaultStore(inner, rules, capabilities=said)
    made = pools or fake_group(family, memory=OpaqueMemory())
    access = FaultAccess(made.access())
    linker = Linker(made.group, store, NAMESPACE, device=access, options=options)
    try:
        yield Rig(made, inner, store, access, linker)
    finally:
        linker.close()


def errors_of(linker: Linker) -> Mapping[str, int]:
    """Return the counted errors by what failed."""
    events = linker.metrics.snapshot().events
    return {name: number for name, number in events.items() if name.endswith("_errors")}


def tokens_of(linker: Linker) -> Mapping[TokenOutcome, int]:
    """Return the reasons that have tokens."""
    tokens = linker.metrics.snapshot().tokens
    return {outcome: number for outcome, number in tokens.items() if number}


def threads_named(part: str) -> list[threading.Thread]:
    """Return the living threads whose name contains something."""
    return [thread for thread in threading.enumerate() if part in thread.name]


def prompts(number: int, pages: int) -> list[tuple[bytes, ...]]:
    """Return the page keys of some prompts that share nothing."""
    return [page_keys(pages, chain=f"prompt {i}") for i in range(number)]

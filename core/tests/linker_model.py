"""An engine in miniature: it keeps books on its pages, drives a linker and checks every promise.

A page is quiet while the linker has no right to write it. Quiet pages are compared byte by byte after
every step, so that a write that lands late is seen wherever it lands.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker
from kvlinker.linker_options import LinkerOptions
from kvlinker.pool_keys import GroupKeys
from kvlinker.store import ObjectKey, WriteStatus
from kvlinker.testing import (
    Call,
    CapabilityChoices,
    Evict,
    FakePools,
    Family,
    FaultAccess,
    FaultStore,
    Gate,
    Hang,
    HostEvent,
    Lie,
    MemoryStore,
    Moment,
    PagePattern,
    PoolMemory,
    Report,
    Rule,
    Tamper,
    fake_group,
    page_keys,
)
from kvlinker.testing.waiting import wait_for
from kvlinker.transfers import PoolTransfer

__all__ = ["Engine", "EngineOptions"]

PAGES = 24
CHAIN_PAGES = 6
CHAINS = tuple(page_keys(CHAIN_PAGES, chain=name) for name in ("a", "b", "c"))
Place = tuple[str, int]
"""Logical pool and page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What is fixed for the life of an engine."""

    family: Family
    memory: PoolMemory
    choices: CapabilityChoices
    capacity_bytes: int | None = None
    seed: int = 0
    load_seconds: float = 0.15


@dataclass(slots=True, kw_only=True, eq=False)
class Pending:
    """Pages that a load fills or an offload reads."""

    transfers: tuple[PoolTransfer, ...]
    pages: Mapping[str, tuple[int, ...]]
    keys: tuple[bytes, ...]
    event: HostEvent | None = None
    filled: bool = True
    over: bool = False
    losses: int = 0
    """How often the store had lost everything when it was offered."""


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """Loads that were started together."""

    loads: dict[str, Pending]
    event: HostEvent | None = None


@dataclass(slots=True, eq=False)
class Books:
    """What the engine knows of its calls."""

    lookups: dict[str, tuple[tuple[bytes, ...], list[int]]] = field(default_factory=dict)
    queued: dict[str, Pending] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    offers: deque[Pending] = field(default_factory=deque)
    events: list[tuple[HostEvent, Callable[[], None]]] = field(default_factory=list)
    accepted: int = 0
    completed: int = 0
    dropped: int = 0
    last_index: int = -1


class Engine:
    """Drives a linker over small pools and a store that goes wrong."""

    def __init__(self, options: EngineOptions) -> None:
        """Make pools, store and linker."""
        self.inner = MemoryStore(capacity_bytes=options.capacity_bytes, **options.choices)
        self.store = FaultStore(self.inner, seed=options.seed)
        self.pools: FakePools = fake_group(options.family, memory=options.memory, pages=PAGES)
        self.access = FaultAccess(self.pools.access(), seed=options.seed)
        namespace = KeyNamespace(model_id="model", producer="engine")
        self.linker = Linker(
            self.pools.group,
            self.store,
            namespace,
            device=self.access,
            options=LinkerOptions(
                lookup_seconds=0.1,
                load_seconds=options.load_seconds,
                offload_seconds=options.load_seconds,
                quiesce_seconds=0.25,
                quarantine_seconds=0.02,
                breaker_seconds=0.002,
                max_queued_offloads=3,
            ),
        )
        self.books = Books()
        self.gates: list[Gate] = []
        self.closed = False
        self._threads = ThreadPoolExecutor(1)
        self._junk = 0
        self._losses = 0
        self._bounded = options.capacity_bytes is not None
        self._objects = self._all_objects(GroupKeys(self.pools.group, namespace))
        self._free: dict[str, list[int]] = {n: list(range(PAGES)) for n in self.pools.logical_pools}
        self._quiet: dict[Place, bytes] = {}
        self._no_writes_since: int | None = None
        self._no_objects_but: frozenset[ObjectKey] | None = None
        for name in self.pools.logical_pools:
            self._rest({name: tuple(range(PAGES))})

    # ---- what is right ------------------------------------------------------------------------

    def _all_objects(self, keys: GroupKeys) -> dict[tuple[str, bytes], dict[ObjectKey, bytes]]:
        """Return entry and page key to the page's objects and what each must hold."""
        found: dict[tuple[str, bytes], dict[ObjectKey, bytes]] = {}
        for entry in self.pools.group.entries:
            parts = [entry.components] if entry.packed else [(c,) for c in entry.components]
            for page_key in (key for chain in CHAINS for key in chain):
                found[entry.name, page_key] = {
                    keys.of_part(entry.name, number, [page_key])[0]: b"".join(
                        self.pools.pattern.content(
                            pool=entry.name,
                            label=span.label,
                            page_key=page_key,
                            size=span.row_bytes * entry.page_rows,
                        )
                        for component in components
                        for span in component
                    )
                    for number, components in enumerate(parts)
                }
        return found

    def _restorable(self, keys: Sequence[bytes], stored: frozenset[ObjectKey]) -> set[int]:
        """Return the boundaries that a store of these objects can restore, page by page."""

        def has(pool: str, needed: Sequence[bytes]) -> bool:
            return all(set(self._objects[pool, key]) <= stored for key in needed)

        def window(entry_source: str, boundary: int) -> int:
            size = self.pools.windows.get(entry_source, boundary)
            return min(size, len(keys), boundary)

        return {
            boundary
            for boundary in range(1, len(keys) + 1)
            if all(
                has(
                    entry.name,
                    keys[boundary - window(entry.indices_from_pool, boundary) : boundary],
                )
                for entry in self.pools.group.entries
            )
        }

    # ---- pages --------------------------------------------------------------------------------

    def _bytes(self, place: Place) -> bytes:
        name, page = place
        return b"".join(
            self.pools.memory.read(span, page * entry.page_rows, entry.page_rows)
            for entry in self.pools.group.entries
            if entry.indices_from_pool == name
            for span in entry.spans
        )

    def _rest(self, pages: Mapping[str, tuple[int, ...]]) -> None:
        """From here on, the linker has no right to write these pages."""
        for place in _places(pages):
            self._quiet[place] = self._bytes(place)

    def _wake(self, pages: Mapping[str, tuple[int, ...]]) -> None:
        for place in _places(pages):
            self._quiet.pop(place, None)

    def _take(self, keys: Sequence[bytes]) -> Pending | None:
        """Take free pages for a prefix and write something into them; None where they do not suffice."""
        wanted = {
            name: min(self.pools.windows.get(name, len(keys)), len(keys)) for name in self._free
        }
        if any(len(self._free[name]) < count for name, count in wanted.items()):
            return None
        pages = {
            name: tuple(self._free[name].pop() for _ in range(count))
            for name, count in wanted.items()
        }
        transfers = self.pools.page_transfers(keys, pages)
        self._scribble(transfers, pages)
        return Pending(transfers=transfers, pages=pages, keys=tuple(keys))

    def _scribble(
        self, transfers: Sequence[PoolTransfer], pages: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Use the pages for something else."""
        self._junk += 1
        self._fill(transfers, PagePattern(seed=b"junk%d" % self._junk))
        self._rest(pages)

    def _fill(self, transfers: Sequence[PoolTransfer], pattern: PagePattern) -> None:
        FakePools(
            self.pools.group,
            self.pools.memory,
            pages=PAGES,
            windows=self.pools.windows,
            pattern=pattern,
        ).fill(transfers)

    def _give_back(self, pending: Pending) -> None:
        """Free the pages, and let somebody else use them at once."""
        pending.over = True
        self._scribble(pending.transfers, pending.pages)
        for name, pages in pending.pages.items():
            self._free[name][:0] = pages

    def check(self) -> None:
        """Check what must hold between any two calls."""
        for place, content in self._quiet.items():
            assert self._bytes(place) == content, f"page {place} was written"
        if self._no_writes_since is not None:
            assert self.access.writes_since(self._no_writes_since) == ()
        if self._no_objects_but is not None:
            assert set(self.inner.keys()) <= self._no_objects_but
        snapshot = self.linker.metrics.snapshot()
        assert snapshot.closes, snapshot

    def check_objects(self) -> None:
        """Check that every stored object holds what its key stands for."""
        if self.store.script.times_fired(Tamper):
            return
        right = {
            key: content for objects in self._objects.values() for key, content in objects.items()
        }
        for key in self.inner.keys():  # noqa: SIM118 - a store is no mapping
            try:
                payload = self.inner.payload(key)
            except KeyError:
                continue
            assert payload == right[key]

    # ---- events -------------------------------------------------------------------------------

    def _event(self, kind: int, on_set: Callable[[], None]) -> tuple[HostEvent, ...]:
        """Return ready events: none, done, not yet done, or broken; what they stand for happens with them."""
        if kind == 2:
            event = HostEvent()
            self.books.events.append((event, on_set))
            return (event,)
        if kind == 3:
            return (HostEvent(error=RuntimeError("device lost")),)
        on_set()
        return () if kind == 0 else (HostEvent(done=True),)

    def set_events(self) -> None:
        """Let the engine's streams reach all their points."""
        events, self.books.events = self.books.events, []
        for event, on_set in events:
            on_set()
            event.set()

    def open_gates(self) -> None:
        """Let everything go on that hangs."""
        for gate in self.gates:
            gate.open()
        self.gates.clear()
        for landing in self.store.landings:
            landing.join()
        wait_for(lambda: not self.store.running, "a call of the store never returns")
        self.check()

    # ---- calls --------------------------------------------------------------------------------

    def lookup(self, rid: str, chain: int, count: int) -> list[int]:
        """Look a prefix up; only what is there may be promised, unless the store lies."""
        keys = CHAINS[chain][:count]
        lies = self.store.script.times_fired(Lie)
        before = frozenset(self.inner.keys())
        boundaries = self.linker.lookup(rid, self.pools.lookup_transfers(keys))
        after = frozenset(self.inner.keys())

        assert boundaries == sorted(set(boundaries))
        assert set(boundaries) <= set(range(1, count + 1))
        assert not (self.closed and boundaries)
        known = self.books.lookups.get(rid)
        repeated = known is not None and known[0] == keys and known[1] == boundaries
        if lies == self.store.script.times_fired(Lie) and not repeated:
            assert set(boundaries) <= self._restorable(keys, before | after)
        if not self.closed:
            self.books.lookups[rid] = (keys, boundaries)
        return boundaries

    def load(self, rid: str, choice: int) -> None:
        """Queue a load of a promised prefix, or of one that nobody promised."""
        keys, boundaries = self.books.lookups.get(rid, (CHAINS[0], []))
        length = boundaries[choice % len(boundaries)] if boundaries else 1 + choice % len(keys)
        pending = self._take(keys[:length])
        if pending is None:
            return
        expected = not self.closed and rid not in self.books.queued

        assert self.linker.load(rid, pending.transfers) is expected
        if expected:
            self.books.queued[rid] = pending
            self.books.lookups.pop(rid, None)
        else:
            self._give_back(pending)

    def cancel(self, rid: str) -> None:
        """Take a load back, if it has not started."""
        expected = rid in self.books.queued
        assert self.linker.cancel_queued_load(rid) is expected
        if expected:
            self._give_back(self.books.queued.pop(rid))

    def start(self, event_kind: int) -> None:
        """Start what is queued."""
        loads, self.books.queued = self.books.queued, {}
        batch = Batch(loads=loads)

        def wake() -> None:
            for pending in loads.values():
                if not pending.over:
                    self._wake(pending.pages)

        if loads:
            self._no_writes_since = None
        ready = self._event(event_kind, wake) if loads else ()
        index = self.linker.start_layer_wise_loading(ready=ready)

        assert (index > self.books.last_index) if loads else (index == -1)
        if loads:
            self.books.last_index = index
            self.books.batches[index] = batch

    def wait(self, choice: int, layer: int) -> None:
        """Wait for a layer, in the engine's other thread; what did not fail is there in every pool."""
        index = self._batch(choice)
        self.linker.layer_done_counter.set_consumer(index)
        self._threads.submit(self.linker.layer_done_counter.wait_until, layer).result(timeout=60)
        failed = self.linker.failed_requests(index)
        for rid, pending in self.books.batches.get(index, Batch(loads={})).loads.items():
            if rid not in failed:
                assert self.pools.wrong_pages(pending.transfers, layers=[layer]) == ()

    def finish(self, choice: int, *, ask_first: bool) -> bool:
        """Finish a batch; what is reported as filled holds the right bytes, and stays as it is."""
        index = self._batch(choice)
        batch = self.books.batches.pop(index, None)
        failed: frozenset[str] = frozenset()
        if batch is not None and ask_first:
            self.linker.layer_done_counter.set_consumer(index)
            for layer in range(self.pools.group.num_layers):
                self.linker.layer_done_counter.wait_until(layer)
            failed = self.linker.failed_requests(index)
        landed = self.linker.finish_layer_wise_loading(index)
        if batch is None:
            assert not landed
            return False
        for rid, pending in batch.loads.items():
            if landed or (ask_first and rid not in failed):
                assert self.pools.wrong_pages(pending.transfers) == (), f"{rid} of {index}"
            self._give_back(pending)
        return landed

    def _batch(self, choice: int) -> int:
        indices = [*self.books.batches, 10_000]
        return indices[choice % len(indices)]

    def offload(self, chain: int, count: int, event_kind: int) -> None:
        """Offer pages; the model writes them when their event comes, and the engine keeps them until then."""
        pending = self._take(CHAINS[chain][:count])
        if pending is None:
            return
        pending.filled = False
        pending.losses = self._losses

        def fill() -> None:
            if not pending.over:
                self._fill(pending.transfers, self.pools.pattern)
                self._rest(pending.pages)
                pending.filled = True

        ready = self._event(event_kind, fill)
        self._no_objects_but = self._no_objects_but if self.closed else None
        accepted = self.linker.offload(pending.transfers, ready=ready)

        assert accepted is not self.closed
        if accepted:
            self.books.accepted += 1
            self.books.offers.append(pending)
        else:
            self._give_back(pending)

    def take_completions(self) -> int:
        """Take what has completed; return how many."""
        count = self.linker.num_completed_offloads()
        assert 0 <= count <= len(self.books.offers)
        for _ in range(count):
            self._complete(self.books.offers.popleft())
        if not self.books.offers:
            assert self.linker.pop_completed_offload() is False
        self.check_objects()
        return count

    def _complete(self, pending: Pending) -> None:
        stored = self.linker.pop_completed_offload()
        self.books.completed += 1
        if stored:
            assert pending.filled
            self._check_stored(pending)
        self._give_back(pending)

    def _check_stored(self, pending: Pending) -> None:
        """Check that a store that neither lies nor evicts holds the whole offer."""
        faults = [rule.fault for rule in self.store.script.fired]
        if (
            self._bounded
            or pending.losses < self._losses
            or any(isinstance(fault, Evict | Lie | Tamper) for fault in faults)
        ):
            return
        if Report(status=WriteStatus.EXISTS) in faults:
            return
        sources, stored = self.pools.group.sources, set(self.inner.keys())
        for transfer in pending.transfers:
            for pool in (name for name, source in sources.items() if source == transfer.name):
                for key in transfer.keys:
                    assert isinstance(key, bytes)
                    assert set(self._objects[pool, key]) <= stored

    def lose_objects(self) -> None:
        """Lose everything that is stored, whatever was promised."""
        self._losses += 1
        self.inner.clear(b"")

    def offload_and_reset(self, chain: int, count: int) -> None:
        """Reset while an offload hangs before it publishes; what was overtaken never becomes visible."""
        gate = Gate()
        hang = Hang(gate=gate, moment=Moment.BEFORE_PUBLISH)
        self.store.script.add(Rule(call=Call.WRITE, fault=hang, times=1))
        self.gates.append(gate)
        self.offload(chain, count, 1)
        offers = len(self.books.offers)
        wait_for(
            lambda: gate.arrived > 0 or self.linker.num_completed_offloads() == offers,
            "an accepted offload never completes",
        )
        self.reset()
        self.open_gates()

    def ask_nonsense(self, choice: int) -> None:
        """Ask what no engine should; every answer is the safe one."""
        kv = self.pools.logical_pools[0]
        slots = self.pools.slots(kv, [0])
        bad = (
            PoolTransfer(name=kv, device_indices=slots),
            PoolTransfer(name=kv, keys=CHAINS[0][:2], device_indices=slots),
            PoolTransfer(name=kv, keys=CHAINS[0][:1], device_indices=slots + 1_000_000),
            PoolTransfer(name=kv, keys=CHAINS[0][:1], device_indices=slots.astype(float)),
            PoolTransfer(name=kv, keys=CHAINS[0][:1]),
        )[choice % 5]
        assert self.linker.load(f"nonsense{choice}", [bad]) is False
        assert self.linker.offload([bad]) is False
        assert self.linker.lookup("nonsense", [bad, bad]) == []

    # ---- life cycle ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Reset the linker: nothing is written or published afterwards, and nothing is remembered."""
        self.linker.reset()
        self._forget()

    def close(self) -> None:
        """Close the linker: from here on everything is a miss."""
        self.linker.close()
        self.closed = True
        self._forget()

    def _forget(self) -> None:
        mark = self.access.mark()
        assert self.access.writes_since(mark) == ()
        self._no_writes_since = mark
        self._no_objects_but = frozenset(self.inner.keys())
        assert self.linker.pending == 0
        assert self.linker.num_completed_offloads() == 0
        books, self.books = self.books, Books()
        self.books.accepted, self.books.completed = books.accepted, books.completed
        self.books.dropped = books.dropped + len(books.offers)
        self.books.last_index = books.last_index
        loads = [
            *books.queued.values(),
            *(p for b in books.batches.values() for p in b.loads.values()),
        ]
        for pending in (*loads, *books.offers):
            self._give_back(pending)

    def drain(self) -> None:
        """Let everything go on, and take every completion and every batch."""
        self.open_gates()
        self.set_events()
        self.drain_offloads()
        while self.books.batches:
            self.finish(0, ask_first=True)

    def drain_offloads(self) -> None:
        """Take every completion; each comes at its deadline at the latest."""
        until = time.monotonic() + 60
        while self.books.offers:
            assert time.monotonic() < until, "an accepted offload never completes"
            if not self.take_completions():
                time.sleep(0.001)

    def end(self, *, drain: bool) -> None:
        """Close, let everything land that still can, and check what is left."""
        if drain:
            self.drain()
        self.close()
        self.open_gates()
        self.check_objects()
        self._check_answers()
        self._check_nothing_kept()
        self._threads.shutdown()

    def _check_answers(self) -> None:
        self.linker.close()
        self.ask_nonsense(0)
        self.lookup("late", 0, 2)
        self.load("late", 0)
        self.offload(0, 1, 0)
        self.start(0)
        self.finish(0, ask_first=False)
        self.linker.layer_done_counter.wait_until(0)
        assert self.linker.pending == 0
        assert self.books.completed + self.books.dropped == self.books.accepted
        snapshot = self.linker.metrics.snapshot()
        assert snapshot.closes
        assert snapshot.tokens_open == 0

    def _check_nothing_kept(self) -> None:
        """Check that no hold and no session is left, unless the store failed or hung at letting go."""
        fired = {rule.call for rule in self.store.script.fired}
        if fired & {Call.RELEASE, Call.CLOSE_READ}:
            return
        wait_for(lambda: not self.inner.kept(), "holds or sessions outlive the linker")


def _places(pages: Mapping[str, tuple[int, ...]]) -> list[Place]:
    return [(name, page) for name, numbers in pages.items() for page in numbers]


def opening_gate(seconds: float) -> Gate:
    """Return a gate that opens by itself: a device that hangs for a moment."""
    gate = Gate()
    timer = threading.Timer(seconds, gate.open)
    timer.daemon = True
    timer.start()
    return gate

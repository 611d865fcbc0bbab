"""The linker behind SGLang's real prefix trees and pools, those too whose models need a GPU: every byte comes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from engine_frame.server import LinkerOptions
from engine_frame.trees import CORES, KINDS, PAGES, SETTLE_SECONDS, Restored, Tree
from engine_reads import contents, fill_at_random, overwrite
from faulty_store import PATIENT, TOLD, install, misbehave
from sglang.srt.mem_cache.hicache_storage import PoolName

from kvlinker.description import KVCacheDescription
from kvlinker.loads import LoadQueue
from kvlinker.lookups import LookupTable
from kvlinker.offloads import OffloadQueue
from kvlinker.pools import DevicePoolGroup
from kvlinker.testing import MemoryStore
from kvlinker_sglang.engine import linker as linker_module
from kvlinker_sglang.engine.linker import KVLinker
from kvlinker_sglang.weights import WeightsWatch

each_kind = pytest.mark.parametrize("name", sorted(KINDS))


@dataclass(frozen=True)
class Linked:
    """A tree with the linker, and its store's control."""

    tree: Tree
    linker: KVLinker
    control: Path

    def tokens(self, pages: int, *, first: int = 100) -> list[int]:
        """Return a prompt of whole pages."""
        return list(range(first, first + pages * self.tree.kind.page_size))

    def store(self, pages: int) -> tuple[list[int], list[torch.Tensor]]:
        """Have a prompt of random bytes stored; return it and its bytes. The pools are empty and spoiled then."""
        tree, tokens = self.tree, self.tokens(pages)
        slots = tree.allocate(pages)
        fill_at_random(tree.rows(slots), seed=pages)
        expected = contents(tree.rows(slots))
        tree.insert(tokens, slots)
        tree.settle()
        tree.forget()
        overwrite(tree.rows(slots), 0xFF)
        return tokens, expected

    def holds(self, restored: Restored, expected: list[torch.Tensor]) -> bool:
        """Whether the slots that were loaded have exactly these bytes."""
        found = contents(self.tree.rows(restored.slots))
        return len(found) == len(expected) and all(map(torch.equal, found, expected))

    def counts(self) -> tuple[int, int]:
        """Return the lookups, loads and offloads that are open, and the tokens that are in no reason."""
        counted = self.linker.metrics.snapshot()
        assert counted.closes
        return self.linker.pending, counted.tokens_open


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> str:
    """Return each of SGLang's two trees."""
    return str(request.param)


@pytest.fixture
def name() -> str:
    """Return the kind of pool of tests that ask for no other."""
    return "mha"


@pytest.fixture
def linked(
    name: str,
    core: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Linked]:
    """Give the linker behind a tree over empty pools."""
    monkeypatch.syspath_prepend(install(tmp_path / "plugins"))
    tree = Tree(name=name, core=core)
    control = tmp_path / "control"
    options = replace(
        TOLD,
        extra_config={
            "store": {"plugin": "faulty", "options": {"control": str(control)}},
            "min_hit_tokens": 1,
            "limits": {**PATIENT, "breaker_seconds": 0.001},
        },
    )
    linker = tree.attach(options)
    assert isinstance(linker, KVLinker)
    yield Linked(tree, linker, control)
    linker.close()


@each_kind
@pytest.mark.supports(engine="sglang", level="tree", case="name")
def test_a_stored_prompt_comes_back_byte_for_byte_to_other_slots(
    linked: Linked, proves: Callable[[KVCacheDescription], None]
) -> None:
    proves(linked.tree.description)
    tokens, expected = linked.store(5)
    taken = linked.tree.allocate(2)

    restored = linked.tree.restore(tokens, "again")

    assert (restored.match.device_tokens, restored.match.host_tokens) == (0, len(tokens))
    assert not restored.failed
    assert not set(restored.slots.tolist()) & set(taken.tolist())
    assert linked.holds(restored, expected)
    assert linked.counts() == (0, 0)


@each_kind
def test_what_was_restored_is_adopted_and_offered_to_the_store_again(linked: Linked) -> None:
    tokens, _ = linked.store(5)
    written = linked.linker.metrics.snapshot().events["offload_objects"]
    restored = linked.tree.restore(tokens, "again")

    linked.tree.adopt(tokens, restored)
    linked.tree.settle()

    again = linked.tree.match(tokens, "once more")
    assert (again.device_tokens, again.host_tokens) == (len(tokens), 0)
    counted = linked.linker.metrics.snapshot().events
    assert counted["offload_objects"] == written
    assert counted["objects_skipped"] > 0


@each_kind
def test_l2_boundaries_are_counted_from_the_first_page_that_is_not_in_the_pools(
    linked: Linked,
) -> None:
    tokens, expected = linked.store(5)
    head = tokens[: 2 * linked.tree.kind.page_size]
    linked.tree.adopt(head, linked.tree.restore(head, "head"))

    tail = linked.tree.restore(tokens, "tail")
    linked.tree.adopt(tokens, tail)

    slots = linked.tree.slots_of(linked.tree.match(tokens, "all"))
    found = contents(linked.tree.rows(slots))
    assert (tail.match.device_tokens, len(tail.slots)) == (len(head), len(tokens) - len(head))
    assert all(map(torch.equal, found, expected))


@each_kind
def test_pools_name_every_logical_pool_that_an_entry_takes(linked: Linked) -> None:
    sources = {entry.indices_from_pool for entry in linked.linker.pools.values()}

    assert PoolName.KV in linked.linker.pools
    assert (PoolName.SWA in linked.linker.pools) == (linked.tree.windows is not None)
    assert sources == {str(name) for name in linked.linker.pools}


@pytest.mark.parametrize("name", ["swa", "v4"])
def test_l2_a_window_is_restorable_only_where_a_stored_prompt_ends(linked: Linked) -> None:
    tree = linked.tree
    tokens, _ = linked.store(4)
    longer = [*tokens, *linked.tokens(2, first=9000)]

    match = tree.match(longer, "longer")
    tree.abort(match)

    assert match.host_tokens == len(tokens)


@pytest.mark.parametrize("name", ["dsa", "mha", "v4"])
@pytest.mark.parametrize("fault", ["corrupt", "evict", "hang", "raise"])
def test_l5_a_load_that_fails_ends_its_batch_once_and_the_retry_computes(
    linked: Linked, fault: str
) -> None:
    tree = linked.tree
    tokens, _ = linked.store(3)
    misbehave(
        linked.control, ("open_read" if fault in {"corrupt", "evict"} else "read", fault), times=1
    )

    restored = tree.restore(tokens, "first")
    misbehave(linked.control)
    retry = tree.match(tokens, "retry")

    assert restored.match.host_tokens == len(tokens)
    assert restored.failed
    # What could not be read is not offered again; a shorter prefix that does not need it is.
    assert retry.host_tokens < len(tokens)
    assert linked.counts()[1] == retry.host_tokens
    assert PAGES * tree.kind.page_size == tree.free_slots[0] + len(restored.slots)


def test_l5_what_failed_is_stored_anew_once_it_was_computed(linked: Linked) -> None:
    tree = linked.tree
    tokens, _ = linked.store(3)
    misbehave(linked.control, ("read", "raise"), times=1)
    tree.restore(tokens, "first")
    tree.forget()

    slots = tree.allocate(3)
    fill_at_random(tree.rows(slots), seed=9)
    expected = contents(tree.rows(slots))
    tree.insert(tokens, slots)
    tree.settle()
    tree.forget()

    assert linked.holds(tree.restore(tokens, "again"), expected)


def test_l1_a_lookup_that_fails_is_a_miss(linked: Linked) -> None:
    tokens, _ = linked.store(3)
    found = []
    for fault in ("raise", "hang", "deny"):
        misbehave(linked.control, ("exists", fault))
        found.append(linked.tree.match(tokens, fault).host_tokens)
    misbehave(linked.control)

    assert found == [0, 0, 0]
    assert linked.counts()[1] == 0


@pytest.mark.parametrize("fault", ["full", "hang", "raise"])
def test_l8_an_offload_that_fails_is_offered_again(linked: Linked, fault: str) -> None:
    tree = linked.tree
    tokens, slots = linked.tokens(3), tree.allocate(3)
    misbehave(linked.control, ("write", fault))
    tree.insert(tokens, slots)
    tree.settle()
    failed = linked.linker.metrics.snapshot().events["offloads_failed"]
    misbehave(linked.control)

    # The tree offers a prefix again when somebody else computes on behind it.
    tree.insert([*tokens, *linked.tokens(1, first=9000)], torch.cat([slots, tree.allocate(1)]))
    tree.settle()
    tree.forget()

    assert failed == 1
    assert tree.restore(tokens, "again").match.host_tokens == len(tokens)


@each_kind
def test_l6_a_request_that_is_aborted_before_its_load_starts_leaves_nothing(linked: Linked) -> None:
    tree = linked.tree
    tokens, expected = linked.store(3)
    match = tree.match(tokens, "gone")
    slots = tree.load_back(match)

    tree.abort(match)

    assert len(slots) == len(tokens)
    assert tree.start() == -1
    assert tree.finish([match]) == []
    assert linked.counts() == (0, 0)
    assert linked.holds(tree.restore(tokens, "gone"), expected)


def test_l6_a_request_that_is_aborted_after_its_lookup_is_forgotten_at_the_flush(
    linked: Linked,
) -> None:
    tree = linked.tree
    tokens, _ = linked.store(3)
    tree.abort(tree.match(tokens, "gone"))

    tree.forget()

    assert linked.counts() == (0, 0)


class Forward:
    """An event of a forward that goes on until it is told to end."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.is_done = False

    def query(self) -> bool:
        """See DeviceEvent."""
        self.asked.set()
        return self.is_done


@pytest.fixture
def forward(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> Forward:
    """Return the forward that the engine records an event behind, whenever it is asked for one."""
    running = Forward()
    monkeypatch.setattr(linked.linker, "record_offload_ready", lambda: [running])
    return running


def test_l7_pages_are_stored_as_the_forward_left_them_that_was_running_when_they_were_offered(
    linked: Linked, forward: Forward
) -> None:
    tree = linked.tree
    tokens, slots = linked.tokens(3), tree.allocate(3)
    tree.insert(tokens, slots)
    assert forward.asked.wait(SETTLE_SECONDS)

    fill_at_random(tree.rows(slots), seed=1)
    expected = contents(tree.rows(slots))
    forward.is_done = True
    tree.settle()
    tree.forget()
    overwrite(tree.rows(slots), 0xFF)

    assert linked.holds(tree.restore(tokens, "again"), expected)


def test_b63_slots_are_written_behind_the_forward_that_was_running_when_their_load_began(
    linked: Linked, forward: Forward
) -> None:
    tree = linked.tree
    forward.is_done = True
    tokens, expected = linked.store(3)
    forward.is_done = False
    forward.asked.clear()
    match = tree.match(tokens, "again")
    slots = tree.load_back(match)

    tree.start()
    assert forward.asked.wait(SETTLE_SECONDS)
    overwrite(tree.rows(slots), 0xFF)  # what the last forward may still do to them
    forward.is_done = True
    tree.wait()

    assert tree.finish([match]) == []
    assert all(map(torch.equal, contents(tree.rows(slots)), expected))


def test_several_requests_of_a_batch_land_together(linked: Linked) -> None:
    tree = linked.tree
    tokens, expected = linked.store(3)
    matches = [tree.match(tokens, name) for name in ("a", "b")]
    slots = [tree.load_back(match) for match in matches]

    tree.start()
    tree.wait()
    failed = tree.finish(matches)

    assert failed == []
    for loaded in slots:
        assert all(map(torch.equal, contents(tree.rows(loaded)), expected))


def test_l1_after_a_close_everything_is_a_miss(linked: Linked) -> None:
    tokens, _ = linked.store(3)

    linked.linker.close()
    linked.linker.close()

    assert linked.tree.match(tokens, "late").host_tokens == 0
    linked.tree.insert(tokens, linked.tree.allocate(3))
    assert linked.tree.pending_offloads == 0
    linked.tree.forget()


# ---- what SGLang dies of, or believes ----------------------------------------------------------

SMALLEST = LinkerOptions(name="DictLinker", module="engine_frame.dict_linker")
STEPS: Mapping[str, Callable[[Tree], object]] = {
    "load": lambda tree: tree.load_back(tree.match(list(range(100, 148)), "loads")),
    "lookup": lambda tree: tree.match(list(range(100, 148)), "looks up"),
    "offload": lambda tree: tree.insert(list(range(200, 216)), tree.allocate(1)),
    "start_layer_wise_loading": Tree.start,
}


class WordlessError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError


ERRORS = (
    AssertionError("injected"),
    GeneratorExit(),
    KeyError("injected"),
    MemoryError(),
    OSError(5, "injected"),
    RuntimeError("injected"),
    StopIteration(),
    SystemExit(3),
    WordlessError(),
    asyncio.CancelledError(),
)
PLACES: tuple[tuple[object, str], ...] = (
    (DevicePoolGroup, "resolve_transfers"),
    (KVLinker, "record_offload_ready"),
    (LoadQueue, "cancel"),
    (LoadQueue, "check"),
    (LoadQueue, "finish"),
    (LoadQueue, "start"),
    (LookupTable, "answer"),
    (LookupTable, "take"),
    (OffloadQueue, "num_completed"),
    (OffloadQueue, "offer"),
    (OffloadQueue, "pop_completed"),
    (WeightsWatch, "flush"),
    (linker_module, "core_transfers"),
)
"""Where something raises in the linker, behind each of SGLang's calls."""


def raising(error: BaseException) -> Callable[..., object]:
    """Return a function that raises."""

    def fail(*_: object, **__: object) -> object:
        raise error

    return fail


@pytest.mark.parametrize("call", STEPS)
def test_e1_sglang_itself_catches_nothing_that_a_linker_raises(
    core: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(name="mha", core=core)
    linker = tree.attach(SMALLEST)
    tree.insert(list(range(100, 148)), tree.allocate(3))
    tree.settle()
    tree.forget()

    monkeypatch.setattr(linker, call, raising(RuntimeError("injected")))

    with pytest.raises(RuntimeError, match="injected"):
        STEPS[call](tree)


@pytest.mark.parametrize(
    ("pools", "is_loaded"), [((PoolName.KV, PoolName.SWA), True), ((PoolName.KV,), False)]
)
def test_l4_sglang_itself_loads_no_window_where_a_linker_does_not_name_them(
    core: str, pools: tuple[object, ...], *, is_loaded: bool
) -> None:
    tree = Tree(name="swa", core=core)
    tree.attach(replace(SMALLEST, extra_config={"pools": pools}))
    tokens = list(range(100, 148))
    tree.insert(tokens, tree.allocate(3))
    tree.settle()
    tree.forget()

    match = tree.match(tokens, "again")

    assert match.host_tokens == len(tokens)
    assert (match.window_tokens > 0) == is_loaded


def test_x05_sglang_itself_takes_every_length_for_restorable_where_a_lookup_answers_true(
    core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(name="mha", core=core)
    linker = tree.attach(SMALLEST)
    tokens = list(range(100, 148))

    monkeypatch.setattr(linker, "lookup", lambda *_: [True])

    assert tree.match(tokens, "believes").host_tokens == len(tokens)


@pytest.mark.parametrize(("owner", "name_in_it"), PLACES, ids=[name for _, name in PLACES])
def test_e1_nothing_that_is_raised_in_the_linker_reaches_sglang(
    linked: Linked, owner: object, name_in_it: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = linked.tree
    tokens, expected = linked.store(3)

    for number, error in enumerate(ERRORS):
        with monkeypatch.context() as injected:
            injected.setattr(owner, name_in_it, raising(error))
            tree.abort(tree.match(tokens, f"gone {number}"))
            restored = tree.restore(tokens, f"request {number}")
            tree.insert(linked.tokens(1, first=9000), tree.allocate(1))
            tree.cache.check_hicache_events()
            # Loaded, or given up, or not even begun; never filled with something else.
            assert restored.failed or not len(restored.slots) or linked.holds(restored, expected)
            tree.forget()
        tree.forget()

    assert linked.counts()[0] == 0
    assert linked.holds(tree.restore(tokens, "in the end"), expected)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_e1_an_engine_that_ends_ends_whatever_its_store_raises(
    linked: Linked, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryStore, "close", raising(error))

    linked.linker.close()

    assert linked.linker.metrics.snapshot().events["close_errors"] == 1


def test_x04_each_of_several_offloads_gets_its_own_outcome(linked: Linked) -> None:
    tree = linked.tree
    first, second = linked.tokens(2), linked.tokens(2, first=9000)
    misbehave(linked.control, ("write", "raise"), times=1)

    tree.insert(first, tree.allocate(2))
    tree.insert(second, tree.allocate(2))
    tree.settle()
    tree.forget()

    assert tree.match(first, "first").host_tokens == 0
    assert tree.match(second, "second").host_tokens == len(second)


def test_x05_a_lookup_answers_with_plain_numbers_in_range_and_ascending(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, _ = linked.store(4)
    answers: list[list[int]] = []
    lookup = linked.linker.lookup

    def listen(*arguments: object) -> list[int]:
        answers.append(lookup(*arguments))  # type: ignore[arg-type]  # as they came
        return answers[-1]

    monkeypatch.setattr(linked.linker, "lookup", listen)

    linked.tree.match([*tokens, *linked.tokens(2, first=9000)], "longer")

    assert answers == [[1, 2, 3, 4]]
    assert {type(boundary) for boundary in answers[0]} == {int}

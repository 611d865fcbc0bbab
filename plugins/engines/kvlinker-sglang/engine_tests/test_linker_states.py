"""The linker behind SGLang's real prefix trees over hybrids: pages come back with their state, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_frame.server import LinkerOptions
from engine_frame.state_trees import STATE_KINDS, StateTree
from engine_frame.trees import CORES, PAGES, Restored
from engine_reads import contents, fill_at_random, overwrite
from faulty_store import PATIENT, install
from sglang.srt.mem_cache.hicache_storage import PoolName

from kvlinker.description import KVCacheDescription
from kvlinker_sglang.engine.linker import KVLinker

each_kind = pytest.mark.parametrize("name", sorted(STATE_KINDS))


@dataclass
class Linked:
    """A tree with the linker, and prompts of whole pages."""

    tree: StateTree
    linker: KVLinker

    def tokens(self, pages: int, *, first: int = 100) -> list[int]:
        """Return a prompt."""
        return list(range(first, first + pages * self.tree.kind.page_size))

    def insert(self, *prompts: list[int], seed: int = 1) -> list[list[torch.Tensor]]:
        """Have prompts stored, each with a state of random bytes; return what each needs to go on.

        A prompt begins like the one before it, or with nothing that is in the tree.
        """
        tree, kept = self.tree, []
        slots = tree.allocate(max(map(len, prompts)) // tree.kind.page_size)
        fill_at_random(tree.kept(slots, tree.allocate_state()), seed)
        for prompt in prompts:
            state = tree.allocate_state()
            kept.append(contents(tree.kept(slots[: len(prompt)], state)))
            tree.insert(prompt, slots[: len(prompt)], state=state)
            tree.settle()
        return kept

    def forget(self) -> None:
        """Empty the tree, and spoil all that its pools hold."""
        self.tree.forget()
        overwrite(self.tree.kept(torch.arange(1), torch.arange(1)), 0xFF)

    def holds(self, restored: Restored, expected: list[torch.Tensor]) -> bool:
        """Whether the slots that were loaded have exactly these bytes, the state included."""
        state = self.tree.state_of(restored.match)
        assert state is not None
        found = contents(self.tree.kept(restored.slots, state))
        return len(found) == len(expected) and all(map(torch.equal, found, expected))


Link = Callable[..., Linked]


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    """Return a function that makes a tree of a new worker, with a linker to the test's one directory."""
    made: list[Linked] = []

    def link(name: str, core: str) -> Linked:
        tree = StateTree(name=name, core=core)
        options = {"path": str(tmp_path / "store"), "capacity": "64MiB"}
        config = {
            "store": {"plugin": "file", "options": options},
            "namespace": {"weights_version": "1"},  # no file says which weights these workers have
            "min_hit_tokens": 1,
            "limits": dict(PATIENT),
        }
        linker = tree.attach(LinkerOptions(extra_config=config))
        assert isinstance(linker, KVLinker)
        made.append(Linked(tree, linker))
        return made[-1]

    yield link
    for linked in made:
        linked.linker.close()


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> str:
    """Return each of SGLang's two trees."""
    return str(request.param)


@pytest.fixture
def name() -> str:
    """Return the kind of hybrid of tests that ask for no other."""
    return "mha"


@pytest.fixture
def linked(
    name: str, core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Linked]:
    """Give the linker behind a tree over empty pools, with a store in memory."""
    monkeypatch.syspath_prepend(install(tmp_path / "plugins"))
    tree = StateTree(name=name, core=core)
    store = {"plugin": "faulty", "options": {"control": str(tmp_path / "control")}}
    config = {"store": store, "min_hit_tokens": 1, "limits": dict(PATIENT)}
    linker = tree.attach(LinkerOptions(extra_config=config))
    assert isinstance(linker, KVLinker)
    yield Linked(tree, linker)
    linker.close()


# ---- bytes ------------------------------------------------------------------------------------


@each_kind
@pytest.mark.supports(engine="sglang", level="tree", case="name")
def test_b06_a_prompt_comes_back_with_its_state_byte_for_byte_to_other_slots(
    linked: Linked, proves: Callable[[KVCacheDescription], None]
) -> None:
    proves(linked.tree.description)
    tokens = linked.tokens(5)
    (expected,) = linked.insert(tokens)
    linked.forget()
    pages, states = linked.tree.allocate(2), linked.tree.allocate_state()

    restored = linked.tree.restore(tokens, "again")

    assert (restored.match.device_tokens, restored.match.host_tokens) == (0, len(tokens))
    assert not restored.failed
    assert not set(restored.slots.tolist()) & set(pages.tolist())
    assert linked.tree.state_of(restored.match) != states
    assert linked.holds(restored, expected)


@pytest.mark.parametrize("name", ["mha", "mha_paged", "mla", "side_states"])
def test_a_state_is_found_by_another_worker(link: Link, name: str, core: str) -> None:
    first = link(name, core)
    tokens = first.tokens(5)
    (expected,) = first.insert(tokens)
    first.linker.close()

    second = link(name, core)
    second.forget()
    restored = second.tree.restore(tokens, "again")

    assert restored.match.host_tokens == len(tokens)
    assert second.holds(restored, expected)


def test_states_that_lie_side_by_side_are_found_by_a_worker_that_keeps_them_apart(
    link: Link, core: str
) -> None:
    first = link("mla_envelope", core)
    tokens = first.tokens(5)
    (expected,) = first.insert(tokens)
    first.linker.close()

    second = link("mla", core)
    second.forget()

    assert second.holds(second.tree.restore(tokens, "again"), expected)


# ---- boundaries -------------------------------------------------------------------------------


@each_kind
def test_b27_each_boundary_has_the_state_that_was_stored_behind_its_last_page(
    linked: Linked,
) -> None:
    tokens = linked.tokens(5)
    head = tokens[: 3 * linked.tree.kind.page_size]
    at_three, at_five = linked.insert(head, tokens)

    linked.forget()
    longer = linked.tree.restore([*tokens, *linked.tokens(1, first=9000)], "longer")
    whole = linked.holds(longer, at_five)
    linked.forget()
    shorter = linked.tree.restore([*head, *linked.tokens(2, first=9000)], "shorter")

    assert (longer.match.host_tokens, shorter.match.host_tokens) == (len(tokens), len(head))
    assert whole
    assert linked.holds(shorter, at_three)


@each_kind
def test_b20_a_boundary_without_a_state_is_not_offered(linked: Linked) -> None:
    size = linked.tree.kind.page_size
    tokens = linked.tokens(5)
    linked.insert(tokens)
    linked.forget()

    match = linked.tree.match([*tokens[: 3 * size], *linked.tokens(2, first=9000)], "branch")

    # Its three pages are stored, and the only state is behind the fifth.
    assert (match.device_tokens, match.host_tokens) == (0, 0)
    assert set(linked.linker.metrics.snapshot().misses_by_pool) == {"mamba"}


@each_kind
def test_a_full_hit_ends_where_the_last_token_can_still_be_computed(linked: Linked) -> None:
    tokens = linked.tokens(5)
    head = tokens[: 3 * linked.tree.kind.page_size]
    at_three, _ = linked.insert(head, tokens)
    linked.forget()

    match = linked.tree.schedule(tokens, "again")
    slots = linked.tree.load_back(match)
    linked.tree.start()
    linked.tree.wait()

    # A state cannot step back by a token: the one behind the whole prompt is of no use.
    assert match.host_tokens == len(slots) == len(head)
    assert linked.tree.finish([match]) == []
    assert linked.holds(Restored(match=match, slots=slots, failed=False), at_three)


# ---- the tree ---------------------------------------------------------------------------------


@each_kind
def test_what_was_restored_is_adopted_with_its_state(linked: Linked) -> None:
    tokens = linked.tokens(5)
    (expected,) = linked.insert(tokens)
    linked.forget()
    restored = linked.tree.restore(tokens, "again")
    written = linked.linker.metrics.snapshot().events["offload_objects"]

    linked.tree.adopt(tokens, restored)
    linked.tree.settle()

    again = linked.tree.match(tokens, "once more")
    assert (again.device_tokens, again.host_tokens) == (len(tokens), 0)
    assert linked.tree.free_states == PAGES - 1
    assert linked.holds(restored, expected)
    assert linked.linker.metrics.snapshot().events["offload_objects"] == written


def test_l6_a_request_that_is_aborted_before_its_load_starts_leaves_its_queued_state(
    linked: Linked,
) -> None:
    tokens = linked.tokens(5)
    (expected,) = linked.insert(tokens)
    linked.forget()
    match = linked.tree.match(tokens, "gone")
    linked.tree.load_back(match)

    linked.tree.abort(match)

    assert linked.tree.start() == -1
    assert linked.linker.pending == 0
    assert linked.holds(linked.tree.restore(tokens, "again"), expected)


# ---- waiting ----------------------------------------------------------------------------------


@each_kind
def test_b65_a_forward_waits_for_states_and_pages_alike(linked: Linked) -> None:
    counter = linked.linker.layer_done_counter

    assert linked.tree.requests.layer_transfer_counter is counter
    assert linked.tree.pool.layer_transfer_counter is counter
    assert set(linked.linker.pools) == {PoolName.KV, PoolName.MAMBA}


def test_a_state_that_is_being_loaded_can_be_copied(linked: Linked) -> None:
    tokens = linked.tokens(5)
    (expected,) = linked.insert(tokens)
    linked.forget()
    match = linked.tree.match(tokens, "again")
    slots = linked.tree.load_back(match)
    state, copy = linked.tree.state_of(match), linked.tree.allocate_state()
    assert state is not None
    linked.tree.start()

    linked.tree.requests.copy_mamba_state(state, copy)

    assert linked.tree.finish([match]) == []
    found = contents(linked.tree.kept(slots, copy))
    assert copy != state
    assert all(map(torch.equal, found, expected))

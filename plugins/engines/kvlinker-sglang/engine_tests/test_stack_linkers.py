"""SGLang's own linkers over kvlinker's groups: the same bytes as over its own, and the families that it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import pytest
import torch
from engine_frame.server import LinkerOptions
from engine_frame.state_trees import STATE_KINDS, StateTree
from engine_frame.trees import KINDS, Tree
from engine_frame.trees import PAGES as TREE_PAGES
from engine_reads import Rows, contents, fill_at_random, overwrite, rows_of
from mooncake_stand_in import CONFIG, RecordingClient, install_client
from mori_stand_in import MoriLinker, RangedClient
from real_pools import heads_pool
from sglang.srt.runtime_context import get_memory

from kvlinker_sglang.engine.stack_view import StackEntry

PAGES = 5
ALL = [*sorted(KINDS), *(f"hybrid-{name}" for name in sorted(STATE_KINDS))]
SERVED_BY_SGLANG = ["dsa", "v4", "v4_shared", "hybrid-mla", "hybrid-mla_envelope"]
"""Whose pools SGLang's own strategies lay out for its linkers."""
MOONCAKE = LinkerOptions(
    name="MooncakeDirectLinker", module="kvlinker_sglang.linkers", extra_config=CONFIG
)
MORI = LinkerOptions(name="MoriLinker", module="mori_stand_in")


class OwnLinker(Protocol):
    """One of SGLang's."""

    pools: Mapping[str, object]

    def close(self) -> None:
        """End its threads."""


@dataclass
class Prompt:
    """A prompt of whole pages, and where its KV is."""

    tree: Tree
    tokens: list[int]
    slots: torch.Tensor
    state: torch.Tensor | None

    @classmethod
    def on(cls, tree: Tree) -> Prompt:
        """Take slots for one."""
        state = tree.allocate_state() if isinstance(tree, StateTree) else None
        tokens = list(range(100, 100 + PAGES * tree.kind.page_size))
        return cls(tree, tokens, tree.allocate(PAGES), state)

    @property
    def rows(self) -> list[Rows]:
        """What it needs to go on."""
        if isinstance(self.tree, StateTree) and self.state is not None:
            return self.tree.kept(self.slots, self.state)
        return self.tree.rows(self.slots)

    def store(self, seed: int) -> list[torch.Tensor]:
        """Have it stored with random bytes, which are returned; the pools are empty and spoiled then."""
        fill_at_random(self.rows, seed=seed)
        expected = contents(self.rows)
        self.tree.insert(self.tokens, self.slots, state=self.state)
        self.tree.settle()
        self.tree.forget()
        overwrite(self.rows, 0xFF)
        return expected

    def restore(self) -> list[torch.Tensor]:
        """Load it to other slots, and return what they have then."""
        self.tree.allocate(2)
        restored = self.tree.restore(self.tokens, "again")
        assert not restored.failed
        assert (restored.match.device_tokens, restored.match.host_tokens) == (0, len(self.tokens))
        state = self.tree.state_of(restored.match)
        return contents(Prompt(self.tree, self.tokens, restored.slots, state).rows)


def tree_of(name: str) -> Tree:
    """Make a tree over one of SGLang's pools."""
    if name.startswith("hybrid-"):
        return StateTree(name=name.removeprefix("hybrid-"))
    return Tree(name=name)


@contextmanager
def linked(
    tree: Tree, *, by_kvlinker: bool, options: LinkerOptions = MOONCAKE
) -> Iterator[OwnLinker]:
    """Attach one of SGLang's linkers, over pools that SGLang or kvlinker lays out.

    SGLang keeps a strategy for the life of the process; without a linked server it is not asked.
    """
    with get_memory().override(enable_unified_cache_external_linker=by_kvlinker):
        made: OwnLinker = tree.attach(options)  # type: ignore[assignment]  # SGLang's
    assert all(isinstance(pool, StackEntry) == by_kvlinker for pool in made.pools.values())
    yield made
    made.close()


def client_of(linker: OwnLinker) -> RangedClient:
    """Return the client of a mori linker."""
    assert isinstance(linker, MoriLinker)
    client = linker.client
    assert isinstance(client, RangedClient)
    return client


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> RecordingClient:
    """Give Mooncake's client."""
    return install_client(monkeypatch)


@pytest.mark.parametrize("options", [MOONCAKE, MORI], ids=["mooncake", "mori"])
@pytest.mark.parametrize("name", ALL)
def test_every_family_comes_back_byte_for_byte_through_sglangs_linkers(
    name: str, options: LinkerOptions, client: RecordingClient
) -> None:
    tree = tree_of(name)
    with linked(tree, by_kvlinker=True, options=options):
        prompt = Prompt.on(tree)
        expected = prompt.store(seed=1)

        restored = prompt.restore()

    assert len(restored) == len(expected) > 0
    assert all(map(torch.equal, restored, expected))
    assert not client.open_sessions


@pytest.mark.parametrize("options", [MOONCAKE, MORI], ids=["mooncake", "mori"])
@pytest.mark.usefixtures("client")
def test_a_draft_beside_the_target_comes_back_with_it(options: LinkerOptions) -> None:
    tree = Tree(name="mha")
    draft = heads_pool(layers=1, heads=4, pages=TREE_PAGES)
    tree.params.sidecar_draft_device_pools = (draft,)
    with linked(tree, by_kvlinker=True, options=options):
        prompt = Prompt.on(tree)
        drafted = list(rows_of(draft, prompt.slots, prompt.slots[:0]))
        fill_at_random(drafted, seed=5)
        expected = contents(drafted)
        prompt.store(seed=6)
        overwrite(drafted, 0xFF)
        tree.allocate(2)

        slots = tree.restore(prompt.tokens, "again").slots

    restored = contents(list(rows_of(draft, slots, slots[:0])))
    assert len(restored) == len(expected) == 2
    assert all(map(torch.equal, restored, expected))


@pytest.mark.parametrize("name", SERVED_BY_SGLANG)
def test_the_same_objects_are_stored_as_from_sglangs_own_groups(
    name: str, client: RecordingClient
) -> None:
    tree = tree_of(name)
    stored = []
    for by_kvlinker in (False, True):
        with linked(tree, by_kvlinker=by_kvlinker):
            Prompt.on(tree).store(seed=2)
        stored.append(dict(client.objects))
        client.objects.clear()

    assert len(stored[0]) >= PAGES
    assert stored[1] == stored[0]


@pytest.mark.parametrize("name", SERVED_BY_SGLANG)
def test_moris_objects_are_the_same_too(name: str) -> None:
    tree = tree_of(name)
    stored = []
    for by_kvlinker in (False, True):
        with linked(tree, by_kvlinker=by_kvlinker, options=MORI) as linker:
            Prompt.on(tree).store(seed=4)
            stored.append(client_of(linker).objects)

    assert len(stored[0]) >= PAGES
    assert stored[1] == stored[0]


@pytest.mark.parametrize("name", SERVED_BY_SGLANG)
def test_what_sglangs_own_groups_stored_is_read_in_the_same_ranges(
    name: str, client: RecordingClient
) -> None:
    tree = tree_of(name)
    reads = []
    with linked(tree, by_kvlinker=False):
        expected = Prompt.on(tree).store(seed=3)
    for by_kvlinker in (False, True):
        with linked(tree, by_kvlinker=by_kvlinker):
            prompt = Prompt.on(tree)
            overwrite(prompt.rows, 0xFF)
            tree.forget()
            client.read.clear()

            restored = prompt.restore()

            tree.forget()
        reads.append(list(client.read))
        assert all(map(torch.equal, restored, expected))

    assert reads[1] == reads[0]


@pytest.mark.parametrize("name", sorted(set(ALL) - set(SERVED_BY_SGLANG)))
def test_without_kvlinker_the_other_families_are_refused(
    name: str, client: RecordingClient
) -> None:
    tree = tree_of(name)

    with (
        pytest.raises(ValueError, match="direct external linker"),
        linked(tree, by_kvlinker=False),
    ):
        pass

    assert not client.objects

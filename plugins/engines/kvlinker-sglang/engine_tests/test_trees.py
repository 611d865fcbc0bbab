"""The real prefix tree over real pools, with the smallest linker that is right: what tests of the product stand on."""

from __future__ import annotations

import pytest
import torch
from engine_frame.server import LinkerOptions
from engine_frame.trees import CORES, KINDS, PAGES, Tree
from engine_reads import contents, fill_at_random, overwrite

each_core = pytest.mark.parametrize("core", CORES)
each_kind = pytest.mark.parametrize("name", sorted(KINDS))

DICT_LINKER = LinkerOptions(name="DictLinker", module="engine_frame.dict_linker")
FAILING_LINKER = LinkerOptions(
    name="DictLinker", module="engine_frame.dict_linker", extra_config={"fails": True}
)


def tokens_of(tree: Tree, pages: int) -> list[int]:
    """Return a prompt of whole pages."""
    return list(range(100, 100 + pages * tree.kind.page_size))


def stored(tree: Tree, pages: int) -> tuple[list[int], list[torch.Tensor]]:
    """Fill the pools, insert and store a prompt, and empty the tree; return the prompt and its bytes."""
    tokens, slots = tokens_of(tree, pages), tree.allocate(pages)
    fill_at_random(tree.rows(slots), seed=1)
    expected = contents(tree.rows(slots))
    tree.insert(tokens, slots)
    tree.settle()
    tree.forget()
    overwrite(tree.rows(slots), 0xFF)
    return tokens, expected


@each_core
@each_kind
def test_a_stored_prompt_comes_back_byte_for_byte_to_other_slots(name: str, core: str) -> None:
    tree = Tree(name=name, core=core)
    tree.attach(DICT_LINKER)
    tokens, expected = stored(tree, 5)
    taken = tree.allocate(2)

    restored = tree.restore(tokens, "again")

    found = contents(tree.rows(restored.slots))
    assert (restored.match.device_tokens, restored.match.host_tokens) == (0, len(tokens))
    assert not restored.failed
    assert len(restored.slots) == len(tokens)
    assert not set(restored.slots.tolist()) & set(taken.tolist())
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@each_core
@each_kind
def test_a_restored_prompt_that_the_tree_adopts_is_in_the_pools(name: str, core: str) -> None:
    tree = Tree(name=name, core=core)
    tree.attach(DICT_LINKER)
    tokens, _ = stored(tree, 5)
    restored = tree.restore(tokens, "again")

    tree.adopt(tokens, restored)

    again = tree.match(tokens, "once more")
    assert (again.device_tokens, again.host_tokens) == (len(tokens), 0)
    assert torch.equal(tree.slots_of(again), restored.slots)
    held = (5, tree.kind.window_pages)[: len(tree.free_slots)]
    assert tree.free_slots == tuple((PAGES - pages) * tree.kind.page_size for pages in held)


@each_core
def test_a_prefix_is_offered_behind_what_is_in_the_pools(core: str) -> None:
    tree = Tree(name="mha", core=core)
    tree.attach(DICT_LINKER)
    tokens, _ = stored(tree, 5)
    tree.insert(tokens[: 2 * tree.kind.page_size], tree.allocate(2))

    match = tree.match(tokens, "again")

    assert (match.device_tokens, match.host_tokens) == (32, 48)


@each_core
@each_kind
def test_a_tail_that_was_loaded_is_adopted_behind_what_was_in_the_pools(
    name: str, core: str
) -> None:
    tree = Tree(name=name, core=core)
    tree.attach(DICT_LINKER)
    tokens, expected = stored(tree, 5)
    head = tokens[: 2 * tree.kind.page_size]
    tree.adopt(head, tree.restore(head, "head"))

    tail = tree.restore(tokens, "tail")
    tree.adopt(tokens, tail)

    slots = tree.slots_of(tree.match(tokens, "all"))
    found = contents(tree.rows(slots))
    assert (tail.match.device_tokens, len(tail.slots)) == (len(head), len(tokens) - len(head))
    assert len(slots) == len(tokens)
    assert all(map(torch.equal, found, expected))


@each_core
def test_another_salt_finds_nothing(core: str) -> None:
    tree = Tree(name="mha", core=core)
    tree.attach(DICT_LINKER)
    tokens, _ = stored(tree, 3)

    match = tree.match(tokens, "again", salt="another")

    assert (match.device_tokens, match.host_tokens) == (0, 0)


@each_core
def test_a_load_that_failed_is_told_to_the_scheduler(core: str) -> None:
    tree = Tree(name="mha", core=core)
    tree.attach(FAILING_LINKER)
    tokens, _ = stored(tree, 3)

    restored = tree.restore(tokens, "again")

    assert restored.failed


@each_core
def test_a_queued_load_is_cancelled_with_its_request(core: str) -> None:
    tree = Tree(name="mha", core=core)
    tree.attach(DICT_LINKER)
    tokens, _ = stored(tree, 3)
    match = tree.match(tokens, "gone")
    slots = tree.load_back(match)

    tree.abort(match)
    batch = tree.start()

    assert len(slots) == len(tokens)
    assert batch == -1
    assert tree.finish([match]) == []

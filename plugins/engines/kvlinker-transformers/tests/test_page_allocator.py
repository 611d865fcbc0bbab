"""Page allocator: no page twice, none lost, none handed out while somebody holds it."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlinker.errors import ContractError
from kvlinker_transformers.pages import RESERVED_PAGE, PageAllocator


def test_the_reserved_page_is_never_handed_out() -> None:
    allocator = PageAllocator("kv", 6)

    assert sorted(allocator.allocate(5)) == [1, 2, 3, 4, 5]
    assert RESERVED_PAGE == 0


def test_too_many_pages_are_refused_with_the_counts_and_none_is_taken() -> None:
    allocator = PageAllocator("swa", 6)

    with pytest.raises(ContractError, match="'swa': 6 pages asked for, 5 of 5 are free"):
        allocator.allocate(6)

    assert allocator.free_pages == 5


def test_a_page_is_free_when_its_last_holder_releases_it() -> None:
    allocator = PageAllocator("kv", 3)
    pages = allocator.allocate(2)
    allocator.retain(pages[:1])

    allocator.release(pages)

    assert allocator.free_pages == 1
    allocator.release(pages[:1])
    assert allocator.free_pages == 2


@pytest.mark.parametrize("page", [RESERVED_PAGE, 1, -1, 99])
def test_a_page_that_nobody_holds_can_neither_be_retained_nor_released(page: int) -> None:
    allocator = PageAllocator("kv", 4)

    with pytest.raises(ContractError, match=f"page {page} of 4 is held by nobody"):
        allocator.release([page])
    with pytest.raises(ContractError, match=f"page {page} of 4 is held by nobody"):
        allocator.retain([page])


def test_a_pool_of_nothing_but_the_reserved_page_is_refused() -> None:
    with pytest.raises(ContractError, match=r"at least 2 pages.*got 1"):
        PageAllocator("kv", 1)


def test_a_seed_shuffles_pages_the_same_way_each_time_and_each_space_in_its_own() -> None:
    def order(name: str, seed: int) -> tuple[int, ...]:
        return PageAllocator(name, 20, shuffle_seed=seed).allocate(19)

    assert order("kv", 1) == order("kv", 1)
    assert len({order("kv", 1), order("kv", 2), order("swa", 1), tuple(range(1, 20))}) == 4


class Pages(RuleBasedStateMachine):
    """Random holders against a plain count of them."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator("kv", 9, shuffle_seed=3)
        self.holders: dict[int, int] = {}

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        if count > self.allocator.free_pages:
            with pytest.raises(ContractError):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count)
        assert not set(pages) & set(self.holders)
        self.holders.update(dict.fromkeys(pages, 1))

    @precondition(lambda self: self.holders)
    @rule(choice=st.randoms(use_true_random=False))
    def retain(self, choice: object) -> None:
        page = self._pick(choice)
        self.allocator.retain([page])
        self.holders[page] += 1

    @precondition(lambda self: self.holders)
    @rule(choice=st.randoms(use_true_random=False))
    def release(self, choice: object) -> None:
        page = self._pick(choice)
        self.allocator.release([page])
        self.holders[page] -= 1
        if not self.holders[page]:
            del self.holders[page]

    def _pick(self, choice: object) -> int:
        return choice.choice(sorted(self.holders))  # type: ignore[attr-defined,no-any-return]  # a Random

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        assert self.allocator.free_pages + len(self.holders) == 8


TestPages = Pages.TestCase

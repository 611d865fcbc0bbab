"""A restored boundary has every token that attention reads before it, however windows and pages fit together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvlinker_swa
from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.device_access import device_access_for
from kvlinker.discovery import load_plugins
from kvlinker.explanation import PoolExplanation, explain
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.spans import BufferSpan
from kvlinker.testing import MemoryStore
from kvlinker.testing.pool_memory import HostMemory
from kvlinker.testing.strategies import MadeUpMemory
from kvlinker.testing.waiting import wait_for
from kvlinker.transfers import HitPolicy, PoolTransfer

SLOT = 8
PATIENT = LinkerOptions(lookup_seconds=60)
LAYERS = ("attention", "sliding")
ROLES = ("k", "v", "swa_k", "swa_v")


def describe(
    window: int, page: int, spans: Sequence[BufferSpan] | None = None
) -> KVCacheDescription:
    """Describe a full layer and a layer of windows."""
    nowhere = MadeUpMemory()
    made_up = [nowhere.span(page, SLOT) for _ in ROLES]
    return KVCacheDescription(
        family="swa",
        page_size=page,
        buffers={role: (span,) for role, span in zip(ROLES, spans or made_up, strict=True)},
        layers=tuple(
            LayerFacts(layer=i, global_layer=i, kind=kind) for i, kind in enumerate(LAYERS)
        ),
        logical_pools=(
            LogicalPool(name="kv", page_size=page),
            LogicalPool(name="swa", page_size=page, window=window),
        ),
        facts={"kv_layout": "token_major", "kv_format": "bf16", "kv_scaled": 0},
    )


def boundary_pages(window: int, page: int) -> int:
    """Return how many pages of windows a boundary needs, as kvlinker explains it and engines ask for it."""
    pool = PoolExplanation(
        name="swa",
        indices_from_pool="swa",
        page_size=page,
        page_bytes=1,
        spans=1,
        layers=1,
        objects_per_page=1,
        window=window,
    )
    return pool.boundary_pages


class Prompt:
    """A hybrid's pools with a prompt in them, whose bytes say which token and which buffer they are of."""

    def __init__(self, *, window: int, page: int, pages: int) -> None:
        self.window, self.page, self.pages = window, page, pages
        self.memory = HostMemory()
        self.spans = [self.memory.allocate((pages + 1) * page, SLOT, label=role) for role in ROLES]
        self.group = kvlinker_swa.build_direct_linker_pool_group(describe(window, page, self.spans))
        self.keys = tuple(f"page-{number}" for number in range(pages))

    def linked(self, store: MemoryStore) -> Linker:
        namespace = KeyNamespace(model_id="hybrid", producer="test")
        device = device_access_for(self.group)
        return Linker(self.group, store, namespace, device=device, options=PATIENT)

    def compute(self) -> None:
        """Write every token's K and V into its slot, as a forward pass does."""
        for number, span in enumerate(self.spans):
            for token in range(self.pages * self.page):
                self.memory.write(span, self.slot(token), self.bytes_of(token, number))

    def slot(self, token: int) -> int:
        """Return where a token is: pages are in descending order, so that none is where it would be by itself."""
        page = self.pages - token // self.page
        return page * self.page + token % self.page

    def bytes_of(self, token: int, span: int) -> bytes:
        return (1 + token * len(ROLES) + span).to_bytes(SLOT, "little")

    def slots(self, pages: range) -> list[int]:
        return [
            self.slot(token) for token in range(pages.start * self.page, pages.stop * self.page)
        ]

    def transfers(self, pages: range, windows: range) -> list[PoolTransfer]:
        """Return transfers of some pages, and of those whose windows go with them."""
        return [
            PoolTransfer(
                name="kv",
                keys=self.keys[pages.start : pages.stop],
                device_indices=self.slots(pages),
            ),
            PoolTransfer(
                name="swa",
                keys=self.keys[windows.start : windows.stop],
                device_indices=self.slots(windows),
                hit_policy=HitPolicy.TRAILING_PAGES,
            ),
        ]

    def wrong_tokens(self, boundary: int) -> list[int]:
        """Return the tokens that attention reads at a boundary, and that are not there in some layer."""
        end = boundary * self.page
        return sorted(
            {
                token
                for number, (role, span) in enumerate(zip(ROLES, self.spans, strict=True))
                for token in range(max(0, end - self.window) if "swa" in role else 0, end)
                if self.memory.read(span, self.slot(token)) != self.bytes_of(token, number)
            }
        )


def store_with_boundaries(prompt: Prompt, boundaries: Sequence[int], windows: int) -> MemoryStore:
    """Return a store with the pages of a prompt, and with so many pages of windows before some boundaries."""
    store = MemoryStore(capacity_bytes=1 << 24)
    prompt.compute()
    linker = prompt.linked(store)
    start = 0
    for boundary in boundaries:
        trailing = range(max(0, boundary - windows), boundary)
        assert linker.offload(prompt.transfers(range(start, boundary), trailing))
        wait_for(linker.num_completed_offloads, "the offload")
        assert linker.pop_completed_offload()
        start = boundary
    linker.close()
    return store


def restore(prompt: Prompt, store: MemoryStore, boundary: int, windows: int) -> list[int]:
    """Restore a boundary into pools full of 0xFF, and return the tokens that attention then reads wrong."""
    prompt.memory.poison()
    linker = prompt.linked(store)
    trailing = range(max(0, boundary - windows), boundary)
    asked = prompt.transfers(range(boundary), trailing)
    assert boundary in linker.lookup("request", asked)
    assert linker.load("request", asked)
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    linker.close()
    return prompt.wrong_tokens(boundary)


FITS = [(128, 16), (40, 16), (33, 16), (32, 16), (17, 16), (16, 16), (5, 16), (1, 16), (3, 1)]


@pytest.mark.parametrize(("window", "page"), FITS)
def test_the_pages_of_a_boundary_hold_every_token_that_attention_reads(
    window: int, page: int
) -> None:
    windows = boundary_pages(window, page)
    boundary = windows + 2
    prompt = Prompt(window=window, page=page, pages=boundary + 1)
    store = store_with_boundaries(prompt, [boundary], windows)

    assert restore(prompt, store, boundary, windows) == []


@pytest.mark.parametrize(("window", "page"), [(128, 16), (40, 16), (33, 16), (17, 16), (3, 1)])
def test_with_one_page_less_a_token_that_attention_reads_is_missing(window: int, page: int) -> None:
    windows = boundary_pages(window, page)
    boundary = windows + 2
    prompt = Prompt(window=window, page=page, pages=boundary + 1)
    store = store_with_boundaries(prompt, [boundary], windows)

    wrong = restore(prompt, store, boundary, windows - 1)

    end = boundary * page
    assert wrong == list(range(end - window, end - (windows - 1) * page))


def test_a_prefix_shorter_than_the_window_has_all_its_windows() -> None:
    prompt = Prompt(window=1000, page=16, pages=3)
    windows = boundary_pages(1000, 16)
    store = store_with_boundaries(prompt, [2], windows)

    assert windows == 63
    assert restore(prompt, store, 2, windows) == []


def test_l2_boundaries_are_where_windows_were_stored_whole() -> None:
    # A window of 40 slots needs three pages of 16. Windows are stored before the ends of pages 3 and 7.
    prompt = Prompt(window=40, page=16, pages=8)
    store = store_with_boundaries(prompt, [4, 8], windows=3)
    linker = prompt.linked(store)

    found = linker.lookup("request", prompt.transfers(range(8), range(5, 8)))

    linker.close()
    assert found == [4, 8]


def test_windows_that_overlap_are_stored_once() -> None:
    prompt = Prompt(window=40, page=16, pages=6)
    store = store_with_boundaries(prompt, range(1, 7), windows=3)

    assert store.stats().objects == 6 + 6


def test_the_window_of_a_description_reaches_whoever_sizes_a_store() -> None:
    registry = load_plugins(environ={}, allow=["swa"])

    explanation = explain(describe(40, 16), registry)

    assert explanation.winner == "swa"
    assert {pool.name: pool.boundary_pages for pool in explanation.pools} == {"kv": 0, "swa": 3}
    assert explanation.bytes_per_token == 2 * SLOT
    assert explanation.bytes_per_boundary == 3 * 16 * 2 * SLOT


@given(window=st.integers(1, 300), page=st.integers(1, 70), boundary=st.integers(1, 40))
def test_any_window_is_covered_and_no_page_of_it_is_read_by_nobody(
    window: int, page: int, boundary: int
) -> None:
    pages = range(max(0, boundary - boundary_pages(window, page)), boundary)

    read = range(max(0, boundary * page - window), boundary * page)

    assert {token // page for token in read} == set(pages)

"""What a worker says at its start: how pages are laid out, and a number of tokens that is no promise."""

from __future__ import annotations

from kvlinker.errors import StoreError
from kvlinker.explanation import Explanation, PoolExplanation
from kvlinker.testing import Call, FaultStore, MemoryStore, Raise, Rule
from kvlinker_sglang.start_lines import start_lines

PAGE_BYTES = 4096


def pool(name: str, *, window: int | None = None) -> PoolExplanation:
    return PoolExplanation(
        name=name,
        indices_from_pool=name,
        page_size=64,
        page_bytes=PAGE_BYTES,
        spans=2,
        layers=2,
        objects_per_page=1,
        window=window,
    )


def explained(*pools: PoolExplanation) -> Explanation:
    return Explanation(winner="mha", problem="", verdicts=(), pools=pools)


def test_the_room_is_an_upper_bound_and_says_what_is_not_taken_off() -> None:
    store = MemoryStore(capacity_bytes=100 * PAGE_BYTES)

    layout, room = start_lines(explained(pool("kv")), store, "memory")

    assert layout == (
        "strategy mha (kv 4096 B a page), store memory, 64 bytes per token and 0 more per boundary"
    )
    assert room == (
        "the store holds 0 objects, 0 B of 409600 B: at most 6400 tokens, before headers and index"
    )


def test_a_window_s_room_depends_on_how_often_a_page_ends_a_prefix() -> None:
    store = MemoryStore(capacity_bytes=130 * PAGE_BYTES)

    _, room = start_lines(explained(pool("kv"), pool("swa", window=64)), store, "memory")

    assert room.endswith(
        ": at most 8320 tokens in long prefixes, 4160 if every page ends one, before headers and index"
    )


def test_a_store_without_a_capacity_or_without_an_answer_promises_nothing() -> None:
    endless = MemoryStore()
    silent = FaultStore(MemoryStore(), [Rule(call=Call.STATS, fault=Raise(error=StoreError("x")))])

    rooms = [start_lines(explained(pool("kv")), store, "s")[1] for store in (endless, silent)]

    assert rooms == [
        "the store holds 0 objects, 0 B, and names no capacity",
        "the store does not say what it holds: x",
    ]

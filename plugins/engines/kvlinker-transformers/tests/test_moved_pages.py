"""Moved pages: a sequence's pages, put elsewhere in pools of NaN, continue it bit for bit; nothing less does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from kvlinker_transformers.engine.allocation import pools_for_config
from kvlinker_transformers.engine.request import PagedRequest
from kvlinker_transformers.engine.spaces import IndexSpaces
from kvlinker_transformers.pools import KV, MAMBA, SWA, PagedPools

MakeModel = Callable[..., PreTrainedModel]
Options = Mapping[str, object]
Place = tuple[str, int, int]
"""Role, layer's place in it, and the page's place in the sequence."""
Family = tuple[str, Options, int] | tuple[str, Options, int, torch.dtype]
"""Model type, options of its pools, pages of the prefix, and what the model computes in if not bfloat16."""

SWA_ROLES = frozenset({"swa_k", "swa_v", "swa_kv", "c4_state", "c4_indexer_state"})
STATE_ROLES = frozenset({"ssm_state", "conv_state_0"})
PAGES = 8
MOVED = 8
"""Seed with which every page of a short prefix lies elsewhere than with the seed 1."""
TAIL = 40
STEPS = 6
"""Tokens behind the moved pages, and how many of them one by one: entries that need a state close in the tail, and
each must be among the few that some later token selects."""

FAMILIES: Mapping[str, Family] = {
    "mha": ("llama", {"page_size": 16}, 2),
    "mha-head-major": ("qwen3", {"page_size": 16, "head_major": True}, 2),
    "mha-fp8": ("llama", {"page_size": 16, "kv_format": "fp8_e4m3fn"}, 2),
    "mha-head-major-fp8": (
        "llama",
        {"page_size": 16, "head_major": True, "kv_format": "fp8_e4m3fn"},
        2,
    ),
    # Four pages of a prefix, and the three behind the first of them for a window of 40.
    "swa": ("gemma3_text", {"page_size": 16}, 4),
    "swa-head-major-fp8": ("gemma3_text", {"head_major": True, "kv_format": "fp8_e4m3fn"}, 4),
    "swa-fp32": ("gemma3_text", {"page_size": 16}, 4, torch.float32),
    # Sinks and biases; two of the three pages lie in a window of 128.
    "swa-sinks": ("gpt_oss", {"page_size": 64}, 3),
    "swa-sinks-fp32": ("gpt_oss", {"page_size": 64}, 3, torch.float32),
    "mla": ("deepseek_v3", {}, 2),
    "mla-fp8": ("deepseek_v3", {"kv_format": "fp8_e4m3fn"}, 2),
    "mla-packed": ("deepseek_v3", {"kv_format": "fp8_packed_656"}, 2),
    "dsa": ("deepseek_v32", {}, 2),
    "dsa-packed": ("deepseek_v32", {"kv_format": "fp8_packed_656"}, 2),
    "dsa-shared-index": ("glm_moe_dsa", {}, 2),
    "v4": ("deepseek_v4", {}, 2),
    "states-gdn": ("qwen3_next", {}, 2),
    "states-gdn-fp32": ("qwen3_next", {}, 2, torch.float32),
    "states-kda": ("kimi_linear", {}, 2),
    "states-mamba": ("jamba", {}, 2),
    "states-conv": ("lfm2", {}, 2),
}
WINDOWS = [name for name in FAMILIES if name.startswith("swa")]
STATES = [name for name in FAMILIES if name.startswith("states")]


@dataclass(frozen=True)
class Prefix:
    """A prefix that was computed once: its pages' bytes, and what the model says behind it."""

    model: PreTrainedModel
    options: Options
    prompt: Sequence[int]
    tokens: int
    pages: Mapping[Place, torch.Tensor]
    logits: torch.Tensor

    @property
    def tail(self) -> Sequence[int]:
        """What follows the prefix."""
        return self.prompt[self.tokens :]


def space_of(role: str) -> str:
    if role in STATE_ROLES:
        return MAMBA
    return SWA if role in SWA_ROLES else KV


def page_of(pools: PagedPools, role: str, tensor: torch.Tensor, page: int) -> torch.Tensor:
    rows = len(tensor) // pools.pages[space_of(role)]
    return tensor[page * rows : (page + 1) * rows]


def held_pages(pools: PagedPools, request: PagedRequest) -> Iterator[tuple[Place, torch.Tensor]]:
    for role, tensors in pools.tensors().items():
        table = request.sequence.tables[space_of(role)]
        for position, page in enumerate(table.pages):
            for index, tensor in enumerate(tensors):
                if page and len(tensor):
                    yield (role, index, position), page_of(pools, role, tensor, page)


def new_request(
    model: PreTrainedModel, options: Options, seed: int
) -> tuple[PagedPools, PagedRequest]:
    pools = pools_for_config(model.config, pages=PAGES, **options)  # type: ignore[arg-type]  # any option
    return pools, PagedRequest(model, pools, IndexSpaces(pools, shuffle_seed=seed))


def continue_with(request: PagedRequest, tail: Sequence[int]) -> Iterator[torch.Tensor]:
    # The first token looks back furthest: it alone sees the oldest page of a window in the last layer.
    chunks = [tail[:1], tail[1:-STEPS], *([token] for token in tail[-STEPS:])]
    return map(request.feed, chunks)


@pytest.fixture(scope="module", params=FAMILIES)
def prefix(request: pytest.FixtureRequest, make_model: MakeModel) -> Prefix:
    model_type, options, page_count, *dtype = FAMILIES[request.param]
    model = make_model(model_type, dtype=dtype[0] if dtype else None)
    pools, original = new_request(model, options, seed=1)
    tokens = page_count * pools.page_size
    generator = torch.Generator().manual_seed(11)
    prompt = torch.randint(3, 500, (tokens + TAIL,), generator=generator).tolist()
    original.feed(prompt[:tokens])
    original.drop_behind_window()
    pages = {place: page.clone() for place, page in held_pages(pools, original)}
    logits = torch.stack([*continue_with(original, prompt[tokens:])])
    return Prefix(model, options, prompt, tokens, pages, logits)


def logits_after_a_move(
    prefix: Prefix, instead: Mapping[Place, torch.Tensor] | None = None
) -> Iterator[torch.Tensor]:
    """Put the pages elsewhere, others instead of some of them, and continue."""
    pools, moved = new_request(prefix.model, prefix.options, seed=MOVED)
    moved.resume(prefix.tokens)
    places = dict(held_pages(pools, moved))
    assert places.keys() == prefix.pages.keys()
    for place, page in places.items():
        page.copy_({**prefix.pages, **(instead or {})}[place])
    return continue_with(moved, prefix.tail)


def differ(prefix: Prefix, instead: Mapping[Place, torch.Tensor]) -> bool:
    """Return whether the logits do after a move with other pages instead of some; it stops at the first that do."""
    pairs = zip(logits_after_a_move(prefix, instead), prefix.logits, strict=True)
    return any(not torch.equal(logits, right) for logits, right in pairs)


def test_moved_pages_continue_the_sequence_bit_for_bit(prefix: Prefix) -> None:
    assert torch.equal(torch.stack([*logits_after_a_move(prefix)]), prefix.logits)
    assert not prefix.logits.isnan().any()


def test_moved_pages_lie_elsewhere(prefix: Prefix) -> None:
    _, first = new_request(prefix.model, prefix.options, seed=1)
    _, second = new_request(prefix.model, prefix.options, seed=MOVED)
    for request in (first, second):
        request.resume(prefix.tokens)

    for space, table in first.sequence.tables.items():
        pairs = [*zip(table.pages, second.sequence.tables[space].pages, strict=True)]
        assert any(pairs[-1])
        assert all(before != after for before, after in pairs if before or after), space


def test_b02_without_one_layers_part_of_one_page_the_logits_differ(prefix: Prefix) -> None:
    for place, page in prefix.pages.items():
        assert differ(prefix, {place: torch.zeros_like(page)}), place


@pytest.mark.parametrize("prefix", WINDOWS, indirect=True)
def test_b02_with_two_pages_of_a_window_swapped_the_logits_differ(prefix: Prefix) -> None:
    windows = {(role, layer) for role, layer, _ in prefix.pages if role in SWA_ROLES}
    assert len(windows) >= 4

    # Keys know their positions, so that K and V swapped together would be the same window.
    for window in windows:
        first, *_, last = [place for place in prefix.pages if place[:2] == window]
        swapped = {first: prefix.pages[last], last: prefix.pages[first]}
        assert differ(prefix, swapped), window


def states_of(pages: Mapping[Place, torch.Tensor]) -> dict[tuple[str, int], torch.Tensor]:
    """Return the states among some pages, by role and layer's place in it; there is one boundary."""
    states = {place[:2]: page for place, page in pages.items() if place[0] in STATE_ROLES}
    assert len({place[2] for place in pages if place[0] in STATE_ROLES}) == 1
    return states


@pytest.mark.parametrize("prefix", STATES, indirect=True)
def test_b02_with_two_layers_states_swapped_the_logits_differ(prefix: Prefix) -> None:
    places = [place for place in prefix.pages if place[0] in STATE_ROLES]
    assert {layer for _, layer, _ in places} == {0, 1, 2}

    for role, layer, position in places:
        other = (role, (layer + 1) % 3, position)
        place = (role, layer, position)
        swapped = {place: prefix.pages[other], other: prefix.pages[place]}
        assert differ(prefix, swapped), place


@pytest.mark.parametrize("prefix", STATES, indirect=True)
def test_b20_with_one_layers_state_of_an_earlier_boundary_the_logits_differ(
    prefix: Prefix,
) -> None:
    pools, request = new_request(prefix.model, prefix.options, seed=1)
    request.feed(prefix.prompt[: prefix.tokens - pools.page_size])
    request.drop_behind_window()
    earlier = states_of(dict(held_pages(pools, request)))
    assert earlier.keys() == states_of(prefix.pages).keys()

    for place in prefix.pages:
        if place[:2] in earlier:
            assert differ(prefix, {place: earlier[place[:2]]}), place

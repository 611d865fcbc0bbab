"""Generation: what a store gives back, and what it changes: the time, never the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from kvlinker.discovery import load_plugins
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.linker import LinkerOptions
from kvlinker.registry import PluginRegistry
from kvlinker.testing import MemoryStore
from kvlinker_transformers.engine import (
    GenerationResult,
    PagedEngine,
    model_namespace,
    pools_for_config,
    weights_version,
)
from kvlinker_transformers.engine.generation import prefill_ends
from kvlinker_transformers.models import TINY_MODEL_TYPES, tiny_model

MakeModel = Callable[..., PreTrainedModel]
NEW_TOKENS = 4
PATIENT = LinkerOptions(lookup_seconds=60)
"""A busy machine may take a second for a lookup, which would be a miss by default."""
STATES = ("qwen3_next", "kimi_linear", "jamba", "lfm2")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 500, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    return load_plugins()


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore()
    yield store
    store.close()


def run(
    model: PreTrainedModel,
    store: MemoryStore | None,
    registry: PluginRegistry,
    prompt: list[int],
    *,
    seed: int = 1,
    pages: int = 16,
    chunk_pages: int | None = None,
    salt: str | None = None,
    adapter: str | None = None,
) -> GenerationResult:
    """Generate in an engine of its own, and wait until everything is stored."""
    pools = pools_for_config(model.config, pages=pages)
    with PagedEngine(model, pools, chunk_pages=chunk_pages, shuffle_seed=seed) as engine:
        if store is not None:
            engine.attach(store, registry=registry, options=PATIENT)
        result = engine.generate(
            prompt, max_new_tokens=NEW_TOKENS, salt=salt, adapter=adapter, keep_logits=True
        )
        assert engine.wait_for_offloads()
    return result


@pytest.mark.parametrize("model_type", TINY_MODEL_TYPES)
def test_a_restored_prompt_is_continued_bit_for_bit(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry, model_type: str
) -> None:
    model = make_model(model_type)
    length = 300 if model_type == "deepseek_v4" else 150

    computed = run(model, store, registry, prompt_of(length))
    restored = run(model, store, registry, prompt_of(length), seed=2)

    page_size = pools_for_config(model.config, pages=2).page_size
    assert (computed.cached_tokens, computed.prompt_tokens) == (0, length)
    assert restored.cached_tokens == length // page_size * page_size
    assert torch.equal(restored.logits, computed.logits)
    assert restored.tokens == computed.tokens
    assert restored.first_token_seconds <= restored.total_seconds


def test_a_store_changes_no_logits(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry
) -> None:
    model = make_model("deepseek_v32")

    without = run(model, None, registry, prompt_of(200))
    stored = run(model, store, registry, prompt_of(200))

    assert torch.equal(stored.logits, without.logits)


@pytest.mark.parametrize(("length", "cached"), [(64, 0), (65, 64), (128, 64), (129, 128)])
def test_the_last_token_is_always_computed_and_only_whole_pages_are_restored(
    make_model: MakeModel,
    store: MemoryStore,
    registry: PluginRegistry,
    length: int,
    cached: int,
) -> None:
    model = make_model("deepseek_v3")
    run(model, store, registry, prompt_of(length))

    assert run(model, store, registry, prompt_of(length)).cached_tokens == cached


def test_b28_the_restored_pages_are_a_prefix_of_the_prompt(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry
) -> None:
    model = make_model("deepseek_v3")
    long, same_start = prompt_of(200), [*prompt_of(130), *prompt_of(70, seed=9)]
    other_start = [*prompt_of(70, seed=9), *prompt_of(200)[70:]]
    run(model, store, registry, long)

    assert run(model, store, registry, same_start).cached_tokens == 128
    assert run(model, store, registry, other_start).cached_tokens == 0


def test_generated_tokens_are_part_of_what_is_restored(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry
) -> None:
    model = make_model("llama")
    prompt = prompt_of(46)

    first = run(model, store, registry, prompt)
    dialogue = [*prompt, *first.tokens, *prompt_of(5, seed=3)]

    assert run(model, store, registry, dialogue).cached_tokens == 48


def test_b20_v4_is_restored_only_where_a_window_was_stored(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry
) -> None:
    model = make_model("deepseek_v4")
    run(model, store, registry, prompt_of(800))

    # All pages are there, but windows and states are those of the third page's end alone.
    assert run(model, store, registry, prompt_of(800)[:600]).cached_tokens == 0
    assert run(model, store, registry, prompt_of(800)).cached_tokens == 768


def test_b20_a_hybrid_is_restored_only_where_its_windows_were_stored(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry
) -> None:
    model = make_model("gemma3_text")
    run(model, store, registry, prompt_of(150))

    # All pages of full layers are there; windows of 40 are those of the last three of nine pages.
    assert run(model, store, registry, prompt_of(150)[:130]).cached_tokens == 0
    assert run(model, store, registry, prompt_of(150)).cached_tokens == 144


@pytest.mark.parametrize("model_type", STATES)
def test_b20_a_model_with_states_is_restored_only_where_its_state_was_stored(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry, model_type: str
) -> None:
    model = make_model(model_type)
    page_size = pools_for_config(model.config, pages=2).page_size
    prompt = prompt_of(4 * page_size + 5)
    run(model, store, registry, prompt)

    # All four pages are there, but the state is that of the last one's end alone, and cannot be cut.
    shorter = run(model, store, registry, prompt[: 3 * page_size + 5])
    whole = run(model, store, registry, prompt[: 4 * page_size])
    assert (shorter.cached_tokens, whole.cached_tokens) == (0, 3 * page_size)
    assert run(model, store, registry, prompt).cached_tokens == 4 * page_size


@pytest.mark.parametrize("model_type", STATES)
def test_a_state_is_stored_where_a_generated_token_ends_a_page(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry, model_type: str
) -> None:
    model = make_model(model_type)
    page_size = pools_for_config(model.config, pages=2).page_size
    prompt = prompt_of(page_size - 1)

    first = run(model, store, registry, prompt)
    again = run(model, store, registry, [*prompt, *first.tokens[:2]], seed=2)

    # The first token ends the page, and the second is computed in a pass of its own, as it was.
    assert again.cached_tokens == page_size
    assert torch.equal(again.logits[:2], first.logits[2:])


@pytest.mark.parametrize("model_type", STATES)
def test_a_request_holds_two_states_at_most_and_gives_all_of_them_back(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry, model_type: str
) -> None:
    model = make_model(model_type)
    page_size = pools_for_config(model.config, pages=2).page_size
    prompt = prompt_of(3 * page_size + 5)
    computed = run(model, None, registry, prompt, chunk_pages=1)

    pools = pools_for_config(model.config, pages=16, state_slots=3)
    with PagedEngine(model, pools, chunk_pages=1) as engine:
        engine.attach(store, registry=registry, options=PATIENT)
        for cached in (0, 3, 3):
            result = engine.generate(prompt, max_new_tokens=NEW_TOKENS, keep_logits=True)
            assert result.cached_tokens == cached * page_size
            assert torch.equal(result.logits, computed.logits)


def test_a_hybrid_holds_no_more_windows_than_it_looks_back_to(
    make_model: MakeModel, registry: PluginRegistry
) -> None:
    model = make_model("gemma3_text")
    prompt = prompt_of(150)
    computed = run(model, None, registry, prompt, chunk_pages=1)

    # A pass over one page needs that page and three before it: with the reserved one, five.
    pools = pools_for_config(model.config, pages=16, swa_pages=5)
    with PagedEngine(model, pools, chunk_pages=1) as engine:
        result = engine.generate(prompt, max_new_tokens=NEW_TOKENS, keep_logits=True)

    assert torch.equal(result.logits, computed.logits)


def test_v4_is_restored_at_every_page_that_a_pass_ended_with(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry
) -> None:
    model = make_model("deepseek_v4")
    run(model, store, registry, prompt_of(800), chunk_pages=1)

    shorter = run(model, store, registry, prompt_of(800)[:600], chunk_pages=1)

    assert shorter.cached_tokens == 512
    assert torch.equal(
        shorter.logits, run(model, None, registry, prompt_of(800)[:600], chunk_pages=1).logits
    )


@pytest.mark.parametrize(
    "model_type",
    ["qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "deepseek_v32", "deepseek_v4", *STATES],
)
def test_pass_by_pass_the_logits_are_the_same_however_much_was_restored(
    make_model: MakeModel, registry: PluginRegistry, model_type: str
) -> None:
    model = make_model(model_type)
    page_size = pools_for_config(model.config, pages=2).page_size
    prompt = prompt_of(3 * page_size + 5)
    computed = run(model, None, registry, prompt, chunk_pages=1)

    for pages in (1, 2, 3):
        store = MemoryStore()
        run(model, store, registry, prompt[: pages * page_size + 1], chunk_pages=1)
        restored = run(model, store, registry, prompt, chunk_pages=1)

        assert restored.cached_tokens == pages * page_size
        assert torch.equal(restored.logits, computed.logits)


def test_b35_salts_and_adapters_share_no_pages(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry
) -> None:
    model = make_model("llama")
    prompt = prompt_of(40)
    run(model, store, registry, prompt, salt="a")

    cached = [
        run(model, store, registry, prompt, salt=salt, adapter=adapter).cached_tokens
        for salt, adapter in (("b", None), (None, "a"), (None, None), ("a", "x"), ("a", None))
    ]

    assert cached == [0, 0, 0, 0, 32]


def test_b34_changed_weights_find_nothing_after_a_reset(
    registry: PluginRegistry, store: MemoryStore
) -> None:
    model = tiny_model("llama")
    prompt = prompt_of(40)
    pools = pools_for_config(model.config, pages=16)
    with PagedEngine(model, pools) as engine:
        engine.attach(store, registry=registry, options=PATIENT)
        engine.generate(prompt, max_new_tokens=1)
        assert engine.wait_for_offloads()
        before = engine.generate(prompt, max_new_tokens=1)

        with torch.no_grad():
            next(model.parameters()).mul_(1.5)
        engine.reset()
        after = engine.generate(prompt, max_new_tokens=1)

    assert (before.cached_tokens, after.cached_tokens) == (32, 0)


def test_b33_another_value_format_finds_nothing(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry
) -> None:
    model = make_model("deepseek_v32")
    run(model, store, registry, prompt_of(100))

    pools = pools_for_config(model.config, pages=16, kv_format="fp8_packed_656")
    with PagedEngine(model, pools) as engine:
        engine.attach(store, registry=registry, options=PATIENT)
        result = engine.generate(prompt_of(100), max_new_tokens=1)

    assert result.cached_tokens == 0


@pytest.mark.parametrize("model_type", TINY_MODEL_TYPES)
def test_a_tiny_model_is_the_same_whatever_random_numbers_were_drawn_before(
    model_type: str,
) -> None:
    versions = set()

    for drawn in (0, 3):
        torch.randn(drawn)
        before = torch.get_rng_state()
        versions.add(weights_version(tiny_model(model_type)))
        assert torch.equal(torch.get_rng_state(), before)

    assert len(versions) == 1


def test_a_weights_version_depends_on_weights_and_configuration_alone() -> None:
    model, same = tiny_model("deepseek_v4"), tiny_model("deepseek_v4")
    versions = {weights_version(model), weights_version(same)}
    assert len(versions) == 1

    with torch.no_grad():
        same.get_parameter("model.layers.2.self_attn.compressor.position_bias")[3, 5] += 1.0
    versions.add(weights_version(same))
    versions.add(weights_version(tiny_model("deepseek_v4", seed=1)))
    versions.add(weights_version(tiny_model("deepseek_v4", overrides={"index_topk": 16})))
    assert len(versions) == 4


def test_a_namespace_states_model_weights_producer_and_tenant(make_model: MakeModel) -> None:
    model = make_model("llama")

    namespace = model_namespace(model, model_id="org/model", tenant="a", secret=b"s")

    assert namespace == replace(
        model_namespace(model), model_id="org/model", tenant="a", secret=b"s"
    )
    assert namespace.weights_version == weights_version(model)
    assert namespace.producer == "kvlinker-transformers"


def test_a_stop_token_ends_the_text_and_every_token_is_told_at_once(
    make_model: MakeModel,
) -> None:
    model = make_model("llama")
    engine = PagedEngine(model, pools_for_config(model.config, pages=16))
    told: list[int] = []
    tokens = engine.generate(prompt_of(20), max_new_tokens=6).tokens

    result = engine.generate(
        prompt_of(20), max_new_tokens=6, stop_token_ids={tokens[2]}, on_token=told.append
    )

    assert result.tokens == tuple(told) == tokens[: tokens.index(tokens[2]) + 1]
    assert result.logits.numel() == 0


def test_every_page_is_free_again_after_a_request(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry
) -> None:
    model = make_model("deepseek_v4")
    pools = pools_for_config(model.config, pages=4, swa_pages=4)
    with PagedEngine(model, pools) as engine:
        engine.attach(store, registry=registry, options=PATIENT)
        for seed in range(4):
            # Three pages are all there are: each request needs what the last one's offers kept.
            result = engine.generate(prompt_of(700, seed), max_new_tokens=2)
            assert result.cached_tokens == 0
        assert engine.generate(prompt_of(700), max_new_tokens=2).cached_tokens == 512


def test_a_prompt_longer_than_the_pools_is_refused_and_leaves_nothing_behind(
    make_model: MakeModel,
) -> None:
    model = make_model("llama")
    engine = PagedEngine(model, pools_for_config(model.config, pages=4))

    with pytest.raises(ContractError, match="'kv': 4 pages asked for, 3 of 3 are free"):
        engine.generate(prompt_of(65), max_new_tokens=1)

    assert len(engine.generate(prompt_of(40), max_new_tokens=1).tokens) == 1


@pytest.mark.parametrize(("prompt", "new"), [([], 1), ([1], 0)])
def test_a_generation_without_a_token_is_refused(
    make_model: MakeModel, prompt: list[int], new: int
) -> None:
    model = make_model("llama")
    engine = PagedEngine(model, pools_for_config(model.config, pages=4))

    with pytest.raises(ContractError, match=f"got {len(prompt)} and {new}"):
        engine.generate(prompt, max_new_tokens=new)


@pytest.mark.parametrize("new", [1.5, "2", True])
def test_a_length_that_would_never_be_reached_is_refused(make_model: MakeModel, new: int) -> None:
    model = make_model("llama")
    engine = PagedEngine(model, pools_for_config(model.config, pages=4))

    with pytest.raises(ContractError, match="max_new_tokens must be an integer, got"):
        engine.generate([1], max_new_tokens=new)


@pytest.mark.parametrize("token", [-1, 512, True, 1.5])
def test_a_token_that_the_model_does_not_know_is_refused(make_model: MakeModel, token: int) -> None:
    model = make_model("llama")
    engine = PagedEngine(model, pools_for_config(model.config, pages=4))

    with pytest.raises(ContractError, match="token"):
        engine.generate([1, token], max_new_tokens=1)


def test_one_request_at_a_time(make_model: MakeModel) -> None:
    model = make_model("llama")
    engine = PagedEngine(model, pools_for_config(model.config, pages=8))

    def another(_: int) -> None:
        engine.generate([1], max_new_tokens=1)

    with pytest.raises(ContractError, match="another request is running"):
        engine.generate([1], max_new_tokens=1, on_token=another)


def test_a_second_store_is_refused_until_the_first_is_detached(
    make_model: MakeModel, store: MemoryStore, registry: PluginRegistry
) -> None:
    model = make_model("llama")
    engine = PagedEngine(model, pools_for_config(model.config, pages=8))
    engine.attach(store, registry=registry, options=PATIENT)

    with pytest.raises(ContractError, match="attached already; detach it first"):
        engine.attach(store, registry=registry, options=PATIENT)

    engine.detach()
    assert engine.linker is None
    engine.attach(store, registry=registry, options=PATIENT)
    engine.close()
    engine.close()
    assert store.stats().objects == 0


def test_pools_that_no_plugin_takes_are_refused_with_every_plugins_reason(
    make_model: MakeModel, store: MemoryStore
) -> None:
    model = make_model("deepseek_v32")
    engine = PagedEngine(model, pools_for_config(model.config, pages=8))
    registry = load_plugins(deny=["dsa"])

    with pytest.raises(UnsupportedKVCacheError, match=r"family 'dsa'[\s\S]*mla \(kvlinker-mla"):
        engine.attach(store, registry=registry, options=PATIENT)

    assert len(engine.generate([1], max_new_tokens=1).tokens) == 1


@pytest.mark.parametrize("chunk_pages", [0, -1])
def test_a_pass_over_no_page_is_refused(make_model: MakeModel, chunk_pages: int) -> None:
    model = make_model("llama")

    with pytest.raises(ContractError, match=f"chunk_pages must be at least 1, got {chunk_pages}"):
        PagedEngine(model, pools_for_config(model.config, pages=4), chunk_pages=chunk_pages)


@given(st.integers(0, 6), st.integers(1, 60), st.integers(1, 9), st.none() | st.integers(1, 4))
def test_passes_end_at_the_same_places_wherever_they_start(
    pages: int, tokens: int, page_size: int, chunk_pages: int | None
) -> None:
    start = min(pages, (tokens - 1) // page_size) * page_size

    ends = prefill_ends(start, tokens, page_size, chunk_pages)

    from_the_start = prefill_ends(0, tokens, page_size, chunk_pages)
    assert ends == tuple(end for end in from_the_start if end > start)
    assert ends[-1] == tokens
    assert list(ends) == sorted(set(ends))
    assert all(end % page_size == 0 for end in ends[:-1])
    if chunk_pages:
        steps = zip((0, *from_the_start), from_the_start, strict=False)
        assert all(end - begin <= chunk_pages * page_size for begin, end in steps)

"""Paged cache: where pools lose nothing, a model cannot tell them from transformers' own cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvlinker.errors import ContractError, UnsupportedOperationError
from kvlinker_transformers.engine.allocation import pools_for_config
from kvlinker_transformers.engine.cache import PagedCache
from kvlinker_transformers.engine.codecs import PlainRows
from kvlinker_transformers.engine.geometry import LatentGeometry, V4Geometry, read_geometry
from kvlinker_transformers.engine.pools_latent import DSAPools
from kvlinker_transformers.engine.pools_v4 import V4Pools
from kvlinker_transformers.engine.request import PagedRequest
from kvlinker_transformers.engine.spaces import IndexSpaces
from kvlinker_transformers.models import tiny_model
from kvlinker_transformers.pools import PagedPools

MakeModel = Callable[..., PreTrainedModel]

CPU = torch.device("cpu")
STATES = ("qwen3_next", "kimi_linear", "jamba", "lfm2")
STEPS = 5
"""Decoded tokens: enough to close a group of 4 and to cross a boundary next to a prompt's end."""


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 500, (length,), generator=generator).tolist()


def chunks_of(prompt: Sequence[int], page_size: int) -> list[Sequence[int]]:
    """Split as the engine does: whole pages first, then the rest and single tokens."""
    whole = (len(prompt) - STEPS - 1) // page_size * page_size
    tail = len(prompt) - STEPS
    chunks = [prompt[:whole], prompt[whole:tail], *([token] for token in prompt[tail:])]
    return [chunk for chunk in chunks if chunk]


def unpaged_logits(model: PreTrainedModel, chunks: Sequence[Sequence[int]]) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        return torch.stack(
            [
                model(torch.tensor([chunk]), cache=cache, use_cache=True, logits_to_keep=1).logits[
                    0, -1
                ]
                for chunk in chunks
            ]
        )


def paged_logits(
    model: PreTrainedModel, pools: PagedPools, chunks: Sequence[Sequence[int]]
) -> torch.Tensor:
    request = PagedRequest(model, pools, IndexSpaces(pools, shuffle_seed=5))
    logits = []
    for chunk in chunks:
        logits.append(request.feed(chunk))
        request.drop_behind_window()
    return torch.stack(logits)


def passes_over(model_type: str, chunks: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Return the passes that each chunk takes: Jamba computes what follows others token by token."""
    first, *rest = chunks
    if model_type != "jamba":
        return [[chunk] for chunk in chunks]
    by_token: list[list[Sequence[int]]] = [[[token] for token in chunk] for chunk in rest]
    return [[first], *by_token]


def unpaged_logits_behind_chunks(
    model: PreTrainedModel, model_type: str, chunks: Sequence[Sequence[int]]
) -> torch.Tensor:
    passes = passes_over(model_type, chunks)
    logits = unpaged_logits(model, [one for chunk in passes for one in chunk])
    ends = torch.tensor([len(chunk) for chunk in passes]).cumsum(0) - 1
    return logits[ends]


def exact_dsa_pools(model: PreTrainedModel) -> PagedPools:
    geometry = read_geometry(model.config)
    assert isinstance(geometry, LatentGeometry)
    return DSAPools(
        geometry,
        pages=8,
        page_size=64,
        kv_format="bf16",
        device=CPU,
        index_codec=PlainRows(128, torch.bfloat16),
    )


def exact_v4_pools(model: PreTrainedModel) -> PagedPools:
    geometry = read_geometry(model.config)
    assert isinstance(geometry, V4Geometry)
    return V4Pools(
        geometry,
        pages=6,
        swa_pages=6,
        device=CPU,
        row_codec=PlainRows(512, torch.bfloat16),
        index_codec=PlainRows(128, torch.bfloat16),
    )


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 160])
@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_mha_agrees_with_an_unpaged_cache(
    make_model: MakeModel, model_type: str, layout: str, length: int
) -> None:
    model = make_model(model_type)
    pools = pools_for_config(
        model.config, pages=20, page_size=16, head_major=layout == "head_major"
    )
    chunks = chunks_of(prompt_of(length + STEPS), 16)

    logits = paged_logits(model, pools, chunks)

    assert torch.equal(logits, unpaged_logits(model, chunks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mha_pools_of_the_models_dtype_lose_nothing(
    make_model: MakeModel, dtype: torch.dtype
) -> None:
    model = make_model("llama", dtype=dtype)
    pools = pools_for_config(model.config, pages=8)
    chunks = chunks_of(prompt_of(50), 16)

    logits = paged_logits(model, pools, chunks)

    assert logits.dtype is dtype
    assert torch.equal(logits, unpaged_logits(model, chunks))


@pytest.mark.parametrize("length", [1, 2, 16, 17, 32, 39, 40, 41, 48, 49, 64, 127, 128, 129, 160])
@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss"])
def test_hybrids_agree_with_an_unpaged_cache_on_both_sides_of_every_window(
    make_model: MakeModel, model_type: str, layout: str, length: int
) -> None:
    model = make_model(model_type)
    pools = pools_for_config(
        model.config, pages=20, page_size=16, head_major=layout == "head_major"
    )
    chunks = chunks_of(prompt_of(length + STEPS), 16)

    logits = paged_logits(model, pools, chunks)

    assert torch.equal(logits, unpaged_logits(model, chunks))


@pytest.mark.parametrize("window", [2, 5, 16, 17, 33])
def test_hybrids_agree_over_chunks_of_any_size_with_windows_of_any_size(window: int) -> None:
    model = tiny_model("gemma3_text", overrides={"sliding_window": window})
    prompt = prompt_of(100)
    ends = [1, 2, 15, 16, 18, 33, 40, 41, 47, 48, 70, 71, 100]
    chunks = [prompt[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    logits = paged_logits(model, pools_for_config(model.config, pages=9), chunks)

    assert torch.equal(logits, unpaged_logits(model, chunks))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 200])
def test_mla_agrees_with_an_unpaged_cache(make_model: MakeModel, length: int) -> None:
    model = make_model("deepseek_v3")
    pools = pools_for_config(model.config, pages=8, page_size=64)
    chunks = chunks_of(prompt_of(length + STEPS), 64)

    logits = paged_logits(model, pools, chunks)

    assert torch.equal(logits, unpaged_logits(model, chunks))


@pytest.mark.parametrize("length", [1, 47, 48, 49, 63, 64, 65, 127, 128, 129, 200])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_dsa_agrees_with_an_unpaged_cache(
    make_model: MakeModel, model_type: str, length: int
) -> None:
    model = make_model(model_type)
    chunks = chunks_of(prompt_of(length + STEPS), 64)

    logits = paged_logits(model, exact_dsa_pools(model), chunks)

    assert torch.equal(logits, unpaged_logits(model, chunks))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 33, 64, 65])
@pytest.mark.parametrize("model_type", STATES)
def test_models_with_states_agree_with_an_unpaged_cache_on_both_sides_of_every_page(
    make_model: MakeModel, model_type: str, length: int
) -> None:
    model = make_model(model_type)
    pools = pools_for_config(model.config, pages=12, page_size=16)
    chunks = chunks_of(prompt_of(length + STEPS), 16)

    logits = paged_logits(model, pools, chunks)

    assert torch.equal(logits, unpaged_logits_behind_chunks(model, model_type, chunks))
    assert not logits.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model_type", STATES)
def test_models_with_states_agree_over_chunks_of_any_size(
    make_model: MakeModel, model_type: str, dtype: torch.dtype
) -> None:
    model = make_model(model_type, dtype=dtype)
    pools = pools_for_config(model.config, pages=9, state_slots=3, page_size=16, kv_format="fp32")
    prompt = prompt_of(100)
    # Shorter than a convolution, within a page, to its end, across one and across several.
    ends = [1, 2, 3, 5, 15, 16, 18, 33, 40, 41, 47, 48, 80, 81, 82, 100]
    chunks = [prompt[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    logits = paged_logits(model, pools, chunks)

    assert torch.equal(logits, unpaged_logits_behind_chunks(model, model_type, chunks))


@pytest.mark.parametrize("model_type", STATES)
def test_models_with_states_say_chunk_by_chunk_what_one_pass_without_a_cache_says(
    make_model: MakeModel, model_type: str
) -> None:
    model = make_model(model_type, dtype=torch.float32)
    pools = pools_for_config(model.config, pages=8, page_size=16, kv_format="fp32")
    prompt, ends = prompt_of(100), [32, 70, 71, 100]
    chunks = [prompt[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    with torch.inference_mode():
        whole = model(torch.tensor([prompt]), use_cache=False).logits[0]

    logits = paged_logits(model, pools, chunks)

    # A state that transformers' own cache forgets, too, would be off by 1 or more.
    right = whole[[end - 1 for end in ends]]
    torch.testing.assert_close(logits, right, atol=1e-4, rtol=0)


def test_jamba_is_never_run_over_several_tokens_behind_others(make_model: MakeModel) -> None:
    model = make_model("jamba")
    pools = pools_for_config(model.config, pages=4)
    request = PagedRequest(model, pools, IndexSpaces(pools))
    request.feed(prompt_of(16))

    with pytest.raises(ContractError, match="over 3 tokens this model forgets the state of those"):
        model(torch.ones(1, 3, dtype=torch.int64), cache=request.cache, use_cache=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.get_conv_state(0, 1), "one state of each kind, .* number 1"),
        (lambda cache: cache.get_recurrent_state(0), "layer 0: the pools keep no recurrence"),
        (lambda cache: cache.get_conv_state(1), r"layer 1 keeps pages .* \[0, 2, 4\] keep states"),
        (
            lambda cache: cache.update_conv_state(torch.zeros(1, 64, 1), 0, conv_kernel_size=4),
            "a window of 3 tokens, the model reads 4",
        ),
    ],
)
def test_a_state_that_the_pools_do_not_keep_is_refused(
    make_model: MakeModel, call: Callable[[PagedCache], object], message: str
) -> None:
    model = make_model("lfm2")
    pools = pools_for_config(model.config, pages=4)
    request = PagedRequest(model, pools, IndexSpaces(pools))
    request.feed([3, 4])

    with pytest.raises(ContractError, match=message):
        call(request.cache)


def test_a_recurrence_before_the_first_token_is_refused(make_model: MakeModel) -> None:
    model = make_model("qwen3_next")
    pools = pools_for_config(model.config, pages=4)
    cache = PagedRequest(model, pools, IndexSpaces(pools)).cache

    assert cache.get_recurrent_state(0) is None
    with pytest.raises(ContractError, match="layer 0: the model keeps a recurrence before it has"):
        cache.update_recurrent_state(torch.zeros(1, 2, 128, 128), 0)


def test_a_model_in_another_dtype_than_its_configuration_finds_no_place_for_its_states() -> None:
    model = tiny_model("lfm2", dtype=torch.float32)
    config = type(model.config)(**{**model.config.to_dict(), "dtype": torch.bfloat16})
    pools = pools_for_config(config, pages=4)
    request = PagedRequest(model, pools, IndexSpaces(pools))

    with pytest.raises(ContractError, match=r"in torch.bfloat16, the model computed .* in torch.f"):
        request.feed([3, 4])


@pytest.mark.parametrize(
    "length",
    [
        *(1, 3, 4, 5, 7, 8, 9, 127, 128, 129, 130, 255, 256, 257, 258, 259, 260, 261),
        *(383, 384, 385, 511, 512, 513, 640, 767, 768, 769),
    ],
)
def test_b17_v4_agrees_with_an_unpaged_cache_on_both_sides_of_every_boundary(
    make_model: MakeModel, length: int
) -> None:
    model = make_model("deepseek_v4")
    chunks = chunks_of(prompt_of(length + STEPS), 256)

    logits = paged_logits(model, exact_v4_pools(model), chunks)

    assert torch.equal(logits, unpaged_logits(model, chunks))


def test_v4_agrees_with_an_unpaged_cache_over_chunks_of_any_size(make_model: MakeModel) -> None:
    model = make_model("deepseek_v4")
    prompt = prompt_of(600)
    ends = [1, 2, 5, 6, 9, 120, 127, 128, 130, 250, 255, 258, 262, 263, 384, 520, 521, 600]
    chunks = [prompt[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    logits = paged_logits(model, exact_v4_pools(model), chunks)

    assert torch.equal(logits, unpaged_logits(model, chunks))


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt_oss", "deepseek_v3", "deepseek_v32", "deepseek_v4", *STATES]
)
def test_a_batch_of_sequences_is_refused(make_model: MakeModel, model_type: str) -> None:
    model = make_model(model_type)
    pools = pools_for_config(model.config, pages=4)
    request = PagedRequest(model, pools, IndexSpaces(pools))

    with pytest.raises(ContractError, match="one sequence, got a batch of 2"):
        model(torch.ones(2, 3, dtype=torch.int64), cache=request.cache, use_cache=True)


# The first layer keeps pages in one and a state in the other.
@pytest.mark.parametrize("model_type", ["llama", "lfm2"])
def test_what_moves_or_reorders_pages_is_refused(make_model: MakeModel, model_type: str) -> None:
    model = make_model(model_type)
    pools = pools_for_config(model.config, pages=4)
    cache = PagedRequest(model, pools, IndexSpaces(pools)).cache

    attempts: tuple[Callable[[], object], ...] = (
        cache.reset,
        lambda: cache.reorder_cache(torch.LongTensor([0])),
        lambda: cache.offload(0),
    )
    for attempt in attempts:
        with pytest.raises(UnsupportedOperationError, match="pages belong to one sequence"):
            attempt()


def test_states_that_tokens_could_be_taken_back_from_are_refused(make_model: MakeModel) -> None:
    model = make_model("lfm2")
    pools = pools_for_config(model.config, pages=4)
    cache = PagedRequest(model, pools, IndexSpaces(pools)).cache

    for attempt in (cache.activate_past_recording, lambda: cache.crop(-1)):
        with pytest.raises(UnsupportedOperationError, match="which rules out taking tokens back"):
            attempt()


def test_too_few_pages_are_refused_before_anything_is_written(make_model: MakeModel) -> None:
    model = make_model("llama")
    pools = pools_for_config(model.config, pages=3, page_size=16)
    request = PagedRequest(model, pools, IndexSpaces(pools))

    with pytest.raises(ContractError, match="'kv': 3 pages asked for, 2 of 2 are free"):
        request.feed(prompt_of(33))

    assert request.tokens == 0
    assert all((tensor == 0xFF).all() for tensor in pools.tensors()["k"])

"""What nobody here can restore is refused: by name, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from inspect import isabstract
from pkgutil import walk_packages

import pytest
import torch
from hybrid_pools import request_pool
from indexed_pools import qsa_pool
from pool_groups import installed_plugins
from real_pools import (
    heads_pool,
    latent_pool,
    publish_configuration,
    sparse_pool,
    v4_pool,
    windows_pool,
)
from real_pools_scaled import fp4_heads_pool, mxfp8_heads_pool
from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
from sglang.srt import mem_cache
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsv4 import unified_kv_gate
from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.unified_draft_pool import UnifiedDraftKVPool
from sglang.srt.runtime_context import get_exec, get_parallel, override_platform

import kvlinker_sglang
from kvlinker.description import DescribeRequest, Fact, KVCacheDescription
from kvlinker.errors import ContractError, KVLinkerError, UnsupportedKVCacheError
from kvlinker.selection import select_strategy

Refused = Callable[..., AbstractContextManager[None]]
PACKED, BESIDE = "mtp_draft_device_pools", "sidecar_draft_device_pools"
DESCRIBED_CLASSES = {
    "MHATokenToKVPool",
    "MHATokenToKVPoolFP4",
    "MHATokenToKVPoolMXFP8",
    "MiniMaxM3Nvfp4KVPool",
    "MiniMaxSparseKVPool",
    "SWAKVPool",
    "MLATokenToKVPool",
    "MLATokenToKVPoolFP4",
    "DSATokenToKVPool",
    "HybridLinearKVPool",
    "QSATokenToKVPool",
    "DeepSeekV4TokenToKVPool",
}


def describe(
    pool: object,
    page_size: int = 16,
    *,
    facts: Mapping[str, Fact] = {},
    extras: Mapping[str, object] = {},
) -> KVCacheDescription:
    request = DescribeRequest(page_size=page_size, facts=facts, extras=extras)
    description = kvlinker_sglang.describe_kv_cache("sglang", pool, request)
    assert description is not None
    return description


def bare(kind: type) -> object:
    instance: object = object.__new__(kind)
    return instance


def subclasses(kind: type) -> Iterator[type]:
    children: list[type] = kind.__subclasses__()
    for found in children:
        yield found
        yield from subclasses(found)


@pytest.fixture(autouse=True)
def _configuration() -> None:
    publish_configuration()


# ---- classes ----------------------------------------------------------------------------------


@pytest.mark.refuses(engine="sglang")
def test_every_pool_class_of_this_sglang_is_described_or_refused_for_a_reason_of_its_own(
    refused: Refused,
) -> None:
    for module in walk_packages(mem_cache.__path__, f"{mem_cache.__name__}."):
        if ".storage" not in module.name:
            import_module(module.name)
    found: set[type] = {*subclasses(KVCache), *subclasses(HostKVCache)}
    pools = {kind for kind in found if kind.__module__.startswith("sglang.")}
    concrete = {kind for kind in pools if not isabstract(kind)}

    assert {kind.__name__ for kind in concrete} > DESCRIBED_CLASSES
    for kind in concrete:
        if kind.__name__ not in DESCRIBED_CLASSES:
            with refused(kind.__name__, match=rf"{kind.__name__} is not described: "):
                describe(bare(kind))


def test_a_subclass_that_nobody_knows_is_refused_though_it_looks_like_a_pool() -> None:
    pool = heads_pool()
    pool.__class__ = type("VendorPool", (MHATokenToKVPool,), {"__module__": "vendor.pools"})

    with pytest.raises(
        UnsupportedKVCacheError, match=r"vendor\.pools\.VendorPool, which derives from"
    ):
        describe(pool)


def test_a_pool_that_lost_an_attribute_is_refused_with_its_name() -> None:
    pool = heads_pool()
    vars(pool).pop("kv_cache_layout")

    with pytest.raises(UnsupportedKVCacheError, match="MHATokenToKVPool lacks kv_cache_layout"):
        describe(pool)


# ---- platforms and ranks ----------------------------------------------------------------------


@pytest.mark.refuses(engine="sglang")
def test_rocm_is_refused_whatever_the_pool(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = heads_pool()
    monkeypatch.setattr(torch.version, "hip", "6.4")

    with refused("any pool on ROCm", match="ROCm"):
        describe(pool)


@pytest.mark.refuses(engine="sglang")
def test_slots_that_are_split_over_ranks_are_refused(refused: Refused) -> None:
    pool = heads_pool()

    with (
        get_parallel().override(attn_dcp_size=2),
        refused("decode context parallelism", match=r"over 2 ranks.*--dcp-size"),
    ):
        describe(pool)


# ---- K and V ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("kv_cache_layout", "vectorized_5d", "laid out as 'vectorized_5d'"),
        ("kv_cache_layout", "hnd", r"'hnd' in buffers of \[3\] dimensions"),
        ("quant_method", object(), "quantizes by builtins.object"),
        (
            "k_scale_buffer",
            [torch.zeros(1)],
            "scales beside values that .*UnquantizedKVCacheMethod",
        ),
        (
            "v_scale_buffer",
            [torch.zeros(1)],
            "scales beside values that .*UnquantizedKVCacheMethod",
        ),
        ("post_capture_active", True, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
        ("dtype", torch.int8, "keeps torch.int8 values"),
    ],
)
def test_k_and_v_that_are_kept_otherwise_are_refused(
    attribute: str, value: object, message: str
) -> None:
    pool = heads_pool()
    setattr(pool, attribute, value)

    with pytest.raises(UnsupportedKVCacheError, match=message):
        describe(pool)


@pytest.mark.parametrize("make", [heads_pool, latent_pool, windows_pool])
def test_b96_another_page_size_is_refused_with_both(make: Callable[[], object]) -> None:
    with pytest.raises(ContractError, match=r"pages of 16 slots.*pages of 64"):
        describe(make(), 64, facts={"sliding_window": 40})


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("kv_cache_layout", "hnd", "laid out as 'hnd'"),
        ("store_dtype", torch.float8_e5m2, "keeps torch.float8_e5m2 values"),
        ("post_capture_active", True, "post-capture sizing True"),
    ],
)
@pytest.mark.parametrize(("make", "page_size"), [(fp4_heads_pool, 16), (mxfp8_heads_pool, 128)])
def test_scaled_values_that_are_kept_otherwise_are_refused(
    make: Callable[[], object], page_size: int, attribute: str, value: object, message: str
) -> None:
    pool = make()
    setattr(pool, attribute, value)

    with pytest.raises(UnsupportedKVCacheError, match=rf"the pool, a .*{message}"):
        describe(pool, page_size)


@pytest.mark.refuses(engine="sglang")
def test_mxfp8_scales_in_the_order_of_slots_are_refused(refused: Refused) -> None:
    with refused(
        "MHATokenToKVPoolMXFP8, scales not interleaved",
        match=r"MHATokenToKVPoolMXFP8, keeps scales in the order of slots.*--page-size 128",
    ):
        describe(mxfp8_heads_pool(page_size=16))


def test_a_draft_with_mxfp8_scales_in_the_order_of_slots_is_refused() -> None:
    draft = mxfp8_heads_pool(layers=1)
    draft.mxfp8_sf_interleaved = False  # type: ignore[attr-defined]  # a real pool

    with pytest.raises(UnsupportedKVCacheError, match=r"draft pool 0, .* in the order of slots"):
        describe(mxfp8_heads_pool(), 128, extras={PACKED: (draft,)})


def test_an_mxfp8_pool_that_does_not_say_how_scales_lie_is_refused() -> None:
    pool = mxfp8_heads_pool()
    vars(pool).pop("mxfp8_sf_interleaved")

    with pytest.raises(UnsupportedKVCacheError, match="lacks mxfp8_sf_interleaved"):
        describe(pool, 128)


# ---- latents ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("use_dsa", True), ("kv_scale_buffer", [torch.zeros(1)]), ("dcp_replicated", True)],
)
def test_latents_that_are_kept_otherwise_are_refused(attribute: str, value: object) -> None:
    pool = latent_pool()
    setattr(pool, attribute, value)

    with pytest.raises(UnsupportedKVCacheError, match=r"MLATokenToKVPool, keeps a sparse"):
        describe(pool)


# ---- windows ----------------------------------------------------------------------------------


def test_windows_of_an_unstated_length_are_refused() -> None:
    with pytest.raises(ContractError, match=r"SWAKVPool does not say.*'sliding_window'"):
        describe(windows_pool())


@pytest.mark.refuses(engine="sglang")
def test_halves_of_latents_are_refused(refused: Refused) -> None:
    latents = {
        "page_size": 16,
        "device": "cpu",
        "enable_memory_saver": False,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    pool = windows_pool(
        full_kv_pool_class=MLATokenToKVPool,
        swa_kv_pool_class=MLATokenToKVPool,
        full_kv_pool_kwargs=latents,
        swa_kv_pool_kwargs=latents,
    )

    with refused("SWAKVPool over latents", match=r"full half .*MLATokenToKVPool"):
        describe(pool, facts={"sliding_window": 40})


@pytest.mark.refuses(engine="sglang")
def test_windows_of_a_later_pipeline_stage_are_refused(refused: Refused) -> None:
    pool = windows_pool(full=(5,), sliding=(4,))

    with refused("SWAKVPool of a later pipeline stage", match=r"layers \[4, 5\].*pipeline"):
        describe(pool, facts={"sliding_window": 40})


def test_buffers_in_another_order_than_the_layers_are_refused() -> None:
    with pytest.raises(UnsupportedKVCacheError, match=r"positions \[1, 0\]"):
        describe(windows_pool(full=(3, 1)), facts={"sliding_window": 40})


def test_chunks_are_passed_on_to_the_plugin_that_refuses_them() -> None:
    facts = {"sliding_window": 40, "attention_chunk_size": 32}
    description = describe(windows_pool(), facts=facts)

    with pytest.raises(KVLinkerError, match="chunk"):
        select_strategy(description, installed_plugins())


# ---- sparse attention -------------------------------------------------------------------------


def test_layers_of_another_stage_are_no_shared_index() -> None:
    with pytest.raises(ContractError, match=r"layers \[7\], and the pool has \[3, 6\)"):
        describe(sparse_pool(start_layer=3), 64, facts={"shared_index_layers": (4, 7)})


@pytest.mark.refuses(engine="sglang")
def test_index_keys_of_several_tokens_that_are_not_weighed_are_refused(refused: Refused) -> None:
    with refused(
        "DSATokenToKVPool, index_kpool without index_kpool_compress",
        match=r"DSATokenToKVPool, folds 2 tokens .* without weighing them",
    ):
        describe(sparse_pool(index_kpool=2), 128)


@pytest.mark.parametrize(("attribute", "value"), [("dcp_replicated", True), ("index_page_size", 8)])
def test_index_keys_of_no_whole_groups_in_a_page_are_refused(attribute: str, value: object) -> None:
    pool = sparse_pool()
    setattr(pool, attribute, value)

    with pytest.raises(UnsupportedKVCacheError, match=r"described are whole groups in each page"):
        describe(pool, 64)


def test_packed_rows_of_another_size_are_refused() -> None:
    pool = sparse_pool(dtype=torch.float8_e4m3fn, row_values=640)

    with pytest.raises(UnsupportedKVCacheError, match="packs a slot into 640 B"):
        describe(pool, 64)


# ---- compressed sparse attention --------------------------------------------------------------


def test_a_draft_without_index_keys_beside_a_target_with_some_is_refused() -> None:
    requests = request_pool(draft_tokens=2)
    extras = {"req_to_token_pool": requests, PACKED: (heads_pool(layers=1),)}

    with pytest.raises(
        UnsupportedKVCacheError,
        match=r"draft pool 0 is of class .*MHATokenToKVPool, and only .*QSATokenToKVPool",
    ):
        describe(qsa_pool(requests), extras=extras)


def test_index_keys_of_another_type_than_the_stated_one_are_refused() -> None:
    requests = request_pool()
    pool = qsa_pool(requests)
    keys = pool.qsa_compressed_k_buffer_pool  # type: ignore[attr-defined]  # a real pool
    keys[1] = keys[1].to(torch.float16)

    with pytest.raises(UnsupportedKVCacheError, match=r"float16.* where torch.bfloat16 is stated"):
        describe(pool, extras={"req_to_token_pool": requests})


# ---- DeepSeek V4 ------------------------------------------------------------------------------


@pytest.mark.refuses(engine="sglang")
@pytest.mark.parametrize("fp8", [False, True])
def test_unified_kv_is_refused_whole(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, *, fp8: bool
) -> None:
    monkeypatch.setattr(unified_kv_gate, "is_unified_kv_triton", lambda: True)
    monkeypatch.setattr(unified_kv_gate, "is_unified_kv_fp8", lambda: fp8)

    with refused("DeepSeekV4TokenToKVPool, unified KV", match=r"unified KV.*128 B of rope"):
        describe(v4_pool(), 256)


@pytest.mark.refuses(engine="sglang")
def test_uniform_fp8_is_refused(refused: Refused) -> None:
    with get_exec().kernel.override(dsv4_attn_backend="trtllm"):
        pool = v4_pool()

    with refused(
        "DeepSeekV4TokenToKVPool, uniform fp8", match=r"DeepSeekV4UniformFP8KVPool.*--dsv4-attn"
    ):
        describe(pool, 256)


@pytest.mark.refuses(engine="sglang")
def test_hisparse_is_refused(refused: Refused) -> None:
    with refused(
        "DeepSeekV4TokenToKVPool, HiSparse", match=r"HiSparseC4DevicePool.*--enable-hisparse"
    ):
        describe(v4_pool(hisparse=True), 256)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("swa_kv_pool.kv_layout", KVLayout.V41, r"layout KVLayout.V41"),
        ("swa_kv_pool.dtype", torch.bfloat16, "torch.bfloat16 in layout"),
        ("c4_indexer_kv_pool.uses_aiter_fp4_layout", True, "as ROCm or V4.1"),
        ("c4_indexer_kv_pool.index_k_rne", True, "as ROCm or V4.1"),
        ("c4_indexer_kv_pool.index_k_page8", True, "as ROCm or V4.1"),
        ("c4_indexer_kv_pool.index_k_with_scale_buffer", None, "as ROCm or V4.1"),
        ("compress_state_pools.1.request_scoped", True, "state of layer 1"),
        ("indexer_compress_state_pools.3.online", True, "state of layer 3"),
        ("compress_state_pools.1.swa_page_size", 64, "pages of 64 slots"),
        ("compress_state_pools.1.ring_size", 16, "state rings of several sizes"),
        ("compress_state_pools.1.kv_score_buffer", object(), "a state buffer is of class builtins"),
        ("start_layer", 1, "starts at layer 1, and keeps layers"),
    ],
)
def test_parts_that_are_kept_otherwise_are_refused(
    attribute: str, value: object, message: str
) -> None:
    pool = v4_pool()
    *way, name = attribute.split(".")
    part: object = pool
    for step in way:
        part = part[int(step)] if isinstance(part, list) else vars(part)[step]
    setattr(part, name, value)

    with pytest.raises(UnsupportedKVCacheError, match=message):
        describe(pool, 256)


def test_an_indexer_in_rings_of_another_size_is_refused() -> None:
    pool = v4_pool((0, 4))
    pool.indexer_compress_state_pools[1].ring_size = 16  # type: ignore[attr-defined]  # a real pool

    with pytest.raises(UnsupportedKVCacheError, match="state rings of several sizes"):
        describe(pool, 256)


@pytest.mark.refuses(engine="sglang")
@pytest.mark.parametrize(
    ("draft", "message"), [(False, "windows of running requests"), (True, "a ring of windows")]
)
def test_windows_of_requests_are_refused(refused: Refused, *, draft: bool, message: str) -> None:
    with get_exec().features.override(enable_encoder_swa_bounded_replay=True):
        pool = v4_pool((0,), draft=draft)

    with refused("DeepSeekV4TokenToKVPool, windows of running requests", match=message):
        describe(pool, 256)


def test_windows_in_smaller_pages_are_described_and_refused_by_the_plugin() -> None:
    with override_platform(is_sm120=True), envs.SGLANG_OPT_SM120_DIRECT_SWA_KV.override(True):
        description = describe(v4_pool(), 256)

    assert description.facts["swa_physical_page_size"] == 64
    with pytest.raises(KVLinkerError, match="physical pages have 64 slots"):
        select_strategy(description, installed_plugins())


# ---- drafts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "draft", "page_size", "message"),
    [
        pytest.param(latent_pool, heads_pool, 16, "draft pool 0.*MHATokenToKVPool", id="mla-mha"),
        pytest.param(
            partial(sparse_pool),
            partial(latent_pool, page_size=64),
            64,
            "draft pool 0",
            id="dsa-mla",
        ),
        pytest.param(
            heads_pool,
            partial(heads_pool, dtype=torch.float8_e4m3fn),
            16,
            "kv_format 'fp8_e4m3fn' and the target 'bf16'",
            id="formats",
        ),
        pytest.param(
            heads_pool, partial(heads_pool, head_major=True), 16, "kv_layout", id="layouts"
        ),
        pytest.param(heads_pool, partial(bare, UnifiedDraftKVPool), 16, "draft pool 0", id="fused"),
        pytest.param(
            v4_pool,
            partial(v4_pool, (4,), draft=True),
            256,
            r"draft pool 0.*compress ratio \[4\]",
            id="v4-compressed",
        ),
    ],
)
def test_drafts_that_are_kept_otherwise_than_their_target_are_refused(
    target: Callable[[], object], draft: Callable[[], object], page_size: int, message: str
) -> None:
    for name in (PACKED, BESIDE):
        with pytest.raises(UnsupportedKVCacheError, match=message):
            describe(target(), page_size, extras={name: (draft(),)})


def test_drafts_in_other_pages_are_refused() -> None:
    with pytest.raises(ContractError, match="pages of 32 slots"):
        describe(heads_pool(), extras={PACKED: (heads_pool(page_size=32),)})


@pytest.mark.refuses(engine="sglang")
def test_states_of_drafts_are_refused(refused: Refused) -> None:
    with refused("drafts with states", match="keeps states"):
        describe(heads_pool(), extras={"mtp_draft_mamba_pools": (object(),)})

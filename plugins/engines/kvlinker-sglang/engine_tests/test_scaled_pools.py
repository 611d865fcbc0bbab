"""Pools in scaled blocks: SGLang reads the same values in other slots, and what is kept in another way is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hybrid_pools import hybrid_pool, request_pool
from pool_groups import KEYS, group_of, load, offload
from real_pools import heads_pool, latent_pool, publish_configuration, windows_pool
from real_pools_scaled import fp4_heads_pool, fp4_latent_pool, mxfp8_heads_pool
from sglang.srt.arg_groups.kv_cache_hook import (
    handle_kv4_compatibility,
    handle_mxfp8_kv_cache_compatibility,
)
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod
from sglang.srt.layers.quantization.kvfp4_tensor import NVFP4KVQuantizeUtil
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    MHATokenToKVPoolMXFP8,
)
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs

import kvlinker_sglang
from kvlinker.description import DescribeRequest, Fact
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.testing.engines import PoolExample
from kvlinker.testing.memory_store import MemoryStore
from kvlinker.transfers import PoolTransfer

Refused = Callable[..., AbstractContextManager[None]]
PACKED = "mtp_draft_device_pools"
PAGE, LAYERS = 16, 3
mx_heads_pool = partial(heads_pool, dtype=torch.float4_e2m1fn_x2, quantized_as="fp4_mx_block16")


def describe(
    pool: object,
    page_size: int = PAGE,
    *,
    facts: Mapping[str, Fact] = {},
    extras: Mapping[str, object] = {},
) -> None:
    request = DescribeRequest(page_size=page_size, facts=facts, extras=extras)
    assert kvlinker_sglang.describe_kv_cache("sglang", pool, request) is not None


@pytest.fixture(autouse=True)
def _configuration() -> Iterator[None]:
    """Let SGLang quantize without compiling what it does."""
    publish_configuration()
    with torch.compiler.set_stance("force_eager"):
        yield


# ---- values -----------------------------------------------------------------------------------


def write(pool: object, layer: int, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Let SGLang quantize keys or latents, and store them."""
    pool.set_kv_buffer(  # type: ignore[attr-defined]  # a real pool
        SimpleNamespace(layer_id=layer), slots, values.clone(), values.clone()
    )


def read(pool: object, layer: int, slots: torch.Tensor) -> torch.Tensor:
    """Let SGLang read them back as its attention does."""
    found: torch.Tensor = pool.get_key_buffer(layer)  # type: ignore[attr-defined]  # a real pool
    return found[slots]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        pytest.param(fp4_latent_pool, (1, 576), id="mla-fp4"),
        pytest.param(fp4_heads_pool, (2, 64), id="mha-fp4"),
        pytest.param(mx_heads_pool, (2, 64), id="mha-fp4_by_method"),
    ],
)
def test_sglang_reads_the_values_that_it_wrote_from_other_slots_of_another_pool(
    make: Callable[[], object], shape: tuple[int, int]
) -> None:
    example = PoolExample(name="values", make=make, page_size=PAGE, excused={})
    first, second = group_of(example), group_of(example)
    values = torch.randn(LAYERS, 2 * PAGE, *shape, dtype=torch.bfloat16) * 30
    stored, loaded = torch.arange(3 * PAGE, 5 * PAGE), torch.arange(PAGE, 3 * PAGE)
    for layer in range(LAYERS):
        write(first.target, layer, stored, values[layer])
    store = MemoryStore()

    offload(first.group, [PoolTransfer(name="kv", keys=KEYS, device_indices=stored)], store)
    load(second.group, [PoolTransfer(name="kv", keys=KEYS, device_indices=loaded)], store)

    store.close()
    for layer in range(LAYERS):
        expected = read(first.target, layer, stored)
        assert torch.equal(read(second.target, layer, loaded), expected)
        assert torch.allclose(expected, values[layer], rtol=0.5, atol=10)


# ---- what is kept in another way --------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("dq_k_buffer", torch.zeros(1)),
        ("dq_v_buffer", torch.zeros(1)),
        ("native_k_scale_buffer", [torch.zeros(1)]),
        ("native_v_scale_buffer", [torch.zeros(1)]),
    ],
)
def test_what_a_method_keeps_beside_its_blocks_is_refused(attribute: str, value: object) -> None:
    pool = mx_heads_pool()
    setattr(pool, attribute, value)

    with pytest.raises(UnsupportedKVCacheError, match="FP4MXBlock16KVCacheMethod, or keeps"):
        describe(pool)


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        pytest.param(
            mx_heads_pool, heads_pool, "draft pool 0, .* keeps torch.bfloat16 values", id="target"
        ),
        pytest.param(
            heads_pool, mx_heads_pool, "draft pool 0, .*FP4MXBlock16KVCacheMethod", id="draft"
        ),
        pytest.param(mx_heads_pool, fp4_heads_pool, "MHATokenToKVPoolFP4, and only", id="class"),
        pytest.param(fp4_latent_pool, latent_pool, "MLATokenToKVPool, and only", id="latents"),
        pytest.param(latent_pool, fp4_latent_pool, "MLATokenToKVPoolFP4, and only", id="fp4"),
        pytest.param(fp4_latent_pool, heads_pool, "MHATokenToKVPool, and only", id="heads"),
    ],
)
def test_one_of_target_and_draft_in_blocks_is_refused(
    target: Callable[..., object], draft: Callable[..., object], message: str
) -> None:
    with pytest.raises(UnsupportedKVCacheError, match=message):
        describe(target(), extras={PACKED: (draft(layers=1),)})


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("use_dsa", True, "sparse-attention latent or virtual slots"),
        ("dcp_replicated", True, "sparse-attention latent or virtual slots"),
        ("dtype", torch.uint8, "keeps torch.uint8 values as torch.uint8"),
        ("store_dtype", torch.float8_e5m2, "float4_e2m1fn_x2 values as torch.float8_e5m2"),
    ],
)
def test_fp4_latents_that_are_kept_otherwise_are_refused(
    attribute: str, value: object, message: str
) -> None:
    pool = fp4_latent_pool()
    setattr(pool, attribute, value)

    with pytest.raises(UnsupportedKVCacheError, match=rf"the pool, a .*{message}"):
        describe(pool)


def test_a_latent_pool_that_lost_its_scales_is_refused() -> None:
    pool = fp4_latent_pool()
    vars(pool).pop("kv_scale_buffer")

    with pytest.raises(UnsupportedKVCacheError, match="MLATokenToKVPoolFP4 lacks kv_scale_buffer"):
        describe(pool)


def test_fp4_latents_in_other_pages_are_refused() -> None:
    with pytest.raises(ContractError, match=r"pages of 16 slots.*pages of 64"):
        describe(fp4_latent_pool(), 64)


# ---- servers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "latent"])
def test_sglang_starts_no_server_with_blocks_on_a_cpu(
    model_folder: Callable[[str], Path], model: str
) -> None:
    # So a real prefix tree over the real pools is as far as these go without a GPU.
    arguments = partial(
        ServerArgs,
        model_path=str(model_folder(model)),
        device="cpu",
        attention_backend="torch_native",
    )

    with pytest.raises(RuntimeError, match="KV4 is not tested on non-CUDA platforms"):
        handle_kv4_compatibility(arguments(kv_cache_dtype="fp4_mx_block16"))
    with pytest.raises(ValueError, match=r"requires an SM100\+ \(Blackwell\) GPU"):
        handle_mxfp8_kv_cache_compatibility(arguments(kv_cache_dtype="mxfp8"))


# ---- K and V in blocks beside something else --------------------------------------------------


@pytest.mark.refuses(engine="sglang")
def test_blocks_beside_windows_are_refused(refused: Refused) -> None:
    pool = windows_pool(
        dtype=torch.float8_e4m3fn, page_size=128, token_to_kv_pool_class=MHATokenToKVPoolMXFP8
    )

    with refused(
        "SWAKVPool over mxfp8", match=r"half .*MHATokenToKVPoolMXFP8.*--kv-cache-dtype bf16"
    ):
        describe(pool, 128, facts={"sliding_window": 40})


def mxfp8_hybrid(requests: object) -> object:
    return HybridLinearKVPool(
        size=16 * 128,
        dtype=torch.float8_e4m3fn,
        page_size=128,
        head_num=2,
        head_dim=64,
        full_attention_layer_ids=[2, 4],
        device="cpu",
        mamba_pool=requests.mamba_pool,  # type: ignore[attr-defined]  # a real pool
        start_layer=0,
        full_kv_pool_class=MHATokenToKVPoolMXFP8,
    )


def fp4_hybrid(requests: object) -> object:
    pool = hybrid_pool(requests)
    pool.full_kv_pool = mx_heads_pool(layers=2)  # type: ignore[attr-defined]  # a real pool
    return pool


@pytest.mark.refuses(engine="sglang")
@pytest.mark.parametrize(
    ("what", "make", "page_size", "message"),
    [
        (
            "HybridLinearKVPool over mxfp8",
            mxfp8_hybrid,
            128,
            r"MHATokenToKVPoolMXFP8 is not described.*beside windows or states",
        ),
        ("HybridLinearKVPool over fp4", fp4_hybrid, 16, "quantizes by .*FP4MXBlock16KVCacheMethod"),
    ],
)
def test_blocks_beside_states_are_refused(
    refused: Refused, what: str, make: Callable[[object], object], page_size: int, message: str
) -> None:
    requests = request_pool()

    with refused(what, match=message):
        describe(make(requests), page_size, extras={"req_to_token_pool": requests})


def test_a_draft_in_scaled_blocks_of_its_own_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedKVCacheError, match="where target and drafts are alike"):
        describe(heads_pool(page_size=128), 128, extras={PACKED: (mxfp8_heads_pool(layers=1),)})


# ---- NVFP4 ------------------------------------------------------------------------------------


def nvfp4_pool(*, prefill: str) -> object:
    """Return a pool as a server on this platform builds it for attention by a backend, and TRT-LLM's for decoding."""
    method = NVFP4KVCacheMethod(num_layers=LAYERS, device="cpu", page_size=PAGE)
    method.configure_attention_backends(prefill, "trtllm_mha")
    return MHATokenToKVPool(
        size=16 * PAGE,
        page_size=PAGE,
        dtype=torch.float4_e2m1fn_x2,
        head_num=2,
        head_dim=64,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        quant_method=method,
    )


@pytest.mark.refuses(engine="sglang")
@pytest.mark.parametrize(
    ("is_sm100", "prefill", "linear", "native"),
    [
        pytest.param(True, "flashinfer", True, True, id="sm100-flashinfer"),
        pytest.param(True, "trtllm_mha", False, True, id="sm100-trtllm"),
        pytest.param(False, "trtllm_mha", True, False, id="sm120"),
    ],
)
def test_nvfp4_is_refused_whose_scales_lie_otherwise_on_every_gpu_and_backend(
    refused: Refused, *, is_sm100: bool, prefill: str, linear: bool, native: bool
) -> None:
    with override_platform(is_sm100=is_sm100, is_sm120=not is_sm100):
        pool = nvfp4_pool(prefill=prefill)

    held = vars(pool)
    assert (held["k_scale_buffer"] is not None) == linear
    assert (held["native_k_scale_buffer"] is not None) == native
    with refused(
        "MHATokenToKVPool, NVFP4",
        match=r"NVFP4KVCacheMethod.*scale of each layer.*--kv-cache-dtype fp4_mx_block16",
    ):
        describe(pool)


def test_the_same_nvfp4_bytes_are_other_values_on_another_gpu() -> None:
    attention = SimpleNamespace(layer_id=0, k_scale=0.01, v_scale=0.02)
    model = SimpleNamespace(layers=[SimpleNamespace(attn=attention)])
    blocks = torch.randint(256, (PAGE, 1, 32), dtype=torch.uint8)
    scales = torch.ones((PAGE, 4)).to(torch.float8_e4m3fn)
    read = []
    for is_sm100 in (True, False):
        with override_platform(is_sm100=is_sm100, is_sm120=not is_sm100):
            method = NVFP4KVCacheMethod(num_layers=1, device="cpu", page_size=PAGE)
            method.load_scales_from_model(model)
        # SGLang's arithmetic without FlashInfer, as it is on SM90.
        with override_platform(is_sm100=False, is_sm120=False, is_sm90=True):
            read.append(
                NVFP4KVQuantizeUtil.dequantize(
                    blocks, scales, method.k_scales_gpu[0], dtype=torch.float32
                )
            )

    on_sm100, on_sm120 = read
    assert torch.allclose(on_sm100, 6 * on_sm120)
    assert not torch.allclose(on_sm100, on_sm120)

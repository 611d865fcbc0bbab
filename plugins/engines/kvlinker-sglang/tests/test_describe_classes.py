"""Which objects are SGLang's is told by their class, without SGLang."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvlinker_sglang
from kvlinker.description import DescribeRequest
from kvlinker.errors import ContractError, UnsupportedKVCacheError

REQUEST = DescribeRequest(page_size=16)
POOLS = "sglang.srt.mem_cache.memory_pool"


def instance(name: str, module: str, *bases: type) -> object:
    """Return an instance of a class as if a module had defined it."""
    made: object = type(name, bases, {"__module__": module})()
    return made


@pytest.mark.parametrize("pool", [object(), {}, None, instance("MHATokenToKVPool", "vendor.pools")])
def test_objects_of_other_projects_are_declined_in_silence(pool: object) -> None:
    assert kvlinker_sglang.describe_kv_cache("sglang", pool, REQUEST) is None


def test_other_engines_caches_are_declined_whatever_they_are() -> None:
    pool = instance("NoOpMHATokenToKVPool", POOLS)

    assert kvlinker_sglang.describe_kv_cache("vllm", pool, REQUEST) is None


@pytest.mark.parametrize(
    ("name", "module", "remedy"),
    [
        ("MHATokenToKOnlyPool", POOLS, "describe the pool that the model runner holds"),
        (
            "UnifiedMHATokenToKVPool",
            "sglang.srt.mem_cache.unified_memory_pool",
            "without --enable-unified-memory",
        ),
        (
            "PageInterleaveMHATokenToKVPool",
            "sglang.srt.mem_cache.page_interleave_pool",
            "without --enable-kv-cache-sharding",
        ),
        (
            "MHATokenToKVPoolHost",
            "sglang.srt.mem_cache.pool_host.mha",
            "describe the device pool behind it",
        ),
        (
            "NPUMHATokenToKVPool",
            "sglang.srt.hardware_backend.npu.memory_pool_npu",
            "Ascend NPUs are not described",
        ),
        ("_DummyKVCache", "sglang.srt.hardware_backend.mlx.model_runner_stub", "this accelerator"),
        ("FuturePool", POOLS, "is a class that kvlinker-sglang does not know"),
    ],
)
def test_other_classes_of_sglang_are_refused_by_name_with_what_to_do(
    name: str, module: str, remedy: str
) -> None:
    with pytest.raises(UnsupportedKVCacheError, match=rf"{module}\.{name} .*{remedy}"):
        kvlinker_sglang.describe_kv_cache("sglang", instance(name, module), REQUEST)


def test_a_class_that_derives_from_sglangs_is_refused_with_both_names() -> None:
    known = type("MHATokenToKVPool", (), {"__module__": POOLS})
    pool = instance("VendorPool", "vendor.pools", known)

    with pytest.raises(
        UnsupportedKVCacheError,
        match=rf"vendor\.pools\.VendorPool, which derives from {POOLS}\.MHATokenToKVPool,",
    ):
        kvlinker_sglang.describe_kv_cache("sglang", pool, REQUEST)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (DescribeRequest(page_size=16, facts={"window": 4}), r"facts \['window'\]; known are"),
        (DescribeRequest(page_size=16, extras={"drafts": ()}), r"extras \['drafts'\]; known are"),
        (
            DescribeRequest(page_size=16, extras={"mtp_draft_mamba_pools": [1]}),
            "must be a tuple of pools, got list",
        ),
    ],
)
def test_what_would_not_be_read_of_a_request_is_refused(
    request_: DescribeRequest, message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        kvlinker_sglang.describe_kv_cache("sglang", instance("MHATokenToKVPool", POOLS), request_)


def test_b107_refusing_needs_neither_torch_nor_sglang() -> None:
    program = (
        "import sys, kvlinker_sglang\n"
        "from kvlinker.description import DescribeRequest\n"
        f"pool = type('Pool', (), {{'__module__': '{POOLS}'}})()\n"
        "try:\n"
        "    kvlinker_sglang.describe_kv_cache('sglang', pool, DescribeRequest(page_size=16))\n"
        "except LookupError:\n"
        "    print([name for name in ('torch', 'sglang') if name in sys.modules])\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"

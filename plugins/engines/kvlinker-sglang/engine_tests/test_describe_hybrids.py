"""What descriptions of hybrids say, and which states are refused: by name, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Protocol

import pytest
import torch
from described_pools import DESCRIBED
from hybrid_pools import hybrid_pool, request_pool
from pool_groups import PoolGroup, group_of
from real_pools import heads_pool, latent_pool, sparse_pool, windows_pool
from sglang.srt.disaggregation.decode import HybridMambaDecodeReqToTokenPool
from sglang.srt.mem_cache.memory_pool import PageMajorMHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_memory_pool import UnifiedHybridReqToTokenPool
from sglang.srt.runtime_context import get_parallel

import kvlinker_sglang
from kvlinker.description import DescribeRequest, IndexerKind, KVCacheDescription
from kvlinker.errors import ContractError, StalePoolError, UnsupportedKVCacheError
from kvlinker.testing.engines import PoolExample

BY_NAME = {example.name.removeprefix("hybrid-"): example for example in DESCRIBED}
Refused = Callable[..., AbstractContextManager[None]]
BESIDE, PACKED = "req_to_token_pool", "mtp_draft_device_pools"


class StateTensors(Protocol):
    """A `MambaPool.State`."""

    conv: list[torch.Tensor]


class StatePool(Protocol):
    """A `MambaPool`."""

    mamba_cache: StateTensors

    def register_slot_state(self, state: object) -> None:
        """Let a side state follow the slots."""


class RequestPool(Protocol):
    """A `HybridReqToTokenPool`."""

    mamba_pool: StatePool


def states_of(requests: object) -> StatePool:
    pool: RequestPool = requests  # type: ignore[assignment]  # a real pool
    return pool.mamba_pool


def describe(
    pool: object, page_size: int = 16, extras: Mapping[str, object] = {}
) -> KVCacheDescription:
    request = DescribeRequest(page_size=page_size, extras=extras)
    description = kvlinker_sglang.describe_kv_cache("sglang", pool, request)
    assert description is not None
    return description


def described(
    requests: object, pool: object | None = None, extras: Mapping[str, object] = {}
) -> KVCacheDescription:
    pages = hybrid_pool(requests) if pool is None else pool
    return describe(pages, extras={BESIDE: requests, **extras})


def made(name: str) -> PoolGroup:
    example = BY_NAME[name]
    assert isinstance(example, PoolExample)
    return group_of(example)


# ---- layers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("mha", ["mamba", "mamba", "attention", "mamba", "attention"]),
        ("mha-mlp", ["mamba", "mlp", "attention", "mamba", "attention"]),
        ("mha-both", ["mamba", "mamba", "attention_and_mamba", "mamba", "attention"]),
    ],
)
def test_a_layer_is_what_it_keeps(name: str, kinds: list[str]) -> None:
    assert [facts.kind for facts in made(name).description.layers] == kinds


def test_k3_a_stage_counts_its_layers_from_its_first() -> None:
    found = made("mla-second_stage")

    assert found.description.layer_range == (5, 8)
    assert sorted(found.group.entry_map["kv"].layer_mapping) == [2]
    assert sorted(found.group.entry_map["mamba"].layer_mapping) == [0, 1]


def test_a_layer_of_attention_without_an_index_of_its_own_is_stated_as_such() -> None:
    found = made("dsa-absent_indexer")

    indexers = [facts.indexer for facts in found.description.layers]
    assert indexers[2] is IndexerKind.OWN
    assert indexers[4] is IndexerKind.SHARED
    assert sorted(found.group.entry_map["indexer"].layer_mapping) == [2]


# ---- bytes ------------------------------------------------------------------------------------


def test_b06_a_slot_has_its_recurrence_its_windows_and_both_side_states() -> None:
    bytes_of = made("mha-side_states").page_bytes

    assert bytes_of["mamba"] == 3 * (4 * 16 * 8 * 4 + 96 * 3 * 2)
    assert bytes_of["side_short_conv"] == 2 * 3 * 32 * 2
    assert bytes_of["side_ngram"] == 2 * 8


def test_b02_a_hybrid_of_sparse_attention_has_latents_index_keys_and_states() -> None:
    bytes_of = made("dsa").page_bytes

    assert set(bytes_of) == {"kv", "indexer", "mamba"}
    assert bytes_of["indexer"] == 2 * 8448


def test_b06_a_side_state_that_nobody_knows_is_refused() -> None:
    requests = request_pool()
    unknown = SimpleNamespace(
        iter_transfer_state_entries=lambda: iter([("unknown", torch.zeros(9, 4), None, 0)])
    )
    states_of(requests).register_slot_state(unknown)

    with pytest.raises(UnsupportedKVCacheError, match=r"MambaPool has 1 side states, of which 0"):
        described(requests)


def test_w22_a_state_that_the_pool_replaced_makes_the_group_stale() -> None:
    found = made("mha")
    windows = states_of(found.requests).mamba_cache.conv
    windows[0] = windows[0].clone()

    with pytest.raises(StalePoolError, match=r"conv_state_0\[0\]"):
        found.group.verify()


# ---- ranks ------------------------------------------------------------------------------------


def test_g6_k3_latents_and_side_states_are_every_ranks_and_states_are_each_ranks_own() -> None:
    requests = request_pool(states="kda", side_states=True)
    pool = hybrid_pool(requests, family="mla")

    with get_parallel().override(tp_size=2, attn_tp_size=2, attn_tp_rank=1, moe_tp_size=2):
        replication = described(requests, pool).replication

    replicas = {"latent", "side_short_conv", "side_ngram"}
    assert all(replication.is_replicated(role) for role in replicas)
    for role in ("ssm_state", "conv_state_0"):
        assert [axis.name for axis in replication.axes_of(role)] == ["tp"]
        assert replication.is_writer(role)


# ---- pools of requests ------------------------------------------------------------------------


def test_states_that_are_not_handed_over_are_asked_for() -> None:
    with pytest.raises(ContractError, match=r"HybridLinearKVPool.*'req_to_token_pool'"):
        describe(hybrid_pool(request_pool()))


@pytest.mark.refuses(engine="sglang")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReqToTokenPool, "the pool of requests is of class .*ReqToTokenPool"),
        (UnifiedHybridReqToTokenPool, "--enable-unified-memory"),
        (HybridMambaDecodeReqToTokenPool, "decode servers"),
    ],
)
def test_other_pools_of_requests_are_refused(refused: Refused, kind: type, message: str) -> None:
    with refused(f"states in a {kind.__name__}", match=message):
        describe(hybrid_pool(request_pool()), extras={BESIDE: object.__new__(kind)})


def test_states_of_another_worker_are_refused() -> None:
    with pytest.raises(UnsupportedKVCacheError, match=r"the pool.*has states of its own"):
        described(request_pool(), hybrid_pool(request_pool()))


@pytest.mark.parametrize(
    ("make", "page_size"),
    [(heads_pool, 16), (latent_pool, 16), (sparse_pool, 64), (windows_pool, 16)],
)
def test_states_beside_a_pool_that_is_no_hybrid_are_refused(
    make: Callable[[], object], page_size: int
) -> None:
    with pytest.raises(UnsupportedKVCacheError, match="HybridReqToTokenPool keeps states"):
        describe(make(), page_size, extras={BESIDE: request_pool()})


def test_requests_without_states_are_no_matter() -> None:
    requests = ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)

    assert describe(heads_pool(), extras={BESIDE: requests}).family == "mha"


# ---- states -----------------------------------------------------------------------------------


@pytest.mark.refuses(engine="sglang")
def test_int8_checkpoints_are_refused(refused: Refused) -> None:
    with refused(
        "HybridLinearKVPool, int8 checkpoints of states",
        match=r"MambaCheckpointPool.*-int8-mamba-checkpoint",
    ):
        described(request_pool(int8_checkpoints=True))


@pytest.mark.refuses(engine="sglang")
@pytest.mark.parametrize("states", ["other_windows", "inkling_convs"])
def test_windows_of_several_lengths_or_the_other_way_round_are_refused(
    refused: Refused, states: str
) -> None:
    with refused(
        f"HybridLinearKVPool, {states}", match="MambaPool keeps windows of convolutions as"
    ):
        described(request_pool(states=states))


@pytest.mark.refuses(engine="sglang")
def test_windows_in_the_order_of_amx_kernels_are_refused(refused: Refused) -> None:
    requests = request_pool()
    convs = states_of(requests).mamba_cache.conv
    # [channels, window] as before, with the channels of a token side by side in memory.
    convs[0] = convs[0].as_strided(convs[0].shape, (*convs[0].stride()[:2], 1, convs[0].shape[2]))

    with refused(
        "HybridLinearKVPool, windows in the order of AMX kernels", match="the order of AMX kernels"
    ):
        described(requests)


def test_values_of_other_types_are_refused() -> None:
    requests = request_pool()
    convs = states_of(requests).mamba_cache.conv
    convs[0] = convs[0].to(torch.float64)

    with pytest.raises(UnsupportedKVCacheError, match=r"torch.float64 values"):
        described(requests)


def test_states_in_another_order_than_the_layers_are_refused() -> None:
    with pytest.raises(UnsupportedKVCacheError, match=r"keeps layers \[3, 0\]"):
        described(request_pool(layers=(3, 0)))


def test_pages_in_another_order_than_the_layers_are_refused() -> None:
    requests = request_pool()

    with pytest.raises(UnsupportedKVCacheError, match=r"layers of attention at \{4: 0, 2: 1\}"):
        described(requests, hybrid_pool(requests, attention=(4, 2)))


def test_a_stage_that_keeps_layers_of_an_earlier_one_is_refused() -> None:
    requests = request_pool()

    with pytest.raises(UnsupportedKVCacheError, match="starts at layer 3, and keeps layers"):
        described(requests, hybrid_pool(requests, start_layer=3))


# ---- pages ------------------------------------------------------------------------------------


@pytest.mark.refuses(engine="sglang")
def test_pages_of_all_layers_in_one_row_are_refused(refused: Refused) -> None:
    requests = request_pool()
    pool = hybrid_pool(requests)
    pool.full_kv_pool = object.__new__(PageMajorMHATokenToKVPool)  # type: ignore[attr-defined]  # a real pool

    with refused(
        "HybridLinearKVPool over PageMajorMHATokenToKVPool",
        match="PageMajorMHATokenToKVPool is not described",
    ):
        described(requests, pool)


def test_another_page_size_is_refused_with_both() -> None:
    requests = request_pool()

    with pytest.raises(ContractError, match=r"HybridLinearKVPool has pages of 16.*pages of 64"):
        describe(hybrid_pool(requests), 64, extras={BESIDE: requests})


# ---- drafts -----------------------------------------------------------------------------------


@pytest.mark.refuses(engine="sglang")
def test_a_draft_with_states_of_its_own_is_refused(refused: Refused) -> None:
    draft = hybrid_pool(request_pool(), attention=(0,))

    with refused(
        "HybridLinearKVPool, a draft with states", match=r"draft pool 0.*has states of its own"
    ):
        described(request_pool(), extras={PACKED: (draft,)})


def test_states_of_drafts_are_refused() -> None:
    requests = request_pool()

    with pytest.raises(UnsupportedKVCacheError, match="MambaPool, which is not described"):
        described(requests, extras={"mtp_draft_mamba_pools": (states_of(request_pool()),)})


@pytest.mark.parametrize(
    ("family", "draft"),
    [
        ("mha", latent_pool),
        ("mha", partial(heads_pool, dtype=torch.float8_e4m3fn)),
        ("mla", partial(latent_pool, dtype=torch.float8_e4m3fn)),
        ("mla", sparse_pool),
    ],
)
def test_drafts_that_are_kept_otherwise_than_their_target_are_refused(
    family: str, draft: Callable[[], object]
) -> None:
    requests = request_pool()

    with pytest.raises(UnsupportedKVCacheError, match="draft pool 0"):
        described(requests, hybrid_pool(requests, family=family), {PACKED: (draft(),)})

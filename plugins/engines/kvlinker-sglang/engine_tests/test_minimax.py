"""MiniMax M3's pools: what SGLang writes and reads through them comes back, and what else they may be is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest
import torch
from minimax_pools import MINIMAX, minimax_pool, nvfp4_pool
from pool_groups import KEYS, group_of, load, offload
from real_pools import heads_pool
from sglang.srt.layers.attention import minimax_sparse_backend
from sglang.srt.layers.attention.minimax_sparse_nvfp4_backend import MiniMaxSparseNvfp4AttnBackend
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.mem_cache.minimax_m3_nvfp4_pool import MiniMaxM3Nvfp4KVPool, msa_v1_page_row_bytes

import kvlinker_sglang
from kvlinker.description import DescribeRequest, KVCacheDescription
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.testing.engines import PoolExample
from kvlinker.testing.memory_store import MemoryStore
from kvlinker.transfers import PoolTransfer

Refused = Callable[..., AbstractContextManager[None]]
BY_NAME = {example.name: example for example in MINIMAX}
WITHOUT_DRAFTS = [example for example in MINIMAX if "draft" not in example.name]


def describe(
    pool: object, page_size: int = 16, *, draft: object | None = None
) -> KVCacheDescription:
    extras = {} if draft is None else {"sidecar_draft_device_pools": (draft,)}
    request = DescribeRequest(page_size=page_size, extras=extras)
    description = kvlinker_sglang.describe_kv_cache("sglang", pool, request)
    assert description is not None
    return description


def part_of(pool: object, name: str) -> object:
    return vars(pool)[name]


def pages(page_size: int, *numbers: int) -> torch.Tensor:
    return torch.cat([torch.arange(page_size) + number * page_size for number in numbers])


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore()
    yield store
    store.close()


# ---- what SGLang writes and reads -------------------------------------------------------------


class Written:
    """Tokens of random values that SGLang's own stores put into a pool, and its own reads of them."""

    def __init__(self, pool: object, *, seed: int = 1) -> None:
        assert isinstance(pool, MiniMaxSparseKVPool)
        self.pool = pool
        self._random = torch.Generator().manual_seed(seed)

    def write(self, slots: torch.Tensor) -> None:
        """Store K, V and index keys of some tokens in every layer of the stage."""
        for number in range(self.pool.start_layer, self.pool.end_layer):
            layer = SimpleNamespace(layer_id=number)
            if isinstance(self.pool, MiniMaxM3Nvfp4KVPool):
                self._write_packed(number, slots)
            elif number in self.pool.sparse_layer_id_mapping:
                k, v, key, value = (
                    self._values(slots, *of) for of in ((2, 64),) * 2 + ((1, 32),) * 2
                )
                has_value = number in self.pool.index_kv_layer_id_mapping
                self.pool.set_fused_kv_index_buffer(
                    layer, slots, k, v, key, value if has_value else None
                )
            else:
                k, v = self._values(slots, 2, 64), self._values(slots, 2, 64)
                self.pool.set_kv_buffer(layer, slots, k, v)

    def _write_packed(self, number: int, slots: torch.Tensor) -> None:
        # Quantizing needs a GPU; what it ends with does not.
        k, v, key = (self._bytes(slots, heads, 64) for heads in (2, 2, 1))
        scales = [self._bytes(slots, heads, 8) for heads in (2, 2, 1)]
        self.pool.main_pool.set_quantized_kv_buffer(number, slots, k, v, *scales[:2])
        place = self.pool.index_k_layer_id_mapping[number]
        self.pool.index_k_pool.set_quantized_k_buffer(place, slots, key, scales[2])

    def read(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Return all that SGLang reads of some tokens, layer by layer."""
        found: list[torch.Tensor] = []
        for number in range(self.pool.start_layer, self.pool.end_layer):
            if isinstance(self.pool, MiniMaxM3Nvfp4KVPool):
                place = self.pool.index_k_layer_id_mapping[number]
                found += self.pool.main_pool.get_quantized_rows(number, slots)
                found += self.pool.index_k_pool.get_quantized_rows(place, slots)
                continue
            found += [held[slots] for held in self.pool.get_kv_buffer(number)]
            if number in self.pool.index_kv_layer_id_mapping:
                found += [held[slots] for held in self.pool.get_index_kv_buffer(number)]
            elif number in self.pool.sparse_layer_id_mapping:
                found.append(self.pool.get_index_k_buffer(number)[slots])
        return [part.contiguous().view(torch.uint8) for part in found]

    def _values(self, slots: torch.Tensor, heads: int, size: int) -> torch.Tensor:
        values = torch.randn(len(slots), heads, size, generator=self._random)
        return values.to(torch.bfloat16)

    def _bytes(self, slots: torch.Tensor, heads: int, size: int) -> torch.Tensor:
        shape = (len(slots), heads, size)
        return torch.randint(256, shape, dtype=torch.uint8, generator=self._random)


@pytest.mark.parametrize("example", WITHOUT_DRAFTS, ids=lambda example: example.name)
def test_what_sglang_stored_is_what_it_reads_of_other_slots(
    example: PoolExample, store: MemoryStore
) -> None:
    first, second = group_of(example), group_of(example)
    written, restored = Written(first.target), Written(second.target)
    stored, loaded = pages(example.page_size, 3, 1), pages(example.page_size, 5, 2)
    written.write(stored)
    overwrite_all(second.target)

    offload(first.group, [PoolTransfer(name="kv", keys=KEYS, device_indices=stored)], store)
    load(second.group, [PoolTransfer(name="kv", keys=KEYS, device_indices=loaded)], store)

    expected, found = written.read(stored), restored.read(loaded)
    assert len(found) == len(expected) > 0
    assert all(map(torch.equal, found, expected))


def memory_of(pool: object) -> list[torch.Tensor]:
    """Return the bytes of each tensor that the parts of a pool hold: uint8 [slots or pages, ...]."""
    assert isinstance(pool, MiniMaxSparseKVPool)
    parts = (pool.main_pool, pool.index_k_pool, pool.index_kv_pool)
    names = ("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer")
    held = [vars(part).get(name) or () for part in parts if part is not None for name in names]
    return [tensor.view(torch.uint8) for tensors in held for tensor in tensors]


def overwrite_all(pool: object) -> None:
    for tensor in memory_of(pool):
        tensor.fill_(0xFF)


@pytest.mark.parametrize("example", WITHOUT_DRAFTS, ids=lambda example: example.name)
def test_tokens_of_a_page_write_to_that_page_alone_so_that_none_is_open_at_its_end(
    example: PoolExample,
) -> None:
    pool, size = example.make(), example.page_size
    overwrite_all(pool)

    Written(pool).write(pages(size, 3))

    slots_in_a_row = 1 if size == 16 else size
    for tensor in memory_of(pool):
        rows = torch.ones(len(tensor), dtype=torch.bool)
        rows[3 * size // slots_in_a_row : 4 * size // slots_in_a_row] = False
        assert bool((tensor[rows] == 0xFF).all())
        assert not bool((tensor[~rows] == 0xFF).all())


# ---- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", WITHOUT_DRAFTS, ids=lambda example: example.name)
def test_all_pages_together_are_all_bytes_that_sglang_counts(example: PoolExample) -> None:
    made = group_of(example)
    assert isinstance(made.target, MiniMaxSparseKVPool)
    count = made.target.size // example.page_size + 1

    assert sum(made.page_bytes.values()) * count == sum(made.target.get_kv_size_bytes())


def test_an_nvfp4_page_has_the_bytes_that_sglang_budgets_for_it() -> None:
    made = group_of(BY_NAME["minimax-nvfp4"])

    assert sum(made.page_bytes.values()) == 3 * sum(msa_v1_page_row_bytes(2, 128, 128, 128))
    assert made.page_bytes == {
        "kv": 3 * 2 * 2 * 128 * 64,
        "kv_scale": 3 * 2 * 2 * 128 * 8,
        "indexer": 3 * 128 * 64,
        "indexer_scale": 3 * 128 * 8,
    }


@pytest.mark.parametrize(
    ("name", "page_bytes"),
    [
        ("minimax", {"kv": 4 * 2 * 2 * 64, "indexer": 3 * 32, "indexer_v": 32}),
        ("minimax-keys_alone", {"kv": 4 * 2 * 2 * 64, "indexer": 3 * 32}),
        ("minimax-no_index", {"kv": 2 * 2 * 64}),
    ],
)
def test_a_page_has_index_keys_of_the_layers_that_select(
    name: str, page_bytes: Mapping[str, int]
) -> None:
    found = group_of(BY_NAME[name]).page_bytes

    assert found == {entry: 16 * 2 * values for entry, values in page_bytes.items()}


# ---- waiting ----------------------------------------------------------------------------------


class Waits:
    """Counts the layers that a pool's readers waited for."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def wait_until(self, layer: int) -> None:
        """Take a layer of the stage."""
        self.layers.append(layer)


def test_b65_every_read_of_a_layer_waits_for_it() -> None:
    pool = minimax_pool(start=1)
    assert isinstance(pool, MiniMaxSparseKVPool)
    waits = Waits()
    pool.register_layer_transfer_counter(waits)

    pool.get_key_buffer(1)
    pool.get_value_buffer(2)
    pool.get_kv_buffer(3)
    pool.get_index_k_buffer(1)
    pool.get_index_k_buffer(2)
    pool.get_index_kv_buffer(2)

    assert waits.layers == [0, 1, 2, 0, 1, 1]


def test_b65_nvfp4_kernels_start_behind_a_wait_though_scales_are_read_without_one() -> None:
    pool, waits = nvfp4_pool(start=2), Waits()
    assert isinstance(pool, MiniMaxM3Nvfp4KVPool)
    pool.register_layer_transfer_counter(waits)
    started: list[list[int]] = []
    plan = SimpleNamespace(
        run=lambda *_, **__: started.append(list(waits.layers)), topk_qht=torch.zeros(1, 1, 1)
    )
    backend = object.__new__(MiniMaxSparseNvfp4AttnBackend)
    vars(backend).update(
        kv_pool=pool,
        forward_metadata=SimpleNamespace(msa_v1_decode_plan=plan, msa_v1_attention_plan=plan),
    )
    query, layer = torch.zeros(1), SimpleNamespace(layer_id=3)

    pool.get_main_k_scale_buffer(3)
    pool.get_index_k_scale_buffer(3)
    assert waits.layers == []
    backend._run_msa_v1_decode_indexer(query, layer)  # where the kernel is started
    waits.layers.clear()
    backend._run_msa_v1_decode_attention(query, query, layer)  # the same

    assert started == [[1], [1]]


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.refuses(engine="sglang")
def test_hisparse_is_refused_for_slots_lie_behind_the_rows_of_the_device(refused: Refused) -> None:
    pool = minimax_pool(hisparse=True)
    assert isinstance(pool, MiniMaxSparseKVPool)
    assert len(pool.main_pool.k_buffer[0]) < len(pool.index_k_pool.k_buffer[0])

    with refused("MiniMaxSparseKVPool, HiSparse", match=r"HiSparseMHAMainPool.*--enable-hisparse"):
        describe(pool)


@pytest.mark.refuses(engine="sglang")
def test_heads_before_slots_are_refused_for_sglang_reads_them_as_slots(refused: Refused) -> None:
    pool = minimax_pool(head_major=True)
    assert isinstance(pool, MiniMaxSparseKVPool)
    to_pages = minimax_sparse_backend._kv_cache_to_bnsd  # noqa: SLF001  # what the kernels are given
    assert to_pages(*pool.get_kv_buffer(1), 16)[3] == pool.page_size != pool.head_num

    with refused("MiniMaxSparseKVPool, heads before slots", match="without SGLANG_USE_HND_KVCACHE"):
        describe(pool)


@pytest.mark.refuses(engine="sglang")
@pytest.mark.parametrize(
    ("part", "make"),
    [
        ("index_k_pool", minimax_pool),
        ("index_k_pool", nvfp4_pool),
        ("main_pool", nvfp4_pool),
    ],
    ids=["keys_alone", "nvfp4_keys", "nvfp4_main"],
)
def test_parts_of_a_pool_are_refused_alone(
    part: str, make: Callable[[], object], refused: Refused
) -> None:
    found = part_of(make(), part)

    with refused(type(found).__name__, match="it is a part of a pool; describe the pool that"):
        describe(found, 16 if make is minimax_pool else 128)


@pytest.mark.refuses(engine="sglang")
def test_a_draft_that_selects_by_an_index_of_its_own_is_refused(refused: Refused) -> None:
    draft = minimax_pool(end=2)

    with refused(
        "MiniMaxSparseKVPool as a draft",
        match="draft pool 0 is of class .*MiniMaxSparseKVPool, and only .*MHATokenToKVPool is",
    ):
        describe(minimax_pool(), draft=draft)


def test_a_draft_of_another_format_than_a_plain_target_is_refused() -> None:
    draft = heads_pool(layers=1, dtype=torch.float8_e4m3fn)

    with pytest.raises(UnsupportedKVCacheError, match="draft pool 0 has kv_format 'fp8_e4m3fn'"):
        describe(minimax_pool(), draft=draft)


@pytest.mark.parametrize(
    ("make", "attribute", "value", "reason"),
    [
        (minimax_pool, "layer_num", 3, "has 3 layers in"),
        (
            minimax_pool,
            "index_k_layer_id_mapping",
            {3: 1},
            r"of which \[1, 2, 3\] have an index, and keeps index keys of \[2, 3\]",
        ),
        (
            minimax_pool,
            "index_k_pool.dtype",
            torch.int8,
            "the index of a MiniMaxSparseKVPool keeps torch.int8 values",
        ),
        (
            minimax_pool,
            "index_k_pool",
            part_of(minimax_pool(index_dtype=torch.float16), "index_k_pool"),
            "the index of a MiniMaxSparseKVPool has index_format 'fp16' and the target 'bf16'",
        ),
        (
            minimax_pool,
            "index_k_pool",
            heads_pool(),
            "the index of a MiniMaxSparseKVPool is of class .*MHATokenToKVPool, and only .*MHATokenToKOnlyPool",
        ),
        (
            nvfp4_pool,
            "main_pool",
            heads_pool(),
            "the K and V of a MiniMaxM3Nvfp4KVPool is of class .*MHATokenToKVPool, and only",
        ),
        (
            nvfp4_pool,
            "main_pool.SCALE_GROUP_SIZE",
            32,
            r"has a scale for each 32 values, relative to \[1.0\], and described is one for 16",
        ),
        (
            nvfp4_pool,
            "index_k_pool.global_scale",
            torch.tensor([0.5]),
            r"has a scale for each 16 values, relative to \[0.5\], and described",
        ),
        (minimax_pool, "dense_pool", heads_pool(), "has dense_pool, and says of no layer"),
        (nvfp4_pool, "index_kv_pool", heads_pool(), "has index_kv_pool, and says of no layer"),
    ],
    ids=[
        "layers",
        "keys",
        "type",
        "types",
        "keys_class",
        "main_class",
        "blocks",
        "scale",
        "dense",
        "index",
    ],
)
def test_what_is_kept_otherwise_is_refused(
    make: Callable[[], object], attribute: str, value: object, reason: str
) -> None:
    pool = make()
    *way, name = attribute.split(".")
    part = pool
    for step in way:
        part = part_of(part, step)
    setattr(part, name, value)

    with pytest.raises(UnsupportedKVCacheError, match=reason):
        describe(pool, 16 if make is minimax_pool else 128)


@pytest.mark.parametrize(
    ("make", "part"),
    [(nvfp4_pool, "main_pool"), (nvfp4_pool, "index_k_pool"), (minimax_pool, "index_k_pool")],
    ids=["nvfp4_main", "nvfp4_keys", "keys_alone"],
)
def test_b96_a_part_with_pages_of_its_own_is_refused(make: Callable[[], object], part: str) -> None:
    pool = make()
    vars(part_of(pool, part))["page_size"] = 8
    size = 16 if make is minimax_pool else 128

    with pytest.raises(ContractError, match=rf"pages of 8 slots.*pages of {size}"):
        describe(pool, size)


def test_nvfp4_keys_that_lost_their_scales_are_refused_with_the_name() -> None:
    pool = nvfp4_pool()
    vars(part_of(pool, "index_k_pool")).pop("k_scale_buffer")

    with pytest.raises(
        UnsupportedKVCacheError, match="MiniMaxM3Nvfp4IndexKPool lacks k_scale_buffer"
    ):
        describe(pool, 128)


@pytest.mark.parametrize("make", [minimax_pool, nvfp4_pool])
def test_b96_another_page_size_is_refused_with_both(make: Callable[[], object]) -> None:
    with pytest.raises(ContractError, match=r"pages of (16|128) slots .* pages of 64"):
        describe(make(), 64)

"""SGLang's real prefix trees over a pool that SGLang and kvlinker have never seen: pages come back whole, or not."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lantern_kv.pool import LanternPool
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from transformers import PretrainedConfig

from kvlinker.errors import UnsupportedKVCacheError

LAYERS, PAGES, PAGE = 3, 12, 8
SPOILED = 0xFF
PROMPT = list(range(100, 100 + 5 * PAGE))


def publish_configuration() -> None:
    """Let this process's pools and linkers ask for the server's configuration: one rank on the CPU."""
    config = PretrainedConfig.from_dict({"architectures": ["LlamaForCausalLM"]})
    get_context().override_server_args(
        device="cpu", _model_config=SimpleNamespace(hf_config=config), _mamba_cache_chunk_size=1
    ).install()


class Worker:
    """A worker's pool and tree, linked to a folder."""

    def __init__(self, store: Path, core: str, kind: type[LanternPool] = LanternPool) -> None:
        self.pool = kind(layers=LAYERS, pages=PAGES, page_size=PAGE)
        self.slots = PagedTokenToKVPoolAllocator(
            size=PAGES * PAGE,
            page_size=PAGE,
            dtype=torch.uint8,
            device="cpu",
            kvcache=self.pool,
            need_sort=False,
        )
        requests = ReqToTokenPool(
            size=8, max_context_len=4096, device="cpu", enable_memory_saver=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=self.slots,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
        )
        self.tree = UnifiedRadixCache(params)
        self.linker = create_unified_cache_linker(
            get_context().server_args,
            params,
            backend="dynamic",
            config={
                "linker": "KVLinker",
                "linker_module_path": "kvlinker_sglang",
                "linker_extra_config": {
                    "store": {
                        "plugin": "file",
                        "options": {"path": str(store), "capacity": "64MiB"},
                    },
                    "namespace": {"weights_version": "1"},
                    "min_hit_tokens": 1,
                },
            },
            components=set(self.tree.components),
            forward_stream=None,
        )
        self.tree.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)

    def allocate(self, pages: int) -> torch.Tensor:
        """Take free slots."""
        found: torch.Tensor = self.slots.alloc(pages * PAGE)
        return found.to(torch.int64)

    def light(self, seed: int) -> None:
        """Write random bytes everywhere."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in (self.pool.lamps, *self.pool.wicks):
            held = tensor.view(torch.uint8)
            held.copy_(torch.randint(256, held.shape, dtype=torch.uint8, generator=generator))

    def spoil(self) -> None:
        """Overwrite everything, as in a new process."""
        for tensor in (self.pool.lamps, *self.pool.wicks):
            tensor.view(torch.uint8).fill_(SPOILED)

    def read(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Return what the model would read of whole pages, layer by layer."""
        pages = slots[::PAGE] // PAGE
        found = []
        for layer in range(LAYERS):
            lamps, wicks = self.pool.get_kv_buffer(layer)
            found += [lamps[pages].clone(), wicks.view(torch.uint8)[slots].clone()]
        return found

    def store(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Have a prompt of random bytes stored, and return its bytes."""
        slots = self.allocate(len(tokens) // PAGE)
        self.light(seed=7)
        expected = self.read(slots)
        self.tree.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots))
        limit = time.monotonic() + 30
        while self.tree.linker.pending_offloads:
            self.tree.check_hicache_events()
            assert time.monotonic() < limit
            time.sleep(0.001)
        return expected

    def forget(self) -> None:
        """Empty tree, slots and pool."""
        self.tree.reset()
        self.slots.clear()
        self.spoil()

    def restore(self, tokens: Sequence[int], name: str) -> tuple[int, torch.Tensor, bool]:
        """Match a prompt and load what is offered; return tokens offered, slots, and whether SGLang gives it up."""
        request = Req(name, "", array("q", tokens), SamplingParams(max_new_tokens=1))
        key = RadixKey(array("q", tokens))
        match = self.tree.match_prefix(MatchPrefixParams(key=key, req=request))
        assert match.device_prefix_len == 0
        request.last_node, request.host_hit_length = match.last_device_node, match.host_hit_length
        params = InitLoadBackParams(
            best_match_node=match.best_match_node,
            host_hit_length=match.host_hit_length,
            req=request,
        )
        slots = torch.empty(0, dtype=torch.int64)
        if self.tree.init_load_back(params)[0]:
            slots = self.tree.linker.private_load_indices[name].to(torch.int64)
        self.linker.layer_done_counter.set_consumer(self.tree.ready_to_load_host_cache())
        failed = bool(self.tree.finish_external_linker_loads([request]))
        return match.host_hit_length, slots, failed


@pytest.fixture(params=["rust", "python"])
def core(request: pytest.FixtureRequest) -> str:
    """Return each of SGLang's two trees."""
    publish_configuration()
    return str(request.param)


@pytest.fixture
def worker(core: str, tmp_path: Path) -> Iterator[Worker]:
    """Give a worker over an empty pool."""
    worker = Worker(tmp_path / "store", core)
    yield worker
    worker.linker.close()


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


def test_a_prompt_comes_back_byte_for_byte_to_other_slots(worker: Worker) -> None:
    expected = worker.store(PROMPT)
    worker.forget()
    taken = worker.allocate(2)

    offered, slots, failed = worker.restore(PROMPT, "again")

    assert (offered, len(slots), failed) == (len(PROMPT), len(PROMPT), False)
    assert not set(slots.tolist()) & set(taken.tolist())
    assert equal(worker.read(slots), expected)
    others = torch.ones(len(worker.pool.lamps), dtype=torch.bool)
    others[slots // PAGE] = False
    assert bool((worker.pool.lamps[others] == SPOILED).all())


def test_another_worker_finds_what_the_first_one_stored(
    worker: Worker, core: str, tmp_path: Path
) -> None:
    expected = worker.store(PROMPT)
    worker.linker.close()

    second = Worker(tmp_path / "store", core)
    second.spoil()
    _, slots, failed = second.restore(PROMPT, "again")
    second.linker.close()

    assert not failed
    assert equal(second.read(slots), expected)


@pytest.mark.parametrize("part", [0, 1], ids=["lamps", "wicks"])
def test_a_page_with_one_wrong_byte_is_no_hit(worker: Worker, tmp_path: Path, part: int) -> None:
    expected = worker.store(PROMPT)
    worker.forget()
    fourth = expected[part].reshape(5, -1)[3].numpy().tobytes()
    places = flip(tmp_path / "store", fourth)

    _, slots, failed = worker.restore(PROMPT, "first")
    again, loaded, failed_again = worker.restore(PROMPT, "again")

    assert places == 1
    assert failed
    assert len(slots) == len(PROMPT)
    assert (again, len(loaded), failed_again) == (3 * PAGE, 3 * PAGE, False)
    assert equal(worker.read(loaded), [of[: len(of) * 3 // 5] for of in expected])


def flip(folder: Path, content: bytes) -> int:
    """Change a byte of some bytes wherever a store has them, and return in how many places."""
    count = 0
    for path in (found for found in folder.rglob("*") if found.is_file()):
        held = path.read_bytes()
        if (at := held.find(content)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([content[0] ^ 1]))
            count += 1
    return count


def test_without_its_describer_the_pool_is_refused_by_name(
    core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLINKER_DISABLED_PLUGINS", "lantern_sglang")

    with pytest.raises(UnsupportedKVCacheError, match=r"LanternPool.*which derives from sglang"):
        Worker(tmp_path / "store", core)

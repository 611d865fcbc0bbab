"""Faulty stores: whatever a store does, the engine says what it would have said without one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from kvlinker.discovery import load_plugins
from kvlinker.entries import DevicePoolEntry
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.registry import PluginRegistry
from kvlinker.store import Integrity, ReadStatus, WriteStatus
from kvlinker.testing import (
    Call,
    Evict,
    Fault,
    FaultStore,
    Gate,
    Hang,
    MemoryStore,
    Raise,
    Report,
    Rule,
    Slow,
    Tamper,
)
from kvlinker_transformers.engine import GenerationResult, PagedEngine, pools_for_config

MakeModel = Callable[..., PreTrainedModel]

STATES = ("qwen3_next", "kimi_linear", "jamba", "lfm2")
MODEL_TYPES = (
    *("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
    *STATES,
)
NEW_TOKENS = 4
PATIENT = LinkerOptions(lookup_seconds=60)
SLOTS = 6
"""As few as a prompt has pages, and one more: every free slot is soon used again."""


def prompt_of(model: PreTrainedModel, seed: int = 0) -> list[int]:
    """Tokens of two whole pages and a tail, for any page size."""
    length = 2 * pools_for_config(model.config, pages=2).page_size + 40
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 500, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    return load_plugins()


@contextmanager
def engine_on(
    model: PreTrainedModel,
    store: FaultStore | MemoryStore | None,
    registry: PluginRegistry,
    *,
    seed: int = 1,
    pages: int = 12,
    options: LinkerOptions = PATIENT,
) -> Iterator[PagedEngine]:
    pools = pools_for_config(model.config, pages=pages)
    with PagedEngine(model, pools, shuffle_seed=seed) as engine:
        if store is not None:
            engine.attach(store, registry=registry, options=options)
        yield engine


def say(engine: PagedEngine, prompt: list[int]) -> GenerationResult:
    return engine.generate(prompt, max_new_tokens=NEW_TOKENS, keep_logits=True)


def linker_of(engine: PagedEngine) -> Linker:
    assert engine.linker is not None
    return engine.linker


def stored_by(model: PreTrainedModel, registry: PluginRegistry) -> tuple[MemoryStore, torch.Tensor]:
    """Return a store with the prompt's pages, and the logits that go with them."""
    store = MemoryStore()
    with engine_on(model, store, registry) as engine:
        logits = say(engine, prompt_of(model)).logits
        assert engine.wait_for_offloads()
    return store, logits


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_b50_e2_an_object_that_vanishes_after_the_lookup_means_computing_it_again(
    make_model: MakeModel, registry: PluginRegistry, model_type: str
) -> None:
    model = make_model(model_type)
    store, logits = stored_by(model, registry)
    evict = Rule(call=Call.OPEN_READ, fault=Evict(), positions=frozenset({0}), times=1)
    faulty = FaultStore(store, [evict])

    with engine_on(model, faulty, registry, seed=2) as engine:
        failed = say(engine, prompt_of(model))
        assert engine.wait_for_offloads()
        again = say(engine, prompt_of(model))

    assert (failed.restore_failed, failed.cached_tokens) == (True, 0)
    assert torch.equal(failed.logits, logits)
    assert (again.restore_failed, again.cached_tokens > 0) == (False, True)
    assert torch.equal(again.logits, logits)


@pytest.mark.parametrize(
    ("model_type", "pool", "position"),
    [
        ("deepseek_v32", "kv", 1),
        ("deepseek_v32", "indexer", 1),
        ("qwen3_next", "kv", 1),
        # One state is all that is read.
        *((model_type, "mamba", 0) for model_type in STATES),
    ],
)
@pytest.mark.parametrize("fault", [Tamper(), Report(status=ReadStatus.FAILED)])
def test_e3_a_page_that_cannot_be_read_in_one_pool_is_never_used(
    make_model: MakeModel,
    registry: PluginRegistry,
    model_type: str,
    pool: str,
    position: int,
    fault: Fault,
) -> None:
    model = make_model(model_type)
    store, logits = stored_by(model, registry)
    rule = Rule(call=Call.READ, fault=fault, pool=pool, positions=frozenset({position}))

    with engine_on(model, FaultStore(store, [rule]), registry, seed=2) as engine:
        result = say(engine, prompt_of(model))

    assert result.restore_failed
    assert torch.equal(result.logits, logits)


@pytest.mark.parametrize(
    "call", [Call.EXISTS, Call.HOLD, Call.RELEASE, Call.OPEN_READ, Call.READ, Call.CLOSE_READ]
)
@pytest.mark.parametrize("error", [OSError("no route"), SystemExit(3), RecursionError()])
def test_e1_a_store_that_raises_while_it_is_read_changes_no_logits(
    make_model: MakeModel, registry: PluginRegistry, call: Call, error: BaseException
) -> None:
    model = make_model("llama")
    store, logits = stored_by(model, registry)
    faulty = FaultStore(store, [Rule(call=call, fault=Raise(error=error))])

    with engine_on(model, faulty, registry, seed=2) as engine:
        result = say(engine, prompt_of(model))

    assert torch.equal(result.logits, logits)


def test_e1_a_store_that_cannot_write_leaves_the_engine_its_pages(
    make_model: MakeModel, registry: PluginRegistry
) -> None:
    model = make_model("llama")
    _, logits = stored_by(model, registry)
    faulty = FaultStore(MemoryStore(), [Rule(call=Call.WRITE, fault=Raise(error=OSError()))])

    with engine_on(model, faulty, registry, pages=6) as engine:
        for _ in range(3):
            result = say(engine, prompt_of(model))
            assert torch.equal(result.logits, logits)
            assert result.cached_tokens == 0
        assert engine.wait_for_offloads()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_b58_b65_no_layer_is_read_before_every_pool_of_it_has_landed(
    make_model: MakeModel, registry: PluginRegistry, model_type: str
) -> None:
    model = make_model(model_type)
    store, logits = stored_by(model, registry)
    slow = FaultStore(store, [Rule(call=Call.READ, fault=Slow(seconds=0.01))])

    with engine_on(model, slow, registry, seed=2) as engine:
        result = say(engine, prompt_of(model))

    assert result.cached_tokens > 0
    assert torch.equal(result.logits, logits)


def test_the_first_layers_run_while_the_last_one_is_on_its_way(
    make_model: MakeModel, registry: PluginRegistry
) -> None:
    model = make_model("deepseek_v32")
    store, logits = stored_by(model, registry)
    results: list[GenerationResult] = []
    done = [threading.Event() for _ in range(3)]
    hooks = [
        layer.register_forward_hook(lambda *_, event=event: event.set())
        for layer, event in zip(model.get_decoder().layers, done, strict=True)
    ]
    with Gate() as gate:
        # Two pools in each layer: the fifth read is the first of the last layer.
        held = FaultStore(store, [Rule(call=Call.READ, fault=Hang(gate=gate), first=5)])
        with engine_on(model, held, registry, seed=2) as engine:
            forward = threading.Thread(target=lambda: results.append(say(engine, prompt_of(model))))
            forward.start()
            assert done[1].wait(30)
            gate.wait_for_arrivals(1)
            assert not done[2].is_set()
            gate.open()
            forward.join()
    for hook in hooks:
        hook.remove()

    assert torch.equal(results[0].logits, logits)


def test_w37_a_store_that_hangs_costs_the_deadline_and_no_logits(
    make_model: MakeModel, registry: PluginRegistry
) -> None:
    model = make_model("deepseek_v32")
    store, logits = stored_by(model, registry)
    options = replace(PATIENT, load_seconds=0.2)
    with Gate() as gate:
        hanging = FaultStore(store, [Rule(call=Call.READ, fault=Hang(gate=gate), first=3)])
        with engine_on(model, hanging, registry, seed=2, options=options) as engine:
            result = say(engine, prompt_of(model))

    assert result.restore_failed
    assert torch.equal(result.logits, logits)


def test_b64_pages_of_an_open_offer_are_given_to_nobody(
    make_model: MakeModel, registry: PluginRegistry
) -> None:
    model = make_model("deepseek_v32")
    _, logits = stored_by(model, registry)
    store = MemoryStore()
    with Gate() as gate:
        held = FaultStore(store, [Rule(call=Call.WRITE, fault=Hang(gate=gate))])
        with engine_on(model, held, registry) as engine:
            say(engine, prompt_of(model))
            gate.wait_for_arrivals(1)
            # Were its pages free, this prompt would be written over them before they are stored.
            for seed in (1, 2):
                say(engine, prompt_of(model, seed))
            gate.open()
            assert engine.wait_for_offloads()

    with engine_on(model, store, registry, seed=2) as engine:
        for _ in range(2):
            result = say(engine, prompt_of(model))
            assert result.cached_tokens == 128
            assert torch.equal(result.logits, logits)


@pytest.mark.parametrize("model_type", STATES)
def test_b64_a_state_stays_as_it_is_until_it_is_stored_while_its_request_goes_on(
    make_model: MakeModel, registry: PluginRegistry, model_type: str
) -> None:
    model = make_model(model_type)
    _, logits = stored_by(model, registry)
    store = MemoryStore()
    with Gate() as gate:
        held = FaultStore(store, [Rule(call=Call.WRITE, fault=Hang(gate=gate))])
        with engine_on(model, held, registry, pages=SLOTS) as engine:
            # The tail and the new tokens are computed while nothing is written.
            assert torch.equal(say(engine, prompt_of(model)).logits, logits)
            gate.wait_for_arrivals(1)
            # One slot is all that each of these needs: together they use every one that is free.
            for _ in range(SLOTS):
                engine.generate(prompt_of(model)[:5], max_new_tokens=1)
            gate.open()
            assert engine.wait_for_offloads()

    with engine_on(model, store, registry, seed=2) as engine:
        restored = say(engine, prompt_of(model))
    assert restored.cached_tokens > 0
    assert torch.equal(restored.logits, logits)


def test_b24_a_missing_head_is_computed_and_offered_again(
    make_model: MakeModel, registry: PluginRegistry
) -> None:
    model = make_model("llama")
    store = MemoryStore()
    unwritten = Report(status=WriteStatus.FAILED)
    rule = Rule(call=Call.WRITE, fault=unwritten, positions=frozenset({0}), times=1)

    cached = []
    with engine_on(model, FaultStore(store, [rule]), registry) as engine:
        for _ in range(3):
            cached.append(say(engine, prompt_of(model)).cached_tokens)
            assert engine.wait_for_offloads()
        holes = linker_of(engine).metrics.snapshot().events

    assert cached == [0, 0, 64]
    assert holes["hole_at_page_0"] == 1


def layer_ranges(entry: DevicePoolEntry) -> dict[int, list[tuple[int, int]]]:
    """Return where each layer's bytes lie in an object of the entry: layer to (offset, size)."""
    plans = {
        layer: entry.layer_plan(entry.prepare_locations(range(entry.page_size)), layer)
        for layer in entry.layer_mapping
    }
    ranges = {layer: plan.expand() for layer, plan in plans.items() if plan is not None}
    return {
        layer: list(zip(found.offset.tolist(), found.size.tolist(), strict=True))
        for layer, found in ranges.items()
    }


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_b01_b02_zeros_in_one_layers_part_of_one_stored_page_change_the_logits(
    make_model: MakeModel, registry: PluginRegistry, model_type: str
) -> None:
    model = make_model(model_type)
    # A store that looks at lengths alone takes zeros for a page.
    store = MemoryStore(integrity=Integrity.LENGTH)
    # The last layer of LFM2 reads two tokens back: what is stored is seen by the first ones behind it alone.
    prompt = prompt_of(model)[: 65 if model_type == "lfm2" else None]
    with engine_on(model, store, registry) as engine:
        say(engine, prompt)
        assert engine.wait_for_offloads()
        entries = {entry.name: entry for entry in linker_of(engine).group.entries}
        ranges = {name: layer_ranges(entry) for name, entry in entries.items()}

    def continued(store: FaultStore | MemoryStore = store) -> torch.Tensor:
        with engine_on(model, store, registry, seed=2) as engine:
            result = engine.generate(prompt, max_new_tokens=12, keep_logits=True)
        assert result.cached_tokens > 0
        return result.logits

    stored, watched = store.keys(), FaultStore(store)
    right = continued(watched)
    assert torch.equal(right, continued())
    reads = [record for record in watched.records if record.call is Call.READ]
    pool_of = {key: record.pool for record in reads for key in record.keys}
    last_of_each = {pool_of[key]: key for key in stored if key in pool_of}
    seen = set()
    for pool, key in last_of_each.items():
        payload = store.payload(key)
        for layer, places in ranges[pool].items():
            without = bytearray(payload)
            for offset, size in places:
                without[offset : offset + size] = bytes(size)
            store.tamper(key, bytes(without))
            assert not torch.equal(continued(), right), (pool, layer)
            seen.add((pool, layer))
        store.tamper(key, payload)
    assert seen == {
        (entry.name, layer) for entry in entries.values() for layer in entry.layer_mapping
    }

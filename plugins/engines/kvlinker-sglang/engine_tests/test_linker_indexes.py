"""The linker reads from the model's configuration which index buffers nobody reads, and leaves them out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_frame.server import LinkerOptions
from engine_frame.trees import Tree
from engine_reads import contents, fill_at_random, overwrite
from faulty_store import PATIENT
from real_pools import MODEL_CONFIG, heads_pool, publish_configuration, sparse_pool
from sglang.srt.runtime_context import get_context
from transformers import PretrainedConfig

from kvlinker_sglang.engine.host import shared_index_facts
from kvlinker_sglang.engine.linker import KVLinker

LATENTS, SECOND = 3, 1
"""Layers of the pool, and the one that uses the first one's index."""


@pytest.fixture(autouse=True)
def _glm() -> Iterator[None]:
    publish_configuration()
    types = ["full", "shared", "full", "shared"]
    config = PretrainedConfig.from_dict({**MODEL_CONFIG.to_dict(), "indexer_types": types})
    with get_context().override_server_args(
        device="cpu", _model_config=SimpleNamespace(hf_config=config)
    ):
        yield


def test_layers_of_the_stage_without_an_index_of_their_own_are_named() -> None:
    assert shared_index_facts(sparse_pool()) == {"shared_index_layers": (1,)}
    assert shared_index_facts(sparse_pool(start_layer=1)) == {"shared_index_layers": (1, 3)}


def test_pools_without_an_index_have_none_to_share() -> None:
    assert shared_index_facts(heads_pool()) == {}


def test_an_index_buffer_that_nobody_reads_is_neither_stored_nor_restored(tmp_path: Path) -> None:
    tree = Tree(name="dsa")
    options = {"path": str(tmp_path / "store"), "capacity": "64MiB"}
    linker = tree.attach(
        LinkerOptions(
            extra_config={
                "store": {"plugin": "file", "options": options},
                "limits": dict(PATIENT),
            }
        )
    )
    assert isinstance(linker, KVLinker)
    tokens, slots = list(range(5 * tree.kind.page_size)), tree.allocate(5)
    fill_at_random(tree.rows(slots), seed=1)
    expected = contents(tree.rows(slots))
    tree.insert(tokens, slots)
    tree.settle()
    tree.forget()
    overwrite(tree.rows(slots), 0xFF)

    restored = tree.restore(tokens, "again")

    found = contents(tree.rows(restored.slots))
    dead = found.pop(LATENTS + SECOND)
    del expected[LATENTS + SECOND]
    linker.close()
    assert not restored.failed
    assert bool((dead == 0xFF).all())
    assert all(map(torch.equal, found, expected))

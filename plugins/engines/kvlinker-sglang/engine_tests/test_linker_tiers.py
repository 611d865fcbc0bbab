"""Stores that a configuration names in front of each other serve SGLang's tree, and the far one a restarted server."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_frame.server import LinkerOptions
from engine_frame.trees import Tree
from engine_reads import contents, fill_at_random, overwrite
from faulty_store import PATIENT

from kvlinker_sglang.engine.linker import KVLinker

Store = list[dict[str, dict[str, object]]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Give memory in front of a folder."""
    near = Path(tempfile.mkdtemp(prefix="kvlinker-test-", dir="/dev/shm"))
    yield [
        {"memory": {"path": str(near / "store"), "capacity": "16MiB"}},
        {"file": {"path": str(tmp_path / "store"), "capacity": "64MiB"}},
    ]
    shutil.rmtree(near)


def attach(store: Store) -> tuple[Tree, KVLinker]:
    tree = Tree(name="mha")
    config = {
        "store": store,
        "namespace": {"weights_version": "1"},
        "min_hit_tokens": 1,
        "limits": dict(PATIENT),
    }
    linker = tree.attach(LinkerOptions(extra_config=config))
    assert isinstance(linker, KVLinker)
    return tree, linker


def test_tiers_restore_a_prompt_and_the_far_one_does_after_a_restart(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tree, linker = attach(store)
    tokens, slots = list(range(5 * tree.kind.page_size)), tree.allocate(5)
    fill_at_random(tree.rows(slots), seed=1)
    expected = contents(tree.rows(slots))
    tree.insert(tokens, slots)
    tree.settle()
    tree.forget()
    overwrite(tree.rows(slots), 0xFF)

    near = contents(tree.rows(tree.restore(tokens, "again").slots))
    linker.close()  # and the last one gives the memory back
    restarted, second = attach(store)
    restored = restarted.restore(tokens, "after the restart")
    far = contents(restarted.rows(restored.slots))
    second.close()

    assert all(map(torch.equal, near, expected))
    assert all(map(torch.equal, far, expected))
    assert not restored.failed
    assert "store memory > file" in caplog.text

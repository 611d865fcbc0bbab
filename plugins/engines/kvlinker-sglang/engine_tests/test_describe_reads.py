"""Before each transfer every span is asked where its tensor is now: it reads that one, and no other layer's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import SupportsIndex

import pytest
import torch
from minimax_pools import minimax_pool, nvfp4_pool
from pool_groups import group_of
from real_pools import heads_pool
from real_pools_scaled import fp4_heads_pool, fp4_latent_pool, mxfp8_heads_pool

from kvlinker.testing.engines import PoolExample


class ReadTensors(list[torch.Tensor]):
    """A pool's list, which counts the tensors that are read of it."""

    reads = 0

    def __getitem__(self, place: SupportsIndex) -> torch.Tensor:  # type: ignore[override]  # never a slice
        self.reads += 1
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.reads += len(self)
        return super().__iter__()


def counted(part: object) -> list[ReadTensors]:
    """Let each of a pool's lists of tensors count what is read of it."""
    lists = {
        name: ReadTensors(held)
        for name, held in vars(part).items()
        if isinstance(held, list) and all(isinstance(one, torch.Tensor) for one in held)
    }
    vars(part).update(lists)
    return list(lists.values())


@pytest.mark.parametrize(
    ("make", "page_size", "parts"),
    [
        pytest.param(heads_pool, 16, (), id="mha"),
        pytest.param(fp4_heads_pool, 16, (), id="mha-fp4"),
        pytest.param(mxfp8_heads_pool, 128, (), id="mha-mxfp8"),
        pytest.param(fp4_latent_pool, 16, (), id="mla-fp4"),
        pytest.param(
            minimax_pool, 16, ("main_pool", "index_k_pool", "index_kv_pool"), id="minimax"
        ),
        pytest.param(nvfp4_pool, 128, ("main_pool", "index_k_pool"), id="minimax-nvfp4"),
    ],
)
def test_a_span_reads_its_own_layers_tensor_alone(
    make: Callable[[], object], page_size: int, parts: tuple[str, ...]
) -> None:
    made = group_of(PoolExample(name="reads", make=make, page_size=page_size))
    held = [vars(made.target)[part] for part in parts] or [made.target]
    lists = [one for part in held for one in counted(part)]

    for entry in made.group.entries:
        for span in entry.spans:
            before = sum(one.reads for one in lists)
            span.verify()
            assert sum(one.reads for one in lists) == before + 1, span.label

"""SGLang's pools are described as every engine adapter promises: no tensor is left out without a reason."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from described_pools import DESCRIBED
from hybrid_pools import HybridWorker, hybrid_pool, request_pool
from real_pools import sparse_pool, v4_pool
from sglang.srt.mem_cache.memory_pool import NoOpMHATokenToKVPool

import kvlinker_sglang
from kvlinker.testing.engines import EngineAdapterTests, PoolExample


def bare(kind: type) -> object:
    """Return an instance of a class that is refused by its name: it needs no memory."""
    instance: object = object.__new__(kind)
    return instance


int8_states = HybridWorker(partial(request_pool, int8_checkpoints=True), hybrid_pool)


class TestSGLang(EngineAdapterTests):
    plugin = kvlinker_sglang
    engine = "sglang"
    goldens = Path(__file__).parent / "goldens"
    pools = DESCRIBED
    unsupported = (
        PoolExample(name="no_op", make=partial(bare, NoOpMHATokenToKVPool), page_size=16),
        PoolExample(
            name="int8_states", make=int8_states.pool, extras=int8_states.extras, page_size=16
        ),
        PoolExample(name="folded_index", make=partial(sparse_pool, index_kpool=2), page_size=128),
        PoolExample(name="v4-hisparse", make=partial(v4_pool, hisparse=True), page_size=256),
    )

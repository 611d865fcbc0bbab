"""Real servers of two tensor-parallel workers on gloo: each one's share of a page comes back to as many alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engine_frame.server import Server, ServerOptions
from linked_servers import PAGE, Link, prompt_of

WHOLE = 12 * PAGE
TWO_WORKERS = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # SGLang wants a NUMA node for each worker, or cores that are named
    "TORCHDYNAMO_DISABLE": "1",  # what it compiles for several workers alone needs triton
}


def test_k3_two_workers_find_what_two_workers_stored_and_one_worker_misses(
    start_server: Callable[[ServerOptions], Server],
    model_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    link = Link(store=tmp_path / "store")
    two = link.server(
        model_folder("llama"), dtype="float32", flags=("--tp", "2"), environment=TWO_WORKERS
    )
    server = start_server(two)
    prompt = prompt_of(WHOLE + 5)

    cold = server.client.generate(prompt)
    kept = server.client.generate(prompt)
    link.forget(server.client)
    restored = server.client.generate(prompt)
    server.kill()
    one = start_server(replace(two, flags=(), environment={}))
    other = one.client.generate(prompt)

    assert (restored.host_tokens, restored.device_tokens) == (WHOLE, 0)
    assert (kept.host_tokens, kept.device_tokens) == (0, WHOLE)
    assert (restored.tokens, restored.logprobs) == (kept.tokens, kept.logprobs)
    assert other.cached_tokens == 0
    # Sums of two workers, and of prompts cut elsewhere, are rounded elsewhere.
    for answer in (cold, other):
        assert answer.tokens == restored.tokens
        assert answer.logprobs == pytest.approx(restored.logprobs, abs=1e-4)

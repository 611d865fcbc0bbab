"""Real servers of two tensor-parallel workers on gloo: each one's share of a page comes back to as many alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engine_frame.server import Server, ServerOptions
from linked_servers import PAGE, Link, prompt_of

WHOLE = 12 * PAGE
ENVIRONMENT = {
    # SGLang wants a NUMA node for each worker, or cores that are named; one worker takes the first of them.
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
}
"""Of both servers: what counts as a fact of the values must not be what tells them apart."""


def namespaces_of(server: Server) -> list[str]:
    """Return the digest of the namespace that each worker logged."""
    return re.findall(r"kvlinker: namespace (\w+)", server.log_text())


def test_k3_two_workers_find_what_two_workers_stored_and_one_worker_misses(
    start_server: Callable[[ServerOptions], Server],
    model_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    link = Link(store=tmp_path / "store")
    two = link.server(
        model_folder("llama"), dtype="float32", flags=("--tp", "2"), environment=ENVIRONMENT
    )
    server = start_server(two)
    prompt = prompt_of(WHOLE + 5)

    cold = server.client.generate(prompt)
    kept = server.client.generate(prompt)
    link.forget(server.client)
    restored = server.client.generate(prompt)
    server.kill()
    one = start_server(replace(two, flags=()))
    other = one.client.generate(prompt)

    assert (restored.host_tokens, restored.device_tokens) == (WHOLE, 0)
    assert (kept.host_tokens, kept.device_tokens) == (0, WHOLE)
    assert (restored.tokens, restored.logprobs) == (kept.tokens, kept.logprobs)
    # What the values depend on is alike: a worker's share and its place alone make the miss.
    assert len(namespaces_of(server)) == 2
    assert {*namespaces_of(server)} == {*namespaces_of(one)}
    assert other.cached_tokens == 0
    # Sums of two workers, and of prompts cut elsewhere, are rounded elsewhere.
    for answer in (cold, other):
        assert answer.tokens == restored.tokens
        assert answer.logprobs == pytest.approx(restored.logprobs, abs=1e-4)


def test_k3_workers_that_split_heads_beside_the_axis_of_tokens_get_their_own_heads_back(
    start_server: Callable[[ServerOptions], Server],
    model_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    link = Link(store=tmp_path / "store")
    flags = ("--tp", "2", "--attn-cp-size", "2")  # and no --enable-prefill-cp: tokens are not split
    server = start_server(
        link.server(model_folder("llama"), dtype="float32", flags=flags, environment=ENVIRONMENT)
    )
    prompt = prompt_of(WHOLE + 5)

    server.client.generate(prompt)
    kept = server.client.generate(prompt)
    link.forget(server.client)
    restored = server.client.generate(prompt)

    assert (kept.host_tokens, restored.host_tokens) == (0, WHOLE)
    assert (restored.tokens, restored.logprobs) == (kept.tokens, kept.logprobs)

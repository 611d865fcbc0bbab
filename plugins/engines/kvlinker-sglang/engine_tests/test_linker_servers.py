"""Real servers with the linker: what was computed once is read back, in this process and in the next one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_frame.client import Answer, Client, RequestFailed
from engine_frame.server import Server, ServerOptions, SharedServer
from linked_servers import PAGE, Link, answer_without_cache, prompt_of

Start = Callable[[ServerOptions], Server]
ModelFolder = Callable[[str], Path]
SEVERAL = 12 * PAGE + 5
WHOLE = 12 * PAGE
FAMILIES = {"llama": "mha", "sliding": "swa", "latent": "mla"}
"""Of the models that are served, each by the strategy of that name."""


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Link:
    """Return the link of the server that most tests share; each has prompts of its own."""
    return Link(store=tmp_path_factory.mktemp("shared") / "store")


@pytest.fixture
def client(shared_server: SharedServer, model_folder: ModelFolder, link: Link) -> Client:
    """Return a client of the shared server, whose pools are empty.

    In bf16, the KV of a token that was generated differs a little from that of the same token in a prompt.
    """
    options = link.server(
        model_folder("llama"), max_total_tokens=16_384, max_running_requests=32, dtype="float32"
    )
    return shared_server.get(options).client


def test_a_conversation_goes_on_from_the_store_turn_by_turn(client: Client, link: Link) -> None:
    said: list[int] = []
    before = 0
    for turn in range(5):
        said += prompt_of(2 * PAGE + 3, seed=10 + turn)
        expected = answer_without_cache(client, said, new_tokens=PAGE)
        link.forget(client)

        answer = client.generate(said, new_tokens=PAGE)

        assert answer.tokens == expected.tokens
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        assert answer.host_tokens == before // PAGE * PAGE
        said += answer.tokens
        # The KV of the last token is computed when the next one is.
        before = len(said) - 1

    assert link.settle().tokens_close


def test_32_requests_at_once_share_prefixes_and_get_their_own_answers(
    client: Client, link: Link
) -> None:
    systems = [prompt_of(4 * PAGE, seed=20 + system) for system in range(3)]
    prompts = [
        [*systems[number % 3], *prompt_of(PAGE * (number % 4) + 7, seed=100 + number)]
        for number in range(32)
    ]
    expected = [answer_without_cache(client, prompt, new_tokens=4).tokens for prompt in prompts]
    link.forget(client)
    errors = link.counters().labels("errors_total")

    computed = client.generate_all(prompts, new_tokens=4)
    link.forget(client)
    restored = client.generate_all(prompts, new_tokens=4)

    for answers in (computed, restored):
        assert [a.tokens for a in answers if isinstance(a, Answer)] == expected
    assert sum(a.host_tokens for a in restored if isinstance(a, Answer)) >= 3 * 4 * PAGE
    assert link.settle().tokens_close
    assert link.counters().labels("errors_total") == errors


def test_l6_aborts_at_any_moment_leave_nothing_behind(client: Client, link: Link) -> None:
    prompt = prompt_of(60 * PAGE, seed=30)
    expected = client.generate(prompt)
    with ThreadPoolExecutor(1) as threads:
        for attempt in range(12):
            link.forget(client)
            request = threads.submit(_aborted, client, prompt, f"aborted {attempt}")
            time.sleep(0.003 * attempt)
            client.abort(f"aborted {attempt}")
            request.result()

    link.forget(client)
    again = client.generate(prompt, request_id="aborted 3")

    assert again.output == expected.output
    assert again.host_tokens > 0
    counted = link.settle()
    assert counted.tokens_close
    assert counted["queued/loads"] == 0


def _aborted(client: Client, prompt: list[int], request_id: str) -> None:
    try:
        client.generate(prompt, new_tokens=64, request_id=request_id)
    except RequestFailed:
        return


def test_b35_a_salt_keeps_requests_apart_in_the_store_too(client: Client, link: Link) -> None:
    prompt = prompt_of(SEVERAL, seed=40)
    salts: list[Mapping[str, object]] = [
        {},
        {"extra_key": "a"},
        {"extra_key": "b"},
        {"cache_salt": "a"},
    ]

    first, again = [], []
    for salt in salts:
        first.append(client.generate(prompt, extra=salt).host_tokens)
        link.forget(client)
    for salt in salts:
        again.append(client.generate(prompt, extra=salt).host_tokens)
        link.forget(client)

    assert first == [0, 0, 0, 0]
    assert again == [WHOLE] * 4


@pytest.mark.supports(
    engine="sglang",
    level="server",
    case="model",
    family=FAMILIES,
    kv_format="bf16",
)
@pytest.mark.parametrize("model", FAMILIES)
def test_what_a_server_has_forgotten_is_read_back_by_it_and_by_the_next_one(
    start_server: Start, model_folder: ModelFolder, tmp_path: Path, model: str
) -> None:
    link = Link(store=tmp_path / "store", options={"min_hit_tokens": 5 * PAGE})
    server = start_server(link.server(model_folder(model)))
    prompt, short = prompt_of(SEVERAL), prompt_of(4 * PAGE + 1, seed=1)

    server.client.generate(short)
    cold = server.client.generate(prompt)
    link.forget(server.client)
    restored = server.client.generate(prompt)
    counted = link.settle()
    server.restart()
    first = server.client.generate(prompt)
    warm = server.client.generate(prompt)
    too_short = server.client.generate(short)
    log = server.log_text()

    assert (cold.host_tokens, cold.device_tokens) == (0, 0)
    assert (restored.host_tokens, restored.device_tokens) == (WHOLE, 0)
    assert (first.host_tokens, first.device_tokens) == (WHOLE, 0)
    assert (warm.host_tokens, warm.device_tokens) == (0, WHOLE)
    assert cold.output == restored.output == first.output == warm.output
    assert too_short.cached_tokens == 0
    assert counted["tokens_total/landed"] == WHOLE
    assert counted.tokens_close
    assert not any(counted.labels("errors_total").values())
    assert re.findall(r"kvlinker: strategy (\S+) \(", log) == [FAMILIES[model]] * 2
    assert set(re.findall(r"KV Cache is allocated\. dtype: (\S+),", log)) == {"torch.bfloat16"}


def test_l10_a_server_that_is_stopped_leaves_a_store_that_the_next_one_reads(
    start_server: Start, model_folder: ModelFolder, tmp_path: Path
) -> None:
    link = Link(store=tmp_path / "store")
    server = start_server(link.server(model_folder("llama")))
    prompt = prompt_of(SEVERAL)
    cold = server.client.generate(prompt)
    link.settle()

    server.stop()
    server.start()
    answer = server.client.generate(prompt)

    assert answer.host_tokens == WHOLE
    assert answer.output == cold.output

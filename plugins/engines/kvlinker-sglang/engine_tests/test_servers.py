"""Real servers without any linker: what tests with one compare to."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_frame.client import Answer, RequestFailed
from engine_frame.models import VOCABULARY
from engine_frame.server import LinkerOptions, Server, ServerDied, ServerOptions, SharedServer

PAGE = 16


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    """Return a prompt of random tokens."""
    generator = random.Random(seed)  # noqa: S311 - to be the same in every run
    return [generator.randrange(3, VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("model", ["sliding", "latent", "llama"])
def test_a_prompt_that_is_in_the_pools_gets_the_answer_of_one_that_is_not(
    shared_server: SharedServer, model_folder: Callable[[str], Path], model: str
) -> None:
    client = shared_server.get(ServerOptions(model=model_folder(model), page_size=PAGE)).client
    prompt = prompt_of(12 * PAGE + 5)

    cold = client.generate(prompt)
    warm = client.generate(prompt)
    client.flush_cache()
    client.generate(prompt_of(5 * PAGE, seed=1))
    cold_again = client.generate(prompt)

    assert len(cold.tokens) == len(cold.logprobs) == 8
    assert (cold.cached_tokens, warm.cached_tokens, cold_again.cached_tokens) == (0, 12 * PAGE, 0)
    assert (warm.device_tokens, warm.host_tokens) == (12 * PAGE, 0)
    assert cold.output == warm.output == cold_again.output


def test_another_prompt_gets_another_answer(
    shared_server: SharedServer, model_folder: Callable[[str], Path]
) -> None:
    client = shared_server.get(ServerOptions(model=model_folder("llama"), page_size=PAGE)).client

    outputs = {client.generate(prompt_of(3 * PAGE, seed=seed)).tokens for seed in range(4)}

    assert len(outputs) == 4


def test_prompts_that_come_together_are_all_answered_in_their_order(
    shared_server: SharedServer, model_folder: Callable[[str], Path]
) -> None:
    client = shared_server.get(ServerOptions(model=model_folder("llama"), page_size=PAGE)).client
    prompts = [prompt_of(PAGE * length, seed=length) for length in range(1, 17)]

    answers = client.generate_all(prompts)

    assert [type(answer) for answer in answers] == [Answer] * len(prompts)
    lengths = [answer.prompt_tokens for answer in answers if isinstance(answer, Answer)]
    assert lengths == [len(prompt) for prompt in prompts]


def test_a_request_that_is_aborted_says_so(
    shared_server: SharedServer, model_folder: Callable[[str], Path]
) -> None:
    client = shared_server.get(ServerOptions(model=model_folder("llama"), page_size=PAGE)).client

    with ThreadPoolExecutor() as threads:
        long = threads.submit(
            client.generate, prompt_of(PAGE), new_tokens=1900, logprobs=False, request_id="long"
        )
        while not long.done():
            client.abort("long")
            time.sleep(0.05)

    answer = long.result()
    assert answer.finish == "abort"
    assert len(answer.tokens) < 1900


def test_a_request_that_is_refused_says_why(
    shared_server: SharedServer, model_folder: Callable[[str], Path]
) -> None:
    client = shared_server.get(ServerOptions(model=model_folder("llama"), page_size=PAGE)).client

    with pytest.raises(RequestFailed, match="input_ids"):
        client.generate([])

    assert client.is_healthy()


def test_the_smallest_linker_restores_what_a_server_has_forgotten(
    shared_server: SharedServer, model_folder: Callable[[str], Path]
) -> None:
    options = ServerOptions(
        model=model_folder("llama"),
        page_size=PAGE,
        linker=LinkerOptions(name="DictLinker", module="engine_frame.dict_linker"),
    )
    client = shared_server.get(options).client
    prompt = prompt_of(12 * PAGE + 5)

    cold = client.generate(prompt)
    warm = client.generate(prompt)
    client.flush_cache()
    restored = client.generate(prompt)

    assert (warm.device_tokens, warm.host_tokens) == (12 * PAGE, 0)
    assert (restored.device_tokens, restored.host_tokens) == (0, 12 * PAGE)
    assert cold.output == warm.output == restored.output


def test_a_server_that_does_not_come_up_says_what_it_logged(
    start_server: Callable[[ServerOptions], Server], model_folder: Callable[[str], Path]
) -> None:
    linker = LinkerOptions(module="no_module_of_this_name")

    with pytest.raises(ServerDied, match="No module named 'no_module_of_this_name'"):
        start_server(ServerOptions(model=model_folder("llama"), linker=linker))

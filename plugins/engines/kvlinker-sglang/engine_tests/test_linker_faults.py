"""Real servers over a store that fails, hangs, corrupts, fills up and evicts: every answer is right, and comes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import pytest
from busy_servers import spoil
from engine_frame.client import Answer, Client, RequestFailed
from engine_frame.server import Server, SharedServer
from faulty_store import PATIENT, held_calls, misbehave
from leftovers import check_nothing_is_held
from linked_servers import PAGE, Link, answer_without_cache, prompt_of, wait_for

from kvlinker_file import verify

ModelFolder = Callable[[str], Path]
SEVERAL = 12 * PAGE + 5
WHOLE = 12 * PAGE
LIMITS = {**PATIENT, "breaker_seconds": 0.01}
"""A store that failed is asked again at once."""


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Link:
    """Return the link of the server that all tests here share; its store has room for about 180 pages."""
    folder = tmp_path_factory.mktemp("faults")
    return Link(
        store=folder / "store", capacity="6MiB", options={"limits": LIMITS}, faults=folder / "plug"
    )


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, model_folder: ModelFolder, link: Link) -> Server:
    """Return the server; no prompt of one test is asked by another."""
    misbehave(link.control)
    options = link.server(
        model_folder("llama"), max_total_tokens=16_384, dtype="float32", spawned=True
    )
    return shared_server.get(options)


@pytest.fixture
def client(server: Server, link: Link) -> Client:
    """Return a client of the server, whose store works."""
    misbehave(link.control)
    return server.client


@dataclass(frozen=True)
class Asked:
    """One prompt, and what it was answered while the store worked: computed, and from the engine's own pools."""

    client: Client
    link: Link
    salt: str
    cold: Answer
    warm: Answer

    def ask(self) -> Answer:
        """Ask again."""
        return ask(self.client, self.salt)

    def ask_forgotten(self) -> Answer:
        """Ask again once the store works and the server has forgotten."""
        misbehave(self.link.control)
        self.link.forget(self.client)
        return self.ask()

    def is_right(self, answer: Answer) -> bool:
        """Whether an answer is that without a store, bit for bit.

        In fp32 the last bit of a sum differs where fewer tokens are computed at once: what was restored is compared
        with a prompt that was in the pools.
        """
        like = {0: self.cold, WHOLE: self.warm}[answer.cached_tokens]
        return answer.output == like.output and answer.tokens == self.cold.tokens


def ask(client: Client, salt: str) -> Answer:
    """Ask a prompt that a salt makes another one."""
    return client.generate(prompt_of(SEVERAL), extra={"extra_key": salt})


def stored(client: Client, link: Link, salt: str) -> Asked:
    """Have a prompt answered and stored; the pools are empty then."""
    cold, warm = ask(client, salt), ask(client, salt)
    link.forget(client)
    assert (cold.cached_tokens, warm.device_tokens) == (0, WHOLE)
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-4)
    return Asked(client, link, salt, cold, warm)


def errors(link: Link, call: str) -> float:
    """Return how often a call has failed."""
    return link.counters().labels("errors_total").get(call, 0.0)


# ---- one request ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "fault", "found", "failures"),
    [
        ("exists", "deny", 0, 0),
        ("exists", "evict", 0, 0),
        ("exists", "hang", 0, 1),
        ("exists", "raise", 0, 1),
        ("exists", "slow", WHOLE, 0),
        ("hold", "deny", 0, 0),
        ("hold", "evict", 0, 0),
        ("hold", "hang", 0, 1),
        ("hold", "raise", 0, 1),
        ("read", "slow", WHOLE, 0),
    ],
)
def test_l1_a_lookup_that_goes_wrong_costs_the_hit_and_changes_no_answer(
    client: Client, link: Link, call: str, fault: str, found: int, failures: int
) -> None:
    asked = stored(client, link, f"{call} {fault}")
    before = errors(link, "lookup")

    misbehave(link.control, (call, fault), times=1)
    during = asked.ask()
    after = asked.ask_forgotten()

    assert (during.host_tokens, after.host_tokens) == (found, WHOLE)
    assert asked.is_right(during)
    assert asked.is_right(after)
    assert errors(link, "lookup") == before + failures
    assert link.settle().tokens_close


@pytest.mark.parametrize(
    ("call", "fault"),
    [("open_read", "evict"), ("open_read", "raise"), ("read", "hang"), ("read", "raise")],
)
def test_e2_a_load_that_fails_is_an_error_once_and_the_retry_computes(
    client: Client, link: Link, call: str, fault: str
) -> None:
    asked = stored(client, link, f"{call} {fault}")
    before = link.counters()

    misbehave(link.control, (call, fault))
    with pytest.raises(RequestFailed) as failure:
        asked.ask()
    retry = asked.ask()
    after = asked.ask_forgotten()

    counted = link.settle()
    assert failure.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert (retry.cached_tokens, after.host_tokens) == (0, WHOLE)
    assert asked.is_right(retry)
    assert asked.is_right(after)
    assert counted["errors_total/load"] == before["errors_total/load"] + 1
    assert counted["tokens_total/failed"] == before["tokens_total/failed"] + WHOLE
    assert counted.tokens_close


def test_e3_bytes_that_changed_on_disk_reach_no_answer(client: Client, link: Link) -> None:
    asked = stored(client, link, "corrupt")
    before = link.counters()

    spoil(link.store)
    with pytest.raises(RequestFailed) as failure:
        asked.ask()
    retry = asked.ask()
    after = asked.ask_forgotten()

    counted = link.settle()
    assert failure.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert (retry.cached_tokens, after.host_tokens) == (0, WHOLE)
    assert asked.is_right(retry)
    assert asked.is_right(after)
    assert counted["errors_total/load"] == before["errors_total/load"] + 1
    assert counted["store_events_total/corrupt"] >= before["store_events_total/corrupt"] + 12
    assert counted.tokens_close


def test_l5_a_store_that_promises_what_it_never_had_is_believed_once(
    client: Client, link: Link
) -> None:
    expected = answer_without_cache(client, prompt_of(SEVERAL))
    link.forget(client)

    misbehave(link.control, ("exists", "lie"), ("hold", "lie"))
    with pytest.raises(RequestFailed) as failure:
        ask(client, "lies")
    retry = ask(client, "lies")
    misbehave(link.control)

    assert failure.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert retry.cached_tokens == 0
    assert retry.output == expected.output
    assert link.settle().tokens_close


@pytest.mark.parametrize("fault", ["full", "hang", "raise"])
def test_l8_what_could_not_be_stored_is_computed_and_stored_the_next_time(
    client: Client, link: Link, fault: str
) -> None:
    before = errors(link, "offload")

    misbehave(link.control, ("write", fault))
    asked = stored(client, link, f"write {fault}")
    failed = errors(link, "offload")
    computed = asked.ask_forgotten()
    restored = asked.ask_forgotten()

    assert (computed.cached_tokens, restored.host_tokens) == (0, WHOLE)
    assert asked.is_right(computed)
    assert asked.is_right(restored)
    assert failed > before
    assert errors(link, "offload") == failed
    assert link.settle().tokens_close


def test_l6_a_request_that_is_aborted_while_its_load_hangs_leaves_nothing(
    client: Client, link: Link
) -> None:
    asked = stored(client, link, "stuck")
    misbehave(link.control, ("read", "hang"))

    with ThreadPoolExecutor() as threads:
        stuck = threads.submit(_stuck, client)
        wait_for(lambda: "read" in held_calls(link.control), "the load")
        client.abort("stuck")
        stuck.result()
    retry = asked.ask()
    after = asked.ask_forgotten()

    counted = link.settle()
    assert asked.is_right(retry)
    assert asked.is_right(after)
    assert (retry.cached_tokens, after.host_tokens) == (0, WHOLE)
    assert counted["queued/loads"] == 0
    assert counted.tokens_close


def _stuck(client: Client) -> None:
    with contextlib.suppress(RequestFailed):
        client.generate(
            prompt_of(SEVERAL), request_id="stuck", new_tokens=64, extra={"extra_key": "stuck"}
        )


def test_b78_a_store_that_is_too_small_gives_up_what_is_oldest_and_answers_stay_right(
    client: Client, link: Link
) -> None:
    prompts = [prompt_of(SEVERAL, seed=seed) for seed in range(20)]
    evicted = link.counters()["store_events_total/evicted"]

    computed = [client.generate(prompt, new_tokens=2) for prompt in prompts]
    link.forget(client)
    again = [client.generate(prompt, new_tokens=2) for prompt in reversed(prompts)]

    counted = link.settle()
    assert [answer.tokens for answer in again] == [answer.tokens for answer in computed[::-1]]
    for answer, first in zip(again, computed[::-1], strict=True):
        assert answer.logprobs == pytest.approx(first.logprobs, abs=1e-4)
    assert again[0].host_tokens == WHOLE
    assert min(answer.host_tokens for answer in again) < WHOLE
    assert counted["store_events_total/evicted"] > evicted
    assert counted["store_used_bytes"] <= counted["store_capacity_bytes"]
    assert counted.tokens_close


# ---- the end ----------------------------------------------------------------------------------


def test_l10_a_server_whose_store_hangs_stops_and_leaves_whole_objects(
    server: Server, link: Link
) -> None:
    asked = stored(server.client, link, "before the end")
    misbehave(link.control, ("read", "hang"), ("write", "hang"))

    ask(server.client, "the last")
    with ThreadPoolExecutor() as threads:
        stuck = threads.submit(_lost, asked)
        wait_for(lambda: "read" in held_calls(link.control), "the load")
        server.stop()
        stuck.result()

    report = verify(link.store)
    assert report.is_clean
    assert report.objects >= WHOLE // PAGE
    check_nothing_is_held(link)


def _lost(asked: Asked) -> None:
    with contextlib.suppress(RequestFailed, OSError):
        asked.ask()

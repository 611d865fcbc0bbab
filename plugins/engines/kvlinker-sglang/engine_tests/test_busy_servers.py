"""Real servers of each family that have much to do: conversations, many requests at once, aborts, a store that errs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest
from busy_servers import (
    LONGEST,
    OTHERS,
    PLACES,
    WHOLE,
    Busy,
    check_same,
    persevere,
    spoil,
)
from engine_frame.client import Answer
from engine_frame.server import Server, SharedServer
from faulty_store import PATIENT, FaultChoices, misbehave
from linked_servers import PAGE, Link, answer_without_cache, prompt_of, wait_for

ModelFolder = Callable[[str], Path]
FAMILIES = ["llama", "sliding", "latent"]
CONVERSATIONS = 6
LIMITS = {**PATIENT, "breaker_seconds": 0.01}
"""A store that failed is asked again at once."""


@pytest.fixture(scope="module", params=FAMILIES)
def server_of_family(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: ModelFolder,
    shared_server: SharedServer,
) -> Iterator[Busy]:
    """Give a server of each family with few places; no prompt of one test is asked by another, without its salt.

    In bf16, the KV of a token that was generated differs a little from that of the same token in a prompt.
    """
    shared_server.close()
    folder = tmp_path_factory.mktemp("busy")
    link = Link(
        store=folder / "store",
        capacity="8MiB",
        options={"limits": LIMITS},
        faults=folder / "plug",
    )
    misbehave(link.control)
    options = link.server(
        model_folder(request.param),
        max_running_requests=PLACES,
        max_total_tokens=16_384,
        dtype="float32",
    )
    with Server(options, folder / "log") as server, ThreadPoolExecutor(32) as threads:
        expected = [answer_without_cache(server.client, prompt) for prompt in OTHERS]
        yield Busy(client=server.client, link=link, expected=expected, threads=threads)


@pytest.fixture
def busy(server_of_family: Busy) -> Busy:
    """Return the server once it has nothing to do; its store works, and its pools are empty."""
    misbehave(server_of_family.link.control)
    server_of_family.link.forget(server_of_family.client)
    return server_of_family


# ---- much to do -------------------------------------------------------------------------------


def test_a_conversation_goes_on_from_the_store_turn_by_turn(busy: Busy) -> None:
    said: list[int] = []
    before = 0
    for turn in range(5):
        said += prompt_of(2 * PAGE + 3, seed=10 + turn)
        expected = answer_without_cache(busy.client, said, new_tokens=PAGE)
        busy.link.forget(busy.client)

        answer = busy.client.generate(said, new_tokens=PAGE)

        check_same(answer, expected)
        assert answer.host_tokens == before // PAGE * PAGE
        said += answer.tokens
        # The KV of the last token is computed when the next one is.
        before = len(said) - 1

    assert busy.link.settle().tokens_close


def test_32_requests_at_once_share_prefixes_and_get_their_own_answers(busy: Busy) -> None:
    systems = [prompt_of(4 * PAGE, seed=20 + system) for system in range(3)]
    prompts = [
        [*systems[number % 3], *prompt_of(PAGE * (number % 4) + 7, seed=200 + number)]
        for number in range(32)
    ]
    expected = [answer_without_cache(busy.client, prompt, new_tokens=4) for prompt in prompts]
    busy.link.forget(busy.client)
    errors = busy.link.counters().labels("errors_total")

    computed = busy.client.generate_all(prompts, new_tokens=4)
    busy.link.forget(busy.client)
    restored = busy.client.generate_all(prompts, new_tokens=4)

    for answers in (computed, restored):
        for answer, alone in zip(answers, expected, strict=True):
            assert isinstance(answer, Answer)
            check_same(answer, alone)
    assert sum(a.host_tokens for a in restored if isinstance(a, Answer)) >= 3 * 4 * PAGE
    assert busy.link.settle().tokens_close
    assert busy.link.counters().labels("errors_total") == errors


def test_b78_a_store_that_is_too_small_for_what_is_asked_at_once_evicts_and_answers_stay_right(
    busy: Busy,
) -> None:
    prompts = [prompt_of(20 * PAGE + 5, seed=300 + number) for number in range(30)]
    expected = [answer_without_cache(busy.client, prompt, new_tokens=2) for prompt in prompts]
    busy.link.forget(busy.client)
    before = busy.link.counters()

    rounds = []
    for _ in range(2):
        rounds.append(busy.client.generate_all(prompts, new_tokens=2))
        busy.link.forget(busy.client)

    for answers in rounds:
        for answer, alone in zip(answers, expected, strict=True):
            assert isinstance(answer, Answer)
            check_same(answer, alone)
    counted = busy.link.settle()
    assert counted["store_events_total/evicted"] > before["store_events_total/evicted"]
    assert counted["store_used_bytes"] <= counted["store_capacity_bytes"]
    assert counted.tokens_close


def test_b35_a_salt_keeps_requests_apart_in_the_store_too(busy: Busy) -> None:
    prompt = prompt_of(WHOLE + 5, seed=40)
    salts: list[Mapping[str, object]] = [
        {},
        {"extra_key": "a"},
        {"extra_key": "b"},
        {"cache_salt": "a"},
    ]

    first, again = [], []
    for salt in salts:
        first.append(busy.client.generate(prompt, extra=salt).host_tokens)
        busy.link.forget(busy.client)
    for salt in salts:
        again.append(busy.client.generate(prompt, extra=salt).host_tokens)
        busy.link.forget(busy.client)

    assert first == [0, 0, 0, 0]
    assert again == [WHOLE] * 4


# ---- aborts, at each stage of a request, told by the stage and not by a clock -----------------


def test_l6_a_request_that_is_aborted_while_it_waits_for_a_place(busy: Busy) -> None:
    prompt = prompt_of(WHOLE + 5, seed=1)
    busy.client.generate(prompt, extra={"extra_key": "waits"})
    busy.link.forget(busy.client)
    others = busy.occupy(PLACES, "beside one that waits")

    victim = busy.submit(prompt, "waits", LONGEST, "waiting")
    wait_for(lambda: busy.client.load().waiting > 0, "the request that waits")
    answer = busy.abort("waiting", victim)

    assert answer is None or not answer.tokens
    assert busy.client.load().running > 0
    busy.check_others(others)
    busy.check_victim(prompt, "waits")


def test_l6_a_request_that_is_aborted_while_its_pages_are_loaded(busy: Busy) -> None:
    prompt = prompt_of(WHOLE + 5, seed=2)
    busy.client.generate(prompt, extra={"extra_key": "loads"})
    busy.link.forget(busy.client)
    others = busy.occupy(PLACES - 1, "beside one that loads")

    misbehave(busy.link.control, ("read", "hold"))
    victim = busy.submit(prompt, "loads", LONGEST, "loading")
    busy.wait_until_held("read")
    busy.client.abort("loading")
    misbehave(busy.link.control)
    answer = busy.abort("loading", victim)

    assert answer is None or len(answer.tokens) < LONGEST
    busy.check_others(others)
    busy.check_victim(prompt, "loads")


def test_l6_a_request_that_is_aborted_while_it_is_answered(busy: Busy) -> None:
    prompt = prompt_of(WHOLE + 5, seed=3)
    others = busy.occupy(PLACES - 2, "beside one that decodes")

    victim = busy.submit(prompt, "decodes", LONGEST, "decoding")
    wait_for(lambda: busy.client.load().running == PLACES - 1, "the request")
    busy.client.generate(prompt_of(PAGE, seed=4), new_tokens=2)  # begun later, and answered
    answer = busy.abort("decoding", victim)

    assert answer is not None
    assert 0 < len(answer.tokens) < LONGEST
    busy.check_others(others)
    busy.check_victim(prompt, "decodes")


def test_l6_a_request_that_is_aborted_while_its_pages_are_stored(busy: Busy) -> None:
    prompt = prompt_of(WHOLE + 5, seed=5)
    others = busy.occupy(PLACES - 1, "beside one that stores")

    misbehave(busy.link.control, ("write", "hold"))
    victim = busy.submit(prompt, "stores", LONGEST, "storing")
    busy.wait_until_held("write")
    answer = busy.abort("storing", victim)

    assert answer is not None
    assert len(answer.tokens) < LONGEST
    busy.check_others(others)
    busy.check_victim(prompt, "stores")


def test_l6_all_requests_that_are_aborted_at_once_leave_nothing(busy: Busy) -> None:
    prompts = [prompt_of(WHOLE + 5, seed=30 + number) for number in range(4 * PLACES)]
    for prompt in prompts[::2]:
        busy.client.generate(prompt, extra={"extra_key": "all"})
    busy.link.forget(busy.client)

    misbehave(busy.link.control, ("read", "hold"), ("write", "slow"))
    requests = [
        busy.submit(prompt, "all", LONGEST, f"all {number}")
        for number, prompt in enumerate(prompts)
    ]
    busy.wait_until_held("read")
    names = [f"all {number}" for number in range(len(requests))]
    for name in names:
        busy.client.abort(name)
    misbehave(busy.link.control, ("write", "slow"))
    answers = list(busy.threads.map(busy.abort, names, requests))

    assert all(answer is None or len(answer.tokens) < LONGEST for answer in answers)
    for prompt in prompts[:2]:
        busy.check_victim(prompt, "all")


def test_l6_aborts_at_any_moment_leave_nothing_behind(busy: Busy) -> None:
    prompt = prompt_of(60 * PAGE, seed=50)
    expected = busy.client.generate(prompt)
    for attempt in range(8):
        busy.link.forget(busy.client)
        request = busy.submit(prompt, "", 64, f"aborted {attempt}")
        time.sleep(0.005 * attempt)
        busy.client.abort(f"aborted {attempt}")
        wait([request])

    busy.link.forget(busy.client)
    again = busy.client.generate(prompt, request_id="aborted 3")

    check_same(again, expected)
    assert again.host_tokens > 0
    counted = busy.link.settle()
    assert counted.tokens_close
    assert counted["queued/loads"] == 0


# ---- a store that goes wrong meanwhile --------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """What all conversations say at one time, and the tokens they are answered without a cache."""

    prompts: Sequence[Sequence[int]]
    expected: Sequence[tuple[int, ...]]


@pytest.fixture(scope="module")
def turns(server_of_family: Busy) -> list[Turn]:
    """Return the turns of conversations, half of which begin with the same text."""
    misbehave(server_of_family.link.control)
    client = server_of_family.client
    said = [prompt_of(4 * PAGE, seed=number % 2) for number in range(CONVERSATIONS)]
    turns = []
    for turn in range(3):
        for number, words in enumerate(said):
            words.extend(prompt_of(PAGE + 5, seed=100 * turn + number))
        prompts = [list(words) for words in said]
        answers = [answer_without_cache(client, words).tokens for words in prompts]
        turns.append(Turn(prompts, answers))
        for words, answer in zip(said, answers, strict=True):
            words.extend(answer)
    return turns


@dataclass(frozen=True)
class Mixture:
    """Faults that come together, and the calls that are sure to fail by them."""

    faults: Sequence[tuple[str, str]]
    choices: FaultChoices
    failing: frozenset[str]
    spoils: bool = False
    """Whether bytes change on disk, behind each turn."""


MIXTURES = {
    "damage": Mixture((), {}, frozenset({"load"}), spoils=True),
    "errors": Mixture(
        (("exists", "raise"), ("open_read", "raise"), ("read", "raise"), ("write", "raise")),
        {"every": 2, "times": 4},
        frozenset({"lookup", "load", "offload"}),
    ),
    "evictions": Mixture(
        (("hold", "evict"), ("open_read", "evict"), ("write", "full")),
        {"times": 4, "share": 0.3},
        frozenset({"load", "offload"}),
    ),
    "hangs": Mixture(
        (("exists", "hang"), ("read", "hang"), ("write", "hang")),
        {"times": 1},
        frozenset({"lookup", "load", "offload"}),
    ),
    "lies": Mixture(
        (("exists", "lie"), ("hold", "lie"), ("write", "slow")), {"times": 4}, frozenset({"load"})
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_conversations_go_on_while_their_store_goes_wrong(
    busy: Busy, turns: Sequence[Turn], name: str
) -> None:
    client, link, salt = busy.client, busy.link, {"extra_key": name}
    before = link.counters()
    mixture = MIXTURES[name]
    misbehave(link.control, *mixture.faults, **mixture.choices)

    failed = 0
    for turn in turns:
        answers, failures = persevere(client, turn.prompts, salt)
        link.forget(client)
        failed += failures
        assert [answer.tokens for answer in answers] == turn.expected
        if mixture.spoils:
            spoil(link.store)

    misbehave(link.control)
    restored, failures = _ask_until_restored(busy, turns[-1].prompts, salt)

    assert [answer.tokens for answer in restored] == turns[-1].expected
    counted = link.settle()
    grown = {
        call: count - before[f"errors_total/{call}"]
        for call, count in counted.labels("errors_total").items()
    }
    assert counted.tokens_close
    assert {call for call, count in grown.items() if count} >= mixture.failing
    assert failed + failures <= CONVERSATIONS * grown["load"]


def _ask_until_restored(
    busy: Busy, prompts: Sequence[Sequence[int]], salt: Mapping[str, object]
) -> tuple[list[Answer], int]:
    """Ask until every answer is from the store: of a page that is damaged in several layers one is found at a time."""
    failed = 0
    for _ in range(5):
        answers, failures = persevere(busy.client, prompts, salt)
        busy.link.forget(busy.client)
        failed += failures
        if all(answer.host_tokens > 0 for answer in answers):
            return answers, failed
    pytest.fail("the conversations were never restored")

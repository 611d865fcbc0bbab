"""Two real servers on one directory: killed while they write to it, stopped, and started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from types import NoneType
from typing import Self

import pytest
from engine_frame.client import Answer, Client
from engine_frame.server import Server, SharedServer, free_port
from faulty_store import HALT, held_calls, misbehave
from leftovers import check_nothing_is_held, is_free
from linked_servers import PAGE, Link, answer_without_cache, prompt_of, wait_for

from kvlinker_file import verify

ModelFolder = Callable[[str], Path]
WHOLE = 12 * PAGE
LONG = 40 * PAGE
LOAD = 24
"""Prompts of a load, of which some are stored when the server is killed, and others are not."""
WRITES = 4
"""Of that load, which end before the server is killed."""
WRITTEN = WRITES * LONG // PAGE // 2
"""Objects of the load that are stored then, at the least: a prompt may be written in pieces."""


@dataclass(frozen=True)
class Linked:
    """A server and its linker."""

    server: Server
    link: Link

    @property
    def client(self) -> Client:
        """A client of the server that is running."""
        return self.server.client

    def running(self) -> Self:
        """Start the server where it does not run, and return this."""
        if not self.client.is_healthy():
            self.server.start()
        return self

    def kill_while_it_writes(self, prompts: Sequence[list[int]]) -> None:
        """Ask many prompts, and end the server with SIGKILL in a write, behind others and before more."""
        misbehave(self.link.control, ("write", HALT), first=WRITES + 1)
        with _asked(self.client, prompts) as requests:
            wait_for(lambda: held_calls(self.link.control) == ["write"], "the write")
            self.server.kill()
        misbehave(self.link.control)
        failures = [request.exception() for request in requests]
        assert any(failures)
        assert all(isinstance(f, NoneType | OSError | HTTPException) for f in failures)


@contextmanager
def _asked(client: Client, prompts: Sequence[list[int]]) -> Iterator[list[Future[Answer]]]:
    """Ask all prompts meanwhile, and wait for what becomes of each."""
    with ThreadPoolExecutor(8) as threads:
        yield [threads.submit(client.generate, prompt, new_tokens=2) for prompt in prompts]


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, model_folder: ModelFolder, shared_server: SharedServer
) -> Iterator[tuple[Linked, Linked]]:
    """Return two servers of one model on one directory."""
    shared_server.close()
    folder = tmp_path_factory.mktemp("pair")
    first = Link(store=folder / "store", capacity="256MiB", faults=folder / "first")
    second = replace(first, port=free_port(), faults=folder / "second")
    model = model_folder("llama")
    with (
        Server(first.server(model, max_total_tokens=16_384), folder / "first.log") as one,
        Server(second.server(model, max_total_tokens=16_384), folder / "second.log") as other,
    ):
        yield Linked(one, first), Linked(other, second)


def test_what_one_server_stored_the_other_one_restores(pair: tuple[Linked, Linked]) -> None:
    for seed, (writer, reader) in enumerate([pair, pair[::-1]]):
        prompt = prompt_of(WHOLE + 5, seed=seed)
        computed = writer.client.generate(prompt)
        writer.link.settle()

        restored = reader.client.generate(prompt)

        assert computed.cached_tokens == 0
        assert (restored.host_tokens, restored.device_tokens) == (WHOLE, 0)
        assert restored.output == computed.output
        assert reader.link.settle().tokens_close


def test_a_server_goes_on_while_the_other_one_is_killed_in_the_middle_of_its_writes(
    pair: tuple[Linked, Linked],
) -> None:
    survivor, victim = pair
    prompts = [prompt_of(LONG, seed=100 + number) for number in range(LOAD)]
    own = [prompt_of(WHOLE + 5, seed=200 + number) for number in range(16)]
    expected = [answer_without_cache(survivor.client, prompt) for prompt in own]
    errors = survivor.link.counters().labels("errors_total")

    with ThreadPoolExecutor(1) as threads:
        meanwhile = threads.submit(_ask_one_by_one, survivor, own)
        victim.kill_while_it_writes(prompts)
        answers = meanwhile.result()

    assert [answer.output for answer in answers] == [answer.output for answer in expected]
    _assert_some_are_stored_and_all_answers_are_right(survivor, prompts)
    survivor.link.forget(survivor.client)
    again = _ask_one_by_one(survivor, own)
    assert [answer.output for answer in again] == [answer.output for answer in expected]
    assert [answer.host_tokens for answer in again] == [WHOLE] * len(own)
    assert survivor.link.counters().labels("errors_total") == errors
    assert survivor.link.settle().tokens_close


def test_l10_what_a_server_stored_before_it_was_stopped_the_next_one_restores(
    pair: tuple[Linked, Linked],
) -> None:
    first, second = pair
    prompt = prompt_of(WHOLE + 5, seed=2)
    cold = first.running().client.generate(prompt)
    first.link.settle()

    first.server.stop()
    answer = second.running().client.generate(prompt)

    assert is_free(first.link.port)
    assert (answer.host_tokens, answer.device_tokens) == (WHOLE, 0)
    assert answer.output == cold.output


def test_l10_a_server_that_is_killed_in_the_middle_of_its_writes_leaves_whole_objects_and_a_stopped_one_holds_none(
    pair: tuple[Linked, Linked],
) -> None:
    pair[0].server.kill()
    last = pair[1].running()
    prompts = [prompt_of(LONG, seed=300 + number) for number in range(LOAD)]

    last.kill_while_it_writes(prompts)
    report = verify(last.link.store)
    last.server.options = replace(last.server.options, spawned=True)  # its end is an operator's
    last.running()

    assert report.is_clean
    assert report.objects >= WRITTEN
    _assert_some_are_stored_and_all_answers_are_right(last, prompts)
    assert not any(last.link.counters().labels("errors_total").values())
    last.server.stop()
    assert verify(last.link.store).is_clean
    check_nothing_is_held(last.link)


def _ask_one_by_one(linked: Linked, prompts: Sequence[list[int]]) -> list[Answer]:
    return [linked.client.generate(prompt) for prompt in prompts]


def _assert_some_are_stored_and_all_answers_are_right(
    linked: Linked, prompts: Sequence[list[int]]
) -> None:
    """Ask all prompts of a server that was killed while it stored them."""
    found = []
    for prompt in prompts:
        answer = linked.client.generate(prompt)
        expected = answer_without_cache(linked.client, prompt)
        assert answer.tokens[0] == expected.tokens[0]
        assert answer.logprobs[0] == pytest.approx(expected.logprobs[0], abs=0.02)
        found.append(answer.host_tokens)
    assert sum(found) >= WRITTEN * PAGE
    assert 0 in found

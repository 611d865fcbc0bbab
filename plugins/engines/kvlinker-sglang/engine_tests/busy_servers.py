"""A server that has much to do while its store goes wrong: how it is asked, aborted and checked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import pytest
from engine_frame.client import Answer, Client, RequestFailed
from faulty_store import held_calls, misbehave
from linked_servers import PAGE, Link, answer_without_cache, prompt_of, wait_for

__all__ = ["LONGEST", "OTHERS", "PLACES", "WHOLE", "Busy", "check_same", "persevere", "spoil"]

WHOLE = 12 * PAGE
PLACES = 4
"""Requests that run at a time; others wait."""
LONGEST = 1800
"""Tokens that a request generates which is to be there until it is aborted: as many as the models' contexts take."""
OTHERS = tuple(tuple(prompt_of(WHOLE + 5, seed=100 + number)) for number in range(PLACES))
"""Prompts of those whom nobody aborts."""


@dataclass(frozen=True, kw_only=True)
class Busy:
    """A server and its linker, whose store may go wrong, and what others are answered whom nobody aborts."""

    client: Client
    link: Link
    expected: Sequence[Answer]
    """Of the others, without a cache."""
    threads: ThreadPoolExecutor

    def submit(self, prompt: list[int], salt: str, tokens: int, name: str) -> Future[Answer]:
        """Ask, without waiting for the answer."""
        return self.threads.submit(
            self.client.generate,
            prompt,
            new_tokens=tokens,
            request_id=name,
            extra={"extra_key": salt},
        )

    def occupy(self, places: int, salt: str) -> Mapping[str, Future[Answer]]:
        """Begin requests of others, and return them by name once all of them run and everything is stored."""
        others = {
            f"{salt} {number}": self.submit(list(prompt), salt, LONGEST, f"{salt} {number}")
            for number, prompt in enumerate(OTHERS[:places])
        }
        wait_for(lambda: self.client.load().running == places, "the requests of others")
        self.link.settle()
        return others

    def wait_until_held(self, call: str) -> None:
        """Return once the store, which was told to, holds a call."""
        wait_for(lambda: call in held_calls(self.link.control), f"the store's {call}")

    def abort(self, name: str, request: Future[Answer]) -> Answer | None:
        """Abort a request and return what it had been answered, or nothing where it never ran."""
        while not request.done():  # an abort that overtakes its request is of nobody
            self.client.abort(name)
            wait([request], timeout=0.05)
        failure = request.exception()
        if failure is not None:
            assert isinstance(failure, RequestFailed)
            assert "aborted" in failure.text.lower()
            return None
        answer = request.result()
        assert answer.finish == "abort"
        return answer

    def check_others(self, others: Mapping[str, Future[Answer]]) -> None:
        """Check that nobody else was touched: all go on until they are aborted, and are answered as without a cache."""
        assert not any(request.done() for request in others.values())
        for (name, request), expected in zip(others.items(), self.expected, strict=False):
            answer = self.abort(name, request)
            assert answer is not None
            _check_beginning(answer, expected)

    def check_victim(self, prompt: list[int], salt: str) -> None:
        """Check that the prompt of an aborted request is answered as by a server without a cache, and then restored."""
        misbehave(self.link.control)
        expected = answer_without_cache(self.client, prompt)
        first = self.client.generate(prompt, extra={"extra_key": salt})
        self.link.forget(self.client)
        second = self.client.generate(prompt, extra={"extra_key": salt})

        check_same(first, expected)
        check_same(second, expected)
        assert (second.host_tokens, second.device_tokens) == (WHOLE, 0)
        self.link.forget(self.client)
        counted = self.link.counters()
        assert counted.tokens_close
        assert counted["open_tokens"] == 0
        assert self.client.load().running == 0


def check_same(answer: Answer, expected: Answer) -> None:
    """Check what an answer begins with: in fp32 requests that run together differ in last bits alone."""
    assert len(answer.tokens) >= len(expected.tokens)
    _check_beginning(answer, expected)


def _check_beginning(answer: Answer, expected: Answer) -> None:
    count = min(len(answer.tokens), len(expected.tokens))
    assert count
    assert answer.tokens[:count] == expected.tokens[:count]
    assert answer.logprobs[:count] == pytest.approx(expected.logprobs[:count], abs=1e-3)


def spoil(store: Path) -> None:
    """Change one byte of every 4 KiB of what is stored, behind the header of an object."""
    for segment in store.glob("segments/*.slab"):
        with segment.open("r+b") as file:
            for place in range(2048, segment.stat().st_size, 4096):
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 0xFF]))


def persevere(
    client: Client, prompts: Sequence[Sequence[int]], extra: Mapping[str, object]
) -> tuple[list[Answer], int]:
    """Send all prompts together, those again that failed; return their answers, and how many failed."""
    answers: dict[int, Answer] = {}
    failed = 0
    for attempt in itertools.count():
        assert attempt <= 10, "a request fails for ever"
        left = [number for number in range(len(prompts)) if number not in answers]
        if not left:
            break
        outcomes = client.generate_all([prompts[number] for number in left], extra=extra)
        for number, outcome in zip(left, outcomes, strict=True):
            if isinstance(outcome, Answer):
                answers[number] = outcome
            else:
                assert outcome.status == HTTPStatus.SERVICE_UNAVAILABLE
                failed += 1
    return [answers[number] for number in range(len(prompts))], failed

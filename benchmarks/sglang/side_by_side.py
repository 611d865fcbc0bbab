"""What is asked of every variant: the same prompts, in turn, and the same answers, or nothing is told."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from engine_frame.client import Answer
from linker_events import Event, What
from measuring import Times, in_turn
from random_model import VOCABULARY
from timed_engine import Engine, Timed

__all__ = ["COLD", "DEVICE", "SideBySide", "WrongAnswerError", "make_prompt"]

COLD, DEVICE = "no cache", "a device hit"
ANSWERED = 8
FIRST_PLAIN_TOKEN = 3


class WrongAnswerError(Exception):
    """A variant does not answer as the engine does without a linker, or did not restore what it should have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Truth:
    """What the engine says to one prompt when no linker is asked."""

    cold: Answer
    hit: Answer
    """With all but the last token in the device's pool: what a restored prompt computes, bit by bit."""


@dataclass(slots=True)
class SideBySide:
    """An engine and the linkers in it."""

    engine: Engine
    linkers: Sequence[str]
    rounds: int
    _truths: dict[int, _Truth] = field(default_factory=dict)

    def prime(self, length: int) -> None:
        """Let every variant compute a prompt of `length` tokens and one more, keep it, restore it, and answer equally.

        Raises:
            WrongAnswerError: one does not.
        """
        prompt = make_prompt(length)
        ask = functools.partial(self.engine.ask, new_tokens=ANSWERED)
        cold = ask(COLD, prompt, flush=True).answer
        hit = ask(DEVICE, prompt, flush=False).answer
        truth = self._truths[length] = _Truth(cold=cold, hit=hit)
        _check(COLD, truth, cold, device=0, host=0)
        _check(DEVICE, truth, hit, device=length, host=0)
        for name in self.linkers:
            first = ask(name, prompt, flush=True).answer
            _check(name, truth, first, device=0, host=0)
            again = ask(name, prompt, flush=True).answer
            _check(name, truth, again, device=0, host=length)

    def restores(self, length: int) -> tuple[Times, Times]:
        """Time a primed prompt: the first token of every variant, and all lookups of a request of linkers."""
        runs: dict[str, Callable[[], Timed]] = {
            COLD: functools.partial(self._cold, length),
            DEVICE: functools.partial(self._device, length),
        }
        for name in self.linkers:
            runs[name] = functools.partial(self._restored, length, name)
        found, first_token = self._in_turn(runs, lambda one: one.seconds)
        lookups = {name: [_total(one, What.LOOKUP) for one in found[name]] for name in self.linkers}
        return first_token, Times(lookups)

    def loads(self, length: int, limits: Mapping[str, Callable[[], float]]) -> Times:
        """Time what loading a primed prompt takes with the machine to itself, and in turn with it what bounds it."""

        def load(name: str) -> float:
            return _total(self._restored(length, name, is_alone=True), What.LOAD)

        runs = {name: functools.partial(load, name) for name in self.linkers}
        return in_turn({**runs, **limits}, rounds=self.rounds)

    def offloads(self, length: int) -> tuple[Times, Times]:
        """Time a prompt that nobody has seen, another one each round: its first token, and storing its pages."""
        runs: dict[str, Callable[[], Timed]] = {
            name: functools.partial(self._unseen, length, name, count())
            for name in (COLD, *self.linkers)
        }
        found, first_token = self._in_turn(runs, lambda one: one.seconds)
        for name in self.linkers:
            _check_equal(name, found[name], found[COLD])
        stored = {name: [_total(one, What.OFFLOAD) for one in found[name]] for name in self.linkers}
        return first_token, Times(stored)

    def _in_turn(
        self, runs: Mapping[str, Callable[[], Timed]], seconds: Callable[[Timed], float]
    ) -> tuple[dict[str, list[Timed]], Times]:
        found: dict[str, list[Timed]] = {name: [] for name in runs}

        def run(name: str) -> float:
            found[name].append(runs[name]())
            return seconds(found[name][-1])

        times = in_turn({name: functools.partial(run, name) for name in runs}, rounds=self.rounds)
        return {name: each[-self.rounds :] for name, each in found.items()}, times

    def _cold(self, length: int) -> Timed:
        found = self.engine.ask(COLD, make_prompt(length), flush=True)
        _check(COLD, self._truths[length], found.answer, device=0, host=0)
        return found

    def _device(self, length: int) -> Timed:
        self.engine.ask(DEVICE, make_prompt(length), flush=True)
        found = self.engine.ask(DEVICE, make_prompt(length), flush=False)
        _check(DEVICE, self._truths[length], found.answer, device=length, host=0)
        return found

    def _restored(self, length: int, name: str, *, is_alone: bool = False) -> Timed:
        found = self.engine.ask(name, make_prompt(length), flush=True, is_alone=is_alone)
        _check(name, self._truths[length], found.answer, device=0, host=length)
        return found

    def _unseen(self, length: int, name: str, numbers: Iterator[int]) -> Timed:
        prompt = make_prompt(length, seed=f"{length} {next(numbers)}")
        found = self.engine.ask(name, prompt, flush=True)
        if found.answer.cached_tokens:
            msg = f"{name} has pages of a prompt that nobody sent"
            raise WrongAnswerError(msg)
        return found


def make_prompt(length: int, *, seed: str = "") -> list[int]:
    """Return `length` tokens that can be cached and one more, which is always computed."""
    draw = random.Random(seed or str(length))  # noqa: S311  # the same prompt each time
    return [draw.randrange(FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(length + 1)]


def _check(name: str, truth: _Truth, answer: Answer, *, device: int, host: int) -> None:
    """Compare tokens and every bit of the log-probabilities, of a hit with the device hit's.

    Where a hit begins is where a pass does, and another pass rounds otherwise: on some processors the engine's own
    device hit answers with another token of two that are as likely, and a linker has to answer as that does.
    """
    cached = answer.device_tokens, answer.host_tokens
    if cached != (device, host):
        msg = f"{name}: {cached} tokens came from device and linker, not {(device, host)}"
        raise WrongAnswerError(msg)
    same = truth.hit if device or host else truth.cold
    answered = len(answer.tokens)
    if answer.tokens != same.tokens[:answered]:
        msg = f"{name} answers {answer.tokens}, and the engine without a linker {same.tokens}"
        raise WrongAnswerError(msg)
    if answer.logprobs != same.logprobs[:answered]:
        msg = f"{name} has log-probabilities {answer.logprobs}, not {same.logprobs}"
        raise WrongAnswerError(msg)


def _check_equal(name: str, found: Sequence[Timed], cold: Sequence[Timed]) -> None:
    if [each.answer.output for each in found] != [each.answer.output for each in cold]:
        msg = f"{name} does not answer what it computes as an engine without a cache does"
        raise WrongAnswerError(msg)


def _total(found: Timed, what: What) -> float:
    """Return the seconds of a kind of event.

    Raises:
        WrongAnswerError: there was none, or one failed.
    """
    events: Sequence[Event] = [event for event in found.events if event.what is what]
    if not events or not all(event.is_ok for event in events):
        msg = f"no {what.value} that went well: {found.events}"
        raise WrongAnswerError(msg)
    return sum(event.seconds for event in events)

"""Several engines, or several ranks of one, share a directory: what one offloads another restores while both run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvlinker.testing import Family
from kvlinker_file import verify

PROCESS = Path(__file__).parent / "linker_process.py"


class EngineProcess:
    """An engine in another process."""

    def __init__(self, folder: Path, family: Family, weights: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROCESS), str(folder), family.value, weights],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: str) -> object:
        """Return the answer to a line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{request}\n")
        self.process.stdin.flush()
        answer: object = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> int:
        """Let it close everything and return what it ended with."""
        self.process.communicate(timeout=60)
        return self.process.returncode

    def kill(self) -> None:
        """Kill it, if it runs."""
        with self.process:
            self.process.kill()


StartEngine = Callable[..., EngineProcess]


@pytest.fixture
def start_engine(folder: Path) -> Iterator[StartEngine]:
    """Give a function that starts an engine over the directory; what it started does not outlive the test."""
    started: list[EngineProcess] = []

    def start(family: Family = Family.V4, *, weights: str = "1") -> EngineProcess:
        started.append(EngineProcess(folder, family, weights))
        return started[-1]

    yield start
    for engine in started:
        engine.kill()


@pytest.mark.parametrize("family", [Family.MHA, Family.V4, Family.MAMBA], ids=lambda f: f.value)
def test_what_one_engine_offloads_another_restores_while_both_run(
    start_engine: StartEngine, folder: Path, family: Family
) -> None:
    first, second = start_engine(family), start_engine(family)

    assert second.ask("restore prompt 4") == [0, 0]
    assert first.ask("offload prompt 4") is True
    assert second.ask("restore prompt 4") == [4, 0]
    assert second.ask("offload other 6") is True
    assert first.ask("restore other 6") == [6, 0]

    assert (first.end(), second.end()) == (0, 0)
    report = verify(folder)
    assert report.is_clean
    assert report.objects > 0


def test_an_engine_of_other_weights_finds_nothing_of_its_neighbours(
    start_engine: StartEngine,
) -> None:
    first, second = start_engine(weights="1"), start_engine(weights="2")

    assert first.ask("offload prompt 4") is True

    assert second.ask("restore prompt 4") == [0, 0]
    assert second.ask("offload prompt 4") is True
    assert first.ask("restore prompt 4") == [4, 0]
    assert second.ask("restore prompt 4") == [4, 0]


def test_what_an_engine_offloaded_outlives_it_for_those_that_run_on(
    start_engine: StartEngine,
) -> None:
    first, second = start_engine(), start_engine()
    assert first.ask("offload prompt 4") is True
    assert first.ask("restore prompt 4") == [4, 0]

    first.kill()

    assert second.ask("restore prompt 4") == [4, 0]
    assert second.ask("offload other 4") is True
    assert start_engine().ask("restore other 4") == [4, 0]

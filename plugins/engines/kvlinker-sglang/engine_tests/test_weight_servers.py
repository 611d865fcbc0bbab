"""A real server whose weights are replaced while it runs: no page of others is read back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_frame.client import Answer, Client
from engine_frame.models import make_model
from engine_frame.new_weights import (
    begin_session,
    end_session,
    halves_of,
    send_tensors,
    take_folder,
)
from engine_frame.server import Server, SharedServer
from linked_servers import PAGE, Link, answer_without_cache, prompt_of

ModelFolder = Callable[[str], Path]
WHOLE = 12 * PAGE
PROMPT = prompt_of(WHOLE + 5)


@dataclass(frozen=True)
class Trained:
    """A server that is started with the first of two models, its linker, and what fresh servers of both answer."""

    server: Server
    link: Link
    folders: tuple[Path, Path]
    fresh: tuple[Answer, Answer]

    @property
    def client(self) -> Client:
        """A client of the server."""
        return self.server.client

    def begun_by(self, answer: Answer) -> int | None:
        """Return the number of the model whose first token it has: the rest may differ where requests are batched."""
        first = [fresh.tokens[0] for fresh in self.fresh]
        return first.index(answer.tokens[0]) if answer.tokens[0] in first else None

    def ask(self) -> Answer:
        """Ask, and let the server forget."""
        answer = self.client.generate(PROMPT)
        self.link.forget(self.client)
        return answer

    def take(self, number: int, name: str | None = None) -> None:
        """Let the server take the weights of one of the models."""
        take_folder(self.client, self.folders[number], name=name)

    def model_of(self, answer: Answer) -> int | None:
        """Return the number of the model whose answer it is, bit for bit."""
        outputs = [fresh.output for fresh in self.fresh]
        return outputs.index(answer.output) if answer.output in outputs else None


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, model_folder: ModelFolder, shared_server: SharedServer
) -> Iterator[Trained]:
    """Return a server whose store already has the prompt's pages of both models, each from a server of its own."""
    shared_server.close()
    folder = tmp_path_factory.mktemp("trained")
    first, second = model_folder("llama"), make_model("llama", folder, seed=1)
    link = Link(store=folder / "store")
    with Server(link.server(second), folder / "second.log") as server:
        of_second = server.client.generate(PROMPT)
        link.settle()
    with Server(link.server(first), folder / "first.log") as server:
        of_first = server.client.generate(PROMPT)
        link.forget(server.client)
        assert of_first.tokens[0] != of_second.tokens[0]
        yield Trained(server, link, (first, second), (of_first, of_second))


def test_b34_behind_an_update_from_disk_only_its_own_pages_are_read(trained: Trained) -> None:
    trained.take(0)
    # A name that comes back is not believed, and one that was never given says nothing.
    steps = [(1, "2"), (0, "1"), (1, "2"), (0, "2"), (1, None), (0, None)]

    asked = []
    for number, name in steps:
        trained.take(number, name)
        asked.append((trained.ask(), trained.ask()))

    models = [[trained.model_of(answer) for answer in answers] for answers in asked]
    assert models == [[number, number] for number, _ in steps]
    for answers in asked:
        assert [(a.host_tokens, a.device_tokens) for a in answers] == [(0, 0), (WHOLE, 0)]
    assert trained.link.settle().tokens_close


def test_b34_nothing_is_stored_or_read_in_a_session_and_behind_it_only_its_own_pages(
    trained: Trained,
) -> None:
    client, (first, rest) = trained.client, halves_of(trained.folders[1])
    trained.take(0)
    trained.link.forget(client)
    written = trained.link.settle()["store_events_total/written"]

    begin_session(client)
    send_tensors(client, first, name="session")
    mixed = trained.ask(), trained.ask()
    send_tensors(client, rest, name="session")
    whole = trained.ask(), trained.ask()
    written_inside = trained.link.settle()["store_events_total/written"]
    end_session(client)
    behind = trained.ask(), trained.ask()

    assert [trained.model_of(answer) for answer in mixed] == [None, None]
    assert [trained.model_of(answer) for answer in (*whole, *behind)] == [1] * 4
    assert [answer.host_tokens for answer in (*mixed, *whole, *behind)] == [0] * 5 + [WHOLE]
    assert written_inside == written
    assert answer_without_cache(client, PROMPT).output == behind[1].output


def test_b34_requests_that_come_while_weights_are_replaced_are_answered_by_one_model(
    trained: Trained,
) -> None:
    trained.take(0)
    answered_by, restored = [], []

    with ThreadPoolExecutor(8) as threads:
        for number in (1, 0, 1):
            early = [threads.submit(trained.client.generate, PROMPT) for _ in range(16)]
            early[0].result()
            trained.take(number)
            late = [threads.submit(trained.client.generate, PROMPT) for _ in range(8)]
            early_ones = {trained.begun_by(request.result()) for request in early}
            late_ones = {trained.begun_by(request.result()) for request in late}
            answered_by.append((early_ones - {number}, late_ones))
            trained.link.forget(trained.client)
            restored.append(trained.ask())

    assert answered_by == [({0}, {1}), ({1}, {0}), ({0}, {1})]
    assert [trained.begun_by(answer) for answer in restored] == [1, 0, 1]
    assert [answer.host_tokens for answer in restored] == [WHOLE] * 3

"""What all engine tests share: models made once, and servers that end with their test or are shared by many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
from engine_frame.models import make_model
from engine_frame.server import Server, ServerOptions, SharedServer

from kvlinker.description import KVCacheDescription
from kvlinker.description_json import description_to_json
from kvlinker.errors import UnsupportedKVCacheError

collect_ignore = ["outsider"]
"""A distribution of its own, which is tested where it is installed; see test_outsider.py."""


def pytest_configure(config: pytest.Config) -> None:
    """Let SGLang warn of what it cannot do without a GPU, and torch of what SGLang uses; all else stays an error."""
    config.addinivalue_line("filterwarnings", r"ignore::UserWarning:sglang\..*")
    config.addinivalue_line("filterwarnings", r"ignore::DeprecationWarning:torch\..*")
    config.addinivalue_line("filterwarnings", "ignore:MultiPlatformOp is:DeprecationWarning")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Keep sums in one order, and leave the other core to the engine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def proves(record_property: Callable[[str, object], None]) -> Callable[[KVCacheDescription], None]:
    """Return a function by which a test marked `supports` states of which cache it moved the bytes."""
    return lambda description: record_property("description", description_to_json(description))


@pytest.fixture
def refused(
    record_property: Callable[[str, object], None],
) -> Callable[..., AbstractContextManager[None]]:
    """Return what a test marked `refuses` expects a refusal in: of what, and a `match` of the message."""

    @contextmanager
    def refused(what: str, *, match: str) -> Iterator[None]:
        with pytest.raises(UnsupportedKVCacheError, match=match) as caught:
            yield
        record_property("refused", [what, str(caught.value)])

    return refused


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a tiny model, once, and returns its folder: `llama`, `sliding` or `latent`."""
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda name: make_model(name, folder))


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """Return what keeps one server up for tests that want the same; take it where nothing is killed."""
    shared = SharedServer(tmp_path_factory.mktemp("servers"))
    yield shared
    shared.close()


@pytest.fixture
def start_server(
    tmp_path: Path, shared_server: SharedServer
) -> Iterator[Callable[[ServerOptions], Server]]:
    """Return a function that starts a server for this test alone; it may be stopped, killed and restarted."""
    shared_server.close()
    servers: list[Server] = []
    numbers = count(1)

    def start(options: ServerOptions) -> Server:
        server = Server(options, tmp_path / f"server-{next(numbers)}.log")
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()

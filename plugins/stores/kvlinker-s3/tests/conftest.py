"""Fixtures: an S3 server of the tests' own, a proxy in front of it, and stores on them or in a directory."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlinker_s3 import S3Store, S3StoreOptions

sys.path.insert(0, str(Path(__file__).parent))

from http_proxy import Proxy, proxy_to
from s3_server import BUCKET, OpenStore, S3Server, settings_for


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of the machine's own decide where a store looks, and give it the tests' key."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("KV_S3_TEST_SECRET", "open sesame")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Give the server that tests share, each with a prefix of its own."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    """Give a proxy in front of the server that tests share."""
    with proxy_to(server.port) as proxy:
        yield proxy


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[S3Server]:
    """Give a server that a test may kill."""
    server = S3Server(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def prefix() -> str:
    """Give a prefix that no other test has."""
    return uuid.uuid4().hex[:8]


@pytest.fixture
def open_store(prefix: str) -> Iterator[OpenStore]:
    """Give what opens a store on a port, impatient unless told otherwise; it is closed after the test."""
    stores: list[S3Store] = []

    def open_it(port: int, **options: object) -> S3Store:
        short = {"connect_seconds": 10.0, "answer_seconds": 20.0, "retry_seconds": 0.2}
        place = {"url": f"s3://{BUCKET}", "settings": settings_for(port), "prefix": prefix}
        config = {**place, "pause_seconds": 0.05, **short, **options}
        stores.append(S3Store(S3StoreOptions.of_config(config)))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()

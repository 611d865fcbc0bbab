"""Fixtures: peer servers in processes of their own; where there is no NIXL, what needs it is skipped, and says so."""

from __future__ import annotations

import functools
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bucket_server import BucketServer
from peer_process import PeerProcess

from kvlinker.errors import StoreError
from kvlinker_nixl.library import load_client

_WITH_NIXL = {
    "test_files",
    "test_gds",
    "test_kit",
    "test_linker",
    "test_objects",
    "test_peers",
    "test_soak",
}
"""Files of tests that move bytes by NIXL itself; those in other files have a client of their own."""


@functools.cache
def missing_reason() -> str:
    """Return why NIXL is not there, or an empty text."""
    try:
        load_client()
    except StoreError as error:
        return str(error)
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs NIXL before its servers are started."""
    if item.path.stem in _WITH_NIXL and (reason := missing_reason()):
        pytest.skip(reason)


@pytest.fixture
def with_nixl() -> None:
    """Skip a test that needs NIXL, in a file of others."""
    if reason := missing_reason():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def near_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let UCX use this machine's memory and loopback alone."""
    monkeypatch.setenv("UCX_TLS", "self,sm,tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    monkeypatch.setenv("KV_NIXL_TEST_SECRET", "open sesame")


@pytest.fixture(scope="session")
def shared_peer() -> Iterator[PeerProcess]:
    """Give a server with 4 MiB that tests share."""
    server = PeerProcess("4MiB")
    yield server
    server.end()


@pytest.fixture
def empty_peer(shared_peer: PeerProcess) -> PeerProcess:
    """Give the shared server, with nothing in it."""
    shared_peer.empty()
    return shared_peer


@pytest.fixture
def peer() -> Iterator[PeerProcess]:
    """Give a server with 4 MiB that a test may kill."""
    server = PeerProcess("4MiB")
    yield server
    server.end()


@pytest.fixture(scope="session")
def bucket() -> Iterator[BucketServer]:
    """Give a server of S3's kind that tests share, each with a prefix of its own."""
    server = BucketServer()
    yield server
    server.kill()


@pytest.fixture
def prefix() -> str:
    """Give a prefix that no other test has."""
    return uuid.uuid4().hex[:8]

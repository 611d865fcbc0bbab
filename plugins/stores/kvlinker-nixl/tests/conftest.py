"""Fixtures: peer servers in processes of their own, and stores that are closed after the test."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bucket_server import BucketServer
from peer_process import PeerProcess


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

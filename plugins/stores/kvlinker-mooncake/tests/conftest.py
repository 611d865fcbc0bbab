"""Fixtures: a Mooncake cluster of the tests' own in a network of its own, and stores on it; without, tests say so."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvlinker_mooncake import MooncakeStore, MooncakeStoreOptions

sys.path.insert(0, str(Path(__file__).parent))

from fake_mooncake import StillClock
from mooncake_cluster import MooncakeCluster, OpenStore, missing_reason
from network_namespace import NetworkNamespace

_TIMED = ("calls", "framed_reading", "probing", "reading", "removing", "writing")
PATIENT_SECONDS = 10
"""Of a master that lets writes be as slow as a crowded machine makes them."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """Give the clock by which stores measure, and by which they wait for leases, other writers and a lost master."""
    clock = StillClock()
    for name in _TIMED:
        monkeypatch.setattr(f"kvlinker_mooncake.{name}.time", clock)
    return clock


@pytest.fixture(scope="session")
def namespace() -> Iterator[NetworkNamespace]:
    """Give a network of the tests' own; where there can be none, tests are counted as skipped, with the reason."""
    if reason := missing_reason():
        pytest.skip(reason)
    try:
        namespace = NetworkNamespace()
    except OSError as error:  # in a container, any number may be what forbids it
        pytest.skip(f"a network namespace cannot be made, which needs root: {error}")
    yield namespace
    namespace.close()


@pytest.fixture
def inside(namespace: NetworkNamespace) -> Iterator[None]:
    """Let a test, and the threads and processes that it begins, be in that network."""
    with namespace.entered():
        yield


@pytest.fixture(scope="session")
def shared_cluster(
    namespace: NetworkNamespace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MooncakeCluster]:
    """Give the cluster that tests share."""
    with namespace.entered():
        cluster = MooncakeCluster(tmp_path_factory.mktemp("mooncake"))
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(shared_cluster: MooncakeCluster, inside: None) -> MooncakeCluster:  # noqa: ARG001  # a test that uses it is inside
    """Give the cluster that tests share, each with a prefix of its own."""
    return shared_cluster


@pytest.fixture
def own_cluster(inside: None, tmp_path: Path) -> Iterator[MooncakeCluster]:  # noqa: ARG001  # as above
    """Give a cluster that a test may kill."""
    cluster = MooncakeCluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture
def patient_cluster(inside: None, tmp_path: Path) -> Iterator[MooncakeCluster]:  # noqa: ARG001  # as above
    """Give a cluster that a test may kill, and that lets writes be as slow as a crowded machine makes them."""
    cluster = MooncakeCluster(tmp_path, discard_seconds=PATIENT_SECONDS)
    yield cluster
    cluster.close()


@pytest.fixture
def prefix() -> str:
    """Give a prefix that no other test has."""
    return uuid.uuid4().hex[:8]


@pytest.fixture
def open_store(prefix: str) -> Iterator[OpenStore]:
    """Give what opens a store on a cluster with a client of its own; it is closed after the test."""
    with ExitStack() as opened:
        yield lambda cluster, **options: _closed_by(
            opened, MooncakeStore(_options(cluster, prefix, options))
        )


@pytest.fixture
def open_quickly(cluster: MooncakeCluster, prefix: str) -> Iterator[OpenStore]:
    """Give what opens a store on the shared cluster's kept client; it is closed after the test."""
    with ExitStack() as opened:
        yield lambda **options: _closed_by(
            opened, cluster.open_quickly(_options(cluster, prefix, options))
        )


def _options(
    cluster: MooncakeCluster, prefix: str, options: Mapping[str, object]
) -> MooncakeStoreOptions:
    reads = "whole" if options.get("staged") else "ranged"
    config = {**cluster.options, "prefix": prefix, "reads": reads, **options}
    return MooncakeStoreOptions.of_config(config)


def _closed_by(opened: ExitStack, store: MooncakeStore) -> MooncakeStore:
    opened.callback(store.close)
    return store

"""Policies around real stores keep what every store promises: objects here, and the whole kit where time is no matter.

What a policy cannot be put around is refused by name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import composed_store
import pytest
from composed_store import open_composed
from mooncake_cluster import MooncakeCluster, missing_reason
from network_namespace import NetworkNamespace
from redis_server import BINARY, RedisServer
from s3_server import S3Server
from wrapped_inners import CAPACITY, INNERS, Inner

from kvlinker.errors import ContractError
from kvlinker.keys import NAMESPACE_BYTES, encode_fields
from kvlinker.store import ObjectKey, Store
from kvlinker.testing.shelves import object_keys
from kvlinker.testing.store_object_tests import StoreObjectTests
from kvlinker.testing.stores import Damage, OpenStore, PersistentStoreTests

_SECONDS = 300_000_000
"""Nearly ten years: no test runs into the next period."""
_NAMESPACE = object_keys(1)[0][:NAMESPACE_BYTES]
POLICIES: Mapping[str, Mapping[str, object]] = {
    "admission": {"remember": 10_000},
    "expiring": {"seconds": _SECONDS},
    "pinned": {"capacity": CAPACITY // 12, "namespaces": [_NAMESPACE.hex()], "uses": 5},
    "quota": {"bytes": CAPACITY + (1 << 20)},
    "retrying": {"first_seconds": 0.001},
}
CODECS: Mapping[str, Mapping[str, object]] = {
    "compressed": {"level": 1},
    "encrypted": {"secret": "0f" * 32},
}
"""Whose short forms are tests of core and of the file store."""
WITHOUT_LEASES = frozenset({"directory", "s3", "redis", "mooncake"})
COMBINATIONS = [
    (policy, inner)
    for policy, inner in itertools.product([*POLICIES, *CODECS], INNERS)
    if policy != "pinned" or inner not in WITHOUT_LEASES
]
SHORT = [
    (policy, inner)
    for policy, inner in COMBINATIONS
    if policy in POLICIES and inner in ("file", "memory" if policy == "pinned" else "directory")
]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if BINARY is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    server = RedisServer(BINARY, tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def s3_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the key that settings refer to."""
    monkeypatch.setenv("KV_S3_TEST_SECRET", "open sesame")


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let UCX use this machine's memory alone."""
    if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13")):
        pytest.skip("nixl is not installed: pip install nixl, or --no-deps nixl-cu12")
    monkeypatch.setenv("UCX_TLS", "self,sm,tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")


@pytest.fixture(scope="session")
def mooncake_network() -> Iterator[NetworkNamespace]:
    if reason := missing_reason():
        pytest.skip(reason)
    try:
        network = NetworkNamespace()
    except PermissionError as error:
        pytest.skip(f"a network namespace cannot be made, which needs root: {error}")
    yield network
    network.close()


@pytest.fixture(scope="session")
def shared_mooncake(
    mooncake_network: NetworkNamespace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MooncakeCluster]:
    with mooncake_network.entered():
        cluster = MooncakeCluster(tmp_path_factory.mktemp("mooncake"))
    yield cluster
    cluster.close()


@pytest.fixture
def mooncake_cluster(
    shared_mooncake: MooncakeCluster, mooncake_network: NetworkNamespace
) -> Iterator[MooncakeCluster]:
    with mooncake_network.entered():
        yield shared_mooncake


def expiring_name(key: ObjectKey) -> ObjectKey:
    """Return what an expiring store calls an object; it must never change, or stored objects are not found."""
    period = int(time.time() // (_SECONDS / 2))
    fields = ("kvlinker.expiring/1", _SECONDS * 1_000_000 // 2, period)
    own = hashlib.blake2b(encode_fields(fields) + key, digest_size=20)
    return key[:NAMESPACE_BYTES] + own.digest()


class PolicyFixtures:
    """A policy around a store, as a composition names both."""

    @pytest.fixture
    def inner(
        self, combination: tuple[str, str], request: pytest.FixtureRequest, tmp_path: Path
    ) -> Iterator[Inner]:
        yield from INNERS[combination[1]](request, tmp_path)

    @pytest.fixture
    def config(self, combination: tuple[str, str], inner: Inner) -> Mapping[str, object]:
        policy = combination[0]
        own = {**POLICIES, **CODECS}[policy]
        return {policy: {**own, "store": inner.config}}

    @pytest.fixture
    def open_store(self, config: Mapping[str, object], inner: Inner) -> OpenStore:
        return lambda: open_composed(config, inside=inner.open_store)

    @pytest.fixture
    def damage(self, combination: tuple[str, str], inner: Inner) -> Damage:
        names: Callable[[ObjectKey], ObjectKey] = (
            expiring_name if combination[0] == "expiring" else bytes
        )

        def flip(_store: Store, key: ObjectKey, _payload: bytes) -> None:
            inner.flip(names(key))

        return flip


def _name(combination: tuple[str, str]) -> str:
    return "-".join(combination)


class TestObjectsOfPolicies(PolicyFixtures, StoreObjectTests):
    """What the kit asks of objects, around stores that need no server."""

    @pytest.fixture(params=SHORT, ids=_name)
    def combination(self, request: pytest.FixtureRequest) -> tuple[str, str]:
        found: tuple[str, str] = request.param
        return found


@pytest.mark.soak
class TestPoliciesAroundEveryStore(PolicyFixtures, PersistentStoreTests):
    """The whole kit, for each policy around each store."""

    plugin = composed_store

    @pytest.fixture(params=COMBINATIONS, ids=_name)
    def combination(self, request: pytest.FixtureRequest) -> tuple[str, str]:
        found: tuple[str, str] = request.param
        return found


# ---- what is refused --------------------------------------------------------------------------


def test_a_store_without_leases_cannot_be_pinned_in_and_is_named(tmp_path: Path) -> None:
    inside = {"s3": {"url": tmp_path.as_uri()}}

    with pytest.raises(ContractError, match=r"S3Store has no leases, .* such as memory or file"):
        open_composed({"pinned": {"capacity": 4096, "uses": 2, "store": inside}})


@pytest.mark.parametrize("name", ["encrypted", "compressed"])
@pytest.mark.usefixtures("nixl")
def test_a_store_that_moves_the_pools_memory_itself_gets_no_other_bytes_and_is_named(
    tmp_path: Path, name: str
) -> None:
    place = {"backend": "POSIX", "path": str(tmp_path / "store"), "capacity": CAPACITY}
    own = {"secret": "0f" * 32} if name == "encrypted" else {}

    with pytest.raises(ContractError, match="SlotStore moves pool memory"):
        open_composed({name: {**own, "store": {"nixl": {**place, "staged": False}}}})

"""Restore a prefix of real models through a linker from stores and tiers of stores: tokens in a second.

A prefix is stored once, and restored as an engine does it: a lookup, and a load that lands layer by layer, with
the reads that SGLang's linker makes. "First" is a restore from far: the near store is empty, and what the kernel
keeps of files is forgotten. "Again" is one behind it, once what was read has been copied to the near store. The
limit is one memcpy of as many bytes, measured in turn. Servers run on the same machine, and in a network namespace of
their own where that can be had, which Mooncake needs.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench_mooncake import LEASE_MS, cluster, own_network
from bench_redis import redis_server
from bench_s3 import BUCKET, s3_server
from measuring import Row, Scale, Times, duration, in_turn, missing_peer, run_script, size, timed
from model_pools import MODELS, Model, ModelPools, copier
from pages import MIB

from kvlinker.device import HostAccess
from kvlinker.discovery import load_plugins
from kvlinker.errors import KVLinkerError
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker
from kvlinker.linker_options import LinkerOptions
from kvlinker.registry import PluginRegistry
from kvlinker.store import Store
from kvlinker.stores.composition import compose
from kvlinker.stores.tiered import TieredStore

TOPIC = "Restored tokens a second, through tiers of stores"
LIMIT = "one memcpy of the same bytes"
TOTAL_MIB = 96
COLD_ROUNDS, WARM_ROUNDS = 3, 4
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # folders in it get names that nobody can guess
READ_BYTES = 8 * MIB
"""What SGLang's linker reads together, in layers."""
PATIENT_SECONDS = 300.0
KEY_DIGITS = "5e" * 32
"""Of the encrypted stores: what it is does not matter here."""
Config = Mapping[str, object]


class UnavailableError(Exception):
    """A combination does not work here; the text says why."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers of this run, each as its address or as the reason why there is none."""

    _addresses: dict[str, str] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)

    def start(
        self, name: str, stack: ExitStack, server: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Run a server for as long as the stack lasts, or note why it does not run."""
        try:
            self._addresses[name] = str(stack.enter_context(server()))
        except (OSError, ImportError, NotImplementedError, RuntimeError) as error:
            self._reasons[name] = f"no {name} here: {error}"

    def address(self, name: str) -> str:
        """Return where a server is.

        Raises:
            UnavailableError: it is not there.
        """
        if name not in self._addresses:
            raise UnavailableError(self._reasons.get(name, f"no {name} here"))
        return self._addresses[name]


def start_servers(stack: ExitStack) -> Servers:
    """Start what can be started, for as long as the stack lasts."""
    servers = Servers()
    servers.start("network namespace", stack, own_network)
    servers.start("redis-server", stack, lambda: redis_server(_redis_binary()))
    servers.start("S3 server", stack, _s3_server)

    def mooncake() -> AbstractContextManager[object]:
        try:
            servers.address("network namespace")
        except UnavailableError as error:
            raise OSError(str(error)) from error
        return cluster()

    servers.start("Mooncake cluster", stack, mooncake)
    return servers


def _redis_binary() -> str:
    binary = shutil.which("redis-server")
    if binary is None:
        message = "it is not installed: apt-get install redis-server"
        raise FileNotFoundError(message)
    return binary


def _s3_server() -> AbstractContextManager[object]:
    if importlib.util.find_spec("moto") is None:
        message = "moto is not installed: pip install 'moto[s3]' flask flask-cors"
        raise FileNotFoundError(message)
    return s3_server()


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the stores of one run are."""

    folder: Path
    memory: Path | None
    """A folder in a tmpfs; None where there is none."""
    servers: Servers
    capacity: int

    @property
    def near(self) -> Path:
        """A folder on the disk that a nearer store has, emptied before a restore from far."""
        return self.folder / "near"

    def in_memory(self) -> Config:
        """Return a store in memory, which is empty each time it is opened.

        Raises:
            UnavailableError: there is no tmpfs.
        """
        if self.memory is None:
            message = f"{SHARED_MEMORY} is not there: mount a tmpfs"
            raise UnavailableError(message)
        return {"memory": {"path": str(self.memory / "near"), "capacity": self.capacity}}

    def on_disk(self, name: str = "far") -> Config:
        """Return a store on the disk."""
        return {"file": {"path": str(self.folder / name), "capacity": self.capacity}}

    def through_nixl(self) -> Config:
        """Return a file on the disk that NIXL moves bytes to and from."""
        room = self.capacity + 256 * MIB  # an object has a small share of it
        options = {"backend": "POSIX", "path": str(self.folder / "far"), "capacity": room}
        return {"nixl": options}

    def in_directory(self) -> Config:
        """Return the object store, in a directory."""
        return {"s3": {"url": (self.folder / "objects").as_uri()}}

    def on_redis(self) -> Config:
        """Return the Redis store."""
        return {"redis": {"url": f"redis://127.0.0.1:{self.servers.address('redis-server')}/0"}}

    def in_bucket(self) -> Config:
        """Return the object store, in a server."""
        port = self.servers.address("S3 server")
        secret = self.folder / "secret"
        secret.write_text("any will do", encoding="utf-8")
        settings = {
            "endpoint": f"http://127.0.0.1:{port}",
            "region": "us-east-1",
            "access_key_id": "benchmark",
            "secret_access_key": f"${{file:{secret}}}",
            "virtual_hosted_style_request": False,
        }
        return {"s3": {"url": f"s3://{BUCKET}", "settings": settings}}

    def in_cluster(self, *, staged: bool) -> Config:
        """Return the Mooncake store."""
        options = {
            "master": self.servers.address("Mooncake cluster"),
            "prefix": "staged" if staged else "straight",
            "staged": staged,
            "lease_seconds": LEASE_MS / 1000,
        }
        return {"mooncake": options}


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Stores as a configuration puts them together."""

    name: str
    config: Callable[[Places], object]
    is_cold_first: bool = True
    """Whether a first restore differs from those behind it."""
    near: str = ""
    """Name of the near store, where there are tiers."""


def _encrypted(store: object) -> Config:
    return {"encrypted": {"secret": KEY_DIGITS, "store": store}}


COMBINATIONS = (
    Combination(name="memory", config=Places.in_memory, is_cold_first=False),
    Combination(name="file", config=Places.on_disk),
    Combination(name="redis", config=Places.on_redis, is_cold_first=False),
    Combination(name="s3 in a directory", config=Places.in_directory),
    Combination(name="s3 in a server", config=Places.in_bucket, is_cold_first=False),
    Combination(
        name="mooncake, straight",
        config=lambda place: place.in_cluster(staged=False),
        is_cold_first=False,
    ),
    Combination(
        name="mooncake, staged",
        config=lambda place: place.in_cluster(staged=True),
        is_cold_first=False,
    ),
    Combination(name="nixl, a file", config=Places.through_nixl),
    Combination(name="encrypted file", config=lambda place: _encrypted(place.on_disk())),
    Combination(
        name="memory > file",
        near="memory",
        config=lambda place: [place.in_memory(), place.on_disk()],
    ),
    Combination(
        name="memory > redis",
        near="memory",
        config=lambda place: [place.in_memory(), place.on_redis()],
    ),
    Combination(
        name="memory > s3 in a server",
        near="memory",
        config=lambda place: [place.in_memory(), place.in_bucket()],
    ),
    Combination(
        name="memory > mooncake, staged",
        near="memory",
        config=lambda place: [place.in_memory(), place.in_cluster(staged=True)],
    ),
    Combination(
        name="file > s3 in a directory",
        near="file",
        config=lambda place: [place.on_disk("near"), place.in_directory()],
    ),
    Combination(
        name="file > s3 in a server",
        near="file",
        config=lambda place: [place.on_disk("near"), place.in_bucket()],
    ),
    Combination(
        name="memory > encrypted file",
        near="memory",
        config=lambda place: [place.in_memory(), _encrypted(place.on_disk())],
    ),
)


class Restoring:
    """A linker over one combination, and a prefix that it has stored."""

    def __init__(
        self, pools: ModelPools, config: object, place: Places, registry: PluginRegistry
    ) -> None:
        """Open the stores and store the prefix.

        Raises:
            KVLinkerError: a store cannot be opened here.
            UnavailableError: the prefix was not stored.
        """
        self._pools = pools
        self._tree = compose("tiers", {"stores": [config]})
        self._place = place
        self._registry = registry
        self._requests = (f"request {number}" for number in itertools.count())
        self._store: Store = self._tree.open(registry)
        self._linker = self._linked()
        self._offload()

    def _linked(self) -> Linker:
        options = LinkerOptions(
            lookup_seconds=PATIENT_SECONDS,
            load_seconds=PATIENT_SECONDS,
            offload_seconds=PATIENT_SECONDS,
            min_read_bytes=READ_BYTES,
        )
        namespace = KeyNamespace(model_id=self._pools.name, producer="benchmark")
        return Linker(
            self._pools.group, self._store, namespace, device=HostAccess(), options=options
        )

    def _offload(self) -> None:
        if not self._linker.offload(self._pools.transfers(0)):
            message = "the prefix was refused"
            raise UnavailableError(message)
        while not self._linker.num_completed_offloads():
            time.sleep(0.005)
        if not self._linker.pop_completed_offload():
            message = "the prefix was not stored; the log of the run says why"
            raise UnavailableError(message)

    def restore(self) -> float:
        """Bring the prefix back; return the seconds of the lookup and of the load to its last layer."""
        request = next(self._requests)
        start = time.perf_counter()
        boundaries = self._linker.lookup(request, self._pools.questions())
        is_queued = self._linker.load(request, self._pools.transfers(1))
        index = self._linker.start_layer_wise_loading()
        has_landed = self._linker.finish_layer_wise_loading(index)
        seconds = time.perf_counter() - start
        if boundaries[-1:] != [self._pools.pages] or not is_queued or not has_landed:
            message = "the prefix did not come back; the log of the run says why"
            raise UnavailableError(message)
        return seconds

    def restore_first(self) -> float:
        """Bring the prefix back from far; return the seconds of that alone."""
        self.close()
        shutil.rmtree(self._place.near, ignore_errors=True)
        _forget(self._place.folder)
        self._store = self._tree.open(self._registry)
        self._linker = self._linked()
        return self.restore()

    def wait_for_promotions(self) -> None:
        """Wait until what was read is near."""
        if isinstance(self._store, TieredStore):
            self._store.wait_for_promotions(PATIENT_SECONDS)

    def hits(self, tier: str) -> int:
        """Return how many objects came from a tier so far."""
        return self._store.stats().counters.get(f"{tier}_hits", 0)

    def close(self) -> None:
        """Close the linker and the stores."""
        self._linker.close()
        self._store.close()


def _forget(folder: Path) -> None:
    """Let the kernel forget what it keeps of the files."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows of all models and combinations; of the model with most pools where no figures are wanted."""
    registry = load_plugins()
    with ExitStack() as stack:
        servers = start_servers(stack)
        for model in MODELS[1:2] if scale.is_quick else MODELS:
            pools = ModelPools(model, registry, total_bytes=scale.choose(TOTAL_MIB, 8) * MIB)
            for combination in COMBINATIONS:
                yield from _combination_rows(model, pools, combination, servers, registry, scale)


def _combination_rows(
    model: Model,
    pools: ModelPools,
    combination: Combination,
    servers: Servers,
    registry: PluginRegistry,
    scale: Scale,
) -> Iterator[Row]:
    """Yield the rows of one combination, or the one that says why there are none."""
    what = f"{model.name}: {combination.name}"
    try:
        with ExitStack() as stack:
            place = _places(pools, servers, stack)
            restoring = Restoring(pools, combination.config(place), place, registry)
            stack.callback(restoring.close)
            yield from list(_restores(what, restoring, pools, combination, scale))
    except (KVLinkerError, OSError, UnavailableError) as error:
        yield missing_peer(TOPIC, what, LIMIT, f"Error: {error}")


def _places(pools: ModelPools, servers: Servers, stack: ExitStack) -> Places:
    """Make folders that are gone when the stack ends."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    memory = None
    if SHARED_MEMORY.is_dir():
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
    capacity = pools.total_bytes * 5 // 4 + 64 * MIB
    return Places(folder=folder, memory=memory, servers=servers, capacity=capacity)


def _restores(
    what: str, restoring: Restoring, pools: ModelPools, combination: Combination, scale: Scale
) -> Iterator[Row]:
    copy = timed(copier(pools.total_bytes))
    if combination.is_cold_first:
        times = in_turn(
            {"ours": restoring.restore_first, "memcpy": copy},
            rounds=min(COLD_ROUNDS, scale.rounds),
            warm_ups=0,
        )
        yield _row(f"{what}, first", times, pools)
    pools.spoil()
    restoring.restore()
    if not pools.is_restored():
        message = f"{what}: other bytes came back than were stored"
        raise RuntimeError(message)
    restoring.wait_for_promotions()
    before = restoring.hits(combination.near)
    times = in_turn(
        {"ours": restoring.restore, "memcpy": copy}, rounds=min(WARM_ROUNDS, scale.rounds)
    )
    is_near = not combination.near or restoring.hits(combination.near) > before
    remark = "" if is_near else "; nothing of it came from near"
    yield _row(what + (", again" if combination.is_cold_first else ""), times, pools, remark)


def _row(what: str, times: Times, pools: ModelPools, remark: str = "") -> Row:
    rates = {name: pools.tokens / times.median(name) for name in ("memcpy", "ours")}
    return Row(
        topic=TOPIC,
        what=what,
        against=LIMIT,
        ratio=times.ratio("memcpy", "ours"),
        figures=(
            f"{rates['memcpy']:,.0f} / {rates['ours']:,.0f} tokens/s; {size(pools.total_bytes)} of "
            f"{pools.tokens:,} tokens in {duration(times.median('ours'))}{remark}"
        ),
    )


if __name__ == "__main__":
    run_script(__doc__, measure)

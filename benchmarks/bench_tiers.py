"""Restore a prefix of real models through a linker from stores and tiers of stores: tokens in a second.

A prefix is stored once, and restored as an engine does it: a lookup, and a load that lands layer by layer, with
the reads that SGLang's linker makes. "First" is a restore from far: the near store is empty, and what the kernel
keeps of files is forgotten. "Again" is one behind it, once what was read has been copied to the near store. The
limit is one memcpy of as many bytes, measured in turn. Servers run on the same machine.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench_redis import redis_server
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
TOTAL_MIB = 128
COLD_ROUNDS, WARM_ROUNDS = 3, 4
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # folders in it get names that nobody can guess
READ_BYTES = 8 * MIB
"""What SGLang's linker reads together, in layers."""
PATIENT_SECONDS = 300.0
KEY_DIGITS = "5e" * 32
"""Of the encrypted stores: what it is does not matter here."""
Config = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the stores of one run are."""

    folder: Path
    memory: Path | None
    """A folder in a tmpfs; None where there is none."""
    redis_url: str | None
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

    def on_server(self) -> Config:
        """Return the Redis store.

        Raises:
            UnavailableError: there is no server.
        """
        if self.redis_url is None:
            message = "redis-server is not installed: apt-get install redis-server"
            raise UnavailableError(message)
        return {"redis": {"url": self.redis_url}}


class UnavailableError(Exception):
    """A combination does not work here; the text says why."""


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
    Combination(name="redis", config=Places.on_server, is_cold_first=False),
    Combination(name="s3 in a directory", config=Places.in_directory),
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
        config=lambda place: [place.in_memory(), place.on_server()],
    ),
    Combination(
        name="file > s3 in a directory",
        near="file",
        config=lambda place: [place.on_disk("near"), place.in_directory()],
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
    """Yield the rows of all models and combinations."""
    registry = load_plugins()
    with ExitStack() as stack:
        url = _redis_url(stack)
        for model in MODELS:
            pools = ModelPools(model, registry, total_bytes=scale.choose(TOTAL_MIB, 8) * MIB)
            for combination in COMBINATIONS:
                yield from _combination_rows(model, pools, combination, url, registry, scale)


def _redis_url(stack: ExitStack) -> str | None:
    """Start a server where there is one, for as long as the stack lasts."""
    binary = shutil.which("redis-server")
    if binary is None:
        return None
    return f"redis://127.0.0.1:{stack.enter_context(redis_server(binary))}/0"


def _combination_rows(
    model: Model,
    pools: ModelPools,
    combination: Combination,
    url: str | None,
    registry: PluginRegistry,
    scale: Scale,
) -> Iterator[Row]:
    """Yield the rows of one combination, or the one that says why there are none."""
    what = f"{model.name}: {combination.name}"
    try:
        with ExitStack() as stack:
            place = _places(pools, url, stack)
            restoring = Restoring(pools, combination.config(place), place, registry)
            stack.callback(restoring.close)
            yield from list(_restores(what, restoring, pools, combination, scale))
    except (KVLinkerError, OSError, UnavailableError) as error:
        yield missing_peer(TOPIC, what, LIMIT, f"Error: {error}")


def _places(pools: ModelPools, url: str | None, stack: ExitStack) -> Places:
    """Make folders that are gone when the stack ends."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    memory = None
    if SHARED_MEMORY.is_dir():
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
    capacity = pools.total_bytes * 5 // 4 + 64 * MIB
    return Places(folder=folder, memory=memory, redis_url=url, capacity=capacity)


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

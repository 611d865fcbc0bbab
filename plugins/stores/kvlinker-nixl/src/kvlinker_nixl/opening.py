"""Opening makes a store of its options: agents with the backend, and what says where objects are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kvlinker.errors import StoreError
from kvlinker.store import Store
from kvlinker_nixl.agents import Agent, Memory
from kvlinker_nixl.depots import LocalDepot
from kvlinker_nixl.library import Client, load_client
from kvlinker_nixl.moving import Line, LineLimits, Target
from kvlinker_nixl.object_store import ObjectLane, ObjectStore
from kvlinker_nixl.options import Backend, NixlStoreOptions
from kvlinker_nixl.peer_depot import Channel, PeerDepot
from kvlinker_nixl.registering import PoolRegistrations
from kvlinker_nixl.slab_file import SlabFile, slab_layout
from kvlinker_nixl.space import Space
from kvlinker_nixl.state import SlotState
from kvlinker_nixl.store import SlotStore

__all__ = ["make_lines", "open_nixl_store", "pool_registrations"]

_log = logging.getLogger(__name__)

_BLOCK = 4096
"""What transfers past the page cache begin and end at."""
_CACHE_LINE = 64
_FILE_BYTES = 1 << 60
"""More than a file has: it is registered once, and grows."""
_ADVICE: Mapping[Backend, str] = {
    Backend.POSIX: "try another io, one of aio, uring and posix_aio",
    Backend.GDS: "it needs an NVIDIA GPU, its driver, nvidia-fs and cuFile (libcufile); use POSIX without",
    Backend.GDS_MT: "it needs an NVIDIA GPU, its driver, nvidia-fs and cuFile (libcufile); use POSIX without",
    Backend.UCX: "is UCX_TLS set to something that this machine has?",
    Backend.OBJ: "check bucket, endpoint, region and keys",
}


def open_nixl_store(options: NixlStoreOptions, *, client: Client | None = None) -> Store:
    """Open the store that options describe.

    Args:
        options: see NixlStoreOptions.
        client: NIXL, where it is loaded already; the installed one otherwise.

    Raises:
        StoreError: NIXL, its backend, the place or its server cannot be had.
    """
    client = client or load_client()
    if options.backend is Backend.UCX:
        return _open_peer(options, client)
    if options.backend is Backend.OBJ:
        return _open_objects(options, client)
    return _open_files(options, client)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """The two lines of a store."""

    reads: Line
    writes: Line

    def close(self) -> None:
        """Close both, and let NIXL end their agents, which whoever keeps the error would keep."""
        for line in (self.reads, self.writes):
            line.close()
            line.agent.close()


def make_lines(options: NixlStoreOptions, client: Client, params: Mapping[str, str]) -> _Lines:
    """Return lines with agents of their own.

    Raises:
        StoreError: the backend cannot be had.
    """
    limits = LineLimits(
        transfer_seconds=options.transfer_seconds,
        pause_seconds=options.pause_seconds,
        call_bytes=options.call_bytes,
        close_seconds=options.close_seconds,
        errors_add_up=options.backend is not Backend.OBJ,
    )

    def make(name: str) -> Line:
        advice = _ADVICE[options.backend]
        agent = Agent(client, options.backend.value, params, advice=advice)
        return Line(agent, f"nixl store {options.place}, {name}", limits)

    return _Lines(reads=make("loads"), writes=make("offloads"))


def pool_registrations(options: NixlStoreOptions, lines: _Lines) -> PoolRegistrations:
    """Return what registers pool memory, with nobody where pages go through blocks."""
    agents = () if options.is_staged else (lines.reads.agent, lines.writes.agent)
    reaches_devices = options.backend.is_gds
    kinds = {Memory.HOST, Memory.DEVICE} if reaches_devices else {Memory.HOST}
    return PoolRegistrations(
        agents,
        kinds=frozenset(kinds),
        max_regions=options.max_regions,
        max_region_bytes=options.max_region_bytes,
    )


@contextmanager
def _closing_on_error(close: Callable[[], object]) -> Iterator[None]:
    """Close what was opened where the rest cannot be."""
    try:
        yield
    except BaseException:
        close()
        raise


# ---- files ------------------------------------------------------------------------------------


def _open_files(options: NixlStoreOptions, client: Client) -> Store:
    if options.path is None:
        msg = f"nixl store: backend {options.backend.value} needs option 'path'"
        raise StoreError(msg)
    params = {options.io.param: "true"} if options.backend is Backend.POSIX else {}
    lines = make_lines(options, client, params)
    alignment = _BLOCK if options.direct_io or options.backend.is_gds else _CACHE_LINE
    layout = slab_layout(options.capacity, alignment)
    has_checksums = options.is_staged or not options.backend.is_gds
    with _closing_on_error(lines.close):
        file = SlabFile(
            options.path,
            layout,
            is_direct=options.direct_io or options.backend.is_gds,
            has_checksums=has_checksums,
        )
    with _closing_on_error(file.close), _closing_on_error(lines.close):
        space = Space(layout, file)
        file.load(space)
        if options.direct_io and not file.is_direct:
            space.counters["direct_io_refused"] += 1
            _log.warning(
                "nixl store %s: the file system takes no O_DIRECT; transfers go through the page cache",
                options.path,
            )
        for line in (lines.reads, lines.writes):
            place = (0, _FILE_BYTES, file.transfer_fd, "")
            line.kept.append(line.agent.register([place], Memory.FILE))
    depot = LocalDepot(
        space,
        file,
        capacity=options.capacity,
        target=Target(memory=Memory.FILE, device=file.transfer_fd),
    )
    state = SlotState(
        depot,
        reads=lines.reads,
        writes=lines.writes,
        alignment=alignment if options.is_staged else 1,
        is_staged=options.is_staged,
        has_checksums=has_checksums,
    )
    return SlotStore(state, pool_registrations(options, lines), is_shared=False)


# ---- memory of another process ------------------------------------------------------------------


def _open_peer(options: NixlStoreOptions, client: Client) -> Store:
    lines = make_lines(options, client, {})

    def channel(line: Line) -> Channel:
        return Channel(
            options.address,
            line.agent,
            answer_seconds=options.connect_seconds,
            pause_seconds=options.pause_seconds,
        )

    channels = channel(lines.reads), channel(lines.writes)
    with _closing_on_error(lines.close), _closing_on_error(channels[0].close):  # the only one asked
        depot = PeerDepot(*channels)
    state = SlotState(
        depot,
        reads=lines.reads,
        writes=lines.writes,
        alignment=1,
        is_staged=options.is_staged,
        has_checksums=True,
    )
    return SlotStore(state, pool_registrations(options, lines), is_shared=True)


# ---- object storage -----------------------------------------------------------------------------


def _open_objects(options: NixlStoreOptions, client: Client) -> Store:
    lines = make_lines(options, client, _object_params(options))
    with _closing_on_error(lines.close):
        reads, writes = (
            ObjectLane(options, f"nixl store {options.place}, {name}", line)
            for name, line in (("lookups", lines.reads), ("offloads", lines.writes))
        )
        return ObjectStore(options, reads, writes)


def _object_params(options: NixlStoreOptions) -> Mapping[str, str]:
    """Return the backend's parameters; what is not given is looked for by its own chain."""
    params = {"bucket": options.bucket, "region": options.region, "req_checksum": "required"}
    if options.endpoint:
        params["endpoint_override"] = options.endpoint
        params["scheme"] = options.endpoint.partition("://")[0]
        params["use_virtual_addressing"] = "false"
    name, key = options.read_keys()
    if name:
        params["access_key"] = name
    if key:
        params["secret_key"] = str(key)
    return params

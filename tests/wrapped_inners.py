"""Stores that policies are put around: where each lies, and how a stored byte of one of its objects is changed."""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest
from mooncake_cluster import MooncakeCluster
from redis_server import RedisServer
from s3_server import BUCKET, S3Server, settings_for

from kvlinker.frames import PREFIX_BYTES, read_header_bytes
from kvlinker.store import ObjectKey
from kvlinker.stores.policies import OpenStore
from kvlinker_mooncake import MooncakeStoreOptions
from kvlinker_mooncake.names import Names
from kvlinker_s3 import S3StoreOptions
from kvlinker_s3.client import open_client
from kvlinker_s3.names import Names as S3Names

__all__ = ["CAPACITY", "INNERS", "Inner", "Place"]

CAPACITY = 4 << 20
"""Of those that have one."""
_LIMIT_SECONDS = 60.0
_KEY_AT = 32
"""Where the key is in the header of a frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A store in its place."""

    config: Mapping[str, object]
    """As a composition names it."""
    flip: Callable[[ObjectKey], None]
    """Changes the first stored byte of the payload of the object of a name."""
    open_store: OpenStore | None = None
    """Opens it, where that is not done as it is named."""


Place: TypeAlias = Callable[[pytest.FixtureRequest, Path], Iterator[Inner]]
"""Makes one for the length of a test, in a folder of its own."""


def payloads_in(raw: bytes, name: ObjectKey) -> Iterator[int]:
    """Yield where the payloads of all frames of a name begin."""
    at = raw.find(name)
    while at >= 0:
        start = at - _KEY_AT
        size = read_header_bytes(raw[start : start + PREFIX_BYTES]) if start >= 0 else None
        if size is not None:
            yield start + size
        at = raw.find(name, at + 1)


def places_in(folders: Sequence[Path], name: ObjectKey) -> list[tuple[Path, int, int]]:
    """Return in which files the payloads of all frames of a name begin, at which byte, and what it is."""
    found = []
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        raw = path.read_bytes()
        found += [(path, at, raw[at]) for at in payloads_in(raw, name)]
    return found


def flip_in_files(*folders: Path) -> Callable[[ObjectKey], None]:
    """Return what changes an object wherever it lies in some folders."""

    def flip(name: ObjectKey) -> None:
        places = places_in(folders, name)
        assert places, f"no frame of {name.hex()} in {folders}"
        for path, at, value in places:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([value ^ 1]))

    return flip


def flipped(raw: bytes, name: ObjectKey) -> bytes:
    """Return a value with the first byte of its payload changed."""
    (at,) = payloads_in(raw, name)
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


def _file(folder: Path) -> Mapping[str, object]:
    return {"file": {"path": str(folder), "capacity": CAPACITY}}


def in_files(_request: pytest.FixtureRequest, folder: Path) -> Iterator[Inner]:
    """Yield a store in files."""
    yield Inner(config=_file(folder / "far"), flip=flip_in_files(folder))


def _in_memory() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvlinker-test-", dir="/dev/shm"))


def in_memory(_request: pytest.FixtureRequest, _folder: Path) -> Iterator[Inner]:
    """Yield a store in memory that outlives its processes."""
    near = _in_memory()
    options = {"path": str(near / "store"), "capacity": CAPACITY, "keep": True}
    yield Inner(config={"memory": options}, flip=flip_in_files(near))
    shutil.rmtree(near)


def in_tiers(_request: pytest.FixtureRequest, folder: Path) -> Iterator[Inner]:
    """Yield memory in front of files."""
    near = _in_memory()
    memory = {"memory": {"path": str(near / "store"), "capacity": "2MiB"}}
    stores = [memory, _file(folder / "far")]
    yield Inner(config={"tiers": {"stores": stores}}, flip=flip_in_files(near, folder))
    shutil.rmtree(near)


def in_tiers_that_write_back(_request: pytest.FixtureRequest, folder: Path) -> Iterator[Inner]:
    """Yield memory that outlives its processes in front of files, which get what is written behind that."""
    near = _in_memory()
    memory = {"memory": {"path": str(near / "store"), "capacity": "2MiB", "keep": True}}
    options = {"stores": [memory, _file(folder / "far")], "write": "back"}

    def flip(name: ObjectKey) -> None:
        end = time.monotonic() + _LIMIT_SECONDS
        while not places_in([folder], name):  # before it is far, it would come there as it was
            assert time.monotonic() < end, f"{name.hex()} is not far"
            time.sleep(0.01)
        flip_in_files(near, folder)(name)

    yield Inner(config={"tiers": options}, flip=flip)
    shutil.rmtree(near)


def in_sealed_files(_request: pytest.FixtureRequest, folder: Path) -> Iterator[Inner]:
    """Yield an encrypted store in files."""
    options = {"secret": "0f" * 32, "store": _file(folder / "far")}
    yield Inner(config={"encrypted": options}, flip=flip_in_files(folder))


def in_packed_files(_request: pytest.FixtureRequest, folder: Path) -> Iterator[Inner]:
    """Yield a compressed store in files."""
    options = {"store": _file(folder / "far")}
    yield Inner(config={"compressed": options}, flip=flip_in_files(folder))


def in_a_directory(_request: pytest.FixtureRequest, folder: Path) -> Iterator[Inner]:
    """Yield the object store in a directory."""
    place = folder / "objects"
    place.mkdir()
    yield Inner(config={"s3": {"url": place.as_uri()}}, flip=flip_in_files(place))


def on_s3(request: pytest.FixtureRequest, _folder: Path) -> Iterator[Inner]:
    """Yield the object store on a server."""
    server: S3Server = request.getfixturevalue("s3_server")
    options = {
        "url": f"s3://{BUCKET}",
        "prefix": uuid.uuid4().hex[:8],
        "settings": settings_for(server.port),
    }
    checked = S3StoreOptions.of_config(options)

    def flip(name: ObjectKey) -> None:
        client, place = open_client(checked), S3Names(checked.prefix).of_object(name)
        raw = bytes(client.get(place).buffer())
        client.put(place, flipped(raw, name), use_multipart=False)

    yield Inner(config={"s3": options}, flip=flip)


def on_redis(request: pytest.FixtureRequest, _folder: Path) -> Iterator[Inner]:
    """Yield a store on a Redis server."""
    server: RedisServer = request.getfixturevalue("redis_server")
    prefix = uuid.uuid4().hex[:8]

    def flip(name: ObjectKey) -> None:
        client, place = server.client(), f"{prefix}:{{{name.hex()}}}"
        value: object = client.get(place)
        assert isinstance(value, bytes)
        client.set(place, flipped(value, name))

    yield Inner(config={"redis": {"url": server.url, "prefix": prefix}}, flip=flip)


def in_a_nixl_file(request: pytest.FixtureRequest, folder: Path) -> Iterator[Inner]:
    """Yield a file that NIXL moves, through host memory."""
    request.getfixturevalue("nixl")
    options = {
        "backend": "POSIX",
        "path": str(folder / "store"),
        "capacity": CAPACITY,
        "staged": True,
    }
    yield Inner(config={"nixl": options}, flip=flip_in_files(folder))


def on_mooncake(request: pytest.FixtureRequest, _folder: Path) -> Iterator[Inner]:
    """Yield a store on a Mooncake cluster, through host memory."""
    cluster: MooncakeCluster = request.getfixturevalue("mooncake_cluster")
    prefix = uuid.uuid4().hex[:8]
    options = {**cluster.options, "prefix": prefix, "staged": True}
    checked = MooncakeStoreOptions.of_config(options)

    def flip(name: ObjectKey) -> None:
        client, place = cluster.plain_client(), Names(prefix).of_object(name)
        value = flipped(client.get(place), name)
        assert client.remove(place, force=True) == 0
        assert client.put(place, value) == 0

    yield Inner(
        config={"mooncake": options},
        flip=flip,
        open_store=lambda: cluster.open_quickly(checked),
    )


INNERS: Mapping[str, Place] = {
    "file": in_files,
    "memory": in_memory,
    "tiers": in_tiers,
    "written_back": in_tiers_that_write_back,
    "encrypted": in_sealed_files,
    "compressed": in_packed_files,
    "directory": in_a_directory,
    "s3": on_s3,
    "redis": on_redis,
    "nixl": in_a_nixl_file,
    "mooncake": on_mooncake,
}

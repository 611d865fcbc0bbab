"""A million objects in a directory, put there as files with the frames that the store would write."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import xxhash

from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.testing.many_objects import ManyObjects
from kvlinker.testing.verdicts import expect

__all__ = ["put_files"]


def path_of(folder: Path, key: bytes) -> Path:
    """Return where the store keeps an object, below the folder of its prefix."""
    fanout = NAMESPACE_BYTES + 1
    return (
        folder
        / key[:NAMESPACE_BYTES].hex()
        / key[NAMESPACE_BYTES:fanout].hex()
        / key[fanout:].hex()
    )


def put_files(folder: Path, objects: ManyObjects, count: int) -> None:
    """Write the files of objects, once it is sure that they are those that the store itself wrote.

    Args:
        folder: of the store's prefix; the store has written the first two objects.
        objects: whose files.
        count: of them.

    Raises:
        AssertionError: the store's own are others.
    """
    for number, keys in enumerate(objects.calls(count)):
        values = objects.values(keys, checksum=xxhash.xxh3_64_intdigest)
        paths = [path_of(folder, key) for key in keys]
        if not number:
            written = [path.read_bytes() for path in islice(paths, 2)]
            expect("what the store wrote", written, values[:2])
        for parent in {path.parent for path in paths}:
            parent.mkdir(parents=True, exist_ok=True)
        for path, value in zip(paths, values, strict=True):
            path.write_bytes(value)

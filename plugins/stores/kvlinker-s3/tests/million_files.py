"""A million objects in a directory, put there as files with the frames that the store would write."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.testing.many_objects import ManyObjects
from kvlinker.testing.verdicts import expect

__all__ = ["put_files"]


def path_of(folder: Path, key: bytes) -> str:
    """Return where the store keeps an object, below the folder of its prefix."""
    fanout = NAMESPACE_BYTES + 1
    parts = (key[:NAMESPACE_BYTES], key[NAMESPACE_BYTES:fanout], key[fanout:])
    return "/".join([str(folder), *(part.hex() for part in parts)])


def put_files(folder: Path, objects: ManyObjects, count: int) -> None:
    """Write the files of objects, once it is sure that they are those that the store itself wrote.

    Args:
        folder: of the store's prefix; the store has written the first two objects.
        objects: whose files.
        count: of them.

    Raises:
        AssertionError: the store's own are others.
    """
    made: set[str] = set()
    for number, keys in enumerate(objects.calls(count)):
        values = objects.values(keys, checksum=xxhash.xxh3_64_intdigest)
        paths = [path_of(folder, key) for key in keys]
        if not number:
            written = [Path(path).read_bytes() for path in paths[:2]]
            expect("what the store wrote", written, values[:2])
            for path in paths[:2]:
                Path(path).unlink()
        for parent in {path.rpartition("/")[0] for path in paths} - made:
            Path(parent).mkdir(parents=True, exist_ok=True)
            made.add(parent)
        for path, value in zip(paths, values, strict=True):
            _put(path, value)


def _put(path: str, value: bytes) -> None:
    """Write a file that is not there; of a million, a Path and a buffer would cost more than the file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(file, value)
    finally:
        os.close(file)

"""Half-written files are what a killed writer leaves in a directory: the library renames a file when it is whole."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvlinker.keys import NAMESPACE_BYTES, OBJECT_KEY_BYTES
from kvlinker_s3.directory import entries_of, root_of

__all__ = ["sweep"]

_DIGITS = 2 * (OBJECT_KEY_BYTES - NAMESPACE_BYTES - 1)
_HALF_WRITTEN = re.compile(rf"[0-9a-f]{{{_DIGITS}}}#\d+")
"""The name of an object, and what the library puts behind it until the file is whole."""
_OLD_SECONDS = 3600.0
"""No write takes so long: whoever began an older one is gone."""


def sweep(url: str, prefix: str) -> int:
    """Remove files that were never finished from a directory, and return how many.

    Args:
        url: of the directory, `file:///...`.
        prefix: the folder below it that all objects are in.
    """
    latest = time.time() - _OLD_SECONDS
    removed = 0
    for folder in _folders(f"{root_of(url)}/{prefix}"):
        for entry in _entries(folder):
            # Of a million files, nearly all are whole.
            if "#" not in entry.name:
                continue
            # Another store may sweep, or rename, at the same time; what cannot be removed takes room and no more.
            with suppress(OSError):
                if _HALF_WRITTEN.fullmatch(entry.name) and entry.stat().st_mtime < latest:
                    Path(entry).unlink()
                    removed += 1
    return removed


def _folders(root: str) -> Iterator[str]:
    """Yield the folders that objects are in: 256 for each namespace."""
    for namespace in _entries(root):
        if _is_folder(namespace):
            yield from (folder.path for folder in _entries(namespace.path) if _is_folder(folder))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # A file system whose listings do not say it is asked for each entry, which may be gone or closed to us.
    with suppress(OSError):
        return entry.is_dir(follow_symlinks=False)
    return False


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with suppress(OSError):
        return entries_of(folder)
    return []

"""Half-written files are what a killed writer leaves in a directory: the library renames a file when it is whole."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvlinker.keys import NAMESPACE_BYTES, OBJECT_KEY_BYTES

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
    for folder in _folders(Path(unquote(urlsplit(url).path)) / prefix):
        for entry in _entries(folder):
            # Another store may sweep, or rename, at the same time.
            with suppress(FileNotFoundError, PermissionError):
                if _HALF_WRITTEN.fullmatch(entry.name) and entry.stat().st_mtime < latest:
                    Path(entry).unlink()
                    removed += 1
    return removed


def _folders(root: Path) -> Iterator[Path]:
    """Yield the folders that objects are in: 256 for each namespace."""
    for namespace in _entries(root):
        if namespace.is_dir(follow_symlinks=False):
            for folder in _entries(Path(namespace)):
                if folder.is_dir(follow_symlinks=False):
                    yield Path(folder)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, PermissionError):
        return []

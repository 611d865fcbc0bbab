"""What the files of a store take on the disk, those included that were deleted and that a process still has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["DiskWatch"]

_BLOCK_BYTES = 512


class DiskWatch:
    """Measures a folder again and again; what it measures is exact while nobody changes anything.

    A file without a name can be measured only by who has it open, so each file is opened when it is first
    seen, and closed when it has no name and no process has it.
    """

    def __init__(self, folder: Path) -> None:
        """Watch a folder, which need not exist yet."""
        self._folder = folder.resolve()
        self._known: dict[int, int] = {}
        """Inode number to a descriptor of the file."""

    def measure(self, processes: Sequence[int]) -> int:
        """Return the bytes on disk of all files in the folder, and of deleted ones that processes have."""
        named = {inode: size for path in self._paths() for inode, size in self._look(path)}
        nameless: dict[int, int] = {}
        for process in processes:
            nameless.update(self._mapped_by(process))
            nameless.update(self._opened_by(process))
        for inode in self._known.keys() - named.keys() - nameless.keys():
            os.close(self._known.pop(inode))
        return sum({**nameless, **named}.values())

    def close(self) -> None:
        """Let go of all files."""
        while self._known:
            os.close(self._known.popitem()[1])

    def _paths(self) -> Iterator[Path]:
        for folder, _, names in os.walk(self._folder):
            yield from (Path(folder, name) for name in names)

    def _look(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yield inode number and bytes of a named file, if it still has its name."""
        with suppress(FileNotFoundError):
            found = path.lstat()
            if found.st_ino not in self._known and path.is_file():
                self._known[found.st_ino] = os.open(path, os.O_RDONLY)
            yield found.st_ino, found.st_blocks * _BLOCK_BYTES

    def _mapped_by(self, process: int) -> Iterator[tuple[int, int]]:
        """Yield inode number and bytes of known files without a name that a process has mapped."""
        for line in _lines(process, "maps"):
            if str(self._folder) in line and line.endswith("(deleted)"):
                inode = int(line.split(maxsplit=5)[4])
                if inode in self._known:
                    yield inode, os.fstat(self._known[inode]).st_blocks * _BLOCK_BYTES

    def _opened_by(self, process: int) -> Iterator[tuple[int, int]]:
        """Yield inode number and bytes of files without a name that a process has open."""
        with suppress(FileNotFoundError, ProcessLookupError):
            for link in Path(f"/proc/{process}/fd").iterdir():
                with suppress(FileNotFoundError):
                    target = str(link.readlink())
                    if target.startswith(str(self._folder)) and target.endswith("(deleted)"):
                        found = link.stat()
                        yield found.st_ino, found.st_blocks * _BLOCK_BYTES


def _lines(process: int, name: str) -> list[str]:
    with suppress(FileNotFoundError, ProcessLookupError):
        path = Path(f"/proc/{process}/{name}")
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []

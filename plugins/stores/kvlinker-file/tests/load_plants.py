"""What a process of a load can do wrong on purpose, so that the load shows that it would notice."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path

from kvlinker_file.mapping import FileMapping

__all__ = ["Plant", "Planter"]

_LEAKED_BYTES = 4 << 20


class Plant(Enum):
    """Something that must not be."""

    LIE = "lie"
    """Wrong bytes are written."""
    LOSE = "lose"
    """Held objects go."""
    RESURRECT = "resurrect"
    """Objects exist that were deleted."""
    MISCOUNT = "miscount"
    OVER_CAPACITY = "over_capacity"
    UNLINKED = "unlinked"
    """Bytes over the capacity lie in a file that was deleted and is still mapped."""
    DESCRIPTOR = "descriptor"
    MAPPING = "mapping"
    THREAD = "thread"
    MEMORY = "memory"
    HANG = "hang"
    CRASH = "crash"


class Planter:
    """Does what was planted that is not a call of the store, once after each round."""

    def __init__(self, plant: Plant | None, folder: Path, capacity: int) -> None:
        """Plant something, or nothing."""
        self._plant = plant
        self._path = folder / "planted"
        self._marker = folder / "kvlinker-file.json"
        self._capacity = capacity
        self._leaks: list[object] = []
        self._planted = -1

    def do_wrong(self) -> None:
        """Do it."""
        acts: dict[Plant, Callable[[], object]] = {
            Plant.OVER_CAPACITY: lambda: self._reserve(self._create()),
            Plant.UNLINKED: self._unlink,
            Plant.DESCRIPTOR: lambda: self._leaks.append(self._create()),
            Plant.MAPPING: self._map,
            Plant.THREAD: threading.Thread(target=threading.Event().wait, daemon=True).start,
            # S311: no secrets
            Plant.MEMORY: lambda: self._leaks.append(random.randbytes(_LEAKED_BYTES)),  # noqa: S311
            Plant.HANG: threading.Event().wait,
            Plant.CRASH: lambda: os.kill(os.getpid(), signal.SIGSEGV),
        }
        if self._plant in acts:  # the others are acts of its users
            acts[self._plant]()

    def _create(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT)

    def _reserve(self, descriptor: int) -> None:
        os.posix_fallocate(descriptor, 0, self._capacity)

    def _unlink(self) -> None:
        if self._planted < 0:
            self._planted = self._create()  # empty until it has no name
            return
        if not self._is_watched():  # only who opened it by its name can measure it without one
            return
        self._path.unlink()
        self._reserve(self._planted)
        self._leaks.append(FileMapping(self._planted, self._capacity, alignment=mmap.PAGESIZE))
        self._planted = -1

    def _is_watched(self) -> bool:
        """Return whether the load, which started this process, has seen the planted file."""
        for link in Path(f"/proc/{os.getppid()}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if link.readlink() == self._path.resolve():
                    return True
        return False

    def _map(self) -> None:
        with self._marker.open("rb") as marker:
            self._leaks.append(mmap.mmap(marker.fileno(), 0, prot=mmap.PROT_READ))

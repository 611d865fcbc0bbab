"""What a process of a soak can do wrong on purpose, so that the soak shows that it would notice."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from enum import Enum

__all__ = ["Plant", "plant_leak"]

_LEAKED_BYTES = 4 << 20


class Plant(Enum):
    """Something that must not be."""

    LIE = "lie"
    """Wrong bytes are written."""
    RESURRECT = "resurrect"
    """Objects exist that were deleted."""
    ERROR = "error"
    """A call fails although no server is away."""
    DESCRIPTOR = "descriptor"
    THREAD = "thread"
    MEMORY = "memory"
    HANG = "hang"
    CRASH = "crash"


def plant_leak(plant: Plant | None, leaks: list[object]) -> None:
    """Do what was planted that is not a call of the store; once after each round.

    Args:
        plant: what, if anything.
        leaks: keeps what is leaked.
    """
    acts: dict[Plant, Callable[[], object]] = {
        Plant.DESCRIPTOR: lambda: leaks.append(os.open("/dev/null", os.O_RDONLY)),
        Plant.THREAD: threading.Thread(target=threading.Event().wait, daemon=True).start,
        Plant.MEMORY: lambda: leaks.append(random.randbytes(_LEAKED_BYTES)),  # noqa: S311 - no secrets
        Plant.HANG: threading.Event().wait,
        Plant.CRASH: lambda: os.kill(os.getpid(), signal.SIGSEGV),
    }
    if plant in acts:  # the others are acts of its users
        acts[plant]()

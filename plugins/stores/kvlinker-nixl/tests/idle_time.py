"""Processor time of a process's threads while nobody asks them for anything."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def busiest_thread(pid: int, *, seconds: float) -> float:
    """Return the part of one core that the busiest thread of a process uses, while this thread sleeps."""
    before = _ticks(pid)
    time.sleep(seconds)
    after = _ticks(pid)
    used = [after[thread] - before.get(thread, 0) for thread in after]
    return max(used) / _TICKS_PER_SECOND / seconds


def _ticks(pid: int) -> dict[str, int]:
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        found[folder.name] = int(fields[11]) + int(fields[12])
    return found

"""The memory of another process, as a bad memory chip changes it."""

from __future__ import annotations

from pathlib import Path

_MOST_BYTES = 1 << 28


def flip_byte_in_memory(pid: int, payload: bytes) -> None:
    """Change one byte of an object that lies in the writable memory of a process, wherever it has lain too.

    Raises:
        AssertionError: it is not there.
    """
    needle = payload[: len(payload) // 16]
    changed = 0
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, mode, *_ = line.split()
            first, last = (int(part, 16) for part in place.split("-"))
            if not mode.startswith("rw") or last - first > _MOST_BYTES or "[vvar" in line:
                continue
            try:
                memory.seek(first)
                found = memory.read(last - first)
            except OSError:
                continue  # a device's, which has no bytes of ours
            at = found.find(needle)
            while at >= 0:
                memory.seek(first + at)
                memory.write(bytes([needle[0] ^ 0x40]))
                changed += 1
                at = found.find(needle, at + 1)
    assert changed, "the object's bytes are nowhere in the memory of the process"

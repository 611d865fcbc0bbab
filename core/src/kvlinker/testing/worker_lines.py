"""What a process of a load or a soak says on its standard output, one JSON value a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["CallError", "Resources", "Round", "parse_line", "resources_now"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a process has taken."""

    descriptors: int
    threads: int
    mappings: int
    """Of files of the store."""
    private_kib: int
    """Resident memory that belongs to no file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """An error of the store as a whole, which is right while its server is away."""

    text: str

    def line(self) -> str:
        """Return it as a line."""
        return json.dumps({"error": self.text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a process did between opening the store and closing it, and what it has after that."""

    number: int
    counts: Mapping[str, int]
    """Answers that its users had, and under `store NAME` what the store counted."""
    resources: Resources

    def line(self) -> str:
        """Return it as a line."""
        said = {
            "number": self.number,
            "counts": dict(self.counts),
            "resources": asdict(self.resources),
        }
        return json.dumps(said)


def parse_line(line: str) -> Round | CallError | str | int:
    """Return a round, an error, the text of a violation, or a number of calls that were made.

    Raises:
        ValueError: it is none of these.
    """
    said: object = json.loads(line)
    if isinstance(said, str | int):
        return said
    if not isinstance(said, dict):
        msg = f"no line of a worker: {line}"
        raise ValueError(msg)  # noqa: TRY004 - one error for everything that was not said by a worker
    if "error" in said:
        return CallError(text=str(said["error"]))
    resources = Resources(**said["resources"])
    return Round(number=said["number"], counts=said["counts"], resources=resources)


def resources_now(folder: Path | None = None) -> Resources:
    """Return what this process has taken; `folder` is the store's, where its files are mapped."""
    status = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    )
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return Resources(
        descriptors=len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - counts, reads no file
        threads=int(status["Threads"]),
        mappings=maps.count(f"{folder}/") if folder else 0,
        private_kib=int(status["RssAnon"].split()[0]),
    )

"""Findings: what `kvlinker doctor` looks at, each with what it saw and whether that is well."""

from __future__ import annotations

import json
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import importlib_metadata

import kvlinker
from kvlinker.installed import PluginRecord, PluginStatus
from kvlinker.moving import current_mover
from kvlinker.quantities import amount
from kvlinker.store import StoreStats

__all__ = [
    "Finding",
    "Level",
    "disk_finding",
    "environment_findings",
    "limit_finding",
    "plugin_findings",
    "torch_finding",
]

_FEWEST_FILES = 1024
"""Descriptors that a process should be allowed: a store may keep hundreds of files open, and a server its sockets."""
_TORCH_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"version": torch.__version__, "built_for": torch.version.cuda, "devices": names}))
"""


class Level(Enum):
    """Whether a finding needs anybody's attention."""

    GOOD = "ok"
    NOTE = "note"
    """Worth knowing; nothing is wrong for certain."""
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    level: Level = Level.GOOD
    text: str


def environment_findings() -> Iterator[Finding]:
    """Yield which Python and which kvlinker this is, and whether an older kvlinker lies about."""
    yield Finding(topic="python", text=f"{platform.python_version()} at {sys.executable}")
    yield Finding(topic="system", text=f"{platform.system()} {platform.release()}")
    mover = current_mover()
    yield Finding(topic="copies", text="by Python alone" if mover is None else f"by mover {mover}")
    place = Path(kvlinker.__file__).parent
    found = [
        (str(distribution.version), str(distribution.locate_file("")))
        for distribution in importlib_metadata.distributions(name="kvlinker")
    ]
    yield Finding(topic="kvlinker", text=f"{kvlinker.__version__} at {place}")
    others = {(version, where) for version, where in found if version != kvlinker.__version__}
    for version, where in sorted(others):
        text = f"metadata of {version} lies in {where}, which is not what is imported; remove it, or install anew"
        yield Finding(topic="kvlinker", level=Level.PROBLEM, text=text)


def torch_finding(deadline_s: float) -> Finding:
    """Return which torch is installed and what it sees, asked in a process of its own.

    Args:
        deadline_s: seconds that importing it may take.
    """
    if not any(importlib_metadata.distributions(name="torch")):
        text = "not installed; core, model plugins and stores work without it"
        return Finding(topic="torch", level=Level.NOTE, text=text)
    command = [sys.executable, "-c", _TORCH_PROGRAM, json.dumps(sys.path)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=deadline_s, check=True
        )
    except subprocess.TimeoutExpired:
        text = f"importing it did not finish within {deadline_s:g} s"
        return Finding(topic="torch", level=Level.PROBLEM, text=text)
    except subprocess.CalledProcessError as error:
        last = (str(error.stderr).strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        text = f"importing it failed: {last}"
        return Finding(topic="torch", level=Level.PROBLEM, text=text)
    seen: dict[str, str | list[str] | None] = json.loads(done.stdout)
    devices = ", ".join(seen["devices"] or ())
    if devices:
        return Finding(topic="torch", text=f"{seen['version']}, CUDA devices: {devices}")
    if seen["built_for"]:
        text = f"{seen['version']} is built for CUDA {seen['built_for']} and sees no device"
        return Finding(topic="torch", level=Level.NOTE, text=text)
    return Finding(topic="torch", text=f"{seen['version']}, CPU alone")


def plugin_findings(records: Sequence[PluginRecord]) -> Iterator[Finding]:
    """Yield for each plugin where it comes from, and what became of it."""
    for record in records:
        topic = f"{record.kind.value} {record.name}"
        editable = ", editable" if record.editable else ""
        where = f"{record.distribution} {record.version} in {record.location}{editable}"
        level = {
            PluginStatus.BROKEN: Level.PROBLEM,
            PluginStatus.DUPLICATE: Level.PROBLEM,
            PluginStatus.DISABLED: Level.NOTE,
        }.get(record.status, Level.GOOD)
        reason = f": {record.status.value}: {record.reason}" if record.reason else ""
        yield Finding(topic=topic, level=level, text=f"{where}{reason}")
        for folder in record.shadowed:
            text = f"other metadata of {record.distribution} lies in {folder} and is not used; remove it"
            yield Finding(topic=topic, level=Level.NOTE, text=text)


def limit_finding() -> Finding:
    """Return how many files this process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEWEST_FILES:
        return Finding(topic="open files", text=f"up to {soft:,}")
    text = (
        f"only {soft:,} are allowed, and up to {hard:,} on request; try: ulimit -n {_FEWEST_FILES}"
    )
    return Finding(topic="open files", level=Level.PROBLEM, text=text)


def disk_finding(path: Path, stats: StoreStats) -> Finding:
    """Return whether the disk has the room that a store may still take.

    Args:
        path: where the store is.
        stats: of the open store.
    """
    free = shutil.disk_usage(path).free
    if stats.capacity_bytes is None:
        return Finding(topic="disk", text=f"{amount(free)} free at {path}")
    wanted = stats.capacity_bytes - stats.used_bytes
    if wanted > free:
        text = f"{amount(free)} free at {path}, but the store may take {amount(wanted)} more; lower its capacity"
        return Finding(topic="disk", level=Level.PROBLEM, text=text)
    return Finding(topic="disk", text=f"{amount(free)} free at {path}, {amount(wanted)} wanted")

"""A process that writes objects and is killed at a chosen moment, as the kernel or an operator would."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvlinker.device import DeviceAccess, HostObjects
from kvlinker.plans import TransferPlan
from kvlinker.store import ObjectKey, Store
from kvlinker.testing.altered_access import CopyingPart
from kvlinker.testing.shelves import Shelf, allow, object_keys
from kvlinker.testing.verdicts import fail

__all__ = ["GROUP", "KillMoment", "KilledWriter", "run_writer", "write_and_die"]

GROUP = 4
"""Objects of one write."""
_GROUPS_BEFORE = 3
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from kvlinker.testing.killed_writer import write_and_die
write_and_die(*sys.argv[2:])
"""
_DEADLINE_S = 120.0


class KillMoment(Enum):
    """When, in its last write, the writer is killed."""

    BEFORE_COPY = "before_copy"
    HALF_COPIED = "half_copied"
    BEFORE_PUBLISH = "before_publish"
    """The bytes were copied, and the permission to publish is about to be given."""
    AFTER_WRITE = "after_write"
    """The write has answered, and the store was never closed."""


_IN_COPIES = frozenset({KillMoment.BEFORE_COPY, KillMoment.HALF_COPIED})


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledWriter:
    """What a killed writer had done."""

    stored: tuple[ObjectKey, ...]
    """Objects that it was told are stored."""
    interrupted: tuple[ObjectKey, ...]
    """Objects of the write in which it was killed; empty where that write had answered."""


class _Opens(Protocol):
    """A module with the hook of a store plugin."""

    def open_store(self, config: Mapping[str, object]) -> Store:
        """See `kvlinker.hookspecs`."""
        ...


def group_keys(number: int) -> tuple[ObjectKey, ...]:
    """Return the keys of one write."""
    return object_keys(GROUP, chain=f"write {number}")


def run_writer(module: str, config: Mapping[str, object], moment: KillMoment) -> KilledWriter:
    """Let a new process open the store, write, and be killed.

    Args:
        module: name under which the plugin can be imported.
        config: options of the store, in values that JSON has.
        moment: when it is killed.

    Raises:
        AssertionError: it ended in another way.
    """
    paths, options = json.dumps(sys.path), json.dumps(dict(config))
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, paths, module, options, moment.value],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if done.returncode != -signal.SIGKILL:
        fail(
            f"the writer ended with {done.returncode} before it was killed:\n{done.stderr[-2000:]}"
        )
    groups = len(done.stdout.split())
    return KilledWriter(
        stored=tuple(key for number in range(groups) for key in group_keys(number)),
        interrupted=() if moment is KillMoment.AFTER_WRITE else group_keys(groups),
    )


def write_and_die(module: str, options: str, moment: str) -> None:
    """Write some groups, say each one that is stored, and die in the next, as the child of `run_writer`."""
    plugin: _Opens = importlib.import_module(module)
    store = plugin.open_store(json.loads(options))
    shelf = Shelf(store)
    for number in range(_GROUPS_BEFORE):
        shelf.stock(group_keys(number))
        _say(number)
    keys = group_keys(_GROUPS_BEFORE)
    when = KillMoment(moment)
    if store.capabilities.device_memory and when in _IN_COPIES:
        when = KillMoment.BEFORE_PUBLISH  # no copy of such a store goes through the access
    match when:
        case KillMoment.BEFORE_COPY:
            shelf.write(keys, memory=_DyingAccess(shelf.access, copies=False))
        case KillMoment.HALF_COPIED:
            shelf.write(keys, memory=_DyingAccess(shelf.access, copies=True))
        case KillMoment.BEFORE_PUBLISH:
            shelf.write(keys, may_publish=_die)
        case KillMoment.AFTER_WRITE:
            shelf.stock(keys)
            _say(_GROUPS_BEFORE)
    _die()


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _die() -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return allow()


class _HalfCopiedError(Exception):
    """Raised when half of the pages were copied."""


class _DyingAccess(DeviceAccess):
    """Kills the process in the first copy out of pool memory."""

    def __init__(self, access: DeviceAccess, *, copies: bool) -> None:
        self._part = CopyingPart(access, _HalfCopiedError())
        self._copies = copies

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        if self._copies:
            with suppress(_HalfCopiedError):
                self._part.copy_out(plan, host)
        _die()

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        self._part.copy_in(plan, host)

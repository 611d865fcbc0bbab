"""What the parts of one linker share: the group and the store, and what they count, report and give up by."""

from __future__ import annotations

from dataclasses import dataclass

from kvlinker.cleanup import Cleanup
from kvlinker.failures import FailureLog
from kvlinker.guard import GuardedStore
from kvlinker.linker_options import LinkerOptions
from kvlinker.metrics import LinkerMetrics
from kvlinker.pool_keys import Quarantine
from kvlinker.pools import DevicePoolGroup

__all__ = ["LinkerParts"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkerParts:
    """Shared by the lookups, loads and offloads of a linker."""

    group: DevicePoolGroup
    store: GuardedStore
    options: LinkerOptions
    metrics: LinkerMetrics
    failures: FailureLog
    quarantine: Quarantine
    cleanup: Cleanup

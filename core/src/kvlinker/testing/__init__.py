"""What tests of linkers, stores and plugins are made of: honest small stores and pools, and faults on demand.

The conformance kit is in the modules `models`, `stores` and `engines`, which need pytest; nothing else here does.
"""

from __future__ import annotations

from kvlinker.testing.fault_access import CopyRecord, FaultAccess
from kvlinker.testing.fault_store import FaultStore, StoreCallRecord
from kvlinker.testing.faults import (
    AnswerNone,
    CopyHalf,
    Evict,
    FlipBytes,
    Hang,
    LandLate,
    Lie,
    Miscount,
    Moment,
    Raise,
    Report,
    Slow,
    Tamper,
    TamperableStore,
    TamperKind,
)
from kvlinker.testing.gates import Gate, HostEvent
from kvlinker.testing.memory_store import CapabilityChoices, MemoryStore
from kvlinker.testing.patterns import PagePattern, page_keys
from kvlinker.testing.pool_memory import (
    CopyTiming,
    HostMemory,
    OpaqueAccess,
    OpaqueMemory,
    PoolMemory,
)
from kvlinker.testing.pools import FakePools, Family, PageFault, fake_group
from kvlinker.testing.python_mover import PythonMover
from kvlinker.testing.script import (
    Answers,
    Call,
    Fault,
    FaultedCall,
    FaultScript,
    Landing,
    Rule,
)

__all__ = [
    "AnswerNone",
    "Answers",
    "Call",
    "CapabilityChoices",
    "CopyHalf",
    "CopyRecord",
    "CopyTiming",
    "Evict",
    "FakePools",
    "Family",
    "Fault",
    "FaultAccess",
    "FaultScript",
    "FaultStore",
    "FaultedCall",
    "FlipBytes",
    "Gate",
    "Hang",
    "HostEvent",
    "HostMemory",
    "LandLate",
    "Landing",
    "Lie",
    "MemoryStore",
    "Miscount",
    "Moment",
    "OpaqueAccess",
    "OpaqueMemory",
    "PageFault",
    "PagePattern",
    "PoolMemory",
    "PythonMover",
    "Raise",
    "Report",
    "Rule",
    "Slow",
    "StoreCallRecord",
    "Tamper",
    "TamperKind",
    "TamperableStore",
    "fake_group",
    "page_keys",
]

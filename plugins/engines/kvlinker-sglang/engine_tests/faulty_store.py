"""The store plugin `faulty`, for tests alone: a store that goes wrong as a file says, while it is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict, Unpack

from kvlinker.device import DeviceAccess
from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.store import (
    Hold,
    ObjectKey,
    ReadRequest,
    ReadSession,
    Store,
    WriteBatch,
    WriteStatus,
)
from kvlinker.testing import (
    Call,
    Evict,
    Fault,
    FaultStore,
    Gate,
    Hang,
    Lie,
    MemoryStore,
    Raise,
    Report,
    Rule,
    Slow,
    Tamper,
)
from kvlinker.testing.script import FaultScript
from kvlinker_file import FileStore, FileStoreOptions

__all__ = [
    "FAULTS",
    "PATIENT",
    "FaultChoices",
    "describe_plugin",
    "install",
    "misbehave",
    "open_store",
]

_HANG_SECONDS = 60.0
FAULTS: Mapping[str, Callable[[Gate], Fault]] = MappingProxyType(
    {
        "corrupt": lambda _: Tamper(),
        "deny": lambda _: Lie(exists=False),
        "evict": lambda _: Evict(),
        "full": lambda _: Report(status=WriteStatus.FULL),
        "hang": lambda gate: Hang(gate=gate),
        "lie": lambda _: Lie(exists=True),
        "raise": lambda _: Raise(error=OSError("injected")),
        "slow": lambda _: Slow(seconds=0.3),
    }
)
"""What a store can be told to do, by name."""

PATIENT = MappingProxyType({"lookup_seconds": 60.0, "load_seconds": 60.0, "offload_seconds": 60.0})
"""A linker's limits that nothing reaches but what hangs."""


class FaultChoices(TypedDict, total=False):
    """See `kvlinker.testing.Rule`."""

    times: int
    every: int
    share: float
    chance: float


def install(folder: Path) -> Path:
    """Let whoever has a folder on its path find the plugin, and return the folder."""
    info = folder / "kvlinker_faulty-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvlinker-faulty\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[kvlinker.stores]\nfaulty = faulty_store\n")
    return folder


def misbehave(control: Path, *faults: tuple[str, str], **choices: Unpack[FaultChoices]) -> None:
    """Tell a store what happens from here on: pairs of a call and a fault; nothing, without any."""
    rules = [{"call": call, "fault": fault, **choices} for call, fault in faults]
    control.parent.mkdir(exist_ok=True)
    new = control.with_suffix(".new")
    new.write_text(json.dumps(rules))
    new.replace(control)


@hookimpl
def describe_plugin() -> PluginInfo:
    """See `kvlinker.hookspecs`."""
    return PluginInfo(api_version=1, summary="goes wrong when it is told to")


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    """Open a store that obeys the file `control`: a file store with further options, or one in memory without any."""
    options = dict(config)
    control = Path(str(options.pop("control")))
    store = FileStore(FileStoreOptions.of_config(options)) if options else MemoryStore()
    return _ControlledStore(store, control)


class _ControlledStore(FaultStore):
    """Reads what it has to do wrong before every call."""

    def __init__(self, store: Store, control: Path) -> None:
        super().__init__(store)
        self._control = control
        self._read = ""
        self._gate = Gate(limit_seconds=_HANG_SECONDS)

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        self._obey()
        return super().exists(keys)

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        self._obey()
        return super().hold(keys, seconds=seconds)

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        self._obey()
        return super().write(batches, memory, may_publish=may_publish)

    def open_read(self, request: ReadRequest) -> ReadSession:
        self._obey()
        return super().open_read(request)

    def _obey(self) -> None:
        wanted = self._control.read_text() if self._control.exists() else "[]"
        if wanted == self._read:
            return
        self._read = wanted
        old, self._gate = self._gate, Gate(limit_seconds=_HANG_SECONDS)
        self.script = FaultScript(self._rule(**rule) for rule in json.loads(wanted))
        old.open()

    def _rule(self, *, call: str, fault: str, **choices: Unpack[FaultChoices]) -> Rule:
        return Rule(call=Call(call), fault=FAULTS[fault](self._gate), **choices)

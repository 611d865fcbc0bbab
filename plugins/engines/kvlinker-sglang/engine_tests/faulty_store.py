"""The store plugin `faulty`, for tests alone: a store that goes wrong as a file says, while it is used."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict, Unpack

from engine_frame.server import LinkerOptions

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
    Moment,
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
    "HALT",
    "PATIENT",
    "TOLD",
    "FaultChoices",
    "describe_plugin",
    "hangs_to_come",
    "held_calls",
    "install",
    "misbehave",
    "open_store",
]

_HANG_SECONDS = 60.0
FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "corrupt": Tamper(),
        "deny": Lie(exists=False),
        "evict": Evict(),
        "full": Report(status=WriteStatus.FULL),
        "lie": Lie(exists=True),
        "raise": Raise(error=OSError("injected")),
        "slow": Slow(seconds=0.3),
    }
)
"""What a store can be told to do, by name; beside these it can be told to hang."""

HANG = "hang"
"""To hold a call until the store is told something else; the linker of `told_linker` gives it up soon."""
HOLD = "hold"
"""The same, with a linker that is patient."""
HALT = "halt"
"""The same of a write whose bytes are copied, and not to be found yet."""
_MOMENTS = MappingProxyType({HALT: Moment.BEFORE_PUBLISH, HANG: Moment.BEFORE, HOLD: Moment.BEFORE})

PATIENT = MappingProxyType({"lookup_seconds": 60.0, "load_seconds": 60.0, "offload_seconds": 60.0})
"""A linker's limits that nothing reaches but what hangs."""
TOLD = LinkerOptions(name="ToldLinker", module="told_linker")
"""The linker that goes with this store: where a call is to hang, its limits are short."""


class FaultChoices(TypedDict, total=False):
    """See `kvlinker.testing.Rule`."""

    first: int
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
    _note_of(control).unlink(missing_ok=True)
    new = control.with_suffix(".new")
    new.write_text(json.dumps(rules))
    new.replace(control)


def held_calls(control: Path) -> list[str]:
    """Return the calls that hang, or hung, since the store was told what to do last."""
    note = _note_of(control)
    return note.read_text().split() if note.exists() else []


def hangs_to_come(control: Path) -> frozenset[str]:
    """Return the calls of which the next one is to hang until the linker gives it up."""
    held = held_calls(control)
    rules = json.loads(control.read_text()) if control.exists() else []
    return frozenset(
        rule["call"]
        for rule in rules
        if rule["fault"] == HANG and held.count(rule["call"]) < rule.get("times", len(held) + 1)
    )


def _note_of(control: Path) -> Path:
    return control.with_name(f"{control.name}.held")


class _ToldGate(Gate):
    """Says that it holds a call, and holds it until the store is told something else."""

    def __init__(self, control: Path, call: str) -> None:
        super().__init__(limit_seconds=_HANG_SECONDS)
        self._control = control
        self._rules = control.read_text()
        self._call = call

    def pass_through(self) -> None:
        with _note_of(self._control).open("a") as note:
            note.write(f"{self._call}\n")
        limit = time.monotonic() + _HANG_SECONDS
        while self._control.read_text() == self._rules:
            if time.monotonic() > limit:
                msg = f"nobody told the store to end its {self._call} within {_HANG_SECONDS} s"
                raise TimeoutError(msg)
            time.sleep(0.02)


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
        self.script = FaultScript(self._rule(**rule) for rule in json.loads(wanted))

    def _rule(self, *, call: str, fault: str, **choices: Unpack[FaultChoices]) -> Rule:
        if fault in _MOMENTS:
            gate = _ToldGate(self._control, call)
            made: Fault = Hang(gate=gate, moment=_MOMENTS[fault])
        else:
            made = FAULTS[fault]
        return Rule(call=Call(call), fault=made, **choices)

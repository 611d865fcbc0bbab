"""The linker over the store `faulty`, whose limits are short for calls that the store is told to hang in.

A call that hangs costs its limit, and a call that works may take long on a busy machine: one limit cannot be both.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType

from faulty_store import hangs_to_come

from kvlinker_sglang.engine.linker import KVLinker
from kvlinker_sglang.engine.parameters import WorkerParameters
from kvlinker_sglang.options import parse_config
from kvlinker_sglang.transfers import EngineTransfer

__all__ = ["ToldLinker"]

_LIMITS: Mapping[str, tuple[frozenset[str], float]] = MappingProxyType(
    {
        "lookup_seconds": (frozenset({"exists", "hold"}), 0.5),
        "load_seconds": (frozenset({"open_read", "read"}), 1.5),
        "offload_seconds": (frozenset({"exists", "write"}), 1.0),
    }
)
"""Limit to the calls of a store that it bounds, and the seconds that it has while one of them is to hang."""


class ToldLinker(KVLinker):
    """The linker, which looks before each call whether its store is to hang in it."""

    def __init__(self, server_args: object, params: WorkerParameters, **choices: object) -> None:
        """See KVLinker."""
        super().__init__(server_args, params, **choices)
        options = parse_config(choices["extra_config"]).store.options
        self._control = Path(str(options["control"]))
        self._usual = {name: attrgetter(name)(self._linker.options) for name in _LIMITS}

    def lookup(self, rid: str, transfers: list[EngineTransfer]) -> list[int]:
        """See KVLinker."""
        self._follow()
        return super().lookup(rid, transfers)

    def start_layer_wise_loading(self) -> int:
        """See KVLinker."""
        self._follow()
        return super().start_layer_wise_loading()

    def offload(self, transfers: list[EngineTransfer], session_id: str | None = None) -> bool:
        """See KVLinker."""
        self._follow()
        return super().offload(transfers, session_id)

    def _follow(self) -> None:
        """Set the limits of what comes next; the options are frozen for whoever does not test them."""
        hanging = hangs_to_come(self._control)
        for name, (calls, seconds) in _LIMITS.items():
            value = seconds if calls & hanging else self._usual[name]
            object.__setattr__(self._linker.options, name, value)

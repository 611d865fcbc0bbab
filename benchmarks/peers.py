"""Peers: other projects' classes, installed into a folder of their own that only benchmarks see."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LMCACHE", "SGLANG", "Peer", "PeerUnavailableError"]

_FOLDER = Path(sys.prefix) / "peers"
"""Where `make bench` installs them: beside the environment's own packages, never among them."""


class PeerUnavailableError(Exception):
    """A peer cannot run here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A project whose classes run on the CPU when nothing but the modules in question is imported."""

    name: str
    """As the table shows it."""
    package: str
    is_bare: bool
    """Whether the package's own module must not run, because it wants a GPU."""

    def load(self, module: str) -> types.ModuleType:
        """Return a module of the peer.

        Raises:
            PeerUnavailableError: it is not installed, or does not import on this machine.
        """
        if str(_FOLDER) not in sys.path:
            sys.path.append(str(_FOLDER))
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # a benchmark reports to nobody
        try:
            if self.is_bare:
                self._enter_bare()
            return importlib.import_module(f"{self.package}.{module}")
        except Exception as error:
            msg = (
                f"{type(error).__name__}: {error}; `make bench` installs it where a registry has it"
            )
            raise PeerUnavailableError(msg) from error

    def _enter_bare(self) -> None:
        """Make submodules importable without running the package's module."""
        if self.package in sys.modules:
            return
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(self.package)
        package = types.ModuleType(self.package)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[self.package] = package


SGLANG = Peer(name="SGLang 0.5.23", package="sglang", is_bare=True)
LMCACHE = Peer(name="LMCache 0.5.6", package="lmcache", is_bare=False)

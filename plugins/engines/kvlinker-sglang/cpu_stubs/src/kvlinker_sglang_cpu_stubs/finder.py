"""The import hook: answers for the stubbed packages and everything below them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from kvlinker_sglang_cpu_stubs.stand_ins import StandInModule
from kvlinker_sglang_cpu_stubs.triton_names import names_of

__all__ = ["STUBBED", "StubFinder", "StubLoader", "find_stand_ins"]

STUBBED = ("sgl_kernel", "torchvision", "triton")
"""Packages that SGLang imports wherever it runs, and of which a CPU has none that works."""


class StubLoader(Loader):
    """Makes stand-ins of modules."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty stand-in."""
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Add the names that have to be more than a stand-in."""
        vars(module).update(names_of(module.__name__))


class StubFinder(MetaPathFinder):
    """Finds any module of the stubbed packages, before whatever is installed of them."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the import system passes it
        target: ModuleType | None = None,  # noqa: ARG002 - the import system passes it
    ) -> ModuleSpec | None:
        """Return a package's spec, so that every name may have modules below it."""
        if fullname.partition(".")[0] not in STUBBED:
            return None
        return ModuleSpec(fullname, StubLoader(), origin="stand-in", is_package=True)


def find_stand_ins() -> None:
    """Put the hook before all others; once is enough."""
    if not any(isinstance(finder, StubFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StubFinder())

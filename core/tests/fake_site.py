"""A folder of installed distributions, made up for a test: metadata as an installer writes it, and real modules."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent

from kvlinker.discovery import (
    PluginKind,
    PluginRecord,
    PluginRegistry,
    PluginStatus,
    available,
    load_plugins,
)

__all__ = ["ENGINE", "MODEL", "STORE", "FakeSite", "load_twice"]

_PREAMBLE = """
from kvlinker.hookspecs import PluginInfo, StrategyMatch, hookimpl

@hookimpl
def describe_plugin():
    return PluginInfo(api_version=1, summary="a fake")
"""
MODEL = (
    _PREAMBLE
    + """
@hookimpl
def match_kv_cache(description):
    return None
"""
)
STORE = (
    _PREAMBLE
    + """
@hookimpl
def open_store(config):
    raise ValueError(f"opened with {dict(config)}")
"""
)
ENGINE = (
    _PREAMBLE
    + """
@hookimpl
def describe_kv_cache(engine, kv_cache, request):
    return None
"""
)


class FakeSite:
    """A folder on sys.path that fake distributions are installed in; what they import is forgotten at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: list[str] = []

    def install(
        self,
        distribution: str,
        entries: Mapping[str, str],
        *,
        kind: PluginKind = PluginKind.MODEL,
        version: str = "1.0",
        modules: Mapping[str, str] | None = None,
    ) -> Path:
        """Install a distribution with entry points of one kind; return its metadata folder.

        Args:
            distribution: its name.
            entries: public name to the entry point's value.
            kind: of all entries.
            version: its version.
            modules: name to source, for the modules that come with it.
        """
        for name, source in (modules or {}).items():
            self.write(name, source)
        lines = [f"[{kind.group}]", *(f"{name} = {value}" for name, value in entries.items())]
        return self.metadata(distribution, "\n".join(lines), version=version)

    def metadata(self, distribution: str, entry_points: str, *, version: str = "1.0") -> Path:
        """Write a dist-info folder with these entry points; return it."""
        folder = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
        (folder / "RECORD").write_text("")
        (folder / "entry_points.txt").write_text(entry_points)
        return folder

    def write(self, name: str, source: str) -> None:
        """Write a module that is importable while the site lasts."""
        (self.folder / f"{name}.py").write_text(dedent(source))
        self._modules.append(name)

    def forget(self) -> None:
        """Take the site's modules out of this process."""
        for name in self._modules:
            sys.modules.pop(name, None)

    def is_imported(self, module: str) -> bool:
        """Return whether this process has imported the module."""
        return module in sys.modules

    def load(self, *names: str, strict: bool | None = None) -> PluginRegistry:
        """Load the named plugins alone: what else is installed here is not part of the test."""
        return load_plugins(allow=names, strict=strict, environ={})

    def record(self, registry: PluginRegistry, name: str) -> PluginRecord:
        """Return the one record that answers to the name."""
        (found,) = [record for record in registry.records if record.answers_to(name)]
        return found

    def installed(self, *names: str) -> Sequence[PluginRecord]:
        """Return the installed plugins that answer to any of the names."""
        return [r for r in available() if any(r.answers_to(name) for name in names)]

    def make_editable(self, metadata: Path) -> None:
        """Mark a distribution as an editable install."""
        origin = {"url": "file:///src", "dir_info": {"editable": True}}
        (metadata / "direct_url.json").write_text(json.dumps(origin))


def load_twice(path: Sequence[str], *names: str) -> list[list[str]]:
    """Load the named plugins two times in a process with this path; return what became of them."""
    sys.path[:] = path
    found = []
    for _ in range(2):
        registry = load_plugins(allow=names, environ={})
        broken = [r.reason for r in registry.records if r.status is PluginStatus.BROKEN]
        found.append([plugin.name for plugin in registry.models()] + broken)
    return found

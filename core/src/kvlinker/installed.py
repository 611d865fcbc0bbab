"""Which plugins are installed, read from the metadata of distributions; nothing is imported.

A distribution counts once however often it is seen. Where its metadata lies in several places, an
installed `.dist-info` beats an `.egg-info` left behind, and the earlier path beats the later one.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import importlib_metadata

from kvlinker.errors import PluginNotFoundError
from kvlinker.spelling import nearest_names

__all__ = [
    "OFFICIAL_PLUGINS",
    "PluginKind",
    "PluginRecord",
    "PluginStatus",
    "available",
    "install_hint",
    "normalize",
    "plugin_not_found",
]

_logger = logging.getLogger(__name__)


class PluginKind(Enum):
    """What a plugin is for."""

    MODEL = "model"
    """Recognises a KV cache and lays it out."""
    STORE = "store"
    """Keeps objects under keys."""
    ENGINE = "engine"
    """Describes an engine's KV cache."""

    @property
    def group(self) -> str:
        """The entry-point group."""
        return f"kvlinker.{self.value}s"


class PluginStatus(Enum):
    """What became of an installed plugin."""

    AVAILABLE = "available"
    """Known from metadata; not loaded."""
    LOADED = "loaded"
    BROKEN = "broken"
    """Loading it failed; the record says why."""
    DISABLED = "disabled"
    """An allow or deny list keeps it from loading; it was not imported."""
    DUPLICATE = "duplicate"
    """Another distribution claims the name too; usable as `distribution:name` alone."""


OFFICIAL_PLUGINS: Mapping[PluginKind, tuple[str, ...]] = MappingProxyType(
    {
        PluginKind.MODEL: ("deepseek_v4", "dsa", "mamba", "mha", "mla", "swa"),
        PluginKind.STORE: ("file", "memory", "mooncake", "nixl", "redis", "s3"),
        PluginKind.ENGINE: ("sglang", "transformers"),
    }
)
"""Names that this project provides, for hints in messages and nothing else; never one that anybody could take."""


def normalize(distribution: str) -> str:
    """Return a distribution's name in the one spelling that package indexes compare."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRecord:
    """What is known of one installed plugin."""

    name: str
    """Public name: the left side of the entry point."""
    kind: PluginKind
    distribution: str
    version: str
    module: str
    """The entry point's value."""
    location: str = ""
    """Folder that holds the distribution's metadata."""
    editable: bool = False
    shadowed: tuple[str, ...] = ()
    """Folders with other metadata of the same distribution, which are not used."""
    status: PluginStatus = PluginStatus.AVAILABLE
    reason: str = ""
    """Why it is not loaded."""
    summary: str = ""
    """What the plugin says of itself; known once it is loaded."""
    api_version: int | None = None
    traceback: str = ""
    """Where loading failed, as text: no frame is kept alive."""

    @property
    def qualified_name(self) -> str:
        """The name that no other distribution can claim: `distribution:name`."""
        return f"{self.distribution}:{self.name}"

    def order(self) -> tuple[str, str, str, str]:
        """Return what plugins are sorted by: name and distribution, never the order on disk."""
        return self.name, normalize(self.distribution), self.kind.value, self.module

    def answers_to(self, name: str) -> bool:
        """Return whether `name` means this plugin: its name, or `distribution:name`."""
        distribution, _, plain = name.rpartition(":")
        same = not distribution or normalize(distribution) == normalize(self.distribution)
        return same and plain == self.name

    def __str__(self) -> str:
        return f"{self.kind.value} plugin {self.name!r} ({self.distribution} {self.version})"


def available() -> tuple[PluginRecord, ...]:
    """Return every installed plugin, by name and distribution; metadata is read anew, nothing is imported."""
    importlib.invalidate_caches()
    records: list[PluginRecord] = []
    for name in _providers():
        with _damage_reported(name):
            records.extend(_records(name))
    return tuple(sorted(records, key=PluginRecord.order))


def _providers() -> tuple[str, ...]:
    found: set[str] = set()
    for distribution in importlib_metadata.distributions():
        with _damage_reported(str(distribution.locate_file(""))):
            if any(_entries(distribution)):
                found.add(normalize(_required(distribution.name, "Name")))
    return tuple(sorted(found))


@contextmanager
def _damage_reported(what: str) -> Iterator[None]:
    # Anything may be wrong with the metadata of any distribution; it must not hide the plugins of the others.
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        _logger.warning("cannot read the metadata of a distribution (%s): %r", what, error)


def _required(value: str | None, field: str) -> str:
    # Metadata without the field reads as None in some versions of importlib-metadata, whatever its types say.
    if not value:
        msg = f"its metadata has no {field}"
        raise ValueError(msg)
    return value


def _entries(
    distribution: importlib_metadata.IDistribution,
) -> Iterator[tuple[PluginKind, importlib_metadata.EntryPoint]]:
    kinds = {kind.group: kind for kind in PluginKind}
    for entry in distribution.entry_points:
        if entry.group in kinds:
            yield kinds[entry.group], entry


def _records(name: str) -> Iterator[PluginRecord]:
    seen = sorted(importlib_metadata.distributions(name=name), key=_is_leftover)
    if not seen:
        return
    chosen, location = seen[0], _place(seen[0])
    others = dict.fromkeys(_place(other) for other in seen[1:])
    entries = {(kind, entry.name, entry.value) for kind, entry in _entries(chosen)}
    for kind, entry_name, value in entries:
        yield PluginRecord(
            name=entry_name,
            kind=kind,
            distribution=chosen.name,
            version=_required(chosen.version, "Version"),
            module=value,
            location=location,
            editable=_is_editable(chosen),
            shadowed=tuple(place for place in others if place != location),
        )


def _is_leftover(distribution: importlib_metadata.IDistribution) -> bool:
    return distribution.read_text("METADATA") is None


def _place(distribution: importlib_metadata.IDistribution) -> str:
    # lib64 is a link to lib in many environments: one place, seen twice.
    return os.path.realpath(str(distribution.locate_file("")))


def _is_editable(distribution: importlib_metadata.IDistribution) -> bool:
    try:
        origin: object = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    folder: object = origin.get("dir_info") if isinstance(origin, dict) else None
    return isinstance(folder, dict) and folder.get("editable") is True


def install_hint(kind: PluginKind, name: str) -> str:
    """Return the command that installs an official plugin, or an empty text for another one."""
    if name not in OFFICIAL_PLUGINS[kind]:
        return ""
    return f"pip install kvlinker-{name.replace('_', '-')}"


def plugin_not_found(
    name: str, records: Collection[PluginRecord], *, kinds: Collection[PluginKind], asked: str
) -> PluginNotFoundError:
    """Return the error for a name that no distribution provides, with the closest match and what to install.

    Args:
        name: as it was asked for, plain or `distribution:name`.
        records: what is installed.
        kinds: kinds that the name could have meant.
        asked: who asked, to begin the message with.
    """
    installed = [record for record in records if record.kind in kinds]
    plain = name.rpartition(":")[2]
    official = [official for kind in kinds for official in OFFICIAL_PLUGINS[kind]]
    parts = [f"{asked} {name!r}, which no installed distribution provides"]
    close = nearest_names(plain, [r.name for r in installed] + official)
    known = {record.name for record in installed}
    if meant := [near for near in close if near != plain or near in known]:
        forms = [form for near in meant for form in _forms(near, name, installed)]
        parts.append(f"did you mean {' or '.join(forms)}?")
    names = sorted({_name_and_state(record) for record in installed})
    parts.append(f"installed: {', '.join(names) or 'none'}")
    targets = [plain] if plain in official else list(close)
    missing = [target for target in targets if target not in known]
    hints = [install_hint(kind, target) for target in missing for kind in kinds]
    parts.extend(f"try: {hint}" for hint in hints if hint)
    return PluginNotFoundError("; ".join(parts))


def _forms(name: str, asked: str, installed: Sequence[PluginRecord]) -> list[str]:
    """Return how a plugin can be asked for: in the form of what was asked for, where that says which one is meant."""
    owners = [record.qualified_name for record in installed if record.name == name]
    return owners if len(owners) > 1 or (owners and ":" in asked) else [name]


def _name_and_state(record: PluginRecord) -> str:
    usable = record.status in {PluginStatus.AVAILABLE, PluginStatus.LOADED}
    return record.name if usable else f"{record.name} ({record.status.value})"

"""Allow and deny lists: which installed plugins may be imported at all.

Lists come from the environment and from arguments, and all of them hold: an argument narrows what the
environment admits, it never widens it. A denied plugin is not imported, whatever allows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvlinker.errors import ContractError
from kvlinker.installed import PluginKind, PluginRecord, PluginStatus, plugin_not_found

__all__ = ["ALLOW_VARIABLE", "DENY_VARIABLE", "STRICT_VARIABLE", "admit", "is_strict"]

ALLOW_VARIABLE = "KVLINKER_PLUGINS"
"""Names, separated by commas; set and empty, it admits no plugin."""
DENY_VARIABLE = "KVLINKER_DISABLED_PLUGINS"
STRICT_VARIABLE = "KVLINKER_STRICT_PLUGINS"


@dataclass(frozen=True, slots=True, kw_only=True)
class _NameList:
    """A list of plugin names and where it was given."""

    source: str
    names: tuple[str, ...]

    def lists(self, record: PluginRecord) -> bool:
        return any(record.answers_to(name) for name in self.names)

    def check(self, records: Sequence[PluginRecord]) -> None:
        for name in self.names:
            if not any(record.answers_to(name) for record in records):
                asked = f"{self.source} lists"
                raise plugin_not_found(name, records, kinds=tuple(PluginKind), asked=asked)


def admit(
    records: Sequence[PluginRecord],
    *,
    allow: Iterable[str] | None,
    deny: Iterable[str] | None,
    environ: Mapping[str, str],
    allowed_by: str = "the argument 'allow'",
) -> tuple[PluginRecord, ...]:
    """Return the records, DISABLED where a list keeps a plugin from being imported.

    Args:
        records: everything that is installed.
        allow: names, or `distribution:name`; None for no such list. An empty list admits nothing.
        deny: names, or `distribution:name`; it wins.
        environ: where the variables are read.
        allowed_by: what `allow` is called in messages.

    Raises:
        PluginNotFoundError: a list holds a name that no distribution provides.
        ContractError: a list is a single text.
    """
    allows = _lists(allow, allowed_by, ALLOW_VARIABLE, environ)
    denies = _lists(deny, "the argument 'deny'", DENY_VARIABLE, environ)
    for names in (*allows, *denies):
        names.check(records)
    return tuple(_judge(record, allows, denies) for record in records)


def _lists(
    argument: Iterable[str] | None, label: str, variable: str, environ: Mapping[str, str]
) -> tuple[_NameList, ...]:
    if isinstance(argument, str):
        msg = f"{label} must be a list of plugin names, got the text {argument!r}; write [{argument!r}]"
        raise ContractError(msg)
    found = []
    if variable in environ:
        names = (name.strip() for name in environ[variable].split(","))
        found.append(_NameList(source=variable, names=tuple(filter(None, names))))
    if argument is not None:
        found.append(_NameList(source=label, names=tuple(argument)))
    return tuple(found)


def _judge(
    record: PluginRecord, allows: Sequence[_NameList], denies: Sequence[_NameList]
) -> PluginRecord:
    reasons = [f"denied by {names.source}" for names in denies if names.lists(record)]
    reasons += [f"not allowed by {names.source}" for names in allows if not names.lists(record)]
    if not reasons:
        return record
    return replace(record, status=PluginStatus.DISABLED, reason=reasons[0])


def is_strict(argument: bool | None, environ: Mapping[str, str]) -> bool:  # noqa: FBT001 - mirrors an option
    """Return whether a broken plugin is an error at once: the argument, or else the environment.

    Raises:
        ContractError: the variable is set to something other than 0, 1 or nothing.
    """
    if argument is not None:
        return argument
    text = environ.get(STRICT_VARIABLE, "").strip()
    if text not in {"", "0", "1"}:
        msg = f"{STRICT_VARIABLE} must be 0 or 1, got {text!r}"
        raise ContractError(msg)
    return text == "1"

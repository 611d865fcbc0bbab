"""Checks that a group moves exactly the described memory: every span once, unaltered, or omitted with a reason.

A strategy that forgets a buffer, uses one twice or shrinks one restores wrong text without a crash;
so nothing that a strategy built is used before it was compared with the description.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from kvlinker.description import KVCacheDescription
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError
from kvlinker.hookspecs import StrategyMatch
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan

__all__ = ["claim_problem", "group_problem"]

_SHOWN = 4
"""Names in one message; a model has hundreds of spans."""


def claim_problem(match: StrategyMatch, description: KVCacheDescription) -> str:
    """Return what is wrong with a claim, or an empty text: it must name every role and no other label or role."""
    described = set(description.buffers)
    labels = {span.label for spans in description.buffers.values() for span in spans}
    if left := described - match.buffers:
        return f"matched, but leaves {_names('buffer', left)} out"
    if strange := match.buffers - described:
        return f"claims {_names('buffer', strange)}, which the description does not have"
    if absent := match.omitted.keys() - labels:
        return f"omits {_names('span', absent)}, which the description does not have"
    return ""


def group_problem(
    group: DevicePoolGroup, match: StrategyMatch, description: KVCacheDescription
) -> str:
    """Return the first thing that makes the group differ from what was described and claimed, or an empty text."""
    return next(_problems(group, match, description), "")


def _problems(
    group: DevicePoolGroup, match: StrategyMatch, description: KVCacheDescription
) -> Iterator[str]:
    yield from _frame_problems(group, description)
    roles = _roles(description)
    for entry in group.entries:
        yield from _entry_problems(entry, roles, description)
    used = Counter(span.label for entry in group.entries for span in entry.spans)
    if twice := {label for label, count in used.items() if count > 1}:
        yield f"uses {_names('span', twice)} more than once"
    if both := used.keys() & match.omitted.keys():
        yield f"uses {_names('span', both)} and omits the same"
    if forgotten := roles.keys() - used.keys() - match.omitted.keys():
        yield f"forgets {_names('span', forgotten)}; use every span, or omit it with a reason"


def _frame_problems(group: DevicePoolGroup, description: KVCacheDescription) -> Iterator[str]:
    layers = len(description.layers)
    pairs = (
        ("page size", group.page_size, description.page_size),
        ("number of layers", group.num_layers, layers),
        ("global layer range", group.layer_range, description.layer_range),
    )
    for what, built, described in pairs:
        if built != described:
            yield f"made a group whose {what} is {built}, but the description says {described}"


def _roles(description: KVCacheDescription) -> dict[str, tuple[str, BufferSpan]]:
    return {
        span.label: (role, span)
        for role, spans in description.buffers.items()
        for span in spans
        if span.rows
    }


def _entry_problems(
    entry: DevicePoolEntry,
    roles: dict[str, tuple[str, BufferSpan]],
    description: KVCacheDescription,
) -> Iterator[str]:
    where = f"in pool {entry.name!r}"
    if description.logical_pool(entry.indices_from_pool) is None:
        known = [pool.name for pool in description.logical_pools]
        yield f"takes indices {where} from {entry.indices_from_pool!r}, but the engine allocates from {known}"
    index_map = description.index_maps.get(entry.indices_from_pool)
    if index_map is not None and entry.index_mapper is not index_map:
        # Untranslated slots are other requests' rows: wrong text rather than a crash.
        yield f"drops the engine's index map of {entry.indices_from_pool!r} {where}; pass it as index_mapper"
    for span in entry.spans:
        if span.label in roles:
            role, original = roles[span.label]
            yield from _span_problems(span, original, where)
            yield from _rank_problems(entry, role, description)
        else:
            yield f"uses span {span.label!r} {where}, which was not described"


def _span_problems(span: BufferSpan, original: BufferSpan, where: str) -> Iterator[str]:
    if not _is_regrouped(span, original):
        yield f"altered span {span.label!r} {where}: {_shape(original)} became {_shape(span)}"


def _rank_problems(
    entry: DevicePoolEntry, role: str, description: KVCacheDescription
) -> Iterator[str]:
    # Ranks that hold different bytes under one key would load each other's.
    lacking = [a for a in description.replication.axes_of(role) if a not in entry.rank_axes]
    if lacking:
        axes = ", ".join(f"{axis.name} {axis.rank}/{axis.size}" for axis in lacking)
        yield f"keeps {role!r} in pool {entry.name!r} without the rank axes {axes} that it is sharded over"


def _is_regrouped(span: BufferSpan, original: BufferSpan) -> bool:
    try:
        return original.group_rows(span.row_bytes // original.row_bytes) == span
    except ContractError:
        return False


def _shape(span: BufferSpan) -> str:
    shape = f"{span.rows} rows of {span.row_bytes} B (stride {span.row_stride} B)"
    return f"{shape} at {span.base_ptr:#x}"


def _names(what: str, names: Collection[str]) -> str:
    shown = ", ".join(repr(name) for name in sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what}{'s' if len(names) > 1 else ''} {shown}{more}"

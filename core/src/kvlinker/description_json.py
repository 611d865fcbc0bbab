"""The JSON form of a description: everything but addresses, so that a layout can be explained without memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

from kvlinker.description import (
    Fact,
    IndexArray,
    IndexerKind,
    KVCacheDescription,
    LayerFacts,
    LogicalPool,
    PoolKind,
    RankAxis,
    Replication,
)
from kvlinker.errors import ContractError
from kvlinker.spans import BufferSpan, MemoryKind, MemoryRegion

__all__ = ["FORMAT", "description_from_json", "description_to_json"]

FORMAT = "kvlinker-description/1"
Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

_FIELDS = (
    "format",
    "family",
    "page_size",
    "buffers",
    "layers",
    "logical_pools",
    "index_maps",
    "facts",
    "replication",
)
_FIRST_ADDRESS = 1 << 32
_ALIGNMENT = 1 << 12
_SHOWN = 80
"""Characters of a wrong value that a message shows."""
_Choice = TypeVar("_Choice", IndexerKind, PoolKind)


def description_to_json(description: KVCacheDescription) -> str:
    """Return the JSON form: spans without addresses, index maps by the name of their pool."""
    form: dict[str, object] = {
        "format": FORMAT,
        "family": description.family,
        "page_size": description.page_size,
        "buffers": {
            role: [_dump_span(span) for span in spans]
            for role, spans in description.buffers.items()
        },
        "layers": [_dump_layer(facts) for facts in description.layers],
        "logical_pools": [
            {"name": p.name, "kind": p.kind.value, "page_size": p.page_size, "window": p.window}
            for p in description.logical_pools
        ],
        "index_maps": sorted(description.index_maps),
        "facts": dict(description.facts),
        "replication": {
            "axes": [
                {"name": a.name, "rank": a.rank, "size": a.size}
                for a in description.replication.axes
            ],
            "sharded_over": {
                role: sorted(over) for role, over in description.replication.sharded_over.items()
            },
        },
    }
    return json.dumps(form, indent=2, sort_keys=True)


def _dump_span(span: BufferSpan) -> dict[str, object]:
    return {
        "label": span.label,
        "rows": span.rows,
        "row_bytes": span.row_bytes,
        "row_stride": span.row_stride,
        "device": span.device if span.rows else "cpu",  # no rows are nowhere
    }


def _dump_layer(facts: LayerFacts) -> dict[str, object]:
    return {
        "layer": facts.layer,
        "global_layer": facts.global_layer,
        "kind": facts.kind,
        "compress_ratio": facts.compress_ratio,
        "indexer": facts.indexer.value,
    }


def description_from_json(text: str) -> KVCacheDescription:
    """Return the description of a JSON form, with made-up addresses that overlap nowhere.

    Raises:
        ContractError: the text is not such a form; the message names the field and what it should be.
    """
    try:
        parsed: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"a description must be JSON: {error}"
        raise ContractError(msg) from error
    form = _Reader(parsed, "description")
    if (found := form.text("format")) != FORMAT:
        msg = f"description.format is {found!r}, this version reads {FORMAT!r}; describe the cache again"
        raise ContractError(msg)
    form.allow(*_FIELDS)
    buffers, facts, addresses = form.child("buffers"), form.child("facts"), _Addresses()
    family, page_size = form.text("family"), form.integer("page_size")
    spans = {
        role: tuple(_load_span(item, addresses) for item in buffers.items(role))
        for role in buffers.names()
    }
    layers = tuple(_load_layer(item) for item in form.items("layers"))
    pools = tuple(_load_pool(item) for item in form.items("logical_pools"))
    index_maps = dict.fromkeys(form.texts("index_maps"), _no_translation)
    values = {name: facts.fact(name) for name in facts.names()}
    replication = _load_replication(form.child("replication"))
    with form.located():
        return KVCacheDescription(
            family=family,
            page_size=page_size,
            buffers=spans,
            layers=layers,
            logical_pools=pools,
            index_maps=index_maps,
            facts=values,
            replication=replication,
        )


def _no_translation(indices: IndexArray) -> IndexArray:
    msg = f"a description read from JSON has no index maps; cannot translate {len(indices)} slots"
    raise ContractError(msg)


class _Addresses:
    """Made-up addresses, page aligned, that never overlap."""

    def __init__(self) -> None:
        self._next = _FIRST_ADDRESS

    def take(self, size: int) -> int:
        start = self._next
        self._next += (size + 2 * _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        return start


class _Reader:
    """One JSON object with the path to it, for messages."""

    def __init__(self, value: Json, path: str) -> None:
        if not isinstance(value, dict):
            msg = f"{path} must be an object, got {type(value).__name__}"
            raise ContractError(msg)
        self._value: Mapping[str, Json] = value
        self._path = path

    def names(self) -> tuple[str, ...]:
        return tuple(self._value)

    def allow(self, *names: str) -> None:
        if unknown := [name for name in self._value if name not in names]:
            msg = f"{self._path}.{unknown[0]} is no field of the form; it has {', '.join(names)}"
            raise ContractError(msg)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Put the path in front of what a constructor refuses."""
        try:
            yield
        except ContractError as error:
            msg = f"{self._path}: {error}"
            raise ContractError(msg) from error

    def child(self, name: str) -> _Reader:
        return _Reader(self._value.get(name), f"{self._path}.{name}")

    def items(self, name: str) -> list[_Reader]:
        return [_Reader(v, f"{self._path}.{name}[{i}]") for i, v in enumerate(self._list(name))]

    def text(self, name: str) -> str:
        value = self._value.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def integer(self, name: str) -> int:
        value = self._value.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(name, "an integer", value)
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self._value.get(name) is None else self.integer(name)

    def texts(self, name: str) -> list[str]:
        texts = [item for item in self._list(name) if isinstance(item, str)]
        if len(texts) != len(self._list(name)):
            raise self._wrong(name, "a list of strings", self._value.get(name))
        return texts

    def fact(self, name: str) -> Fact:
        value = self._value.get(name)
        if isinstance(value, list):
            integers = [i for i in value if isinstance(i, int) and not isinstance(i, bool)]
            if len(integers) == len(value):
                return tuple(integers)
        elif isinstance(value, (int, str)) and not isinstance(value, bool):
            return value
        raise self._wrong(name, "an integer, a string or a list of integers", value)

    def choice(self, name: str, kind: type[_Choice]) -> _Choice:
        value = self._value.get(name)
        for member in kind:
            if member.value == value:
                return member
        allowed = ", ".join(repr(member.value) for member in kind)
        raise self._wrong(name, f"one of {allowed}", value)

    def _list(self, name: str) -> list[Json]:
        value = self._value.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list", value)
        return value

    def _wrong(self, name: str, expected: str, value: Json) -> ContractError:
        return ContractError(f"{self._path}.{name} must be {expected}, got {_shorten(value)}")


def _shorten(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _load_span(item: _Reader, addresses: _Addresses) -> BufferSpan:
    item.allow("label", "rows", "row_bytes", "row_stride", "device")
    label, device = item.text("label"), item.text("device")
    rows, size, stride = item.integer("rows"), item.integer("row_bytes"), item.integer("row_stride")
    extent = max(rows - 1, 0) * max(stride, 0) + max(size, 1)
    base = addresses.take(extent)
    with item.located():
        region = MemoryRegion(
            base_ptr=base,
            size_bytes=extent,
            device=device,
            kind=MemoryKind.HOST if device == "cpu" else MemoryKind.DEVICE,
        )
        return BufferSpan(
            base_ptr=base if rows else 0,
            rows=rows,
            row_bytes=size,
            row_stride=stride,
            region=region if rows else None,
            label=label,
        )


def _load_layer(item: _Reader) -> LayerFacts:
    item.allow("layer", "global_layer", "kind", "compress_ratio", "indexer")
    layer, global_layer = item.integer("layer"), item.integer("global_layer")
    kind, ratio = item.text("kind"), item.integer("compress_ratio")
    indexer = item.choice("indexer", IndexerKind)
    with item.located():
        return LayerFacts(
            layer=layer,
            global_layer=global_layer,
            kind=kind,
            compress_ratio=ratio,
            indexer=indexer,
        )


def _load_pool(item: _Reader) -> LogicalPool:
    item.allow("name", "kind", "page_size", "window")
    name, kind = item.text("name"), item.choice("kind", PoolKind)
    page_size, window = item.integer("page_size"), item.optional_integer("window")
    with item.located():
        return LogicalPool(name=name, kind=kind, page_size=page_size, window=window)


def _load_replication(form: _Reader) -> Replication:
    form.allow("axes", "sharded_over")
    roles = form.child("sharded_over")
    axes = tuple(_load_axis(item) for item in form.items("axes"))
    sharded = {role: frozenset(roles.texts(role)) for role in roles.names()}
    with form.located():
        return Replication(axes=axes, sharded_over=sharded)


def _load_axis(item: _Reader) -> RankAxis:
    item.allow("name", "rank", "size")
    name, rank, size = item.text("name"), item.integer("rank"), item.integer("size")
    with item.located():
        return RankAxis(name=name, rank=rank, size=size)

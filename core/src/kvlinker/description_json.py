"""The JSON form of a description: everything but addresses, so that a layout can be explained without memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from kvlinker.spans import BufferSpan

__all__ = ["FORMAT", "description_from_json", "description_to_json"]

FORMAT = "kvlinker-description/1"
Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

_FIRST_ADDRESS = 1 << 32
_ALIGNMENT = 1 << 12


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
        "device": span.device,
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
    except json.JSONDecodeError as error:
        msg = f"a description must be JSON: {error}"
        raise ContractError(msg) from error
    form = _Reader(parsed, "description")
    if (found := form.text("format")) != FORMAT:
        msg = f"description.format is {found!r}, this version reads {FORMAT!r}; describe the cache again"
        raise ContractError(msg)
    addresses = _Addresses()
    replication = form.child("replication")
    return KVCacheDescription(
        family=form.text("family"),
        page_size=form.integer("page_size"),
        buffers={
            role: tuple(_load_span(item, addresses) for item in form.child("buffers").items(role))
            for role in form.child("buffers").names()
        },
        layers=tuple(_load_layer(item) for item in form.items("layers")),
        logical_pools=tuple(_load_pool(item) for item in form.items("logical_pools")),
        index_maps=dict.fromkeys(form.texts("index_maps"), _no_translation),
        facts={name: form.child("facts").fact(name) for name in form.child("facts").names()},
        replication=Replication(
            axes=tuple(
                RankAxis(name=a.text("name"), rank=a.integer("rank"), size=a.integer("size"))
                for a in replication.items("axes")
            ),
            sharded_over={
                role: frozenset(replication.child("sharded_over").texts(role))
                for role in replication.child("sharded_over").names()
            },
        ),
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

    def _list(self, name: str) -> list[Json]:
        value = self._value.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list", value)
        return value

    def _wrong(self, name: str, expected: str, value: Json) -> ContractError:
        return ContractError(f"{self._path}.{name} must be {expected}, got {value!r}")


def _load_span(item: _Reader, addresses: _Addresses) -> BufferSpan:
    rows, stride = item.integer("rows"), item.integer("row_stride")
    return BufferSpan(
        base_ptr=addresses.take(max(rows, 0) * max(stride, 0)) if rows else 0,
        rows=rows,
        row_bytes=item.integer("row_bytes"),
        row_stride=stride,
        label=item.text("label"),
    )


def _load_layer(item: _Reader) -> LayerFacts:
    return LayerFacts(
        layer=item.integer("layer"),
        global_layer=item.integer("global_layer"),
        kind=item.text("kind"),
        compress_ratio=item.integer("compress_ratio"),
        indexer=_enum(IndexerKind, item.text("indexer")),
    )


def _load_pool(item: _Reader) -> LogicalPool:
    return LogicalPool(
        name=item.text("name"),
        kind=_enum(PoolKind, item.text("kind")),
        page_size=item.integer("page_size"),
        window=item.optional_integer("window"),
    )


_E = TypeVar("_E", IndexerKind, PoolKind)


def _enum(kind: type[_E], text: str) -> _E:
    try:
        return kind(text)
    except ValueError as error:
        allowed = ", ".join(member.value for member in kind)
        msg = f"{text!r} is no {kind.__name__}; use one of {allowed}"
        raise ContractError(msg) from error

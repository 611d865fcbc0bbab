"""Examples of an engine's pools, and the checks that `EngineAdapterTests` makes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from kvlinker.description import DescribeRequest, Fact, KVCacheDescription, PoolKind
from kvlinker.description_json import description_to_json
from kvlinker.errors import ContractError, KVLinkerError, StalePoolError
from kvlinker.registry import PluginRegistry
from kvlinker.selection import describe_cache
from kvlinker.spans import BufferSpan
from kvlinker.testing.found_memory import FoundMemory, find_memory
from kvlinker.testing.verdicts import fail

__all__ = [
    "PoolExample",
    "check_excuses",
    "check_golden",
    "check_memory",
    "check_other_page_size",
    "check_repeatable",
    "check_spans",
    "check_unsupported",
]

_SHOWN = 3
"""Ways to one allocation in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolExample:
    """A pool of the engine, and what of its memory is no part of the KV cache."""

    name: str
    """Of the test cases with this pool, and of its golden file."""
    make: Callable[[], object]
    """Makes the pool as the engine does, small."""
    page_size: int
    """Of the engine's prefix tree, in slots."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """What the caller states in the request."""
    extras: Callable[[], Mapping[str, object]] = dict
    """Makes the engine's objects beside the pool, such as draft pools."""
    excused: Mapping[str, str] = field(default_factory=dict)
    """Pattern of dotted ways, such as `c128.*.scratch.*`, to the reason why that memory need not be kept."""

    def __post_init__(self) -> None:
        if blank := [pattern for pattern, reason in self.excused.items() if not reason.strip()]:
            msg = f"pool {self.name!r}: {blank[0]!r} is excused without a reason"
            raise ContractError(msg)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Described:
    """A pool, its description and the memory that was found."""

    description: KVCacheDescription
    memory: tuple[FoundMemory, ...]
    kept: tuple[object, ...]
    """The pool and its extras, alive as long as the addresses are compared."""

    @property
    def spans(self) -> tuple[BufferSpan, ...]:
        """All spans that have rows."""
        roles = self.description.buffers.values()
        return tuple(span for spans in roles for span in spans if span.rows)


def _described(engine: str, example: PoolExample, registry: PluginRegistry) -> _Described:
    pool, extras = example.make(), dict(example.extras())
    request = DescribeRequest(page_size=example.page_size, facts=example.facts, extras=extras)
    description = describe_cache(engine, pool, request, registry=registry)
    memory = find_memory({"": pool, **extras}) if extras else find_memory(pool)
    return _Described(description=description, memory=memory, kept=(pool, extras))


def _is_excused(memory: FoundMemory, pattern: str) -> bool:
    return any(fnmatchcase(path, pattern) for path in memory.paths)


def _ways(memory: FoundMemory) -> str:
    more = len(memory.paths) - _SHOWN
    return ", ".join(memory.paths[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def check_memory(engine: str, example: PoolExample, registry: PluginRegistry) -> None:
    """Fail if memory of the pool is neither described nor excused: it would come back as it happens to be."""
    found = _described(engine, example, registry)
    if not found.memory:
        fail(f"pool {example.name!r}: no tensor was found in it; make it as the engine does")
    for memory in found.memory:
        left = memory.uncovered(found.spans)
        if left and not any(_is_excused(memory, pattern) for pattern in example.excused):
            fail(
                f"pool {example.name!r}: {left} of {memory.size_bytes} B in {_ways(memory)} are not described; "
                f"describe them, or say in `excused` why they need not be kept"
            )


def check_excuses(engine: str, example: PoolExample, registry: PluginRegistry) -> None:
    """Fail if an excuse is for nothing, or for memory that is described."""
    found = _described(engine, example, registry)
    for pattern in example.excused:
        excused = [memory for memory in found.memory if _is_excused(memory, pattern)]
        if not any(memory.uncovered(found.spans) for memory in excused):
            what = "memory that is described" if excused else "nothing"
            fail(f"pool {example.name!r}: {pattern!r} excuses {what}; remove it")


def check_spans(engine: str, example: PoolExample, registry: PluginRegistry) -> None:
    """Fail if a span lies elsewhere than in the pool's own memory, or nothing keeps that alive."""
    found = _described(engine, example, registry)
    for span in found.spans:
        if not any(memory.holds(span) for memory in found.memory):
            fail(
                f"pool {example.name!r}: span {span.label!r} lies in no tensor that the pool refers to; describe the "
                f"engine's own buffer, never a copy of it"
            )
        if span.region is None or span.region.owner is None:
            fail(
                f"pool {example.name!r}: nothing keeps the memory of span {span.label!r} alive; give its region an "
                f"owner, as BufferSpan.from_tensor does"
            )
        try:
            span.verify()
        except StalePoolError as error:
            fail(f"pool {example.name!r}: {error}")


def check_repeatable(engine: str, example: PoolExample, registry: PluginRegistry) -> None:
    """Fail if describing one pool twice gives two descriptions."""
    pool, extras = example.make(), dict(example.extras())
    request = DescribeRequest(page_size=example.page_size, facts=example.facts, extras=extras)
    first, second = (describe_cache(engine, pool, request, registry=registry) for _ in range(2))
    if (first.buffers, description_to_json(first)) != (second.buffers, description_to_json(second)):
        fail(f"pool {example.name!r}: described twice, it is described differently")


def check_other_page_size(engine: str, example: PoolExample, registry: PluginRegistry) -> None:
    """Fail if a prefix tree of other pages than the pool's is described as if they were equal."""
    asked = 2 * example.page_size
    request = DescribeRequest(page_size=asked, facts=example.facts, extras=dict(example.extras()))
    try:
        description = describe_cache(engine, example.make(), request, registry=registry)
    except KVLinkerError:
        return
    paged = [pool for pool in description.logical_pools if pool.kind is PoolKind.PAGED]
    if all(pool.page_size == asked for pool in paged):
        fail(
            f"pool {example.name!r}: its pages have {example.page_size} slots, and are described as pages of {asked} "
            f"because the tree has such; report the pool's own page size, or refuse"
        )


def check_golden(
    engine: str, example: PoolExample, registry: PluginRegistry, folder: Path, *, update: bool
) -> None:
    """Fail unless the description is the one that was checked in; write it where that is asked for."""
    text = description_to_json(_described(engine, example, registry).description) + "\n"
    path = folder / f"{example.name}.json"
    if update:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    golden = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != golden:
        fail(
            f"pool {example.name!r} is not described as in {path}: {_difference(golden, text)}; if the new description "
            f"is right, run pytest with --kvlinker-update-goldens and review what changed"
        )


def _difference(old: str, new: str) -> str:
    if not old:
        return "there is no such file"
    before, after = old.splitlines(), new.splitlines()
    pairs = enumerate(zip(before, after, strict=False), 1)
    line, (was, is_now) = next(
        ((number, pair) for number, pair in pairs if pair[0] != pair[1]),
        (min(len(before), len(after)) + 1, ("another number of lines", "")),
    )
    return f"line {line} was {was.strip()!r} and is {is_now.strip()!r}"


def check_unsupported(engine: str, example: PoolExample, registry: PluginRegistry) -> None:
    """Fail unless a pool that is not supported is refused with the name of its class."""
    pool = example.make()
    name = type(pool).__name__
    request = DescribeRequest(
        page_size=example.page_size, facts=example.facts, extras=dict(example.extras())
    )
    try:
        describe_cache(engine, pool, request, registry=registry)
    except KVLinkerError as error:
        if name not in str(error):
            fail(f"the refusal of a {name} does not name it: {error}")
        return
    fail(f"a {name} is described, and listed as unsupported; refuse it with its name")

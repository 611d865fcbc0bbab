"""Layouts: what model plugins share when they read a description and lay its buffers out as pools.

Nothing here knows a family. Every refusal names the family, what was reported, and what should be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from kvlinker.description import Fact, KVCacheDescription, PoolKind
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan

__all__ = [
    "DRAFT_LAYERS",
    "draft_count",
    "folded_keys",
    "integer_fact",
    "pool_entry",
    "pool_group",
    "require_facts",
    "require_page_rows",
    "require_paged_pools",
    "require_pools",
    "require_roles",
    "require_row_bytes",
    "ride_along",
    "role_spans",
    "text_fact",
]

DRAFT_LAYERS = "draft_layers"
"""Fact: how many draft (MTP, EAGLE) layers keep KV under the target's slots; buffers must agree with it."""


def require_roles(
    description: KVCacheDescription, *, required: Iterable[str], optional: Iterable[str] = ()
) -> None:
    """Refuse a description that lacks a role, or has one that the plugin does not know.

    Raises:
        ContractError: a required role has no buffers; the rest alone would restore a part of the cache.
        UnsupportedKVCacheError: a role is unknown, and its buffers would be left out.
    """
    needed = tuple(required)
    present = {role for role, spans in description.buffers.items() if spans}
    if unknown := sorted(description.buffers.keys() - {*needed, *optional}):
        msg = (
            f"family {description.family!r}: buffers {unknown} are unknown here, and a page without them "
            f"would be a part of the cache; install a plugin that lays them out"
        )
        raise UnsupportedKVCacheError(msg)
    if missing := [role for role in needed if role not in present]:
        msg = (
            f"family {description.family!r}: buffers {missing} are missing, and a page without them would "
            f"restore a part of the cache; the engine adapter must describe every persistent buffer"
        )
        raise ContractError(msg)


def require_facts(description: KVCacheDescription, *, known: Collection[str]) -> None:
    """Refuse a description with a fact that the plugin does not read: it may say that bytes mean something else.

    Args:
        description: the cache.
        known: names of the facts that the plugin reads; `draft_layers` need not be among them.

    Raises:
        UnsupportedKVCacheError: a fact is unknown.
    """
    if unknown := sorted(description.facts.keys() - {*known, DRAFT_LAYERS}):
        stated = {name: description.facts[name] for name in unknown}
        msg = (
            f"family {description.family!r}: facts {stated} are unknown here, and may change what the bytes "
            f"mean; known are {sorted(known)}; install a plugin that reads them"
        )
        raise UnsupportedKVCacheError(msg)


def text_fact(
    description: KVCacheDescription, name: str, *, known: Collection[str] | None = None
) -> str:
    """Return a fact that is text, and one of the known ones where they are given.

    Raises:
        ContractError: the fact is missing or no text; it is never guessed.
        UnsupportedKVCacheError: the value is not among the known ones.
    """
    value = _fact(description, name)
    if not isinstance(value, str) or not value:
        raise _wrong_fact(description, name, "a non-empty text", value)
    if known is not None and value not in known:
        raise _unknown_fact(description, name, value, known)
    return value


def integer_fact(
    description: KVCacheDescription, name: str, *, known: Collection[int] | None = None
) -> int:
    """Return a fact that is an integer, and one of the known ones where they are given.

    Raises:
        ContractError: the fact is missing or no integer; it is never guessed.
        UnsupportedKVCacheError: the value is not among the known ones.
    """
    value = _fact(description, name)
    if not isinstance(value, int):
        raise _wrong_fact(description, name, "an integer", value)
    if known is not None and value not in known:
        raise _unknown_fact(description, name, value, known)
    return value


def _fact(description: KVCacheDescription, name: str) -> Fact:
    if name not in description.facts:
        msg = (
            f"family {description.family!r}: fact {name!r} is missing; sizes do not tell it, "
            f"so the engine adapter must state it"
        )
        raise ContractError(msg)
    return description.facts[name]


def _wrong_fact(
    description: KVCacheDescription, name: str, wanted: str, value: Fact
) -> ContractError:
    return ContractError(
        f"family {description.family!r}: fact {name!r} must be {wanted}, got {value!r}"
    )


def _unknown_fact(
    description: KVCacheDescription, name: str, value: Fact, known: Collection[Fact]
) -> UnsupportedKVCacheError:
    names = ", ".join(repr(item) for item in known)
    return UnsupportedKVCacheError(
        f"family {description.family!r}: {name} {value!r} is not laid out here; known are {names}"
    )


def require_paged_pools(description: KVCacheDescription, *names: str) -> None:
    """Refuse unless the engine allocates from exactly these paged index spaces, in pages of the tree's size.

    Raises:
        ContractError: one is missing, or its pages differ from the tree's; the message has both sizes.
        UnsupportedKVCacheError: there are others, or one is no paged pool.
    """
    require_pools(description, paged=names)


def require_pools(
    description: KVCacheDescription, *, paged: Collection[str], slots: Collection[str] = ()
) -> None:
    """Refuse unless the engine allocates from exactly these index spaces.

    Args:
        description: the cache.
        paged: names of paged pools, whose pages have the tree's size.
        slots: names of pools in which a slot is a whole state.

    Raises:
        ContractError: one is missing, or its pages differ from the tree's; the message has both sizes.
        UnsupportedKVCacheError: there are others, or one is of another kind.
    """
    kinds = {**dict.fromkeys(paged, PoolKind.PAGED), **dict.fromkeys(slots, PoolKind.SLOT)}
    where = f"family {description.family!r}"
    if others := [pool.name for pool in description.logical_pools if pool.name not in kinds]:
        msg = f"{where}: logical pools {others} are unknown here; known are {list(kinds)}"
        raise UnsupportedKVCacheError(msg)
    for name, kind in kinds.items():
        pool = description.logical_pool(name)
        if pool is None:
            msg = f"{where}: there is no logical pool {name!r}; describe the index space that slots come from"
            raise ContractError(msg)
        if pool.kind is not kind:
            wanted = "paged" if kind is PoolKind.PAGED else "a pool of whole states"
            msg = f"{where}: logical pool {name!r} must be {wanted}, got {pool.kind.value}"
            raise UnsupportedKVCacheError(msg)
        if kind is PoolKind.PAGED and pool.page_size != description.page_size:
            msg = (
                f"{where}: logical pool {name!r} has pages of {pool.page_size} slots and the prefix tree "
                f"pages of {description.page_size}; make the engine's page sizes equal"
            )
            raise ContractError(msg)


def role_spans(
    description: KVCacheDescription,
    role: str,
    *,
    count: int,
    per: str = "layer",
    row_bytes: int | None = None,
) -> tuple[BufferSpan, ...]:
    """Return a role's spans after checking how many there are, that none is empty, and their row size.

    Args:
        description: the cache.
        role: which buffers.
        count: expected spans.
        per: what there is one span for, in messages.
        row_bytes: expected bytes of a row; None accepts any.

    Raises:
        ContractError: the number, the rows or the row size are not what was expected.
    """
    spans = description.buffers.get(role, ())
    where = f"family {description.family!r}"
    if len(spans) != count:
        msg = f"{where}: {role!r} has {len(spans)} buffers, expected {count}, one per {per}"
        raise ContractError(msg)
    for span in spans:
        if not span.rows:
            msg = (
                f"{where}: span {span.label!r} has no rows, but its {per} needs them; describe the "
                f"memory that the engine really uses"
            )
            raise ContractError(msg)
    if row_bytes is not None:
        require_row_bytes(description, spans, row_bytes)
    return spans


def require_row_bytes(
    description: KVCacheDescription, spans: Iterable[BufferSpan], row_bytes: int
) -> None:
    """Refuse spans whose rows are not what the stated formats say.

    Raises:
        ContractError: a buffer holds a part of a row, or another format than the stated one.
    """
    for span in spans:
        if span.row_bytes != row_bytes:
            msg = (
                f"family {description.family!r}: span {span.label!r} has rows of {span.row_bytes} B, "
                f"expected {row_bytes} B; the buffer is not whole, or not of the stated format"
            )
            raise ContractError(msg)


def require_page_rows(
    description: KVCacheDescription, role: str, *, beside: str, rows_are_pages: bool
) -> None:
    """Refuse spans without a row for each whole page of the spans `beside` them, one by one.

    The latter's rows are pages if `rows_are_pages`, or else slots.

    Raises:
        ContractError: the rows are of slots or of another pool; a page would get another one's bytes.
    """
    slots = 1 if rows_are_pages else description.page_size
    spans, others = (description.buffers.get(name, ()) for name in (role, beside))
    for span, other in zip(spans, others, strict=True):
        if span.rows != other.rows // slots:
            msg = (
                f"family {description.family!r}: span {span.label!r} has {span.rows} rows, expected "
                f"{other.rows // slots}, one per page of {other.label!r}; describe it page by page"
            )
            raise ContractError(msg)


def folded_keys(
    description: KVCacheDescription, fact: str, key_format: str, *, unstated: int | None = None
) -> tuple[int, str]:
    """Return how many keys a page has, where neighbouring tokens share one, and what the keys' values are.

    Args:
        description: the cache.
        fact: name of the fact that says how many tokens share a key.
        key_format: what a value is, however many tokens share it.
        unstated: tokens where the fact is missing; None refuses that.

    Raises:
        ContractError: a page has no whole groups of tokens, so that one would be open at its end.
    """
    size, missing = description.page_size, fact not in description.facts
    tokens = unstated if missing and unstated is not None else integer_fact(description, fact)
    if tokens < 1 or size % tokens:
        msg = (
            f"family {description.family!r}: fact {fact!r} is {tokens}, of which a page of {size} slots "
            f"has no whole number; state how many tokens share a key"
        )
        raise ContractError(msg)
    return size // tokens, key_format if tokens == 1 else f"{key_format}, a key for {tokens} tokens"


def draft_count(description: KVCacheDescription, *roles: str) -> int:
    """Return how many draft layers ride on the target's; every role has one span for each.

    Raises:
        ContractError: the roles differ in number or from the fact `draft_layers`, or there are more
            drafts than layers to ride on.
    """
    counts = {role: len(description.buffers.get(role, ())) for role in roles}
    where = f"family {description.family!r}"
    if len(set(counts.values())) != 1:
        msg = f"{where}: draft buffers must come in equal numbers, got {counts}"
        raise ContractError(msg)
    count = counts[roles[0]]
    stated = integer_fact(description, DRAFT_LAYERS) if DRAFT_LAYERS in description.facts else count
    if stated != count:
        msg = (
            f"{where}: fact {DRAFT_LAYERS!r} says {stated}, but {count} are described; drafts without "
            f"their KV would run on leftover rows"
        )
        raise ContractError(msg)
    if count > len(description.layers):
        msg = f"{where}: {count} draft layers cannot ride on {len(description.layers)} layers"
        raise ContractError(msg)
    return count


def ride_along(positions: Mapping[int, int], riders: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Return a layer mapping in which draft spans, placed behind the target's, ride on its layers.

    Args:
        positions: layer to the position of its own span, 0..n-1.
        riders: for each draft span in order, the layer that it is loaded with, even one without a span.

    >>> ride_along({0: 0, 2: 1}, [0, 1])
    {0: (0, 2), 1: (3,), 2: (1,)}
    """
    mapping: dict[int, tuple[int, ...]] = {layer: (at,) for layer, at in positions.items()}
    for at, layer in enumerate(riders, start=len(positions)):
        mapping[layer] = (*mapping.get(layer, ()), at)
    return dict(sorted(mapping.items()))


def pool_entry(
    description: KVCacheDescription,
    *,
    name: str,
    indices_from_pool: str,
    roles: Sequence[str],
    components: Sequence[Sequence[BufferSpan]],
    layer_mapping: Mapping[int, int | Sequence[int]],
    rows_are_pages: bool,
    value_format: str,
) -> DevicePoolEntry:
    """Return an entry with what the description says of its roles: index map, rank axes, writer.

    Args:
        description: the cache.
        name: physical pool.
        indices_from_pool: logical pool whose slots address it; where they are whole states, a page is one slot.
        roles: the roles whose spans are in it; ranks must hold them in the same way.
        components: see `DevicePoolEntry`.
        layer_mapping: see `DevicePoolEntry`.
        rows_are_pages: see `DevicePoolEntry`.
        value_format: what a value's bits mean.

    Raises:
        ContractError: the roles are sharded differently, or the layout is refused (see `DevicePoolEntry`).
    """
    shards = description.replication
    places = {role: (shards.is_replicated(role), shards.axes_of(role)) for role in roles}
    if len(set(places.values())) != 1:
        held = {
            role: "the same on all ranks" if same else [axis.name for axis in axes]
            for role, (same, axes) in places.items()
        }
        msg = f"pool {name!r}: its buffers must be sharded alike, got {held}; list every role in the replication"
        raise ContractError(msg)
    replicated, rank_axes = places[roles[0]]
    return DevicePoolEntry(
        name=name,
        indices_from_pool=indices_from_pool,
        components=components,
        layer_mapping=layer_mapping,
        page_size=_page_size(description, indices_from_pool),
        rows_are_pages=rows_are_pages,
        index_mapper=description.index_maps.get(indices_from_pool),
        replicated=replicated,
        value_format=value_format,
        rank_axes=rank_axes,
        is_writer=shards.is_writer(roles[0]),
    )


def _page_size(description: KVCacheDescription, pool: str) -> int:
    """Return the slots in a page of a logical pool: 1 where a slot is a whole state."""
    source = description.logical_pool(pool)
    holds_states = source is not None and source.kind is PoolKind.SLOT
    return 1 if holds_states else description.page_size


def pool_group(
    description: KVCacheDescription, entries: Sequence[DevicePoolEntry], *, layout: str
) -> DevicePoolGroup:
    """Return the group of a description's entries under a layout's name and version, such as `dsa/1`."""
    return DevicePoolGroup(
        entries,
        len(description.layers),
        description.page_size,
        layout=layout,
        layer_range=description.layer_range,
    )

"""The checks that `ModelPluginTests` makes, one for each promise of a model plugin.

Each takes the plugin and an example of a cache, and raises AssertionError with what is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvlinker.coverage import claim_problem
from kvlinker.description import IndexArray, IndexMap, KVCacheDescription, RankAxis, Replication
from kvlinker.description_json import description_to_json
from kvlinker.errors import KVLinkerError
from kvlinker.layouts import DRAFT_LAYERS
from kvlinker.plugins import one_line
from kvlinker.pools import DevicePoolGroup
from kvlinker.testing.cache_examples import (
    DRAFT_PREFIX,
    CacheExample,
    changed_facts,
    draft_layers,
    layer_slices,
    with_facts,
    without_drafts,
    without_role,
)
from kvlinker.testing.loading import load_under_test
from kvlinker.testing.strategies import (
    MadeUpMemory,
    ModelHooks,
    check_round_trip,
    check_strategy,
)
from kvlinker.testing.verdicts import fail

__all__ = [
    "STRANGE_FAMILY",
    "check_bytes",
    "check_changed_facts",
    "check_declines_other_families",
    "check_draft_count",
    "check_every_role_is_needed",
    "check_fingerprint_is_the_layouts",
    "check_index_maps",
    "check_layers",
    "check_loads",
    "check_omitted",
    "check_page_size",
    "check_refused",
    "check_sharding",
    "check_shifted_stage",
    "check_stages",
    "check_unchanged",
    "check_unknown_fact",
    "check_unknown_role",
]

STRANGE_FAMILY = "kvlinker_kit_unknown"
"""A family that nobody lays out."""
_STRANGE_ROLE = "kvlinker_kit_unknown"
_STRANGE_FACT = "kvlinker_kit_unknown"
_FIRST_LAYER = 5


def check_loads(plugin: ModelHooks) -> None:
    """Fail unless the module loads as a model plugin of this API: hooks marked, named and versioned."""
    if not load_under_test(plugin, name="under_test").models():
        fail("the module has no hook match_kv_cache, so it is no model plugin")


def check_refused(plugin: ModelHooks, description: KVCacheDescription, what: str) -> str:
    """Return the text of a refusal, empty where the plugin declines in silence; fail if it takes the cache.

    Args:
        plugin: the plugin.
        description: a cache that nobody can lay out.
        what: what is wrong with it, to follow "a cache".
    """
    try:
        match = plugin.match_kv_cache(description)
    except KVLinkerError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises, the test says what to raise
        fail(
            f"match_kv_cache raises {one_line(error)} for a cache {what}; raise a KVLinkerError, or return None"
        )
    if match is not None:
        fail(f"match_kv_cache takes a cache {what}; raise a KVLinkerError that says what is wrong")
    return ""


def check_declines_other_families(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail unless the same buffers under another family's name are declined with None."""
    description = replace(example.made_up(), family=STRANGE_FAMILY)
    if text := check_refused(plugin, description, f"of the family {STRANGE_FAMILY!r}"):
        fail(
            f"match_kv_cache raises for another family ({text}); return None, for it is asked about every cache"
        )


def check_unknown_role(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail unless a buffer that no strategy can know keeps the plugin from taking the cache."""
    description = example.made_up()
    buffers = {**description.buffers, _STRANGE_ROLE: (MadeUpMemory().span(8, 8),)}
    check_refused(
        plugin,
        replace(description, buffers=buffers),
        f"with the unknown buffers {_STRANGE_ROLE!r}, which would not be restored",
    )


def check_unknown_fact(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail unless a fact that no strategy can know keeps the plugin from taking the cache."""
    check_refused(
        plugin,
        with_facts(example.made_up(), **{_STRANGE_FACT: 1}),
        f"with the unknown fact {_STRANGE_FACT!r}, which may change what its bytes mean",
    )


def check_every_role_is_needed(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail if the cache is taken when one of its roles is not described, other than optional ones."""
    description = example.made_up()
    for role in description.buffers:
        if not role.startswith(DRAFT_PREFIX) and role not in example.optional:
            what = f"without its buffers {role!r}, so that half of it would be restored"
            check_refused(plugin, without_role(description, role), what)


def check_draft_count(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail if drafts are stated that are not described: they would run on leftover rows."""
    description = example.made_up()
    count = draft_layers(description)
    more = with_facts(description, **{DRAFT_LAYERS: count + 1})
    check_refused(plugin, more, f"that states {count + 1} draft layers and describes {count}")
    if count:
        none = with_facts(without_drafts(description), **{DRAFT_LAYERS: count})
        check_refused(plugin, none, f"that states {count} draft layers and describes none")


def check_page_size(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail unless a prefix tree of other pages than the pools' is refused, with both numbers."""
    description = example.made_up()
    theirs, ours = description.page_size, 2 * description.page_size
    text = check_refused(
        plugin,
        replace(description, page_size=ours),
        f"of pages of {theirs} slots under a prefix tree of pages of {ours}",
    )
    if str(theirs) not in text or str(ours) not in text:
        fail(
            f"the refusal must name both page sizes, {theirs} and {ours}; got: {text or 'no text, declined in silence'}"
        )


def check_changed_facts(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail if a fact can be changed without a refusal and without another layout: it says what the bytes mean."""
    description = example.made_up()
    fingerprint = check_strategy(plugin, description).fingerprint
    for name, value, changed in changed_facts(description):
        try:
            match = plugin.match_kv_cache(changed)
        except KVLinkerError:
            continue
        if match is None:
            continue
        if check_strategy(plugin, changed).fingerprint == fingerprint:
            fail(
                f"with {name} {value!r} instead of {description.facts[name]!r} the layout has the same fingerprint, so "
                f"that each would load the other's bytes; refuse what is unknown, or put it into value_format"
            )


def check_omitted(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail unless what is left out, of buffers with rows, is exactly what the example says is never read."""
    description = example.made_up()
    match = plugin.match_kv_cache(description)
    if match is None:
        fail(f"match_kv_cache declines the family {description.family!r}")
    if problem := claim_problem(match, description):
        fail(problem)
    rows = {span.label: span.rows for spans in description.buffers.values() for span in spans}
    omitted = {label for label in match.omitted if rows[label]}
    if forgotten := sorted(omitted - example.omitted):
        fail(
            f"leaves out {forgotten}, which the example does not list as `omitted`; say there why nobody reads them"
        )
    if stored := sorted(example.omitted - omitted):
        fail(f"moves {stored}, which the example says are never read")


def check_unchanged(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail if asking twice gives two answers, or asking changes the description."""
    description = example.made_up()
    before = _everything(description)
    check_strategy(plugin, description)
    if _everything(description) != before:
        fail("the description is not what it was after match and build; a plugin only reads it")


def _everything(description: KVCacheDescription) -> tuple[object, ...]:
    spans = tuple(description.buffers.items())
    return description_to_json(description), spans, dict(description.index_maps)


def check_fingerprint_is_the_layouts(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail if other addresses or more pages make another layout: a restarted engine would miss everything."""
    here = check_strategy(plugin, example.made_up()).fingerprint
    there = check_strategy(plugin, example.elsewhere()).fingerprint
    if here != there:
        fail(
            f"the fingerprint changes with addresses or row counts ({here.hex()}, {there.hex()}); keep both out of it"
        )


def check_layers(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail unless each span is restored with its own layer: loaded later, the layer has run without it."""
    description = example.made_up()
    group = check_strategy(plugin, description)
    loaded_with = _loaded_with(group)
    for role, spans in description.buffers.items():
        if role.startswith(DRAFT_PREFIX):
            continue
        layers = example.layers_of(description, role)
        if layers is None or len(layers) != len(spans):
            fail(
                f"{role!r} has {len(spans)} spans for {len(description.layers)} layers; say which in `role_layers`"
            )
        for span, layer in zip(spans, layers, strict=True):
            if span.label in loaded_with and layer not in loaded_with[span.label]:
                fail(
                    f"span {span.label!r} belongs to layer {layer} and is loaded with {loaded_with[span.label]}"
                )


def _loaded_with(group: DevicePoolGroup) -> dict[str, list[int]]:
    """Return label to the layers with which the span is loaded."""
    found: dict[str, list[int]] = {}
    for entry in group.entries:
        for layer, positions in entry.layer_mapping.items():
            for component in entry.components:
                for position in positions:
                    found.setdefault(component[position].label, []).append(layer)
    return found


def check_bytes(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail unless every byte of a page comes back at other pages and nothing else changes, in any order of layers."""
    description = example.in_memory()
    group = check_strategy(plugin, description)
    for layers in _orders(group.num_layers):
        check_round_trip(
            group,
            description,
            example.page_rows(description),
            example.moves(description),
            omitted=example.omitted,
            layers=layers,
        )


def _orders(count: int) -> tuple[Sequence[int], ...]:
    ascending = range(count)
    return ascending, ascending[::-1], (*ascending[1::2], *ascending[::2])


def check_shifted_stage(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail unless the same layers deeper in the model are laid out as such: keys name a stage by its layers."""
    description = example.made_up()
    layers = tuple(
        replace(facts, global_layer=facts.global_layer + _FIRST_LAYER)
        for facts in description.layers
    )
    check_strategy(plugin, replace(description, layers=layers))


def check_stages(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail unless the stages of a model together hold what the whole model holds, each layer once."""
    whole = without_drafts(example.made_up())
    stages = tuple(without_drafts(stage(MadeUpMemory().span)) for stage in example.stages)
    stages = stages or layer_slices(whole) or ()
    if not stages:
        fail(
            "a role has not one span for each layer, so that stages cannot be cut; describe some in `stages`"
        )
    groups = [check_strategy(plugin, stage) for stage in stages]
    ends = [group.layer_range[1] for group in groups]
    starts = [group.layer_range[0] for group in groups]
    if [whole.layer_range[0], *ends] != [*starts, whole.layer_range[1]]:
        ranges = [group.layer_range for group in groups]
        fail(f"the stages have layers {ranges}, which do not make up {whole.layer_range}")
    found: Counter[str] = sum(map(_bytes_by_source, groups), Counter())
    expected = _bytes_by_source(check_strategy(plugin, whole))
    if found != expected:
        fail(
            f"a page of all stages has {dict(found)} bytes, one of the whole model {dict(expected)}"
        )


def _bytes_by_source(group: DevicePoolGroup) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for entry in group.entries:
        sizes[entry.indices_from_pool] += entry.page_bytes
    return sizes


def check_index_maps(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail unless each pool takes its slots through its logical pool's translation, once."""
    description = example.made_up()
    maps = {
        pool.name: _shift((number + 1) * pool.page_size)
        for number, pool in enumerate(description.logical_pools)
    }
    group = check_strategy(plugin, replace(description, index_maps=maps))
    for entry in group.entries:
        slots = np.arange(entry.page_size, dtype=np.int64)
        expected = maps[entry.indices_from_pool](slots).tolist()
        if (found := entry.translate_indices(slots).tolist()) != expected:
            fail(
                f"pool {entry.name!r} makes slots {found} of {slots.tolist()}, and the engine's translation for "
                f"{entry.indices_from_pool!r} {expected}; pass description.index_maps on as index_mapper"
            )


def _shift(distance: int) -> IndexMap:
    def shifted(slots: IndexArray) -> IndexArray:
        return slots + distance

    return shifted


def check_sharding(plugin: ModelHooks, example: CacheExample) -> None:
    """Fail unless every shard is written by one rank: all ranks write sharded pools, the first one replicas."""
    description = example.made_up()
    for rank in (0, 1):
        axis = RankAxis(name="tp", rank=rank, size=2)
        replicas = dict.fromkeys(description.buffers, frozenset[str]())
        for replication, replicated in (
            (Replication(axes=(axis,)), False),
            (Replication(axes=(axis,), sharded_over=replicas), True),
        ):
            group = check_strategy(plugin, replace(description, replication=replication))
            for entry in group.entries:
                found = (entry.replicated, entry.rank_axes, entry.is_writer)
                expected = (replicated, () if replicated else (axis,), not (replicated and rank))
                if found != expected:
                    fail(
                        f"pool {entry.name!r} on rank {rank} of 2 has replicated, rank_axes and is_writer {found}, "
                        f"the description says {expected}"
                    )

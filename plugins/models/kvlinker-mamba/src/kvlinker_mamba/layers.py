"""What each layer of a hybrid keeps: pages of tokens, a state, both, or nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from kvlinker.description import KVCacheDescription
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.pools import KV

__all__ = [
    "ATTENTION",
    "ATTENTION_AND_MAMBA",
    "FAMILY",
    "KEPT_IN",
    "MAMBA",
    "MLP",
    "SLIDING",
    "SWA",
    "check_kinds",
    "layers_in",
]

FAMILY = "mamba"
MAMBA = "mamba"
"""The logical pool of states, and the kind of a layer that keeps one."""
SWA = "swa"
"""The logical pool of trailing windows."""
ATTENTION, SLIDING, MLP = "attention", "sliding", "mlp"
ATTENTION_AND_MAMBA = "attention_and_mamba"
"""A layer that runs both side by side, as in Falcon-H1."""
KEPT_IN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        ATTENTION: frozenset({KV}),
        SLIDING: frozenset({SWA}),
        MAMBA: frozenset({MAMBA}),
        ATTENTION_AND_MAMBA: frozenset({KV, MAMBA}),
        # Numbered like every layer, so that the others keep their places.
        MLP: frozenset(),
    }
)
"""`LayerFacts.kind` to the logical pools in which a layer of it keeps something."""


def layers_in(description: KVCacheDescription, pool: str) -> tuple[int, ...]:
    """Return the transfer layers that keep something in a logical pool, in order."""
    return tuple(facts.layer for facts in description.layers if pool in KEPT_IN[facts.kind])


def check_kinds(description: KVCacheDescription, pools: Collection[str]) -> None:
    """Refuse layers of other kinds, and those that keep something in none of the cache's pools.

    Raises:
        UnsupportedKVCacheError: there is such a layer; the message names it.
    """
    known = [kind for kind, kept in KEPT_IN.items() if kept <= set(pools)]
    for facts in description.layers:
        if facts.kind not in known:
            msg = (
                f"family {FAMILY!r}: layer {facts.layer} (global {facts.global_layer}) is of kind {facts.kind!r}; "
                f"laid out here, beside pages of such a kind, are {known}"
            )
            raise UnsupportedKVCacheError(msg)

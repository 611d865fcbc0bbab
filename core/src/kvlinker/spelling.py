"""Spelling: which of some names somebody meant who typed another one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

__all__ = ["nearest_names"]


def nearest_names(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> tuple[str, ...]:
    """Return the names that are as near to the one typed as any, in alphabetical order; none where none resembles it.

    Args:
        name: as it was typed.
        known: to choose from.
        cutoff: from 0, anything, to 1, equal names alone.

    >>> nearest_names("mah", ["mla", "mha", "dsa"])
    ('mha',)
    """
    names = sorted(set(known))
    close = get_close_matches(name, names, n=max(1, len(names)), cutoff=cutoff)
    ranks = {choice: (_edits(name, choice), -_likeness(name, choice)) for choice in close}
    best = min(ranks.values(), default=None)
    return tuple(sorted(choice for choice in close if ranks[choice] == best))


def _likeness(name: str, choice: str) -> float:
    return SequenceMatcher(None, choice, name).ratio()


def _edits(name: str, choice: str) -> int:
    """Return how many letters were missed, added, mistaken or swapped with their neighbour."""
    rows = [list(range(len(choice) + 1))]
    for i, typed in enumerate(name, start=1):
        row = [i]
        for j, meant in enumerate(choice, start=1):
            edits = min(row[-1] + 1, rows[-1][j] + 1, rows[-1][j - 1] + (typed != meant))
            is_swap = i > 1 and j > 1 and name[i - 2] == meant and typed == choice[j - 2]
            row.append(min(edits, rows[-2][j - 2] + 1) if is_swap else edits)
        rows.append(row)
    return rows[-1][-1]

"""What the figures say: rows of ratios, and from which length on restoring is worth it. Knows no engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from measuring import Ratio, Row, Times, duration, size

__all__ = [
    "LOAD_TARGET",
    "Place",
    "first_token_rows",
    "limit_sentence",
    "memory_rows",
    "moving_rows",
    "worth_from",
    "worth_sentence",
]

LOAD_TARGET = 3.0
FIRST_TOKEN = "Time to first token"  # noqa: S105  # a heading
MOVING = "Loads, offloads and lookups"
MEMORY = "Memory of a server's processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a row is about."""

    tokens: int
    bytes_per_token: int
    ours: str
    """Name of our variant."""

    @property
    def moved(self) -> int:
        """Bytes of KV that move."""
        return self.tokens * self.bytes_per_token


def first_token_rows(what: str, place: Place, times: Times) -> Iterator[Row]:
    """Yield how many times faster the first token is than with each other variant."""
    for peer in times.seconds:
        if peer != place.ours:
            yield Row(
                topic=FIRST_TOKEN,
                what=f"{place.tokens:,} tokens {what}",
                against=peer,
                ratio=times.ratio(peer, place.ours),
                figures=times.figures(peer, place.ours),
            )


def moving_rows(
    what: str,
    place: Place,
    times: Times,
    *,
    target: float | None = None,
    limits: Collection[str] = (),
    why_missed: str = "",
    in_bytes: bool = True,
) -> Iterator[Row]:
    """Yield how many times faster a linker's work is than each other linker's, in bytes a second where bytes move.

    Limits have no target: they are what no linker can be faster than.
    """
    for peer in times.seconds:
        if peer != place.ours:
            names = peer, place.ours
            rates = " / ".join(f"{size(int(place.moved / times.median(n)))}/s" for n in names)
            figures = times.figures(*names)
            yield Row(
                topic=MOVING,
                what=f"{what} of {place.tokens:,} tokens",
                against=peer,
                ratio=times.ratio(*names),
                figures=f"{rates}; {figures}" if in_bytes else figures,
                target=None if peer in limits else target,
                why_missed=why_missed,
            )


def limit_sentence(place: Place, times: Times, *, target: float, limits: Collection[str]) -> str:
    """Say what bounds a load, what share of it ours reaches, and where the targets lie."""
    bounds = [f"{name} takes {duration(times.median(name))}" for name in limits]
    best = min(limits, key=times.median)
    share = times.median(best) / times.median(place.ours)
    peers = [name for name in times.seconds if name != place.ours and name not in limits]
    targets = []
    for peer in peers:
        wanted = times.median(peer) / target
        where = (
            "below that of the limit" if wanted < times.median(best) else "above that of the limit"
        )
        targets.append(f"{duration(wanted)} for {peer}, {where}")
    return (
        f"A load of {place.tokens:,} tokens moves {size(place.moved)}. By one thread {' and '.join(bounds)}; "
        f"kvlinker takes {duration(times.median(place.ours))}, checksums and all, "
        f"{share:.0%} of the speed of the faster. "
        f"The target of {target:g} times a peer's speed asks for a time of {'; and of '.join(targets)}."
    )


def memory_rows(ours: str, own: Mapping[str, int], mapped: Mapping[str, int]) -> Iterator[Row]:
    """Yield how many times less memory ours takes than each other variant."""
    for peer in own:
        if peer != ours:
            ratio = own[peer] / own[ours]
            yield Row(
                topic=MEMORY,
                what="anonymous and shared memory, at the end",
                against=peer,
                ratio=Ratio.of([ratio]),
                figures=f"{size(own[peer])} / {size(own[ours])}; files mapped beside it, in the page cache: "
                f"{size(mapped[peer])} / {size(mapped[ours])}",
            )


def worth_from(lowest_ratios: Mapping[int, float]) -> int | None:
    """Return the shortest measured length from which on restoring was slower in no round; None without one.

    Args:
        lowest_ratios: length to the lowest of the rounds' ratios, of computing to restoring.
    """
    worth = None
    for length in sorted(lowest_ratios, reverse=True):
        if lowest_ratios[length] < 1:
            break
        worth = length
    return worth


def worth_sentence(restored: Mapping[int, Times], ours: str, computed: str) -> str:
    """Say from which length on restoring is worth it, and what both cost at the shortest one."""
    worth = worth_from({n: times.ratio(computed, ours).low for n, times in restored.items()})
    shortest = min(restored)
    costs = (
        f"a prompt of {shortest + 1} tokens takes {duration(restored[shortest].median(computed))} computed and "
        f"{duration(restored[shortest].median(ours))} with {shortest} of them restored"
    )
    if worth is None:
        return f"Restoring is faster in every round at no measured length: {costs}."
    return f"Restoring is faster in every round from {worth:,} tokens on: {costs}."

"""Puts tables into a document: each script has a part of its own between two lines, and replaces no other's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["BEGIN", "END", "has_part", "insert", "replace", "with_part"]

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_PART = re.compile(
    r"<!-- measured by (\w+): begin -->\n(.*?)<!-- measured by \1: end -->", re.DOTALL
)
_PART_BEGIN = re.compile(r"<!-- measured by \w+: begin -->")
_COUNT = re.compile(r"^(\d+) of (\d+) targets are met\.$", re.MULTILINE)


def insert(document: str, measured: str, *, begin: str = BEGIN, end: str = END) -> str:
    """Return the document with what stands between two lines replaced.

    Raises:
        ValueError: it lacks one of them.
    """
    before, _, after = _split(document, begin, end)
    return f"{before}{begin}\n\n{measured}\n{end}{after}"


def _split(document: str, begin: str, end: str) -> tuple[str, str, str]:
    before, found_begin, rest = document.partition(begin)
    inside, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        msg = f"the document must have the lines {begin} and {end}"
        raise ValueError(msg)
    return before, inside, after


def _parts(document: str) -> dict[str, str]:
    """Return what each script measured.

    Raises:
        ValueError: a part has no end, so that it would be lost.
    """
    _, inside, _ = _split(document, BEGIN, END)
    parts = {found[1]: found[2].strip() for found in _PART.finditer(inside)}
    begun = _PART_BEGIN.findall(inside)
    if len(begun) != len(parts):
        msg = f"{len(begun)} parts begin and {len(parts)} of them end: {', '.join(begun)}"
        raise ValueError(msg)
    return parts


def has_part(document: str, script: str) -> bool:
    """Whether a script's tables are in the document."""
    return script in _parts(document)


def with_part(document: str, script: str, measured: str, order: Sequence[str]) -> str:
    """Return the document with one script's part, and with the targets of all parts counted again.

    Args:
        document: as it is.
        script: whose part is new.
        measured: what it measured, as Markdown.
        order: names of scripts in the order of their parts; those of others stand behind.

    Raises:
        ValueError: the document has no place for parts, or one of them has no end.
    """
    parts = {**_parts(document), script: measured.strip()}
    places = {name: place for place, name in enumerate(order)}
    names = sorted(parts, key=lambda name: places.get(name, len(order)))
    return insert(
        document, "\n".join([_head(parts), *(_part(name, parts[name]) for name in names)])
    )


def _part(name: str, text: str) -> str:
    return f"<!-- measured by {name}: begin -->\n\n{text}\n\n<!-- measured by {name}: end -->\n"


def _head(parts: Mapping[str, str]) -> str:
    counts = [
        map(int, found.groups()) for text in parts.values() for found in _COUNT.finditer(text)
    ]
    met, judged = (sum(numbers) for numbers in zip(*counts, strict=True)) if counts else (0, 0)
    return f"Of all parts together, {met} of {judged} targets are met.\n"


def replace(path: Path, text: str) -> None:
    """Write a file anew: whoever ends this in the middle leaves the old one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)  # noqa: PTH105  # says what it does to a file that is there

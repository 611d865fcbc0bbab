"""Quantities that people write and read: bytes with a unit, and spans of time."""

from __future__ import annotations

import math
import re

from kvlinker.errors import ContractError
from kvlinker.integers import as_integer

__all__ = ["amount", "as_bytes", "parse_bytes", "parse_seconds"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP = 1024
_BYTES = {
    "": 1,
    **{unit.lower(): _STEP**power for power, unit in enumerate(_UNITS)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def amount(size: float) -> str:
    """Return bytes for people.

    >>> amount(998), amount(8_160_000)
    ('998 B', '7.8 MiB')
    """
    unit = 0
    while size >= _STEP and unit < len(_UNITS) - 1:
        size /= _STEP
        unit += 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def parse_bytes(text: str) -> int:
    """Return bytes from a number, or a number with a unit.

    Raises:
        ContractError: it is neither.

    >>> parse_bytes("20GiB"), parse_bytes("1.5 MB"), parse_bytes("4096")
    (21474836480, 1500000, 4096)
    """
    number, factor = _parts(text, _BYTES, "a number of bytes such as 4096 or 20GiB")
    return int(number) * factor if number.isdecimal() else int(float(number) * factor)


def as_bytes(
    value: object, what: str, *, at_least: int | None = None, at_most: int | None = None
) -> int:
    """Return bytes from what an option may be: a whole number, or a text as `parse_bytes` takes it.

    Args:
        value: the option's.
        what: names the option in messages.
        at_least: smallest number allowed.
        at_most: largest number allowed.

    Raises:
        ContractError: it is neither, or out of bounds.

    >>> as_bytes("64MiB", "call_bytes"), as_bytes(4096, "call_bytes"), as_bytes(2e10, "call_bytes")
    (67108864, 4096, 20000000000)
    """
    return as_integer(_whole(value, what), what, at_least=at_least, at_most=at_most)


def _whole(value: object, what: str) -> int:
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ContractError as error:
            msg = f"{what}: {error}"
            raise ContractError(msg) from error
    if isinstance(value, float) and value.is_integer():  # JSON has one kind of number
        return int(value)
    try:
        return as_integer(value, what)
    except ContractError as error:
        msg = f"{what} must be a whole number of bytes or a text such as '20GiB', got {value!r}"
        raise ContractError(msg) from error


def parse_seconds(text: str) -> float:
    """Return seconds from a number with a unit: s, m, h, d or w.

    Raises:
        ContractError: it is not.

    >>> parse_seconds("90s"), parse_seconds("1.5h"), parse_seconds("7d")
    (90.0, 5400.0, 604800.0)
    """
    number, factor = _parts(text, _SECONDS, "a span of time such as 90s, 12h or 7d")
    return float(number) * factor


def _parts(text: str, units: dict[str, int], expected: str) -> tuple[str, int]:
    """Return the number that a text begins with, and what its unit multiplies that by."""
    match = _QUANTITY.fullmatch(text.strip())
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        msg = f"{text!r} is not {expected}"
        raise ContractError(msg)
    if not math.isfinite(float(match[1]) * factor):
        msg = f"a number of {len(match[1])} digits is not {expected}"
        raise ContractError(msg)
    return match[1], factor

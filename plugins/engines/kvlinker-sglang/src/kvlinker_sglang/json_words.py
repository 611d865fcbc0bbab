"""JSON words: what is wrong with an option, said to somebody who wrote JSON and no Python."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["json_kind", "json_problem"]

_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "bool_type": "true or false",
        "dict_type": "an object",
        "float_type": "a number",
        "int_type": "a whole number",
        "model_type": "an object",
        "string_type": "a string",
        "tuple_type": "a list",
    }
)
"""Error of pydantic to what the value must be."""
_BOUNDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "greater_than": ("above", "gt"),
        "greater_than_equal": ("at least", "ge"),
        "less_than_equal": ("at most", "le"),
    }
)
"""Error of pydantic to the bound that was passed, and where the error has it."""


def json_kind(value: object) -> str:
    """Return what a value is in JSON, and nothing of the value: it may be a secret in the wrong place."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return "a fraction" if isinstance(value, float) and value % 1 else "a number"
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    return "an object" if isinstance(value, Mapping) else "a list"


def json_problem(kind: str, message: str, value: object, bounds: Mapping[str, object]) -> str:
    """Return what a value must be and what kind of value it is; for `key: ` in front of it.

    Args:
        kind: of pydantic's error.
        message: of pydantic's error, for a kind that has no words of its own here.
        value: that was refused.
        bounds: context of pydantic's error.
    """
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, got {json_kind(value)}"
    if kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        return f"must be {word} {str(bounds[key]).removesuffix('.0')}"
    if kind == "string_too_short":
        return "must not be empty"
    return message.removeprefix("Value error, ")

"""Option values are what a configuration says of a wrapper, read strictly and in the units that people write.

No message repeats a value: one may be a secret in the wrong place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from kvlinker.errors import ContractError
from kvlinker.integers import as_integer
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.quantities import parse_bytes, parse_seconds
from kvlinker.spelling import nearest_names

__all__ = ["OptionValues", "kind_of"]

_T = TypeVar("_T")


def kind_of(value: object) -> str:
    """Return what a value is, and not the value."""
    if isinstance(value, Mapping):
        return f"an object with {len(value)} names"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return f"a list of {len(value)}"
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionValues:
    """The options of one wrapper, by name."""

    values: Mapping[object, object] = field(repr=False)
    where: str
    """Place in the configuration, for messages."""

    def check_known(self, known: Sequence[str]) -> None:
        """Refuse options that there are not, with the one that was meant.

        Raises:
            ContractError: there is such an option.
        """
        for name in self.values:
            if name not in known:
                close = " or ".join(map(repr, nearest_names(str(name), known, cutoff=0.5)))
                hint = f"did you mean {close}?" if close else f"it takes {', '.join(known)}"
                msg = f"{self.where}: unknown option {name!r}; {hint}"
                raise ContractError(msg)

    def required(self, name: str, value: _T | None, example: str) -> _T:
        """Return the value of an option that was read, which must have been given."""
        if value is None:
            msg = f"{self.where}.{name} is needed, such as {example}"
            raise ContractError(msg)
        return value

    def integer(self, name: str, *, at_least: int) -> int | None:
        """Return a whole number; None where the option is not given."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            self._refuse(name, "an integer", value)
        return as_integer(value, f"{self.where}.{name}", at_least=at_least)

    def number(self, name: str, *, at_most: float) -> float | None:
        """Return a number from 0 on; None where the option is not given."""
        value = self.values.get(name)
        if value is None:
            return None
        found = _as_float(value)
        if not 0 <= found <= at_most:
            self._refuse(name, f"a number from 0 to {at_most:g}", value)
        return found

    def size(self, name: str) -> int | None:
        """Return bytes, which may have a unit; None where the option is not given."""
        return _size(self.values.get(name), f"{self.where}.{name}")

    def seconds(self, name: str) -> float | None:
        """Return seconds, which may have a unit; None where the option is not given."""
        value = self.values.get(name)
        if value is None:
            return None
        found = _parsed_seconds(value) if isinstance(value, str) else _as_float(value)
        if not (math.isfinite(found) and found > 0):
            self._refuse(name, "a number of seconds or a text such as '90s', '12h' or '7d'", value)
        return found

    def namespaces(self, name: str) -> tuple[bytes, ...]:
        """Return the namespaces of a list; none where the option is not given."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            self._refuse(name, "a list of namespaces", value)
        return tuple(self._namespace(name, item) for item in value)

    def sizes_of_namespaces(self, name: str) -> Mapping[bytes, int]:
        """Return bytes by namespace; none where the option is not given."""
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self._refuse(name, "an object of namespaces and their bytes", value)
        sizes = {
            self._namespace(name, key): _size(item, f"{self.where}.{name}.{key}")
            for key, item in value.items()
        }
        return {
            key: self.required(f"{name}.{key.hex()}", size, "'10GiB'")
            for key, size in sizes.items()
        }

    def _namespace(self, name: str, value: object) -> bytes:
        """Return the namespace that hexadecimal digits name, as start lines and `kvlinker store inspect` show it."""
        found = b""
        if isinstance(value, str):
            try:
                found = bytes.fromhex(value)
            except ValueError:
                found = b""
        if len(found) != NAMESPACE_BYTES:
            what = f"the {2 * NAMESPACE_BYTES} hexadecimal digits of a namespace"
            self._refuse(name, what, value)
        return found

    def _refuse(self, name: str, expected: str, value: object) -> NoReturn:
        msg = f"{self.where}.{name} must be {expected}, got {kind_of(value)}"
        raise ContractError(msg)


def _size(value: object, what: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return as_integer(value, what, at_least=0)
    try:
        return parse_bytes(value if isinstance(value, str) else "")
    except ContractError:
        pass  # its text has the value
    msg = f"{what} must be a number of bytes or a text such as '20GiB', got {kind_of(value)}"
    raise ContractError(msg)


def _as_float(value: object) -> float:
    """Return a number; none where it is no number, or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _parsed_seconds(text: str) -> float:
    """Return the seconds of a text; no number where it is none."""
    try:
        return parse_seconds(text)
    except ContractError:
        return math.nan

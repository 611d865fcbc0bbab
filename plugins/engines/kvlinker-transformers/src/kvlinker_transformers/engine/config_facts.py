"""Configuration facts: a transformers configuration's values, each checked for its type when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvlinker.errors import UnsupportedKVCacheError

__all__ = ["ConfigFacts"]


class ConfigFacts:
    """The values of one model's configuration."""

    def __init__(self, model_type: str, values: Mapping[str, object]) -> None:
        """Take the values as they are.

        Args:
            model_type: named in messages.
            values: the configuration as a mapping.
        """
        self.model_type = model_type
        self._values = values

    def refuse(self, name: str, wanted: str) -> UnsupportedKVCacheError:
        """Return the error that says what was wanted of a value."""
        found = self._values.get(name)
        return UnsupportedKVCacheError(
            f"model type {self.model_type!r}: {name} must be {wanted}, got {found!r}"
        )

    def integer(self, name: str, *, at_least: int = 1) -> int:
        """Return an integer.

        Raises:
            UnsupportedKVCacheError: it is not one, or too small.
        """
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            wanted = "a positive integer" if at_least == 1 else f"an integer of at least {at_least}"
            raise self.refuse(name, wanted)
        return value

    def is_set(self, name: str) -> bool:
        """Return whether the configuration has a value that is neither false nor empty."""
        return bool(self._values.get(name))

    def names(self, name: str, count: int) -> tuple[str, ...] | None:
        """Return one name for each layer, or None where the configuration has no such list.

        Raises:
            UnsupportedKVCacheError: it is no list, or one of another length.
        """
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Sequence) or len(value) != count:
            raise self.refuse(name, f"a list of {count} names")
        return tuple(str(item) for item in value)

    def ratio(self, kind: str) -> int:
        """Return the compress rate of a layer kind.

        Raises:
            UnsupportedKVCacheError: none is stated.
        """
        rates = self._values.get("compress_rates")
        rate = rates.get(kind) if isinstance(rates, Mapping) else None
        if not isinstance(rate, int):
            raise self.refuse("compress_rates", f"a mapping with {kind!r}")
        return rate

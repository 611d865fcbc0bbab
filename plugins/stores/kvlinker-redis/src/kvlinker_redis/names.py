"""Names of values: every key of the store begins with its prefix, and object keys are written in hexadecimal.

The digits stand in braces, which send an object and what is about to become it to one server of a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.named_values import digits_of_key, digits_of_namespace
from kvlinker.store import ObjectKey

__all__ = ["Names"]


class Names:
    """The names of one store."""

    def __init__(self, prefix: str) -> None:
        """Take the prefix that all names begin with."""
        self._prefix = prefix

    def of_object(self, key: ObjectKey) -> str:
        """Return the name of an object.

        Raises:
            ContractError: that is no object key.
        """
        return f"{self._prefix}:{{{digits_of_key(key)}}}"

    def of_objects(self, keys: Sequence[ObjectKey]) -> list[str]:
        """Return the names of objects, in order; see `of_object`."""
        return [self.of_object(key) for key in keys]

    def of_draft(self, key: ObjectKey, call: str) -> str:
        """Return the name under which a call writes an object that nobody may see yet."""
        return f"{self._prefix}~{{{key.hex()}}}:{call}"  # no prefix has a tilde

    @property
    def pattern(self) -> str:
        """The glob of the names of all objects."""
        return f"{self._prefix}:{{*"

    def pattern_of(self, namespace: bytes) -> str:
        """Return the glob of the names of a namespace's objects.

        Raises:
            ContractError: that is no namespace.
        """
        return f"{self._prefix}:{{{digits_of_namespace(namespace)}*"

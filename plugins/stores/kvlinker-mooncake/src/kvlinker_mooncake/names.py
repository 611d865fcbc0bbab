"""Names of objects: the prefix, the namespace and the rest of the key, in hexadecimal digits."""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.keys import NAMESPACE_BYTES, OBJECT_KEY_BYTES
from kvlinker.named_values import digits_of_key, digits_of_namespace
from kvlinker.store import ObjectKey

__all__ = ["Names"]


_REST_BYTES = OBJECT_KEY_BYTES - NAMESPACE_BYTES
"""Of a key behind its namespace: as many end a name, and one separator stands before them."""


class Names:
    """The names of one store."""

    def __init__(self, prefix: str) -> None:
        """Take what all names begin with."""
        self._prefix = prefix
        self._begin = f"{prefix}/"

    def of_object(self, key: ObjectKey) -> str:
        """Return the name of an object.

        Raises:
            ContractError: that is no object key.
        """
        (name,) = self.of_objects([key])
        return name

    def of_objects(self, keys: Sequence[ObjectKey]) -> list[str]:
        """Return the names of objects, in order; see `of_object`."""
        if set(map(len, keys)) - {OBJECT_KEY_BYTES}:
            for key in keys:
                digits_of_key(key)  # which raises, and says how a key is made
        begin = self._begin
        return [begin + key.hex("/", _REST_BYTES) for key in keys]

    def pattern_of(self, namespace: bytes) -> str:
        """Return the regular expression that the names of a namespace's objects match, and no others.

        Raises:
            ContractError: that is no namespace.
        """
        digits = 2 * _REST_BYTES
        return f"^{self._prefix}/{digits_of_namespace(namespace)}/[0-9a-f]{{{digits}}}$"

    def is_object(self, name: str) -> bool:
        """Whether a name is one that an object of this store has."""
        return name.startswith(self._begin) and len(name) == len(
            self.of_object(bytes(OBJECT_KEY_BYTES))
        )

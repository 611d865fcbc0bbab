"""Names of objects: the prefix, the namespace and the rest of the key, in hexadecimal digits."""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.keys import NAMESPACE_BYTES, OBJECT_KEY_BYTES
from kvlinker.named_values import digits_of_key, digits_of_namespace
from kvlinker.store import ObjectKey

__all__ = ["Names"]


_SPLIT = 2 * NAMESPACE_BYTES


class Names:
    """The names of one store."""

    def __init__(self, prefix: str) -> None:
        """Take what all names begin with."""
        self._prefix = prefix

    def of_object(self, key: ObjectKey) -> str:
        """Return the name of an object.

        Raises:
            ContractError: that is no object key.
        """
        digits = digits_of_key(key)
        return f"{self._prefix}/{digits[:_SPLIT]}/{digits[_SPLIT:]}"

    def of_objects(self, keys: Sequence[ObjectKey]) -> list[str]:
        """Return the names of objects, in order; see `of_object`."""
        return [self.of_object(key) for key in keys]

    def pattern_of(self, namespace: bytes) -> str:
        """Return the regular expression that the names of a namespace's objects match, and no others.

        Raises:
            ContractError: that is no namespace.
        """
        digits = 2 * (OBJECT_KEY_BYTES - NAMESPACE_BYTES)
        return f"^{self._prefix}/{digits_of_namespace(namespace)}/[0-9a-f]{{{digits}}}$"

    def is_object(self, name: str) -> bool:
        """Whether a name is one that an object of this store has."""
        return name.startswith(f"{self._prefix}/") and len(name) == len(
            self.of_object(bytes(OBJECT_KEY_BYTES))
        )

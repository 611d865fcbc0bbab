"""Names of objects: a folder for each namespace, and 256 in it, so that no folder of a file system is endless.

Keys are written in hexadecimal digits; nothing that a user typed but the prefix is part of a name.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.keys import NAMESPACE_BYTES, OBJECT_KEY_BYTES
from kvlinker.named_values import digits_of_key, digits_of_namespace
from kvlinker.store import ObjectKey

__all__ = ["Names"]

_NAMESPACE = 2 * NAMESPACE_BYTES
"""Digits that name the first folder."""
_FOLDERS = _NAMESPACE + 2
_DIGITS = frozenset("0123456789abcdef")


class Names:
    """The names of one store."""

    def __init__(self, prefix: str) -> None:
        """Take the folder that all names are in."""
        self.folder = prefix

    def of_object(self, key: ObjectKey) -> str:
        """Return the name of an object.

        Raises:
            ContractError: that is no object key.
        """
        digits = digits_of_key(key)
        return (
            f"{self.folder}/{digits[:_NAMESPACE]}/{digits[_NAMESPACE:_FOLDERS]}/{digits[_FOLDERS:]}"
        )

    def of_objects(self, keys: Sequence[ObjectKey]) -> list[str]:
        """Return the names of objects, in order; see `of_object`."""
        return [self.of_object(key) for key in keys]

    def folder_of(self, namespace: bytes) -> str:
        """Return the folder of a namespace's objects.

        Raises:
            ContractError: that is no namespace.
        """
        return f"{self.folder}/{digits_of_namespace(namespace)}"

    def is_object(self, name: str) -> bool:
        """Whether a name is one that an object has; others in the same folder are somebody else's."""
        digits = name.removeprefix(f"{self.folder}/").replace("/", "")
        return (
            len(digits) == 2 * OBJECT_KEY_BYTES
            and _DIGITS.issuperset(digits)
            and name == self.of_object(bytes.fromhex(digits))
        )

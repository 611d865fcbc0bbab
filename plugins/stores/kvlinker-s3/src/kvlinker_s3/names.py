"""Names of objects: a folder for each namespace, and 256 in it, so that no folder of a file system is endless.

Keys are written in hexadecimal digits; nothing that a user typed but the prefix is part of a name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvlinker.keys import NAMESPACE_BYTES, OBJECT_KEY_BYTES
from kvlinker.named_values import digits_of_key, digits_of_namespace
from kvlinker.store import ObjectKey

__all__ = ["Names"]

_NAMESPACE = 2 * NAMESPACE_BYTES
"""Digits that name the first folder."""
_FOLDERS = _NAMESPACE + 2
_LEVELS = 2


class Names:
    """The names of one store."""

    def __init__(self, prefix: str) -> None:
        """Take the folder that all names are in."""
        self.folder = prefix
        rest = 2 * OBJECT_KEY_BYTES - _FOLDERS
        digits = f"[0-9a-f]{{{_NAMESPACE}}}/[0-9a-f]{{2}}/[0-9a-f]{{{rest}}}"
        self._object = re.compile(f"{re.escape(prefix)}/{digits}")

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
        return self._object.fullmatch(name) is not None

    def levels_below(self, folder: str) -> int:
        """Return how many levels of folders lie between one and its objects: the store's own, or a namespace's."""
        return _LEVELS if folder == self.folder else _LEVELS - 1

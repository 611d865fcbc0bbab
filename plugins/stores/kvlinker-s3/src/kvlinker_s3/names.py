"""Names of objects: a folder for each namespace, and 256 in it, so that no folder of a file system is endless.

Keys are written in hexadecimal digits; nothing that a user typed but the prefix is part of a name.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.errors import ContractError
from kvlinker.keys import NAMESPACE_BYTES, OBJECT_KEY_BYTES
from kvlinker.store import ObjectKey

__all__ = ["Names"]

_FANOUT_BYTES = 1
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
        if len(key) != OBJECT_KEY_BYTES:
            msg = f"an object key has {OBJECT_KEY_BYTES} bytes, got {len(key)}; build it with a KeyBuilder"
            raise ContractError(msg)
        split = NAMESPACE_BYTES + _FANOUT_BYTES
        folders = f"{key[:NAMESPACE_BYTES].hex()}/{key[NAMESPACE_BYTES:split].hex()}"
        return f"{self.folder}/{folders}/{key[split:].hex()}"

    def of_objects(self, keys: Sequence[ObjectKey]) -> list[str]:
        """Return the names of objects, in order; see `of_object`."""
        return [self.of_object(key) for key in keys]

    def folder_of(self, namespace: bytes) -> str:
        """Return the folder of a namespace's objects.

        Raises:
            ContractError: that is no namespace.
        """
        if len(namespace) != NAMESPACE_BYTES:
            msg = f"a namespace has {NAMESPACE_BYTES} bytes, got {len(namespace)}; nothing was removed"
            raise ContractError(msg)
        return f"{self.folder}/{namespace.hex()}"

    def is_object(self, name: str) -> bool:
        """Whether a name is one that an object has; others in the same folder are somebody else's."""
        digits = name.removeprefix(f"{self.folder}/").replace("/", "")
        return (
            len(digits) == 2 * OBJECT_KEY_BYTES
            and _DIGITS.issuperset(digits)
            and name == self.of_object(bytes.fromhex(digits))
        )

"""Which types implement a protocol of methods, asked of each type once: asking costs more than many methods do."""

from __future__ import annotations

from weakref import WeakKeyDictionary

__all__ = ["Implementers"]


class Implementers:
    """Types that have all methods of a protocol.

    >>> from collections.abc import Sized
    >>> sized = Implementers(Sized)
    >>> sized.has_type_of("text"), sized.has_type_of(1)
    (True, False)
    """

    def __init__(self, protocol: type) -> None:
        """Know none yet.

        Args:
            protocol: a runtime protocol that names methods alone.
        """
        self._protocol = protocol
        self._known: WeakKeyDictionary[type, bool] = WeakKeyDictionary()

    def has_type_of(self, value: object) -> bool:
        """Whether the value's type has the methods; what an instance alone has does not count."""
        kind = type(value)
        found = self._known.get(kind)
        if found is None:
            found = self._known[kind] = issubclass(kind, self._protocol)
        return found

"""Which class of SGLang's an object is: by the exact class, never by what it looks like."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvlinker.errors import UnsupportedKVCacheError

__all__ = ["changed", "class_name", "is_of_sglang", "require_class"]

_ENGINE = "sglang"


def class_name(found: object) -> str:
    """Return the full dotted name of an object's class."""
    return _dotted(type(found))


def _dotted(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_of_sglang(found: object) -> bool:
    """Return whether an object's class is SGLang's own, or derives from one that is."""
    return any(kind.__module__.partition(".")[0] == _ENGINE for kind in type(found).__mro__)


def require_class(
    found: object, expected: str, what: str, *, remedies: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse a part of a pool whose class is not exactly the expected one.

    Args:
        found: the part.
        expected: full dotted name of the class.
        what: the part's place, in the message.
        remedies: full dotted name of a class that is known not to be described, to what to do about it.

    Raises:
        UnsupportedKVCacheError: it is of another class, whose bytes may mean something else.
    """
    if (name := class_name(found)) != expected:
        remedy = remedies.get(name, "run SGLang without the option that puts it there")
        msg = (
            f"{what} is of class {name}, and only {expected} is described there, for its bytes may mean something "
            f"else; {remedy}"
        )
        raise UnsupportedKVCacheError(msg)


def changed(found: object, expected: type) -> UnsupportedKVCacheError:
    """Return the refusal of a pool that has lost attributes in a version of SGLang that is not known here."""
    names = (name for kind in expected.__mro__ for name in vars(kind).get("__annotations__", ()))
    missing = sorted(name for name in names if not hasattr(found, name))
    msg = (
        f"{class_name(found)} lacks {', '.join(missing)}: this version of SGLang keeps it otherwise than the versions "
        f"that kvlinker-sglang was tested with; install one of those, or a newer kvlinker-sglang"
    )
    return UnsupportedKVCacheError(msg)

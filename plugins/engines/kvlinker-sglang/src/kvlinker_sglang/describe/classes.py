"""Which class of SGLang's an object is: by the exact class, never by what it looks like."""

from __future__ import annotations

from kvlinker.errors import UnsupportedKVCacheError

__all__ = ["changed", "class_name", "is_of_sglang"]

_ENGINE = "sglang"


def class_name(found: object) -> str:
    """Return the full dotted name of an object's class."""
    return _dotted(type(found))


def _dotted(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_of_sglang(found: object) -> bool:
    """Return whether an object's class is SGLang's own, or derives from one that is."""
    return any(kind.__module__.partition(".")[0] == _ENGINE for kind in type(found).__mro__)


def changed(found: object, expected: type) -> UnsupportedKVCacheError:
    """Return the refusal of a pool that has lost attributes in a version of SGLang that is not known here."""
    names = (name for kind in expected.__mro__ for name in vars(kind).get("__annotations__", ()))
    missing = sorted(name for name in names if not hasattr(found, name))
    msg = (
        f"{class_name(found)} lacks {', '.join(missing)}: this version of SGLang keeps it otherwise than the versions "
        f"that kvlinker-sglang was tested with; install one of those, or a newer kvlinker-sglang"
    )
    return UnsupportedKVCacheError(msg)

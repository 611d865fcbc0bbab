"""What every test class of the kit shares: its tests cannot be replaced without saying why.

A plugin author subclasses one of `ModelPluginTests`, `StoreTests` and `EngineAdapterTests`. A test that
does not hold for a plugin is overridden and marked `xfail` with a reason, so that it stays visible.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

__all__ = ["KitTests", "kit_tests"]

_PACKAGE = __name__.rpartition(".")[0]


class KitTests:
    """A class of tests that plugins inherit."""

    def __init_subclass__(cls) -> None:
        """Refuse a subclass that replaces a test of the kit in silence.

        Raises:
            TypeError: it does; the text says which test, and how to say that it does not hold.
        """
        super().__init_subclass__()
        for name, where in _silent_overrides(cls):
            msg = (
                f"{where.__qualname__}.{name} replaces a test of the kit without a reason; leave it out, or mark it: "
                f"@pytest.mark.xfail(reason='why it does not hold for this plugin')"
            )
            raise TypeError(msg)


def kit_tests(kit: type[KitTests]) -> tuple[str, ...]:
    """Return the names of the tests that a class of the kit holds, inherited ones included."""
    names = {name for base in _kit_bases(kit) for name in vars(base) if name.startswith("test_")}
    return tuple(sorted(names))


def _kit_bases(cls: type) -> tuple[type, ...]:
    return tuple(base for base in cls.__mro__ if base.__module__.startswith(f"{_PACKAGE}."))


def _silent_overrides(cls: type[KitTests]) -> Iterator[tuple[str, type]]:
    """Yield each kit test that is found elsewhere first, unmarked, and the class where it is found."""
    if cls in _kit_bases(cls):
        return
    for name in kit_tests(cls):
        where = next(base for base in cls.__mro__ if name in vars(base))
        if where not in _kit_bases(cls) and not _is_expected_to_fail(vars(where)[name]):
            yield name, where


def _is_expected_to_fail(test: object) -> bool:
    marks = vars(test).get("pytestmark", ()) if callable(test) else ()
    return any(
        isinstance(mark, pytest.Mark)
        and mark.name == "xfail"
        and bool(str(mark.kwargs.get("reason", "")).strip())
        for mark in marks
    )

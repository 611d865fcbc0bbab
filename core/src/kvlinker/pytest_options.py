"""Options of the conformance kit on pytest's command line; pytest loads this module by its entry point.

Every pytest run in an environment with kvlinker imports it, so it imports nothing and does nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; they change nothing but the kit's own tests."""
    group = parser.getgroup("kvlinker", "conformance kit of kvlinker")
    group.addoption(
        "--kvlinker-plugin",
        metavar="NAME",
        help="Installed plugin that kvlinker.testing.smoke tests: a public name, or distribution:name.",
    )
    group.addoption(
        "--kvlinker-store-config",
        metavar="JSON",
        help="Options of a store, as JSON: kvlinker.testing.smoke opens it and moves a few pages.",
    )
    group.addoption(
        "--kvlinker-update-goldens",
        action="store_true",
        help="Write the golden descriptions that EngineAdapterTests compare with.",
    )

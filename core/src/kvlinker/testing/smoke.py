"""Smoke tests of an installed plugin: pytest --pyargs kvlinker.testing.smoke --kvlinker-plugin=NAME.

They need nothing but the plugin. With --kvlinker-store-config='{...}' a store is opened too, and one small
object, which nobody else has, is moved to and from it.
"""

from __future__ import annotations

import json

import pytest

from kvlinker.errors import KVLinkerError
from kvlinker.testing.smoke_checks import SmokeCheck, smoke_checks

__all__ = ["pytest_generate_tests", "test_it"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each thing that holds for the plugin named on the command line."""
    name: object = metafunc.config.getoption("--kvlinker-plugin", default=None)
    if not isinstance(name, str):
        msg = "name the plugin: pytest --pyargs kvlinker.testing.smoke --kvlinker-plugin=NAME"
        raise pytest.UsageError(msg)
    text: object = metafunc.config.getoption("--kvlinker-store-config", default=None)
    try:
        checks = smoke_checks(name, store_config=_store_config(text))
    except KVLinkerError as error:
        raise pytest.UsageError(str(error)) from error
    metafunc.parametrize("check", checks, ids=[check.name for check in checks])


def _store_config(text: object) -> dict[str, object] | None:
    if not isinstance(text, str):
        return None
    try:
        config: object = json.loads(text)
    except ValueError as error:
        msg = f'--kvlinker-store-config must be JSON, such as \'{{"path": "..."}}\': {error}'
        raise pytest.UsageError(msg) from error
    if not isinstance(config, dict):
        msg = f"--kvlinker-store-config must be a JSON object, got {text}"
        raise pytest.UsageError(msg)
    return config


def test_it(check: SmokeCheck) -> None:
    """Run one check; its name says what holds."""
    check.run()

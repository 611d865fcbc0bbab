"""What the tests of the kit for stores share: how the store is opened, and the shelf beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

import pytest

from kvlinker.hookspecs import PluginInfo
from kvlinker.plugins import one_line
from kvlinker.store import ObjectKey, Store
from kvlinker.testing.kit import KitTests
from kvlinker.testing.shelves import Shelf
from kvlinker.testing.verdicts import fail

__all__ = [
    "DEADLINE_S",
    "Damage",
    "OpenStore",
    "StoreFixtures",
    "StoreModule",
    "answer_of",
    "flip_byte_in_files",
    "within",
]

OpenStore: TypeAlias = Callable[[], Store]
Damage: TypeAlias = Callable[[Store, ObjectKey, bytes], None]
"""Takes the store, open or closed, an object's key and its payload, and changes one stored byte of it."""
_T = TypeVar("_T")

DEADLINE_S = 60.0
"""No call of a sound store takes so long; a test that waits longer fails instead of hanging."""


class StoreModule(Protocol):
    """The module that a store plugin's entry point names."""

    __name__: str

    def describe_plugin(self) -> PluginInfo:
        """See `kvlinker.hookspecs`."""
        ...

    def open_store(self, config: Mapping[str, object]) -> Store:
        """See `kvlinker.hookspecs`."""
        ...


class StoreFixtures(KitTests):
    """How the store under test is opened."""

    @property
    def plugin(self) -> StoreModule:
        """The module that the entry point names; a subclass sets the attribute."""
        msg = f"{type(self).__name__} must set `plugin` to the plugin's module, or override the fixture open_store"
        raise NotImplementedError(msg)

    @pytest.fixture
    def config(self) -> Mapping[str, object]:
        """Return options of an empty store with room for 2 to 64 MiB, the same place for the length of a test."""
        msg = (
            f"{type(self).__name__} must override the fixture `config` with the store's options, "
            f"in values that JSON has"
        )
        raise NotImplementedError(msg)

    @pytest.fixture
    def damage(self) -> Damage:
        """Return how a stored byte is changed; needed where the store promises checksums."""
        msg = (
            f"{type(self).__name__} promises checksums: override the fixture `damage`, such as with "
            f"flip_byte_in_files, so that a changed byte can be tried"
        )
        raise NotImplementedError(msg)

    @pytest.fixture
    def open_store(self, request: pytest.FixtureRequest) -> OpenStore:
        """Return what opens the store, at the same place each time."""
        config: Mapping[str, object] = request.getfixturevalue("config")
        return lambda: self.plugin.open_store(config)

    @pytest.fixture
    def reopen(self, open_store: OpenStore) -> Iterator[OpenStore]:
        """Return what opens the store, and closes it when the test ends."""
        opened: list[Store] = []

        def open_once_more() -> Store:
            opened.append(open_store())
            return opened[-1]

        yield open_once_more
        for store in opened:
            store.close()

    @pytest.fixture
    def shelf(self, reopen: OpenStore) -> Shelf:
        """Return pages in pool memory beside a freshly opened store."""
        return Shelf(reopen())


def within(what: str, call: Callable[[], _T]) -> _T:
    """Return what a call returns, and fail if it does not return before the deadline.

    Args:
        what: the call, for the message.
        call: runs in a thread of its own, which is left behind if it hangs.
    """
    answers: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread instead
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name=f"kit: {what}")
    thread.start()
    thread.join(DEADLINE_S)
    if errors:
        raise errors[0]
    if not answers:
        fail(f"{what} did not return within {DEADLINE_S} s")
    return answers[0]


def flip_byte_in_files(folder: Path, payload: bytes) -> None:
    """Change one byte of an object that lies somewhere in the files of a folder, as a bad disk would.

    Raises:
        AssertionError: its bytes are not found: they are compressed, cut up, or nowhere.
    """
    needle = payload[: len(payload) // 16]
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        at = path.read_bytes().find(needle)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([needle[0] ^ 0x40]))
            return
    fail(f"no file in {folder} has the object's first {len(needle)} bytes")


def answer_of(call: Callable[[], object]) -> str:
    """Return an error that a call raises as one line of text, or an empty text."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - shown by the test
        return one_line(error)
    return ""

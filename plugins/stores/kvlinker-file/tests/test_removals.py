"""What was removed stays removed, although another opener makes the tables again before the catalog knows of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from file_shelf import OpenStore, Shelf

from kvlinker_file import FileStore
from kvlinker_file.state import StoreState
from kvlinker_file.table_layout import Word

Key = Callable[..., bytes]


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_a_removal_outlasts_a_recovery_that_comes_before_it_is_saved(
    open_store: OpenStore,
    shelf: Shelf,
    folder: Path,
    key: Key,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    first, second = open_store(), open_store()
    keys = [key(i, 1 + i // 3) for i in range(6)]
    shelf.put(first, keys)
    save = StoreState.save_removals

    def save_after_a_recovery(self: StoreState, *, keep: int | None = None) -> None:
        with (folder / "index.shared").open("r+b") as tables:
            tables.seek(8 * Word.TABLES_MARK)
            tables.write(b"\x01")  # as a process leaves it that is killed while it changes them
        assert second.exists(keys) == (False,) * 3 + (True,) * 3
        save(self, keep=keep)

    monkeypatch.setattr(StoreState, "save_removals", save_after_a_recovery)
    remove(first, keys[:3], how)

    assert first.exists(keys) == second.exists(keys) == (False,) * 3 + (True,) * 3


def remove(store: FileStore, keys: list[bytes], how: str) -> None:
    if how == "delete":
        assert store.delete(keys) == (True,) * len(keys)
    else:
        assert store.clear(keys[0][:12]) == len(keys)

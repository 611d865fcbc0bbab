"""Encrypted files outlive a restart, are read layer by layer, and show nothing of what is in them."""

from __future__ import annotations

from pathlib import Path

from file_shelf import OpenStore, Shelf, make_key

from kvlinker.store import ReadStatus
from kvlinker.stores.encrypted import EncryptedStore

OK, MISS = ReadStatus.OK, ReadStatus.MISS
SECRET = bytes(range(32))


def test_encrypted_files_are_read_after_a_restart_with_the_secret_alone(
    open_store: OpenStore,
) -> None:
    shelf, keys = Shelf(), [make_key(i) for i in range(12)]
    store = EncryptedStore(open_store(), SECRET)
    shelf.put(store, keys)
    store.close()

    again, other = EncryptedStore(open_store(), SECRET), EncryptedStore(open_store(), bytes(32))

    assert shelf.get(again, keys) == (OK,) * 12
    assert shelf.get(again, keys, by_layer=True) == (OK,) * 12
    assert shelf.get(other, keys) == (MISS,) * 12


def test_files_have_none_of_an_object_s_bytes(open_store: OpenStore, folder: Path) -> None:
    shelf, keys = Shelf(), [make_key(i) for i in range(4)]
    plain, sealed = folder / "plain", folder / "sealed"

    shelf.put(open_store(path=plain), keys)
    shelf.put(EncryptedStore(open_store(path=sealed), SECRET), keys)

    needles = [shelf.content(key, layer)[:32] for key in keys for layer in range(4)]
    assert [shows(plain, needle) for needle in needles] == [True] * 16
    assert not any(shows(sealed, needle) for needle in needles)


def shows(folder: Path, needle: bytes) -> bool:
    return any(needle in path.read_bytes() for path in folder.rglob("*") if path.is_file())

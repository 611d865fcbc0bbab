"""Encrypted files keep what every persistent store promises, and show nothing of what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import wrapped_files
from file_shelf import OpenStore, Shelf, make_key
from wrapped_files import SECRET, open_files

from kvlinker.device import HostAccess
from kvlinker.store import ObjectKey, ReadRequest, ReadStatus, Store
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.stores.host_pages import plan_of_rows
from kvlinker.stores.sealing import BlockLayout, Sealer
from kvlinker.testing.shelves import Shelf as KitShelf
from kvlinker.testing.stores import Damage, PersistentStoreTests, flip_byte_in_files

OK, MISS = ReadStatus.OK, ReadStatus.MISS


class TestEncryptedFiles(PersistentStoreTests):
    plugin = wrapped_files

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"wrapper": "encrypted", "path": str(tmp_path / "store")}

    @pytest.fixture
    def damage(self, tmp_path: Path) -> Damage:
        def change(store: Store, key: ObjectKey, payload: bytes) -> None:
            fingerprint = KitShelf(store).request([key]).fingerprint
            flip_byte_in_files(tmp_path, sealed(tmp_path / "store", key, len(payload), fingerprint))

        return change


def sealed(path: Path, key: ObjectKey, size: int, fingerprint: bytes) -> bytes:
    """Return what the files have of an object."""
    layout = BlockLayout(object_bytes=size)
    row = np.zeros((1, layout.sealed_bytes), dtype=np.uint8)
    sizes = np.array(layout.frame_bytes)
    plan = plan_of_rows("sealed", row, np.cumsum(sizes) - sizes, sizes)
    request = ReadRequest(
        keys=(key,),
        object_bytes=layout.sealed_bytes,
        fingerprint=Sealer(SECRET).fingerprint(fingerprint),
    )
    beside = open_files(path)
    with beside.open_read(request) as session:
        assert session.read(plan, HostAccess()) == (OK,)
    beside.close()
    return row.tobytes()


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

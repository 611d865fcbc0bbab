"""Golden vectors of stored forms: prints what `forms.json` must hold, which is what wrappers give the store in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.device import DeviceAccess, HostAccess
from kvlinker.store import ObjectKey, Store, WriteBatch, WriteStatus
from kvlinker.stores.compressed import CompressedStore
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.stores.expiring import ExpiringStore
from kvlinker.stores.host_pages import plan_of_rows, slots_of
from kvlinker.stores.wrapped import WrappedStore
from kvlinker.testing import MemoryStore

FINGERPRINT = bytes(range(16))
CLOCK_SECONDS = 1_800_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A wrapper whose objects are kept from one release to the next."""

    object_bytes: int
    wrap: Callable[[Store], Store]

    @property
    def content(self) -> NDArray[np.uint8]:
        """What the object holds, uint8 [1, object_bytes]: 16-bit values whose upper bytes are alike."""
        items = np.arange(self.object_bytes // 2, dtype="<u2") % 251
        return items.view(np.uint8).reshape(1, -1)


FORMS: Mapping[str, Form] = {
    "compressed": Form(object_bytes=8192, wrap=CompressedStore),
    "encrypted": Form(object_bytes=640, wrap=lambda store: EncryptedStore(store, bytes(range(32)))),
    "expiring": Form(
        object_bytes=64,
        wrap=lambda store: ExpiringStore(store, seconds=7200, clock=lambda: CLOCK_SECONDS),
    ),
}


def object_key() -> ObjectKey:
    """Return the key of every golden object."""
    return bytes(range(100, 132))


def batch_of(
    rows: NDArray[np.uint8], *, key: ObjectKey | None = None, fingerprint: bytes = FINGERPRINT
) -> WriteBatch:
    """Return a batch of one object, whose bytes lie in an array that the caller keeps."""
    offsets, sizes = np.array([0]), np.array([rows.shape[1]])
    plan = plan_of_rows("kv", rows, offsets, sizes)
    return WriteBatch(keys=(key or object_key(),), plan=plan, fingerprint=fingerprint)


class Recorder(WrappedStore):
    """Notes what it is given to write."""

    def __init__(self) -> None:
        """Note nothing yet."""
        super().__init__(MemoryStore())
        self.written: dict[str, str] = {}

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store."""
        (batch,) = batches
        rows = np.empty((1, batch.plan.object_bytes), dtype=np.uint8)
        memory.copy_out(batch.plan, slots_of(rows))
        self.written = {
            "key": batch.keys[0].hex(),
            "fingerprint": batch.fingerprint.hex(),
            "bytes": rows.tobytes().hex(),
        }
        return super().write(batches, memory, may_publish=may_publish)


def written_as(form: Form) -> Mapping[str, str]:
    """Return what a wrapper writes of the golden object: key, fingerprint and bytes, in hexadecimal digits."""
    recorder, rows = Recorder(), form.content
    store = form.wrap(recorder)
    store.write([batch_of(rows)], HostAccess(), may_publish=lambda: True)
    store.close()
    return recorder.written


def main() -> None:
    """Print every golden vector.

    A change here makes objects misses that were stored before. Where that is meant, raise the form's number, and
    write the file anew: `python core/tests/stored_forms.py > core/tests/golden/forms.json`.
    """
    json.dump({name: written_as(form) for name, form in FORMS.items()}, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()

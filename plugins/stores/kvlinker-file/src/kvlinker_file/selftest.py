"""A self-test of an open store: one small object goes all the way, so that a broken disk shows at the start."""

from __future__ import annotations

import os

import numpy as np

from kvlinker.device import HostAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import StoreError
from kvlinker.keys import NAMESPACE_BYTES, OBJECT_KEY_BYTES
from kvlinker.spans import BufferSpan
from kvlinker.store import ReadRequest, ReadStatus, Store, WriteBatch, WriteStatus

__all__ = ["run_self_test"]

_LAYERS = 2
_ROW_BYTES = 512
_FINGERPRINT = b"kvlinker self-test"


def run_self_test(store: Store) -> None:
    """Write an object, look it up, read it layer by layer, delete it.

    Raises:
        StoreError: a step did not do what it should; the message names it.
    """
    memory = np.frombuffer(os.urandom(_LAYERS * 2 * _ROW_BYTES), dtype=np.uint8).copy()
    rows = memory.reshape(_LAYERS, 2, _ROW_BYTES)
    entry = _entry(rows)
    source, target = entry.prepare_locations([0]), entry.prepare_locations([1])
    key = bytes(NAMESPACE_BYTES) + os.urandom(OBJECT_KEY_BYTES - NAMESPACE_BYTES)
    batch = WriteBatch(keys=(key,), plan=entry.page_plan(source), fingerprint=_FINGERPRINT)
    answer = store.write([batch], HostAccess(), may_publish=lambda: True)
    _expect("write", answer == ((WriteStatus.WRITTEN,),))
    _expect("exists", store.exists([key]) == (True,))
    request = ReadRequest(keys=(key,), object_bytes=_LAYERS * _ROW_BYTES, fingerprint=_FINGERPRINT)
    with store.open_read(request) as session:
        for layer in range(_LAYERS):
            plan = entry.layer_plan(target, layer)
            is_read = plan is not None and session.read(plan, HostAccess()) == (ReadStatus.OK,)
            _expect(f"read of layer {layer}", is_read)
    _expect("comparison of what was read", np.array_equal(rows[:, 0], rows[:, 1]))
    _expect("delete", store.delete([key]) == (True,) and store.exists([key]) == (False,))


def _entry(rows: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> DevicePoolEntry:
    spans = [
        BufferSpan(
            base_ptr=layer.ctypes.data,
            rows=2,
            row_bytes=_ROW_BYTES,
            row_stride=_ROW_BYTES,
            label=f"self_test[{i}]",
        )
        for i, layer in enumerate(rows)
    ]
    return DevicePoolEntry(
        name="self_test",
        indices_from_pool="kv",
        components=[spans],
        layer_mapping={layer: layer for layer in range(_LAYERS)},
        page_size=1,
        rows_are_pages=True,
    )


def _expect(step: str, is_right: bool) -> None:  # noqa: FBT001  # the claim that the step makes
    if not is_right:
        msg = f"file store: the self-test failed at {step}"
        raise StoreError(msg)

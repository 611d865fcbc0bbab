"""Pages of GPU memory straight to a file and back; `pytest -m gpu` runs it where there is a GPU with cuFile."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlinker.device import HostAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.spans import BufferSpan, unique_regions
from kvlinker.store import Integrity, ReadRequest, ReadStatus, WriteBatch, WriteStatus
from kvlinker.testing.shelves import object_keys
from kvlinker_nixl import Backend, NixlStoreOptions, open_nixl_store

LAYERS, PAGES, ROW_BYTES = 4, 8, 41_984


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [Backend.GDS, Backend.GDS_MT])
def test_pages_of_gpu_memory_come_back_as_they_were(tmp_path: Path, backend: Backend) -> None:
    import torch  # noqa: PLC0415  # heavy, and not needed where there is no GPU

    options = NixlStoreOptions(backend=backend, path=tmp_path / "store", capacity=64 << 20)
    store = open_nixl_store(options)
    pools = [
        torch.randint(0, 255, (2 * PAGES, ROW_BYTES), dtype=torch.uint8, device="cuda")
        for _ in range(LAYERS)
    ]
    spans = [BufferSpan.from_tensor(pool, label=f"kv[{i}]") for i, pool in enumerate(pools)]
    entry = DevicePoolEntry(
        name="kv",
        indices_from_pool="kv",
        components=[spans],
        layer_mapping={i: i for i in range(LAYERS)},
        page_size=1,
        rows_are_pages=True,
    )
    store.register(unique_regions(spans))
    keys = object_keys(PAGES)
    source = entry.page_plan(entry.prepare_locations(range(PAGES)))
    target = entry.page_plan(entry.prepare_locations(range(PAGES, 2 * PAGES)))
    torch.cuda.synchronize()

    batch = WriteBatch(keys=keys, plan=source, fingerprint=b"gds")
    written = store.write([batch], HostAccess(), may_publish=lambda: True)
    request = ReadRequest(keys=keys, object_bytes=LAYERS * ROW_BYTES, fingerprint=b"gds")
    with store.open_read(request) as session:
        found = session.read(target, HostAccess())

    assert written == ((WriteStatus.WRITTEN,) * PAGES,)
    assert found == (ReadStatus.OK,) * PAGES
    assert all(torch.equal(pool[:PAGES], pool[PAGES:]) for pool in pools)
    assert store.capabilities.integrity is Integrity.LENGTH
    store.close()

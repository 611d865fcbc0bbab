"""Checks of order: no copy overtakes the engine's kernels, and no layer is reported before it is there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvlinker.device import DeviceEvent, HostAccess
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker
from kvlinker.spans import BufferSpan
from kvlinker.testing import HostMemory, MemoryStore, page_keys
from kvlinker_gpu_check.checks import OTHER_PAGES, PAGES, content_of, fill, opened
from kvlinker_gpu_check.findings import expect, expect_equal
from kvlinker_gpu_check.lab import DevicePools, EngineStream, Lab, PoolBytes
from kvlinker_gpu_check.layouts import Layout, PlacedPools

__all__ = ["check_layers_arrive", "check_load_waits", "check_offload_waits"]

NAMESPACE = KeyNamespace(model_id="gpu check", producer="kvlinker")
KEYS = page_keys(len(PAGES))
POLL_SECONDS = 0.001
DEADLINE_SECONDS = 60.0


MemoryT = TypeVar("MemoryT", bound=PoolBytes)


@dataclass(frozen=True, slots=True)
class _Linked(Generic[MemoryT]):
    """Pools in a memory, linked to a store."""

    memory: MemoryT
    pools: PlacedPools
    linker: Linker

    def store_pages(self, *, ready: tuple[DeviceEvent, ...] = ()) -> None:
        """Offload the chosen pages, and wait until they are stored."""
        transfers = self.pools.transfers(KEYS, PAGES)
        expect(self.linker.offload(transfers, ready=ready), "an offload was refused")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self.linker.num_completed_offloads():
            expect(time.monotonic() < deadline, "an offload never completed")
            time.sleep(POLL_SECONDS)
        expect(self.linker.pop_completed_offload(), "an offload completed without storing")

    def start_load(self, *, ready: tuple[DeviceEvent, ...] = ()) -> int:
        """Start to load the pages to the other places; return the batch's index."""
        found = self.linker.lookup("request", self.pools.transfers(KEYS, None))
        expect(len(KEYS) in found, f"only the boundaries {found} are found")
        accepted = self.linker.load("request", self.pools.transfers(KEYS, OTHER_PAGES))
        expect(accepted, "a load was refused")
        return self.linker.start_layer_wise_loading(ready=ready)


@contextmanager
def _linked_host(layout: Layout, store: MemoryStore) -> Iterator[_Linked[HostMemory]]:
    """Link pools in host memory: what they store and load is right, whatever the device does."""
    memory = HostMemory()
    pools = layout.place(memory)
    linker = Linker(pools.group, store, NAMESPACE, device=HostAccess())
    try:
        yield _Linked(memory, pools, linker)
    finally:
        linker.close()


@contextmanager
def _linked_device(
    memory: DevicePools, layout: Layout, store: MemoryStore
) -> Iterator[_Linked[DevicePools]]:
    pools = layout.place(memory)
    with opened(memory, pools) as access:
        linker = Linker(pools.group, store, NAMESPACE, device=access)
        try:
            yield _Linked(memory, pools, linker)
        finally:
            linker.close()


def _page(pools: PlacedPools, span: BufferSpan, page: int) -> tuple[int, int]:
    """Return the first row of a page in a buffer, and its rows."""
    rows = span.rows // pools.pages
    return page * rows, rows


def _content(
    pools: PlacedPools, content: Mapping[str, bytes], span: BufferSpan, page: int
) -> bytes:
    first, rows = _page(pools, span, page)
    return content[span.label][first * span.row_bytes : (first + rows) * span.row_bytes]


def _read(memory: PoolBytes, pools: PlacedPools, span: BufferSpan, page: int) -> bytes:
    return memory.read(span, *_page(pools, span, page))


def check_offload_waits(lab: Lab, layout: Layout) -> None:
    """Offload pages that a slow kernel has yet to write; what is stored must be what it writes.

    Raises:
        CheckFailedError: the offload overtook the kernel.
    """
    memory, store, stream = lab.pools(), MemoryStore(), lab.stream()
    with _linked_device(memory, layout, store) as device, _linked_host(layout, store) as host:
        stale = content_of(device.pools, seed=3)
        fresh = {label: _inverted(content) for label, content in stale.items()}
        fill(memory, device.pools, stale)
        stream.keep_busy()
        for span in device.pools.spans:
            for page in PAGES:
                first, _ = _page(device.pools, span, page)
                stream.write(memory, span, first, _content(device.pools, fresh, span, page))
        device.store_pages(ready=(stream.record(),))
        expect(host.linker.finish_layer_wise_loading(host.start_load()), "nothing was stored")
        _expect_pages(host, fresh, "stored before the kernel had written it")


def check_load_waits(lab: Lab, layout: Layout) -> None:
    """Load into pages that a slow kernel has yet to read; it must read what was there before.

    Raises:
        CheckFailedError: the load overtook the kernel, or brought wrong bytes.
    """
    memory, store, stream = lab.pools(), MemoryStore(), lab.stream()
    with _linked_device(memory, layout, store) as device, _linked_host(layout, store) as host:
        loaded, before = content_of(device.pools, seed=4), content_of(device.pools, seed=5)
        fill(host.memory, host.pools, loaded)
        host.store_pages()
        fill(memory, device.pools, before)
        stream.keep_busy()
        seen = [
            (span, page, stream.read(memory, span, *_page(device.pools, span, page)))
            for span in device.pools.spans
            for page in OTHER_PAGES
        ]
        index = device.start_load(ready=(stream.record(),))
        expect(device.linker.finish_layer_wise_loading(index), "the load failed")
        for span, page, result in seen:
            expected = _content(device.pools, before, span, page)
            what = f"page {page} of {span.label}, as a kernel saw it that the load had to wait for"
            expect_equal(result(), expected, what)
        _expect_pages(device, loaded, "loaded")


def check_layers_arrive(lab: Lab, layout: Layout) -> None:
    """Read every layer in a kernel as soon as it is reported; it must hold what was loaded.

    Raises:
        CheckFailedError: a layer was reported before it was there.
    """
    memory, store, stream = lab.pools(), MemoryStore(), lab.stream()
    with _linked_device(memory, layout, store) as device, _linked_host(layout, store) as host:
        loaded = content_of(device.pools, seed=6)
        fill(host.memory, host.pools, loaded)
        host.store_pages()
        fill(memory, device.pools, content_of(device.pools, seed=7))
        index = device.start_load()
        counter = device.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(device.pools.group.num_layers):
            counter.wait_until(layer)
            for span in _spans_of_layer(device.pools, layer):
                _expect_seen(stream, device, span, loaded, layer)
        expect(device.linker.finish_layer_wise_loading(index), "the load failed")


def _spans_of_layer(pools: PlacedPools, layer: int) -> Iterator[BufferSpan]:
    by_label = {span.label: span for span in pools.spans}
    for entry in pools.group.entries:
        prepared = entry.prepare_locations(pools.slots(entry.indices_from_pool, PAGES))
        plan = entry.layer_plan(prepared, layer)
        yield from (by_label[label] for label in (plan.spans.labels if plan else ()))


def _expect_seen(
    stream: EngineStream,
    device: _Linked[DevicePools],
    span: BufferSpan,
    loaded: Mapping[str, bytes],
    layer: int,
) -> None:
    for source, target in zip(PAGES, OTHER_PAGES, strict=True):
        place = _page(device.pools, span, target)
        got = stream.read(device.memory, span, *place)()
        expected = _content(device.pools, loaded, span, source)
        expect_equal(
            got, expected, f"page {target} of {span.label}, after layer {layer} was reported"
        )


def _expect_pages(linked: _Linked[MemoryT], content: Mapping[str, bytes], what: str) -> None:
    for span in linked.pools.spans:
        for source, target in zip(PAGES, OTHER_PAGES, strict=True):
            got = _read(linked.memory, linked.pools, span, target)
            expected = _content(linked.pools, content, span, source)
            expect_equal(got, expected, f"page {source} of {span.label}, {what}")


def _inverted(content: bytes) -> bytes:
    return content.translate(bytes(255 - value for value in range(256)))

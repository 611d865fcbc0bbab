"""CudaAccess moves the right bytes; here its streams and its device are the CPU's."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvlinker.cuda import CopyDirection, CudaAccess, CudaStreams
from kvlinker.device import HostAccess, HostObjects
from kvlinker.device_access import device_access_for
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import (
    ContractError,
    DeviceCopyError,
    StalePoolError,
    TransferRevokedError,
    UnsupportedOperationError,
)
from kvlinker.plans import TransferPlan
from kvlinker.pools import DevicePoolGroup
from kvlinker.spans import BufferSpan, MemoryRegion
from kvlinker.staging import BUFFERS
from kvlinker.testing import OpaqueMemory, fake_group

PAGE = 4


class CpuCopy:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


class CpuStreams:
    """The CPU as a device, which copies at once or not before it is waited for."""

    def __init__(self, *, lazy: bool, fail: str = "") -> None:
        self.device = torch.device("cpu")
        self.directions: list[CopyDirection] = []
        self.pins: dict[int, int] = {}
        self.buffers: list[torch.Tensor] = []
        self._lazy = lazy
        self._fail = fail

    def pinned(self, size: int) -> torch.Tensor:
        if self._fail == "pinned":
            msg = "cannot pin"
            raise RuntimeError(msg)
        self.buffers.append(torch.empty(size, dtype=torch.uint8))
        return self.buffers[-1]

    def pin(self, address: int, size: int) -> None:
        self.pins[address] = size

    def unpin(self, address: int) -> None:
        del self.pins[address]

    def submit(self, direction: CopyDirection, work: Callable[[], None]) -> CpuCopy:
        self.directions.append(direction)
        if self._fail == "submit":
            msg = "illegal address"
            raise RuntimeError(msg)
        copy = CpuCopy(self._broken if self._fail == "wait" else work)
        if not self._lazy:
            copy.wait()
        return copy

    def _broken(self) -> None:
        msg = "unspecified launch failure"
        raise RuntimeError(msg)


class Pools:
    """A group over torch tensors: slots, padded page rows, a draft that is smaller, scattered slots."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        backing = torch.randint(256, (60_000,), dtype=torch.uint8, generator=generator)
        self.storage = backing
        spans = {
            "k": backing[8 : 8 + 64 * 16].view(64, 16),
            "odd": backing[4001 : 4001 + 64 * 5].view(64, 5),
            "words": backing[6002 : 6002 + 64 * 6].view(64, 6),
            "padded": backing[8000 : 8000 + 16 * 40].view(16, 40)[:, :32],
            "draft": torch.randint(256, (8, 12), dtype=torch.uint8, generator=generator),
            "half": torch.randn(64, 3, generator=generator).to(torch.bfloat16),
        }
        self.spans = {
            label: BufferSpan.from_tensor(tensor, label=label) for label, tensor in spans.items()
        }
        self.tensors = spans
        entries = [
            self._entry("kv", ["k", "odd", "words"]),
            self._entry("index", ["padded", "draft"], rows_are_pages=True),
            self._entry("scattered", ["half"], fragmented=True),
        ]
        self.group = DevicePoolGroup(entries, 3, PAGE, layout="torch/1")

    def _entry(
        self,
        name: str,
        labels: list[str],
        *,
        rows_are_pages: bool = False,
        fragmented: bool = False,
    ) -> DevicePoolEntry:
        return DevicePoolEntry(
            name=name,
            indices_from_pool="kv",
            components=[[self.spans[label] for label in labels]],
            layer_mapping={0: list(range(len(labels)))},
            page_size=PAGE,
            rows_are_pages=rows_are_pages,
            fragmented=fragmented,
        )

    def plans(self, pages: tuple[int, ...]) -> Iterator[TransferPlan]:
        slots = (np.array(pages)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
        for entry in self.group.entries:
            mixed = np.roll(slots, 3) if entry.fragmented else slots
            yield entry.page_plan(entry.prepare_locations(mixed))


def host_slots(plan: TransferPlan) -> tuple[HostObjects, np.ndarray]:
    size = plan.object_bytes
    array = np.zeros((plan.num_pages, size), dtype=np.uint8)
    span = BufferSpan(base_ptr=array.ctypes.data, rows=len(array), row_bytes=size, row_stride=size)
    return HostObjects(span=span, slots=np.arange(len(array), dtype=np.int64)), array


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("buffer_bytes", [64, 104, 4096])
def test_b111_pages_of_tensors_pass_through_both_buffers_unchanged(
    *, lazy: bool, buffer_bytes: int
) -> None:
    direct, pools = Pools(), Pools()
    streams = CpuStreams(lazy=lazy)
    access = CudaAccess(pools.group, staging_bytes=buffer_bytes * BUFFERS, streams=streams)

    for plan, reference, target, other in zip(
        pools.plans((6, 1, 3)),
        direct.plans((6, 1, 3)),
        pools.plans((0, 5, 2)),
        direct.plans((0, 5, 2)),
        strict=True,
    ):
        (host, got), (theirs, expected) = host_slots(plan), host_slots(reference)
        access.copy_out(plan, host)
        HostAccess().copy_out(reference, theirs)
        assert (got == expected).all()
        access.copy_in(target, host)
        HostAccess().copy_in(other, theirs)

    assert torch.equal(pools.storage, direct.storage)
    assert torch.equal(pools.tensors["draft"], direct.tensors["draft"])
    assert torch.equal(pools.tensors["half"], direct.tensors["half"])
    assert set(streams.directions) == set(CopyDirection)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("buffer_bytes", [64, 104, 4096])
def test_l13_pages_of_pinned_slots_do_not_pass_through_the_host_s_buffers(
    *, lazy: bool, buffer_bytes: int
) -> None:
    direct, pools = Pools(), Pools()
    streams = CpuStreams(lazy=lazy)
    access = CudaAccess(
        pools.group, staging_bytes=buffer_bytes * BUFFERS, streams=streams, pinned_run_bytes=1
    )

    for plan, reference in zip(pools.plans((6, 1, 3)), direct.plans((6, 1, 3)), strict=True):
        host, array = host_slots(plan)
        array[:] = np.random.default_rng(3).integers(0, 256, array.shape, dtype=np.uint8)
        pin = access.pin_host(array.ctypes.data, array.size)
        assert pin is not None
        assert streams.pins == {array.ctypes.data: array.size}
        for buffer in streams.buffers:
            buffer.fill_(0xEE)
        access.copy_in(plan, host)
        HostAccess().copy_in(reference, host)
        is_unused = all(bool((buffer == 0xEE).all()) for buffer in streams.buffers)
        assert is_unused == plan.pages.contiguous
        assert pin.release()

    assert torch.equal(pools.storage, direct.storage)
    assert torch.equal(pools.tensors["draft"], direct.tensors["draft"])
    assert torch.equal(pools.tensors["half"], direct.tensors["half"])
    assert streams.pins == {}


def test_closing_the_access_unpins_what_the_host_has_not_released() -> None:
    streams = CpuStreams(lazy=True)
    access = CudaAccess(Pools().group, streams=streams)
    pin = access.pin_host(4096, 8192)

    access.close()

    assert streams.pins == {}
    assert pin is not None
    assert pin.release()


def test_l9_loads_and_offloads_use_streams_of_their_own() -> None:
    pools = Pools()
    streams = CpuStreams(lazy=True)
    access = CudaAccess(pools.group, streams=streams)
    plan = next(pools.plans((1, 2)))
    host, _ = host_slots(plan)

    access.copy_out(plan, host)
    access.copy_in(plan, host)

    assert streams.directions == [CopyDirection.OFFLOAD, CopyDirection.LOAD]


def test_l13_buffers_are_bounded_and_refused_when_a_page_would_not_fit() -> None:
    pools = Pools()

    access = CudaAccess(pools.group, staging_bytes=1000, streams=CpuStreams(lazy=True))
    with pytest.raises(ContractError, match="pool 'kv': a page of one span is 64 B"):
        CudaAccess(pools.group, staging_bytes=255, streams=CpuStreams(lazy=True))

    assert access.staging_bytes == 248 * BUFFERS


@pytest.mark.parametrize("fail", ["submit", "wait"])
def test_errors_of_the_device_are_typed_and_name_the_pool(fail: str) -> None:
    pools = Pools()
    access = CudaAccess(pools.group, streams=CpuStreams(lazy=True, fail=fail))
    plan = next(pools.plans((1, 2)))
    host, _ = host_slots(plan)

    with pytest.raises(DeviceCopyError, match="pool 'kv': the device failed a copy: ") as raised:
        access.copy_in(plan, host)

    assert isinstance(raised.value.__cause__, RuntimeError)


def test_too_little_memory_for_the_buffers_is_an_error_at_once() -> None:
    with pytest.raises(DeviceCopyError, match=r"no memory for 4 .* lower staging_bytes"):
        CudaAccess(Pools().group, streams=CpuStreams(lazy=True, fail="pinned"))


def test_closing_lets_go_of_the_tensors_and_refuses_copies() -> None:
    pools = Pools()
    access = CudaAccess(pools.group, streams=CpuStreams(lazy=True))
    plan = next(pools.plans((1, 2)))
    host, _ = host_slots(plan)
    access.close()
    access.close()

    with pytest.raises(TransferRevokedError, match="was closed"):
        access.copy_in(plan, host)


def one_span_group(region: MemoryRegion) -> DevicePoolGroup:
    span = BufferSpan(
        base_ptr=region.base_ptr, rows=2, row_bytes=8, row_stride=8, region=region, label="one"
    )
    entry = DevicePoolEntry(
        name="kv",
        indices_from_pool="kv",
        components=[[span]],
        layer_mapping={0: 0},
        page_size=1,
        rows_are_pages=True,
    )
    return DevicePoolGroup([entry], 1, 1, layout="one/1")


def test_a_region_that_is_no_tensor_is_refused() -> None:
    array = np.zeros(16, dtype=np.uint8)
    region = MemoryRegion(base_ptr=array.ctypes.data, size_bytes=16, owner=array)

    with pytest.raises(UnsupportedOperationError, match="is no tensor on 'cpu'"):
        CudaAccess(one_span_group(region), streams=CpuStreams(lazy=True))


def test_w22_a_tensor_that_moved_is_refused() -> None:
    tensor = torch.zeros(16, dtype=torch.uint8)
    group = one_span_group(
        MemoryRegion(base_ptr=tensor.data_ptr(), size_bytes=16, owner=tensor, owner_ptr=None)
    )
    tensor.set_(torch.zeros(32, dtype=torch.uint8).untyped_storage())

    with pytest.raises(StalePoolError, match="build a new group"):
        CudaAccess(group, streams=CpuStreams(lazy=True))


def test_pools_on_the_host_are_refused_by_cuda_access() -> None:
    with pytest.raises(UnsupportedOperationError, match=r"on one CUDA device, got \['cpu'\]"):
        CudaAccess(Pools().group)


def test_the_access_follows_from_the_device_of_the_pools() -> None:
    assert isinstance(device_access_for(fake_group().group), HostAccess)
    assert isinstance(device_access_for(Pools().group), HostAccess)


@pytest.mark.parametrize("device", ["npu:0", "xpu", "meta"])
def test_pools_on_another_device_are_refused_by_its_name(device: str) -> None:
    group = one_span_group(MemoryRegion(base_ptr=4096, size_bytes=16, device=device))

    with pytest.raises(
        UnsupportedOperationError, match=f"no device access for pools on '{device}'"
    ):
        device_access_for(group)


def test_pools_on_several_devices_are_refused() -> None:
    opaque = fake_group(memory=OpaqueMemory()).group.entries[0]
    host = one_span_group(MemoryRegion(base_ptr=4096, size_bytes=16)).entries[0]
    mixed = DevicePoolEntry(
        name="other",
        indices_from_pool="kv",
        components=host.components,
        layer_mapping={0: 0},
        page_size=PAGE,
        rows_are_pages=True,
    )
    group = DevicePoolGroup([opaque, mixed], 4, PAGE, layout="mixed/1")

    with pytest.raises(
        UnsupportedOperationError, match="'cpu', 'opaque:0': all of them must be on"
    ):
        device_access_for(group)


def test_cuda_pools_without_a_driver_fail_with_a_typed_error() -> None:
    group = one_span_group(MemoryRegion(base_ptr=4096, size_bytes=16, device="cuda:0"))

    with pytest.raises((DeviceCopyError, UnsupportedOperationError), match="'cuda:0'"):
        device_access_for(group)


class FakeCuda:
    """What CudaStreams uses of torch.cuda, writing down in which order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def make_stream(self, device: torch.device) -> FakeStream:
        del device
        return FakeStream(self, f"s{sum(e.startswith('made') for e in self.events)}")

    def make_event(self, *, blocking: bool) -> FakeEvent:
        assert blocking
        return FakeEvent(self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.events.append(f"enter {stream.name}")
        yield
        self.events.append(f"leave {stream.name}")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.name = name
        self._cuda = cuda
        cuda.events.append(f"made {name}")

    def synchronize(self) -> None:
        self._cuda.events.append(f"synchronize {self.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self._cuda.events.append(f"record on {stream.name}")

    def synchronize(self) -> None:
        self._cuda.events.append("wait for event")


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", cuda.make_stream)
    monkeypatch.setattr(torch.cuda, "Event", cuda.make_event)
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    return cuda


def test_b62_cuda_work_runs_on_its_own_stream_and_its_event_is_behind_it(
    fake_cuda: FakeCuda,
) -> None:
    streams = CudaStreams(torch.device("cuda:0"))

    pending = streams.submit(CopyDirection.OFFLOAD, lambda: fake_cuda.events.append("work"))
    pending.wait()

    assert fake_cuda.events == [
        "made s0",
        "made s1",
        "enter s1",
        "work",
        "record on s1",
        "leave s1",
        "wait for event",
    ]


def test_l5_cuda_work_that_fails_half_way_is_waited_for(fake_cuda: FakeCuda) -> None:
    streams = CudaStreams(torch.device("cuda:0"))

    def work() -> None:
        fake_cuda.events.append("enqueued")
        msg = "launch failed"
        raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="launch failed"):
        streams.submit(CopyDirection.LOAD, work)

    assert ("enqueued", "synchronize s0") in pairwise(fake_cuda.events)


class FakeRuntime:
    """What is used of the CUDA runtime, and who used it on which device."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.threads: set[int] = set()
        self.devices: list[torch.device] = []

    def _note(self, name: str, *arguments: int) -> int:
        self.calls.append((name, arguments))
        self.threads.add(threading.get_ident())
        return self.answer

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802  # the name in the runtime
        return self._note("register", address, size, flags)

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # the name in the runtime
        return self._note("unregister", address)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield


@pytest.fixture(params=[0, 712])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime(int(request.param))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    return fake


def test_cuda_pins_for_every_device_and_its_errors_stay_off_the_threads_that_launch_kernels(
    fake_cuda: FakeCuda, runtime: FakeRuntime
) -> None:
    assert not fake_cuda.events
    streams = CudaStreams(torch.device("cuda:1"))

    questions: list[Callable[[], None]] = [
        lambda: streams.pin(4096, 8192),
        lambda: streams.unpin(4096),
    ]

    for ask in questions:
        if runtime.answer:
            with pytest.raises(RuntimeError, match="error 712 of the CUDA runtime"):
                ask()
        else:
            ask()

    assert runtime.calls == [("register", (4096, 8192, 1)), ("unregister", (4096,))]
    assert threading.get_ident() not in runtime.threads
    assert runtime.devices == [torch.device("cuda:1")] * 2


def test_the_module_imports_no_torch() -> None:
    script = (
        "import sys, kvlinker.cuda, kvlinker.device_access, kvlinker.testing;"
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

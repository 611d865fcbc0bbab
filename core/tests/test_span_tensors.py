"""Spans of tensors: the memory itself, never a copy, and every other tensor is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC2701 - torch has no public name for it

from kvlinker.errors import ContractError, StalePoolError
from kvlinker.spans import BufferSpan, MemoryKind

FLOAT8 = torch.float8_e4m3fn
REFUSED = pytest.raises(ContractError, match=r"^span 'kv\[0\]': ")


def span(tensor: torch.Tensor) -> BufferSpan:
    return BufferSpan.from_tensor(tensor, label="kv[0]")


# ---- what a tensor's rows are -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "item"),
    [
        (torch.uint8, 1),
        (torch.bool, 1),
        (FLOAT8, 1),
        (torch.float8_e5m2, 1),
        (torch.bfloat16, 2),
        (torch.float16, 2),
        (torch.float32, 4),
        (torch.int64, 8),
        (torch.complex64, 8),
    ],
)
def test_rows_are_counted_in_bytes_for_every_dtype(dtype: torch.dtype, item: int) -> None:
    tensor = torch.zeros(6, 2, 5, dtype=dtype)

    found = span(tensor)

    assert (found.base_ptr, found.rows) == (tensor.data_ptr(), 6)
    assert (found.row_bytes, found.row_stride) == (10 * item, 10 * item)
    assert found.label == "kv[0]"


def test_a_one_dimensional_tensor_has_rows_of_one_item() -> None:
    assert span(torch.zeros(6, dtype=torch.int16)).row_bytes == 2


def test_the_region_is_the_whole_allocation_and_the_base_is_the_views() -> None:
    storage = torch.zeros(16, 8, dtype=torch.int32)
    view = storage[3:]

    found = span(view)

    assert found.region is not None
    assert (found.region.base_ptr, found.region.size_bytes) == (storage.data_ptr(), 16 * 32)
    assert found.base_ptr == storage.data_ptr() + 3 * 32
    assert (found.device, found.region.kind) == ("cpu", MemoryKind.HOST)


def test_b92_a_column_slice_names_the_backing_memory_and_is_no_copy() -> None:
    backing = torch.zeros(16, 640, dtype=torch.uint8)

    found = span(backing[:, :512])

    assert found.base_ptr == backing.data_ptr()
    assert (found.rows, found.row_bytes, found.row_stride) == (16, 512, 640)


def test_b98_interleaved_buffers_keep_their_stride() -> None:
    both = torch.zeros(4, 2, 8, dtype=torch.uint8)

    keys, values = span(both[:, 0]), span(both[:, 1])

    assert values.base_ptr == keys.base_ptr + 8
    assert (keys.row_bytes, keys.row_stride) == (8, 16)
    assert keys.end_ptr == both.data_ptr() + 3 * 16 + 8


@pytest.mark.parametrize("rows", [2, 3])
def test_the_stride_of_the_first_of_two_rows_counts(rows: int) -> None:
    backing = torch.zeros(rows, 24, dtype=torch.uint8)

    assert span(backing[:, :8]).row_stride == 24


@pytest.mark.parametrize("stride", [0, 3, 999])
def test_the_stride_of_a_single_row_carries_no_information(stride: int) -> None:
    row = torch.zeros(64, dtype=torch.uint8).as_strided((1, 8), (stride, 1))

    assert span(row).row_stride == 8


def test_the_stride_of_a_dimension_of_one_carries_no_information() -> None:
    tensor = torch.zeros(64, dtype=torch.uint8).as_strided((4, 1, 8), (8, 999, 1))

    assert span(tensor).row_bytes == 8


@pytest.mark.parametrize("shape", [(0, 8), (0,), (0, 2, 4)])
def test_dh2_a_tensor_without_rows_is_a_span_without_rows(shape: tuple[int, ...]) -> None:
    found = span(torch.zeros(shape, dtype=torch.uint8))

    assert (found.rows, found.base_ptr, found.region) == (0, 0, None)


def test_a_tensor_with_a_graph_is_described_like_any_other() -> None:
    leaf = torch.zeros(4, 8, requires_grad=True)

    assert span(leaf).base_ptr == leaf.data_ptr()
    assert span(leaf * 2).rows == 4


# ---- what is refused --------------------------------------------------------------------------


def expanded_rows() -> torch.Tensor:
    return torch.zeros(1, 8).expand(4, 8)


def expanded_within() -> torch.Tensor:
    return torch.zeros(4, 1, 8).expand(4, 3, 8)


def overlapping_rows() -> torch.Tensor:
    return torch.zeros(64).as_strided((4, 8), (4, 1))


@pytest.mark.parametrize("tensor", [expanded_rows(), overlapping_rows()])
def test_w04_rows_that_share_addresses_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ContractError, match=r"rows overlap, .*pass the backing buffer"):
        span(tensor)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 8)[:, ::2], torch.zeros(4, 4, 8)[:, :, :4], torch.zeros(4, 4, 8)[:, ::2]],
)
def test_w01_rows_that_are_strided_inside_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(
        ContractError, match=r"shape \(4, .*\) with stride .* is strided inside a row"
    ):
        span(tensor)


@pytest.mark.parametrize("tensor", [torch.zeros(8, 4).t(), torch.zeros(4, 8, 2).transpose(1, 2)])
def test_w03_a_transposed_buffer_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ContractError, match="is strided inside a row"):
        span(tensor)


def test_w04_an_expansion_within_a_row_is_refused() -> None:
    with pytest.raises(ContractError, match="is strided inside a row"):
        span(expanded_within())


@pytest.mark.parametrize("shape", [(), (4, 0), (4, 2, 0), (0, 0)])
def test_shapes_without_rows_of_bytes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ContractError, match="has no rows of at least one byte"):
        span(torch.zeros(shape))


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(4, 8)


def functional() -> torch.Tensor:
    return torch._to_functional_tensor(torch.zeros(4, 8))  # noqa: SLF001 - how torch.func wraps


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)], layout=torch.jagged)


def conjugate() -> torch.Tensor:
    return torch.zeros(4, 8, dtype=torch.complex64).conj()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: torch.zeros(4, 8, device="meta"),
            r"a Tensor of shape \(4, 8\) on meta has no memory",
        ),
        (lambda: torch.zeros(4, 8).to_sparse(), "torch.sparse_coo torch.float32 tensor is no"),
        (lambda: torch.zeros(4, 8).to_mkldnn(), "is no plain memory; pass its strided backing"),
        (nested, "is no plain memory"),
        (conjugate, "lazily conjugated or negated"),
        (lambda: conjugate().imag, "lazily conjugated or negated"),
        (fake, r"a FakeTensor of shape \(4, 8\) on cpu has no memory"),
        (functional, "has no address"),
    ],
    ids=["meta", "sparse", "mkldnn", "nested", "conjugated", "negated", "fake", "functional"],
)
def test_c3_a_tensor_that_is_no_plain_memory_is_refused(
    make: Callable[[], torch.Tensor], problem: str
) -> None:
    with pytest.raises(ContractError, match=problem):
        span(make())


def test_c3_a_tensor_whose_storage_was_freed_has_no_address() -> None:
    tensor = torch.zeros(4, 8)
    tensor.untyped_storage().resize_(0)

    with REFUSED:
        span(tensor)


def test_c3_a_batched_tensor_has_no_memory() -> None:
    seen: list[str] = []

    def describe(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ContractError) as caught:
            span(tensor)
        seen.append(str(caught.value))
        return tensor

    torch.vmap(describe)(torch.zeros(2, 4, 8))

    assert len(seen) == 1
    assert "has no memory" in seen[0]


# ---- life time --------------------------------------------------------------------------------


def test_c10_a_span_whose_tensor_stayed_is_verified() -> None:
    tensor = torch.zeros(4, 8)
    found = span(tensor)

    tensor.add_(1)

    found.verify()


def swap_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(4, 8)


def swap_storage(tensor: torch.Tensor) -> None:
    tensor.set_(torch.zeros(4, 8).untyped_storage(), 0, (4, 8), (8, 1))


def free_storage(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [swap_data, swap_storage, free_storage])
def test_w22_a_tensor_whose_memory_was_swapped_is_stale(
    change: Callable[[torch.Tensor], None],
) -> None:
    tensor = torch.zeros(4, 8)
    found = span(tensor)

    change(tensor)

    with pytest.raises(StalePoolError, match=r"span 'kv\[0\]': its buffer moved from 0x"):
        found.verify()


def test_w22_a_view_is_stale_when_the_engines_own_tensor_moved() -> None:
    held = torch.zeros(4, 8, dtype=torch.float32)
    found = BufferSpan.from_tensor(held.view(torch.uint8), label="kv[0]", owner=held)
    found.verify()

    held.data = torch.zeros(4, 8)

    with pytest.raises(StalePoolError):
        found.verify()


class Pool:
    """An engine's pool, whose buffer may be dropped."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = torch.zeros(4, 8)

    def data_ptr(self) -> int:
        if self.buffer is None:
            msg = "the pool was released"
            raise RuntimeError(msg)
        return self.buffer.data_ptr()


def test_w23_a_pool_that_dropped_its_buffer_is_stale() -> None:
    pool = Pool()
    assert pool.buffer is not None
    found = BufferSpan.from_tensor(pool.buffer, label="kv[0]", owner=pool)
    found.verify()

    pool.buffer = None

    with pytest.raises(StalePoolError, match=r"moved from 0x[0-9a-f]+ to nowhere"):
        found.verify()

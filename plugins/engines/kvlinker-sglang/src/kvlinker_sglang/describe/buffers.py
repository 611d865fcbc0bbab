"""Spans over the tensors that a pool holds, and what their values are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvlinker.description import Fact, LayerFacts
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.spans import BufferSpan

if TYPE_CHECKING:
    import torch

__all__ = [
    "EachTensor",
    "HeldTensors",
    "Tensors",
    "attention_layers",
    "page_rows",
    "paged",
    "require_same_facts",
    "spans_of",
    "value_format",
]


class Tensors(Protocol):
    """Tensors, one for each place: a pool's list, or what makes one of its views when it is asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> torch.Tensor: ...


HeldTensors: TypeAlias = "Callable[[], Tensors]"
"""Reads the tensors that a pool holds in a list."""


class EachTensor:
    """Tensors of which each is read when it is asked for, so that one of many costs no more than itself.

    Every span of a pool is verified before each transfer; views of all layers for each of them would be their square.
    """

    __slots__ = ("_count", "_read")

    def __init__(self, count: int, read: Callable[[int], torch.Tensor]) -> None:
        self._count = count
        self._read = read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int, /) -> torch.Tensor:
        return self._read(place)


class _HeldTensor:
    """Says where the tensor is that a pool holds now, so that a replaced buffer shows."""

    __slots__ = ("_number", "_tensors")

    def __init__(self, tensors: HeldTensors, number: int) -> None:
        self._tensors = tensors
        self._number = number

    def data_ptr(self) -> int:
        """Return the address of the pool's tensor.

        Raises:
            RuntimeError: the pool holds it no more.
        """
        try:
            return self._tensors()[self._number].data_ptr()
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            msg = f"the pool holds its buffer {self._number} no more: {error}"
            raise RuntimeError(msg) from error


def spans_of(role: str, *held: HeldTensors) -> tuple[BufferSpan, ...]:
    """Return a span for each tensor that pools hold in lists, over its own memory.

    Args:
        role: what the buffers are called; labels are `role[i]`, counted over all lists.
        held: each reads one pool's list, now and whenever a span is verified.

    Raises:
        ContractError: a tensor has no dense rows.
    """
    places = [(tensors, number) for tensors in held for number in range(len(tensors()))]
    return tuple(
        BufferSpan.from_tensor(
            tensors()[number], label=f"{role}[{i}]", owner=_HeldTensor(tensors, number)
        )
        for i, (tensors, number) in enumerate(places)
    )


def page_rows(held: torch.Tensor, rows_per_page: int) -> torch.Tensor:
    """Return a tensor's own memory with a row for each whole page, and without rows that fill none."""
    pages = len(held) // rows_per_page
    return held[: pages * rows_per_page].view(pages, -1)


def paged(held: HeldTensors, rows_per_page: int) -> HeldTensors:
    """Return what reads the same tensors with a row for each whole page; see `page_rows`."""
    return lambda: EachTensor(len(held()), lambda place: page_rows(held()[place], rows_per_page))


def attention_layers(first: int, count: int) -> tuple[LayerFacts, ...]:
    """Return a stage's layers of attention alone, `first` being the first one's number in the model."""
    return tuple(LayerFacts(layer=i, global_layer=first + i) for i in range(count))


def require_same_facts(found: Mapping[str, Fact], target: Mapping[str, Fact], where: str) -> None:
    """Refuse a part that keeps its values otherwise than the target does.

    Raises:
        UnsupportedKVCacheError: a fact differs; the message has both values.
    """
    for name, value in found.items():
        if target.get(name) != value:
            msg = (
                f"{where} has {name} {value!r} and the target {target.get(name)!r}, which one description cannot "
                f"say; run SGLang with one --kv-cache-dtype and layout for both"
            )
            raise UnsupportedKVCacheError(msg)


def value_format(dtype: torch.dtype, stored_as: torch.dtype, where: str) -> str:
    """Return the name of a buffer's values; SGLang keeps fp8 values as uint8 where it must index them.

    Raises:
        UnsupportedKVCacheError: values of that type are not described, or are kept as another type.
    """
    import torch

    names = {
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float32: "fp32",
        torch.float8_e4m3fn: "fp8_e4m3fn",
        torch.float8_e5m2: "fp8_e5m2",
    }
    ways = {torch.uint8, dtype} if dtype.itemsize == 1 else {dtype}
    if dtype not in names or stored_as not in ways:
        msg = (
            f"{where} keeps {dtype} values as {stored_as}, which is not described; "
            f"run SGLang with --kv-cache-dtype bf16, fp8_e4m3 or fp8_e5m2"
        )
        raise UnsupportedKVCacheError(msg)
    return names[dtype]

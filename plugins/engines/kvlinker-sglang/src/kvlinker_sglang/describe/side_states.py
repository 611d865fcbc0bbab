"""Side states: what else goes with a slot of states, in pools that register themselves with `MambaPool`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvlinker.description import Fact
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker_sglang.describe.buffers import spans_of
from kvlinker_sglang.describe.classes import changed, class_name
from kvlinker_sglang.describe.refusals import require_class
from kvlinker_sglang.describe.states import RequestPool, StatePool, value_of_states

if TYPE_CHECKING:
    import torch

__all__ = ["side_buffers", "side_facts"]

_POOLS = "sglang.srt.mem_cache.ple_state_pool"
_SHORT_CONV, _NGRAM = "side_short_conv", "side_ngram"


@runtime_checkable
class _ShortConvs(Protocol):
    """What is read of a `ShortConvPool`: [layers, slots, ...]; None in a model without."""

    conv_state: torch.Tensor | None
    layer_map: dict[int, int]


@runtime_checkable
class _Ngrams(Protocol):
    """What is read of an `NGramPool`: [slots, tokens], of no layer; None in a model without."""

    context: torch.Tensor | None


@runtime_checkable
class _Checkpoint(Protocol):
    """What SGLang says that a slot has beside recurrences and convolutions."""

    extra_checkpoint_buffers: tuple[torch.Tensor, ...]


@runtime_checkable
class _PoolInfo(Protocol):
    buffer_info: object


def side_buffers(
    requests: RequestPool, pool: StatePool, numbers: Sequence[int]
) -> dict[str, tuple[BufferSpan, ...]]:
    """Return the roles of side states.

    Args:
        requests: the pool of requests, which holds them.
        pool: the pool of states, with which they are registered.
        numbers: global layers of the stage; one that keeps none has a span without rows.

    Raises:
        UnsupportedKVCacheError: there are others than are known here.
    """
    short_convs, ngrams = _short_convs(requests), _ngrams(requests)
    buffers: dict[str, tuple[BufferSpan, ...]] = {}
    if short_convs.conv_state is not None:
        buffers[_SHORT_CONV] = _per_layer(short_convs, numbers)
    if ngrams.context is not None:
        buffers[_NGRAM] = spans_of(_NGRAM, lambda: _present(ngrams.context))
    _check_complete(pool, buffers)
    return buffers


def side_facts(requests: RequestPool) -> dict[str, Fact]:
    """Return the formats of side states."""
    short_convs, ngrams = _short_convs(requests), _ngrams(requests)
    facts: dict[str, Fact] = {}
    if short_convs.conv_state is not None:
        facts[f"{_SHORT_CONV}_format"] = value_of_states(short_convs.conv_state, "a side state")
    if ngrams.context is not None:
        facts[f"{_NGRAM}_format"] = f"{ngrams.context.dtype}".removeprefix("torch.")
    return facts


def _short_convs(requests: RequestPool) -> _ShortConvs:
    found = requests.short_conv_pool
    require_class(found, f"{_POOLS}.ShortConvPool", "the pool of short convolutions")
    if not isinstance(found, _ShortConvs):
        raise changed(found, _ShortConvs)
    return found


def _ngrams(requests: RequestPool) -> _Ngrams:
    found = requests.ngram_pool
    require_class(found, f"{_POOLS}.NGramPool", "the pool of recent tokens")
    if not isinstance(found, _Ngrams):
        raise changed(found, _Ngrams)
    return found


def _present(tensor: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if tensor is None else (tensor,)


def _per_layer(pool: _ShortConvs, numbers: Sequence[int]) -> tuple[BufferSpan, ...]:
    """Return a span for each layer of the stage, in order."""

    def tensors() -> Sequence[torch.Tensor]:
        state = pool.conv_state
        kept = (number for number in numbers if number in pool.layer_map)
        return () if state is None else tuple(state[pool.layer_map[number]] for number in kept)

    kept = iter(spans_of(_SHORT_CONV, tensors))
    return tuple(
        (next(kept) if number in pool.layer_map else _WITHOUT_ROWS).relabel(f"{_SHORT_CONV}[{i}]")
        for i, number in enumerate(numbers)
    )


_WITHOUT_ROWS = BufferSpan(base_ptr=0, rows=0, row_bytes=1, row_stride=1)


def _check_complete(pool: StatePool, buffers: dict[str, tuple[BufferSpan, ...]]) -> None:
    """Refuse a pool with other side states than those described.

    Raises:
        UnsupportedKVCacheError: what SGLang says that a slot has is not what was found.
    """
    described = {span.base_ptr for spans in buffers.values() for span in spans if span.rows}
    registered = {tensor.data_ptr() for tensor in _registered(pool)}
    if described != registered:
        msg = (
            f"{class_name(pool)} has {len(registered)} side states, of which {len(described & registered)} are known "
            f"({', '.join(buffers) or 'none'}); run SGLang without a linker for this model"
        )
        raise UnsupportedKVCacheError(msg)


def _registered(pool: StatePool) -> tuple[torch.Tensor, ...]:
    tensors: list[torch.Tensor] = []
    for info in pool.get_device_pool_infos():
        if not isinstance(info, _PoolInfo):
            raise changed(info, _PoolInfo)
        if not isinstance(info.buffer_info, _Checkpoint):
            raise changed(info.buffer_info, _Checkpoint)
        tensors.extend(info.buffer_info.extra_checkpoint_buffers)
    return tuple(tensors)

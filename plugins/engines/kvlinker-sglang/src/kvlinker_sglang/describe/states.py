"""States beside a hybrid's pages: `MambaPool`, which a worker reaches through its `HybridReqToTokenPool`.

A slot is one state of a whole prefix: in every layer a recurrence, the windows of convolutions, or both.
SGLang gives its tree whole slots: a ring of updates (ReplaySSM) is folded in before, and neither rings nor drafts'
intermediate states follow a slot when it copies one (`MambaPool.copy_from`), so that they are no part of a state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvlinker.description import DescribeRequest, Fact
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.spans import BufferSpan
from kvlinker_sglang.describe.buffers import HeldTensors, spans_of
from kvlinker_sglang.describe.classes import changed, class_name
from kvlinker_sglang.describe.refusals import require_class
from kvlinker_sglang.describe.requests import STATES_BESIDE

if TYPE_CHECKING:
    import torch

__all__ = [
    "RequestPool",
    "StatePool",
    "keeps_states",
    "request_pool",
    "require_no_states",
    "state_buffers",
    "state_facts",
    "state_pool",
    "value_of_states",
]

_POOLS = "sglang.srt.mem_cache.memory_pool"
_REQUESTS = f"{_POOLS}.HybridReqToTokenPool"
_POOL = f"{_POOLS}.MambaPool"
_LAYER_AND_SLOT = 2
"""Dimensions of a state's tensor before those of one state."""
_WINDOW_AND_CHANNELS = 2
"""Dimensions of one convolution's state."""


@runtime_checkable
class _KeepsStates(Protocol):
    """What tells a pool of requests with states from one without."""

    mamba_pool: object


@runtime_checkable
class RequestPool(Protocol):
    """What is read of a `HybridReqToTokenPool`."""

    mamba_pool: object
    mamba_ckpt_pool: object
    short_conv_pool: object
    ngram_pool: object


@runtime_checkable
class StateTensors(Protocol):
    """What is read of a `MambaPool.State`: [layers, slots, ...] each."""

    conv: list[torch.Tensor]
    temporal: torch.Tensor


@runtime_checkable
class StatePool(Protocol):
    """What is read of a `MambaPool`."""

    mamba_layer_ids: list[int]
    mamba_cache: StateTensors
    conv_slice_axis: int
    get_device_pool_infos: Callable[[], Sequence[object]]


def keeps_states(request: DescribeRequest) -> bool:
    """Return whether the worker's requests have states beside their pages."""
    return isinstance(request.extras.get(STATES_BESIDE), _KeepsStates)


def require_no_states(pool: object, request: DescribeRequest) -> None:
    """Refuse states beside a pool that is described as if there were none.

    Raises:
        UnsupportedKVCacheError: a prefix of the pool alone would be a part of one.
    """
    if keeps_states(request):
        msg = (
            f"beside the {class_name(pool)} a {class_name(request.extras[STATES_BESIDE])} keeps states, and a prefix "
            f"without them is wrong; run SGLang without a linker for this model"
        )
        raise UnsupportedKVCacheError(msg)


def request_pool(pool: object, request: DescribeRequest) -> RequestPool:
    """Return the pool of requests that states are reached through.

    Raises:
        ContractError: the request does not give it.
        UnsupportedKVCacheError: it is of another class, or the tree's states are in other slots than requests'.
    """
    if STATES_BESIDE not in request.extras:
        msg = (
            f"the states beside a {class_name(pool)} are reached through the pool of requests; "
            f"give it as the extra {STATES_BESIDE!r}"
        )
        raise ContractError(msg)
    found = request.extras[STATES_BESIDE]
    require_class(found, _REQUESTS, "the pool of requests")
    if not isinstance(found, RequestPool):
        raise changed(found, RequestPool)
    if found.mamba_ckpt_pool is not None:
        msg = (
            f"beside a {class_name(pool)} a {class_name(found.mamba_ckpt_pool)} keeps the tree's states as int8, in "
            f"slots of its own, and what is restored goes to slots of requests, which have other values; "
            f"run SGLang without --enable-int8-mamba-checkpoint"
        )
        raise UnsupportedKVCacheError(msg)
    return found


def state_pool(requests: RequestPool) -> StatePool:
    """Return the pool of states.

    Raises:
        UnsupportedKVCacheError: it is of another class, or keeps states in another way.
    """
    pool = requests.mamba_pool
    require_class(pool, _POOL, "the pool of states")
    if not isinstance(pool, StatePool):
        raise changed(pool, StatePool)
    if not isinstance(pool.mamba_cache, StateTensors):
        raise changed(pool.mamba_cache, StateTensors)
    if pool.mamba_layer_ids != sorted(pool.mamba_layer_ids):
        msg = (
            f"{class_name(pool)} keeps layers {pool.mamba_layer_ids}, and described are states in the order of their "
            f"layers; use a version of SGLang that kvlinker-sglang was tested with"
        )
        raise UnsupportedKVCacheError(msg)
    return pool


def state_facts(pool: StatePool) -> dict[str, Fact]:
    """Return how a pool keeps its states.

    Raises:
        UnsupportedKVCacheError: windows differ or lie otherwise than is said, or values are of another type.
    """
    convs = _conv_numbers(pool)
    facts: dict[str, Fact] = {"ssm_format": "none", "conv_states": len(convs)}
    if _state_size(pool.mamba_cache.temporal):
        facts["ssm_format"] = value_of_states(pool.mamba_cache.temporal, "a recurrence")
        # [heads, values, keys]; lightning attention, which has no convolution, keeps [heads, keys, values].
        facts["ssm_layout"] = "value_major" if convs else "key_major"
    if convs:
        facts |= _conv_facts(pool, [pool.mamba_cache.conv[number] for number in convs])
    return facts


def state_buffers(pool: StatePool) -> dict[str, tuple[BufferSpan, ...]]:
    """Return the roles of a pool's states, one span per layer in each: a row is a slot, wherever the next one is."""
    buffers = {}
    if _state_size(pool.mamba_cache.temporal):
        buffers["ssm_state"] = spans_of("ssm_state", lambda: tuple(pool.mamba_cache.temporal))
    for place, number in enumerate(_conv_numbers(pool)):
        role = f"conv_state_{place}"
        buffers[role] = spans_of(role, _windows_of(pool, number))
    return buffers


def value_of_states(tensor: torch.Tensor, what: str) -> str:
    """Return the name of a state's values.

    Raises:
        UnsupportedKVCacheError: values of that type are not described.
    """
    import torch

    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    if tensor.dtype not in names:
        msg = (
            f"{what} keeps {tensor.dtype} values, and described are {', '.join(names.values())}; "
            f"run SGLang with --mamba-ssm-dtype float32"
        )
        raise UnsupportedKVCacheError(msg)
    return names[tensor.dtype]


def _windows_of(pool: StatePool, number: int) -> HeldTensors:
    return lambda: tuple(pool.mamba_cache.conv[number])


def _state_size(tensor: torch.Tensor) -> int:
    """Return the values of one layer's state in one slot; a model without such states has tensors without values."""
    return math.prod(tensor.shape[_LAYER_AND_SLOT:])


def _conv_numbers(pool: StatePool) -> list[int]:
    return [number for number, conv in enumerate(pool.mamba_cache.conv) if _state_size(conv)]


def _conv_facts(pool: StatePool, convs: Sequence[torch.Tensor]) -> dict[str, Fact]:
    shapes = [tuple(conv.shape[_LAYER_AND_SLOT:]) for conv in convs]
    formats = {value_of_states(conv, "a convolution") for conv in convs}
    axis = pool.conv_slice_axis
    plain = all(len(shape) == _WINDOW_AND_CHANNELS for shape in shapes) and axis in (0, 1)
    windows = {shape[1 - axis] for shape in shapes} if plain else set()
    # The axis that ranks split is the channels', and every model has more of them than tokens in its window.
    narrow = plain and all(shape[1 - axis] < shape[axis] for shape in shapes)
    if not narrow or len(windows) != 1 or len(formats) != 1:
        msg = (
            f"{class_name(pool)} keeps windows of convolutions as {shapes} of {sorted(formats)}, with channels on axis "
            f"{axis}; described are windows of one length and format; run SGLang without a linker for this model"
        )
        raise UnsupportedKVCacheError(msg)
    _refuse_permuted(pool, convs)
    return {
        "conv_format": formats.pop(),
        "conv_layout": "window_major" if axis else "channel_major",
        "conv_window": windows.pop(),
    }


def _refuse_permuted(pool: StatePool, convs: Sequence[torch.Tensor]) -> None:
    """Refuse windows whose values lie in memory in another order than their shape says.

    Raises:
        UnsupportedKVCacheError: kernels for AMX have their own order.
    """
    for conv in convs:
        if len(conv) and not conv[0, 0].is_contiguous():
            msg = (
                f"{class_name(pool)} keeps windows in the order of AMX kernels, strides {conv.stride()} of shape "
                f"{tuple(conv.shape)}, which is not described; run SGLang on CUDA, or on a CPU without AMX"
            )
            raise UnsupportedKVCacheError(msg)

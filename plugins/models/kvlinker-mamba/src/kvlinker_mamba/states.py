"""States of linear-attention, state-space and short-convolution layers: a slot holds the whole prefix, not a token.

A state cannot be cut: it restores the one boundary at which it was stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvlinker.description import KVCacheDescription
from kvlinker.errors import ContractError
from kvlinker.layouts import integer_fact, text_fact
from kvlinker.spans import BufferSpan
from kvlinker_mamba.layers import FAMILY, MAMBA, layers_in
from kvlinker_mamba.parts import Kept, Part, require_whole_values, role_part, spans_of_roles

__all__ = ["CONV_LAYOUTS", "NO_SSM", "SSM_LAYOUTS", "STATE_BYTES", "States", "conv_roles"]

STATE_BYTES: Mapping[str, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2})
"""Value formats of states to the bytes of a value."""
NO_SSM = "none"
"""`ssm_format` of a model whose layers keep a convolution's window and nothing else."""
SSM_LAYOUTS = ("value_major", "key_major")
"""[heads, values, keys] or [heads, keys, values]; Mamba's keys are its state, its values the head's channels."""
CONV_LAYOUTS = ("channel_major", "window_major")
"""[channels, window] or [window, channels]."""
_SSM, _SCALE = "ssm_state", "ssm_scale"
_SIDE = "side_"
_SCALED = "int8"
"""A checkpoint of rounded values, which mean nothing without their scales."""

_MAX_CONVS = 64
"""No layer comes near; a wrong number must not cost hours and all memory."""


def conv_roles(count: int) -> tuple[str, ...]:
    """Return the roles of so many convolution states of each layer."""
    return tuple(f"conv_state_{number}" for number in range(count))


class States(Kept):
    """What the slots of `mamba` hold: states of layers in one pool, each side state in one of its own."""

    def facts(self) -> tuple[str, ...]:
        """See Kept: what does not hold for the stated forms is not read, and so it is refused."""
        names = ["ssm_format", "conv_states"]
        ssm_format = self._description.facts.get("ssm_format")
        if ssm_format != NO_SSM:
            names.append("ssm_layout")
        if ssm_format == _SCALED:
            names.append("ssm_scale_format")
        if self._description.facts.get("conv_states"):
            names += ("conv_format", "conv_layout", "conv_window")
        return (*names, *(f"{role}_format" for role in _sides(self._description)))

    def required_roles(self) -> tuple[str, ...]:
        """See Kept."""
        return _state_roles(self._description) if layers_in(self._description, MAMBA) else ()

    def known_roles(self) -> tuple[str, ...]:
        """See Kept."""
        return (*_state_roles(self._description), *_sides(self._description))

    def parts(self) -> tuple[Part, ...]:
        """See Kept."""
        roles = _state_roles(self._description)
        states = role_part(
            self._description,
            roles,
            name=MAMBA,
            pool=MAMBA,
            layers=layers_in(self._description, MAMBA),
            rows_are_pages=True,
            value_format=_value_format(self._description),
        )
        return (
            states,
            *(_side_part(self._description, role) for role in _sides(self._description)),
        )

    def omitted(self) -> Mapping[str, str]:
        """See Kept."""
        return {
            span.label: f"layer {layer} keeps no {role!r}"
            for role in _sides(self._description)
            for layer, span in enumerate(self._description.buffers[role])
            if not span.rows
        }


def _state_roles(description: KVCacheDescription) -> tuple[str, ...]:
    """Return the roles of the layers' states, as the facts have them."""
    ssm_format = text_fact(description, "ssm_format", known=(*STATE_BYTES, _SCALED, NO_SSM))
    count = integer_fact(description, "conv_states")
    if not 0 <= count <= _MAX_CONVS:
        msg = f"family {FAMILY!r}: conv_states must be 0 to {_MAX_CONVS}, got {count}"
        raise ContractError(msg)
    if not count and ssm_format == NO_SSM:
        msg = (
            f"family {FAMILY!r}: ssm_format {ssm_format!r} and conv_states {count} leave no state to keep; "
            f"state what the layers keep"
        )
        raise ContractError(msg)
    ssm = {NO_SSM: (), _SCALED: (_SSM, _SCALE)}.get(ssm_format, (_SSM,))
    return (*ssm, *conv_roles(count))


def _sides(description: KVCacheDescription) -> tuple[str, ...]:
    """Return the roles of side states, in an order that does not depend on the description's."""
    return tuple(sorted(role for role in description.buffers if role.startswith(_SIDE)))


def _value_format(description: KVCacheDescription) -> str:
    """Return what the values of all states are, after checking that the rows have whole ones."""
    return "; ".join(filter(None, (_ssm_format(description), _conv_format(description))))


def _ssm_format(description: KVCacheDescription) -> str:
    ssm_format = text_fact(description, "ssm_format")
    if ssm_format == NO_SSM:
        return ""
    layout = text_fact(description, "ssm_layout", known=SSM_LAYOUTS)
    if ssm_format != _SCALED:
        _check_rows(description, (_SSM,), ssm_format)
        return f"ssm {ssm_format}, {layout}"
    scale_format = text_fact(description, "ssm_scale_format", known=STATE_BYTES)
    _check_rows(description, (_SCALE,), scale_format)
    return f"ssm {ssm_format}, scales {scale_format}, {layout}"


def _conv_format(description: KVCacheDescription) -> str:
    count = integer_fact(description, "conv_states")
    if not count:
        return ""
    conv_format = text_fact(description, "conv_format", known=STATE_BYTES)
    layout = text_fact(description, "conv_layout", known=CONV_LAYOUTS)
    window = integer_fact(description, "conv_window")
    if window < 1:
        msg = f"family {FAMILY!r}: conv_window must be at least 1 token, got {window}"
        raise ContractError(msg)
    _check_rows(description, conv_roles(count), conv_format, columns=window)
    return f"conv {conv_format}, {layout}, window {window}"


def _check_rows(
    description: KVCacheDescription, roles: tuple[str, ...], value_format: str, columns: int = 1
) -> None:
    spans, what = spans_of_roles(description, roles), f"values in {value_format}"
    if columns > 1:
        what = f"windows of {columns} {what}"
    require_whole_values(spans, columns * STATE_BYTES[value_format], what)


def _side_part(description: KVCacheDescription, role: str) -> Part:
    """Return the part of a side state, which has ranks of its own: it is a replica where states are shards."""
    spans = _side_spans(description, role)
    return Part(
        name=role,
        pool=MAMBA,
        roles=(role,),
        layers=tuple(spans),
        components=(tuple(spans.values()),),
        rows_are_pages=True,
        value_format=text_fact(description, f"{role}_format"),
    )


def _side_spans(description: KVCacheDescription, role: str) -> dict[int, BufferSpan]:
    """Return the spans of a side state by the layer that they are loaded with; those without rows are left out.

    A state without a layer axis is read before the first layer, so it is loaded with that one.
    """
    spans, layers = description.buffers[role], len(description.layers)
    if len(spans) not in (1, layers):
        msg = (
            f"family {FAMILY!r}: {role!r} has {len(spans)} buffers for {layers} layers; describe one per layer of "
            f"the stage, without rows where a layer keeps none, or a single one that is of no layer"
        )
        raise ContractError(msg)
    return {layer: span for layer, span in enumerate(spans) if span.rows}

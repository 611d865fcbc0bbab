"""A model's configuration, read with care, and buffers over made-up addresses for the cache it would have.

Model plugins use both to say what a model's pages cost before any engine runs it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvlinker.description import DescribeRequest, Fact
from kvlinker.errors import ContractError, UnsupportedKVCacheError
from kvlinker.integers import as_integer
from kvlinker.spans import BufferSpan, MemoryKind, MemoryRegion
from kvlinker.spelling import nearest_names

__all__ = [
    "MADE_UP_DEVICE",
    "MADE_UP_PAGES",
    "MadeUpPools",
    "ModelConfig",
    "ModelConfigRequest",
    "model_config_from_json",
]

MADE_UP_DEVICE = "made-up"
"""Device of buffers that do not exist: no access copies to it or from it."""
MADE_UP_PAGES = 1024
"""Pages of made-up pools; what a page costs does not depend on it."""
_MAX_LAYERS = 1 << 14
"""No model comes near; a wrong number must not cost hours and all memory."""
_FIRST_ADDRESS = 1 << 40
_ALIGNMENT = 1 << 12

_FORMATS: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
)
"""Names of dtypes in config.json to the value formats of descriptions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's configuration, as its config.json has it; every value is checked when it is read."""

    values: Mapping[str, object]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))
        if not isinstance(self.values.get("model_type"), str):
            msg = (
                f"a model's configuration needs a model_type such as llama, got "
                f"{self.values.get('model_type')!r}; pass the config.json of a model"
            )
            raise ContractError(msg)

    @property
    def model_type(self) -> str:
        """What the model is, such as `llama` or `deepseek_v32`."""
        return str(self.values["model_type"])

    def has(self, name: str) -> bool:
        """Return whether there is a value; null is none."""
        return self.values.get(name) is not None

    def integer(self, name: str, *, default: int | None = None, at_least: int = 1) -> int:
        """Return an integer.

        Args:
            name: of the value.
            default: where there is no value.
            at_least: the smallest one that is accepted.

        Raises:
            ContractError: it is missing, or something else.
        """
        value = self.values.get(name) if self.has(name) else default
        return as_integer(value, f"model type {self.model_type!r}: {name}", at_least=at_least)

    def layers(self) -> int:
        """Return num_hidden_layers.

        Raises:
            ContractError: it is missing, no integer, or no number of layers that a model has.
        """
        what = f"model type {self.model_type!r}: num_hidden_layers"
        count = self.integer("num_hidden_layers")
        return as_integer(count, what, at_most=_MAX_LAYERS)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return whether something holds.

        Args:
            name: of the value.
            default: where there is no value.

        Raises:
            ContractError: it is neither true nor false.
        """
        value = self.values.get(name) if self.has(name) else default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Return a list of integers of at least 0, or None where there is none.

        Raises:
            ContractError: it is something else.
        """
        items = self._items(name)
        what = f"model type {self.model_type!r}: a value of {name}"
        return None if items is None else tuple(as_integer(i, what, at_least=0) for i in items)

    def names(self, name: str, *, count: int) -> tuple[str, ...] | None:
        """Return a list of so many names, one for each layer, or None where there is none.

        Raises:
            ContractError: it is something else, or has another length.
        """
        items = self._items(name)
        if items is None:
            return None
        names = tuple(item for item in items if isinstance(item, str))
        if len(names) != len(items) or len(names) != count:
            raise self._wrong(name, f"a list of {count} names")
        return names

    def letters(self, name: str) -> tuple[str, ...] | None:
        """Return the letters of a text, or the names in a list, or None where there is none.

        Raises:
            ContractError: it is something else.
        """
        value = self.values.get(name)
        if isinstance(value, str):
            return tuple(value)
        items = self._items(name)
        return None if items is None else self.names(name, count=len(items))

    def section(self, name: str) -> ModelConfig | None:
        """Return the configuration inside a value that is an object, or None where there is none.

        Raises:
            ContractError: it is something else.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object")
        # Messages about its values name the model too.
        return ModelConfig(values={**value, "model_type": self.model_type})

    def _items(self, name: str) -> Sequence[object] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self._wrong(name, "a list")
        return value

    def _wrong(self, name: str, wanted: str) -> ContractError:
        found = self.values.get(name)
        return ContractError(
            f"model type {self.model_type!r}: {name} must be {wanted}, got {found!r}"
        )

    def require(self, name: str, expected: int) -> None:
        """Refuse a model whose value differs from the only one that the plugin lays out.

        Raises:
            ContractError: the value is missing, or no integer.
            UnsupportedKVCacheError: it is another one.
        """
        if (found := self.integer(name)) != expected:
            msg = f"model type {self.model_type!r}: {name} {found} is not laid out here; known is {expected}"
            raise UnsupportedKVCacheError(msg)

    def value_format(self) -> str:
        """Return the value format that the model's dtype gives its cache; bf16 where it states none.

        Raises:
            ContractError: the dtype has no value format.
        """
        return self.format_of_dtype("dtype" if self.has("dtype") else "torch_dtype")

    def format_of_dtype(self, name: str, *, default: str = "bfloat16") -> str:
        """Return the value format that a dtype gives.

        Args:
            name: of the value that is a dtype, such as float32.
            default: where there is no value.

        Raises:
            ContractError: the dtype has no value format.
        """
        dtype = self.values.get(name) or default
        if not isinstance(dtype, str) or dtype not in _FORMATS:
            raise self._wrong(name, f"one of {', '.join(_FORMATS)}")
        return _FORMATS[dtype]


def model_config_from_json(text: str) -> ModelConfig:
    """Return the configuration in a config.json; of a model that sees and reads, that of its language model.

    Raises:
        ContractError: the text is no JSON object with a model type.
    """
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"a model's configuration must be JSON: {error}"
        raise ContractError(msg) from error
    if not isinstance(parsed, dict):
        msg = f"a model's configuration must be a JSON object, got {type(parsed).__name__}"
        raise ContractError(msg)
    inner: object = parsed.get("text_config")
    return ModelConfig(values=inner if isinstance(inner, dict) and inner else parsed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfigRequest:
    """How the model whose cache is asked for would be served."""

    page_size: int | None = None
    """Slots in a page of the prefix tree; None for what is usual for the family."""
    draft_layers: int = 0
    """Draft (MTP) layers that keep KV beside the model's own."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Value formats, such as kv_format, that are not the family's usual ones."""

    def __post_init__(self) -> None:
        if self.page_size is not None:
            size = as_integer(self.page_size, "a request's page_size", at_least=1)
            object.__setattr__(self, "page_size", size)
        drafts = as_integer(
            self.draft_layers, "a request's draft_layers", at_least=0, at_most=_MAX_LAYERS
        )
        object.__setattr__(self, "draft_layers", drafts)
        checked = DescribeRequest(page_size=1, facts=self.facts).facts
        object.__setattr__(self, "facts", checked)

    def over(self, usual: Mapping[str, Fact]) -> dict[str, Fact]:
        """Return the usual facts, the request's in their places.

        Raises:
            ContractError: the request has a fact that is not among the usual ones, or of another type.
        """
        for name, value in self.facts.items():
            if name not in usual:
                close = " or ".join(map(repr, nearest_names(name, usual)))
                hint = f"did you mean {close}?" if close else f"known: {', '.join(usual)}"
                msg = f"there is no fact {name!r} of such a cache; {hint}"
                raise ContractError(msg)
            if type(value) is not type(usual[name]):
                msg = f"fact {name!r} must be like {usual[name]!r}, got {value!r}"
                raise ContractError(msg)
        return {**usual, **self.facts}

    def format_of(self, name: str, usual: str, *, known: Collection[str]) -> str:
        """Return the value format that is asked for under a fact's name, or the usual one.

        Raises:
            UnsupportedKVCacheError: it is not among the known ones.
        """
        value = self.facts.get(name, usual)
        if not isinstance(value, str) or value not in known:
            msg = f"{name} {value!r} is not laid out here; known are {', '.join(map(repr, known))}"
            raise UnsupportedKVCacheError(msg)
        return value

    def number_of(self, name: str, usual: int) -> int:
        """Return the number that is asked for under a fact's name, or the usual one.

        Raises:
            ContractError: it is no integer.
        """
        return as_integer(self.facts.get(name, usual), f"fact {name!r}")


class MadeUpPools:
    """Buffers over addresses that nobody has: they overlap nowhere, and nothing can be copied to them."""

    def __init__(self) -> None:
        self._next = _FIRST_ADDRESS

    def buffers(
        self, count: int, *, row_bytes: int, rows_per_page: int = 1
    ) -> tuple[BufferSpan, ...]:
        """Return so many buffers, each of MADE_UP_PAGES pages, in an allocation of its own."""
        return tuple(self._buffer(rows_per_page * MADE_UP_PAGES, row_bytes) for _ in range(count))

    def absent(self, *, row_bytes: int) -> BufferSpan:
        """Return a buffer without rows, as of a layer that keeps none."""
        return BufferSpan(base_ptr=0, rows=0, row_bytes=row_bytes, row_stride=row_bytes)

    def _buffer(self, rows: int, row_bytes: int) -> BufferSpan:
        base, size = self._next, rows * row_bytes
        self._next += -(-size // _ALIGNMENT) * _ALIGNMENT
        region = MemoryRegion(
            base_ptr=base, size_bytes=size, device=MADE_UP_DEVICE, kind=MemoryKind.DEVICE
        )
        return BufferSpan(
            base_ptr=base, rows=rows, row_bytes=row_bytes, row_stride=row_bytes, region=region
        )

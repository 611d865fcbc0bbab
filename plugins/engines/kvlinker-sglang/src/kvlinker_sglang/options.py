"""Options of a worker's linker: `linker_extra_config`, validated before anything is opened.

Secrets come as references to an environment variable or a file: SGLang logs its arguments, this object among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    field_validator,
    model_validator,
)

from kvlinker.errors import ContractError
from kvlinker.linker_options import MAX_COUNT, MAX_SECONDS, LinkerOptions
from kvlinker.spelling import nearest_names
from kvlinker.stores.composition import TIERS, StoreTree, compose
from kvlinker_sglang.json_words import json_kind, json_problem
from kvlinker_sglang.secret_references import SecretReference, check_without_secrets

__all__ = [
    "LimitsConfig",
    "MetricsConfig",
    "NamespaceConfig",
    "StoreConfig",
    "WorkerConfig",
    "parse_config",
]

_MIN_HIT_TOKENS = 64
"""The shortest prefix that `benchmarks/sglang/bench_sglang.py` found faster to restore than to compute."""
_MIN_READ_BYTES = 8 << 20
"""Short prefixes come in few reads, which a call for each layer would cost more than their bytes
(`benchmarks/sglang/bench_sglang.py`); from some hundred tokens on a layer is as long."""
_CORE = LinkerOptions()

_Name = Annotated[str, Field(min_length=1)]
_Flag = Annotated[bool, Strict()]


def _whole(value: object) -> object:
    """JSON has one kind of number: 64.0 is 64, and 64.5 stays what it is, to be refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Integer = Annotated[int, Strict(), BeforeValidator(_whole)]
_Count = Annotated[_Integer, Field(ge=1, le=MAX_COUNT)]
_Seconds = Annotated[float, Strict(), Field(gt=0, le=MAX_SECONDS)]


class _Config(BaseModel):
    """Unknown keys are refused; values stay out of messages, since one may be a secret in the wrong place."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


class StoreConfig(_Config):
    """Which store, and how it is opened; also as `{"NAME": {OPTIONS}}`, or a list of such as tiers from near to far."""

    plugin: _Name
    """Public name of a store plugin, such as `file`, or `distribution:name`; or `tiers`, of several stores."""
    options: dict[str, object] = Field(default_factory=dict)
    """The plugin's own options; a secret among them is `{"env": NAME}` or `{"file": PATH}`."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, store: object) -> object:
        if isinstance(store, list | tuple):
            return {"plugin": TIERS, "options": {"stores": store}}
        if isinstance(store, Mapping) and len(store) == 1:
            ((name, options),) = store.items()
            if name not in cls.model_fields and isinstance(options, Mapping):
                return {"plugin": name, "options": options}
        return store

    @model_validator(mode="after")
    def _can_be_composed(self) -> Self:
        self.tree(self.options)
        return self

    def tree(self, options: Mapping[str, object]) -> StoreTree:
        """Return the store as it is to be opened, with options in which no secret is a reference any more."""
        return compose(self.plugin, options)

    @field_validator("options")
    @classmethod
    def _has_no_secrets(cls, options: dict[str, object]) -> dict[str, object]:
        check_without_secrets(options, "store.options")
        return options


class NamespaceConfig(_Config):
    """Whose values these are: servers share a stored page only where all of this is equal."""

    model_id: _Name | None = None
    """Name of the model; by default its path and revision, as SGLang was given them."""
    weights_version: _Name | None = None
    """Version of the weights that the server starts with; by default what SGLang calls it, with a
    digest of samples of the checkpoint's files."""
    updates_are_unique: _Flag = False
    """Whether the name of an update of weights is never given to other weights, by no run that shares the store:
    replicas then find each other's pages behind an update, and else each keeps its own."""
    producer: _Name | None = None
    """Engine that computes the values; by default `sglang` and its version."""
    tenant: _Name | None = None
    """Keeps servers apart that must not share pages."""
    secret: SecretReference | None = None
    """Keys the digests of object names, so that they cannot be guessed from a prompt."""


class MetricsConfig(_Config):
    """Where Prometheus may ask; nobody, by default."""

    enabled: _Flag = False
    host: _Name = "127.0.0.1"
    port: _Integer = Field(default=9400, ge=1, le=65535)
    """Of worker 0; each further worker of the server takes the next one."""


class LimitsConfig(_Config):
    """Deadlines and queue sizes, named as in `kvlinker.linker_options.LinkerOptions`, which says what each is for."""

    lookup_seconds: _Seconds = _CORE.lookup_seconds
    load_seconds: _Seconds = _CORE.load_seconds
    offload_seconds: _Seconds = _CORE.offload_seconds
    hold_seconds: _Seconds = _CORE.hold_seconds
    miss_seconds: _Seconds = _CORE.miss_seconds
    quarantine_seconds: _Seconds = _CORE.quarantine_seconds
    quiesce_seconds: _Seconds = _CORE.quiesce_seconds
    register_seconds: _Seconds = _CORE.register_seconds
    breaker_seconds: _Seconds = _CORE.breaker_seconds
    max_queued_offloads: _Count = _CORE.max_queued_offloads
    max_remembered_lookups: _Count = _CORE.max_remembered_lookups
    min_read_bytes: _Count = _MIN_READ_BYTES


class WorkerConfig(_Config):
    """What `linker_extra_config` may hold."""

    store: StoreConfig
    namespace: NamespaceConfig = NamespaceConfig()
    strategy: _Name | None = None
    """Model plugin that lays the pools out, where several could."""
    plugins: tuple[_Name, ...] | None = None
    """Names of the plugins that may be loaded, beside this one and the store's; by default every installed one."""
    min_hit_tokens: _Count = _MIN_HIT_TOKENS
    """A stored prefix that is shorter is computed anew: loading it would take longer. The default is what was
    measured with a small model on a CPU; `docs/performance.md` says what it depends on."""
    limits: LimitsConfig = LimitsConfig()
    metrics: MetricsConfig = MetricsConfig()

    def linker_options(self) -> LinkerOptions:
        """Return the limits as the core takes them."""
        return LinkerOptions(**self.limits.model_dump(), min_hit_tokens=self.min_hit_tokens)


def parse_config(extra_config: object) -> WorkerConfig:
    """Return the options in `linker_extra_config`.

    Raises:
        ContractError: a key is unknown, missing or has a wrong value; the text names each, and no value.
    """
    if not isinstance(extra_config, Mapping):
        msg = (
            f"linker_extra_config must be an object with a key store, got {json_kind(extra_config)}"
        )
        raise ContractError(msg)
    try:
        return WorkerConfig.model_validate(dict(extra_config))
    except ValidationError as error:
        problems = [
            _problem(
                detail["type"],
                detail["loc"],
                json_problem(detail["type"], detail["msg"], detail["input"], detail.get("ctx", {})),
            )
            for detail in error.errors()
        ]
    # Outside of the handler: the error behind it knows the values.
    msg = f"linker_extra_config: {'; '.join(problems)}"
    raise ContractError(msg)


def _problem(kind: str, location: tuple[int | str, ...], text: str) -> str:
    path = ".".join(map(str, location))
    if kind == "extra_forbidden":
        return f"{path} is unknown; {_closest(str(location[-1]), _known_keys(location[:-1]))}"
    if kind == "missing":
        return f"{path} is missing"
    return f"{path}: {text}" if path else text


def _known_keys(location: tuple[int | str, ...]) -> tuple[str, ...]:
    parts: Mapping[str, type[BaseModel]] = {
        "store": StoreConfig,
        "namespace": NamespaceConfig,
        "limits": LimitsConfig,
        "metrics": MetricsConfig,
        "secret": SecretReference,
    }
    model = parts[str(location[-1])] if location else WorkerConfig
    return tuple(model.model_fields)


def _closest(name: str, known: tuple[str, ...]) -> str:
    if matches := nearest_names(name, known, cutoff=0.5):
        return f"did you mean {' or '.join(matches)}?"
    return f"it takes {', '.join(known)}"

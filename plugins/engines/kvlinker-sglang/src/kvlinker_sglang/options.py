"""Options of a worker's linker: `linker_extra_config`, validated before anything is opened.

Secrets come as references to an environment variable or a file: SGLang logs its arguments, this object among them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvlinker.errors import ContractError
from kvlinker.linker_options import LinkerOptions
from kvlinker_sglang.secret_references import SecretReference, check_without_secrets

__all__ = [
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
_LIMITS = tuple(item.name for item in fields(LinkerOptions) if item.name != "min_hit_tokens")
_Name = Annotated[str, Field(min_length=1)]


class _Config(BaseModel):
    """Unknown keys are refused; values stay out of messages, since one may be a secret in the wrong place."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


class StoreConfig(_Config):
    """Which store, and how it is opened."""

    plugin: _Name
    """Public name of a store plugin, such as `file`; or `distribution:name`."""
    options: dict[str, object] = Field(default_factory=dict)
    """The plugin's own options; a secret among them is `{"env": NAME}` or `{"file": PATH}`."""

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
    updates_are_unique: bool = False
    """Whether the name of an update of weights is never given to other weights, by no run that shares the store:
    replicas then find each other's pages behind an update, and else each keeps its own."""
    producer: _Name | None = None
    """Engine that computes the values; by default `sglang` and its version."""
    tenant: str | None = None
    """Keeps servers apart that must not share pages."""
    secret: SecretReference | None = None
    """Keys the digests of object names, so that they cannot be guessed from a prompt."""


class MetricsConfig(_Config):
    """Where Prometheus may ask; nobody, by default."""

    enabled: bool = False
    host: _Name = "127.0.0.1"
    port: int = Field(default=9400, ge=1, le=65535)
    """Of worker 0; each further worker of the server takes the next one."""


class WorkerConfig(_Config):
    """What `linker_extra_config` may hold."""

    store: StoreConfig
    namespace: NamespaceConfig = NamespaceConfig()
    strategy: _Name | None = None
    """Model plugin that lays the pools out, where several could."""
    plugins: tuple[_Name, ...] | None = None
    """Names of the plugins that may be loaded, beside this one and the store's; by default every installed one."""
    min_hit_tokens: int = Field(default=_MIN_HIT_TOKENS, ge=1)
    """A stored prefix that is shorter is computed anew: loading it would take longer. The default is what was
    measured with a small model on a CPU; `docs/performance.md` says what it depends on."""
    limits: dict[str, float] = Field(default_factory=dict)
    """Deadlines and queue sizes, by the names of `kvlinker.linker_options.LinkerOptions`."""
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _limits_are_known(self) -> Self:
        for name in self.limits:
            if name not in _LIMITS:
                msg = f"limits.{name} is unknown; {_closest(name, _LIMITS)}"
                raise ValueError(msg)
        self.linker_options()
        return self

    def linker_options(self) -> LinkerOptions:
        """Return the limits as the core takes them.

        Raises:
            ContractError: one is not above 0.
        """
        counts = {item.name for item in fields(LinkerOptions) if item.type == "int"}
        values: dict[str, float] = {"min_read_bytes": _MIN_READ_BYTES}
        values |= {
            name: int(value) if name in counts else value for name, value in self.limits.items()
        }
        return LinkerOptions(**values, min_hit_tokens=self.min_hit_tokens)  # type: ignore[arg-type]  # whole numbers where counts are asked for


def parse_config(extra_config: object) -> WorkerConfig:
    """Return the options in `linker_extra_config`.

    Raises:
        ContractError: a key is unknown, missing or has a wrong value; the text names each, and no value.
    """
    if not isinstance(extra_config, Mapping):
        msg = f"linker_extra_config must be a JSON object, got {type(extra_config).__name__}"
        raise ContractError(msg)
    try:
        return WorkerConfig.model_validate(dict(extra_config))
    except ValidationError as error:
        problems = [
            _problem(detail["type"], detail["loc"], detail["msg"])
            for detail in error.errors(include_input=False)
        ]
    # Outside of the handler: the error behind it knows the values.
    msg = f"linker_extra_config: {'; '.join(problems)}"
    raise ContractError(msg)


def _problem(kind: str, location: tuple[int | str, ...], message: str) -> str:
    path = ".".join(map(str, location))
    if kind == "extra_forbidden":
        return f"{path} is unknown; {_closest(str(location[-1]), _known_keys(location[:-1]))}"
    if kind == "missing":
        return f"{path} is missing"
    text = message.removeprefix("Value error, ")
    return f"{path}: {text}" if path else text


def _known_keys(location: tuple[int | str, ...]) -> tuple[str, ...]:
    parts: Mapping[str, type[BaseModel]] = {
        "store": StoreConfig,
        "namespace": NamespaceConfig,
        "metrics": MetricsConfig,
        "secret": SecretReference,
    }
    model = parts[str(location[-1])] if location else WorkerConfig
    return tuple(model.model_fields)


def _closest(name: str, known: tuple[str, ...]) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if matches:
        return f"did you mean {matches[0]}?"
    return f"it takes {', '.join(known)}"

"""Identity of the values: the namespace under which a server's pages are stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlinker.keys import KeyNamespace, digest_fields
from kvlinker_sglang.checkpoints import checkpoint_digest
from kvlinker_sglang.options import NamespaceConfig

__all__ = ["Checkpoint", "ModelFacts", "make_namespace"]

_MAX_SECRET_BYTES = 64
_DIGEST_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where weights come from."""

    path: str
    """A folder, or the name of a model that is downloaded."""
    revision: str | None = None

    @property
    def name(self) -> str:
        """Path and revision."""
        return self.path if self.revision is None else f"{self.path}@{self.revision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a server says of its model, as far as the values in its KV cache depend on it."""

    engine_version: str
    model: Checkpoint
    weights_version: str | None
    """What the engine calls the weights."""
    draft: Checkpoint | None = None
    adapters: Mapping[str, Checkpoint] = field(default_factory=dict)
    """Name to place of the adapters that the server starts with."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Arguments that change the values: number formats, overrides of the model's configuration."""


def make_namespace(config: NamespaceConfig, facts: ModelFacts) -> KeyNamespace:
    """Return the namespace of a server's pages.

    Raises:
        ContractError: a checkpoint on this host cannot be read, or the secret is absent.
    """
    return KeyNamespace(
        model_id=config.model_id or facts.model.name,
        producer=config.producer or f"sglang {facts.engine_version}",
        weights_version=config.weights_version or _weights_version(facts),
        value_format=json.dumps(dict(facts.values), sort_keys=True),
        tenant=config.tenant,
        secret=_key(config),
    )


def _weights_version(facts: ModelFacts) -> str:
    """Return the engine's name of the weights, with a digest of every checkpoint that is on this host."""
    checkpoints = {"model": facts.model, **{f"adapter {n}": c for n, c in facts.adapters.items()}}
    if facts.draft is not None:
        checkpoints["draft"] = facts.draft
    parts = tuple(
        (
            role,
            None if role == "model" else item.name,
            checkpoint_digest(item.path, revision=item.revision),
        )
        for role, item in sorted(checkpoints.items())
    )
    digest = digest_fields("kvlinker-sglang.weights/1", parts, size=_DIGEST_BYTES).hex()
    return f"{facts.weights_version} {digest}"


def _key(config: NamespaceConfig) -> bytes:
    if config.secret is None:
        return b""
    secret = config.secret.read().encode()
    if len(secret) <= _MAX_SECRET_BYTES:
        return secret
    return digest_fields("kvlinker-sglang.secret/1", (secret,), size=_MAX_SECRET_BYTES)

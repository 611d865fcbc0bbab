"""Identity of the values: the namespace under which a server's pages are stored."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvlinker.keys import KeyNamespace, digest_fields
from kvlinker_sglang.checkpoints import checkpoint_digest
from kvlinker_sglang.options import NamespaceConfig

__all__ = ["Checkpoint", "ModelFacts", "make_namespace"]

logger = logging.getLogger(__name__)

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
    """Arguments and variables of the environment that may change the values: number formats, kernels, overrides of the
    model's configuration."""
    download_dir: str | None = None
    """Where models are downloaded to; by default where Hugging Face's library puts them."""
    weights_in_files: bool = True
    """Whether the weights are those in the checkpoints' files, and not random ones, or another server's."""


def make_namespace(config: NamespaceConfig, facts: ModelFacts, *, launch: str) -> KeyNamespace:
    """Return the namespace of a server's pages.

    Args:
        config: what the operator says.
        facts: what the server says.
        launch: differs between two starts of a server, and not between its ranks.

    Raises:
        ContractError: a checkpoint on this host cannot be read, or the secret is absent.
    """
    return KeyNamespace(
        model_id=config.model_id or facts.model.name,
        producer=config.producer or f"sglang {facts.engine_version}",
        weights_version=config.weights_version or _weights_version(facts, launch),
        value_format=json.dumps(dict(facts.values), sort_keys=True),
        tenant=config.tenant,
        secret=_key(config),
    )


def _weights_version(facts: ModelFacts, launch: str) -> str:
    """Return the engine's name of the weights with a digest of every checkpoint, or an epoch of unknown weights."""
    parts = tuple(_parts(facts))
    unknown = [role for role, _, digest in parts if digest is None]
    if unknown or not facts.weights_in_files:
        what = f"the {' and the '.join(unknown)}" if unknown else "what is loaded"
        logger.warning(
            "kvlinker: no file on this host says which weights %s has: pages of this start are found by no other one; "
            "name the weights in namespace.weights_version",
            what,
        )
        return f"unknown {launch}"
    digest = digest_fields("kvlinker-sglang.weights/1", parts, size=_DIGEST_BYTES).hex()
    return f"{facts.weights_version} {digest}"


def _parts(facts: ModelFacts) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield role, name and digest of everything that has weights; the model's own name stands elsewhere."""
    checkpoints = {"model": facts.model, **{f"adapter {n}": c for n, c in facts.adapters.items()}}
    if facts.draft is not None:
        checkpoints["draft"] = facts.draft
    for role, item in sorted(checkpoints.items()):
        digest = checkpoint_digest(item.path, revision=item.revision, cache_dir=facts.download_dir)
        yield role, None if role == "model" else item.name, digest


def _key(config: NamespaceConfig) -> bytes:
    if config.secret is None:
        return b""
    secret = config.secret.read().encode()
    if len(secret) <= _MAX_SECRET_BYTES:
        return secret
    return digest_fields("kvlinker-sglang.secret/1", (secret,), size=_MAX_SECRET_BYTES)

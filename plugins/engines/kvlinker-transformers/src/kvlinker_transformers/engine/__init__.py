"""The engine: transformers models on paged pools. Importing it imports torch and transformers."""

from __future__ import annotations

from kvlinker_transformers.engine.allocation import pools_for_config
from kvlinker_transformers.engine.paged_engine import GenerationResult, PagedEngine
from kvlinker_transformers.engine.weights import model_namespace, weights_version

__all__ = [
    "GenerationResult",
    "PagedEngine",
    "model_namespace",
    "pools_for_config",
    "weights_version",
]

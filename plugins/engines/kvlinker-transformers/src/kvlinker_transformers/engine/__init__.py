"""The engine: transformers models on paged pools. Importing it imports torch and transformers."""

from __future__ import annotations

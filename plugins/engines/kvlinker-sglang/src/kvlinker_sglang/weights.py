"""Weights: which ones compute the KV now, as far as anybody can say.

An engine may take new weights while it runs. Until its prefix cache is flushed, pages of old and new weights
are mixed, and none may be stored; behind the flush they are named by the update, or belong to a new epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvlinker.keys import KeyNamespace

__all__ = ["WeightsWatch"]


class WeightsWatch:
    """The namespace of the weights that an engine computes with, from its start through every update."""

    def __init__(
        self,
        namespace: KeyNamespace,
        *,
        launch: str,
        engine_version: Callable[[], str | None],
    ) -> None:
        """Begin with the weights that the engine was started with.

        Args:
            namespace: of these weights.
            launch: differs between two starts of an engine, and not between its ranks.
            engine_version: what the engine calls its weights now.
        """
        self._namespace = namespace
        self._launch = launch
        self._engine_version = engine_version
        self._seen = engine_version()
        self._epoch = 0
        self._updated = False
        self._named: str | None = None

    @property
    def namespace(self) -> KeyNamespace:
        """Namespace of what is stored and looked up now."""
        return self._namespace

    @property
    def is_mixed(self) -> bool:
        """Whether the prefix cache may still hold pages of weights that were replaced."""
        return self._updated

    def begin_update(self) -> None:
        """Note that weights are about to change."""
        self._updated, self._named = True, None

    def name_update(self, version: str | None) -> None:
        """Note that all of them have changed, and what the caller calls them."""
        self._updated, self._named = True, version

    def flush(self) -> KeyNamespace:
        """Note that the prefix cache is empty; return the namespace from here on."""
        version = self._version_now()
        if self._updated or version != self._seen:
            named = self._named if self._updated else version
            self._namespace = replace(self._namespace, weights_version=self._version(named))
        self._updated, self._named, self._seen = False, None, version
        return self._namespace

    def _version_now(self) -> str | None:
        try:
            return self._engine_version()
        except Exception:  # noqa: BLE001  # an engine that cannot say it begins an epoch
            return None

    def _version(self, named: str | None) -> str:
        if named is not None:
            return f"update {named}"
        self._epoch += 1
        return f"epoch {self._launch} {self._epoch}"

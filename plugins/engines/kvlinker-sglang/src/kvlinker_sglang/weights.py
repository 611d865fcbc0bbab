"""Weights: which ones compute the KV now, as far as anybody can say.

An engine may take new weights while it runs. Until all of them are there and its prefix cache is empty, pages of old
and new weights are mixed, and none may be stored; from then on they are named by the update, or belong to a new epoch.
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
        updates_are_unique: bool = False,
    ) -> None:
        """Begin with the weights that the engine was started with.

        Args:
            namespace: of these weights.
            launch: differs between two starts of an engine, and not between its ranks.
            engine_version: what the engine calls its weights now.
            updates_are_unique: whether an update's name is never given to other weights by another launch.
        """
        self._namespace = namespace
        self._start = namespace.weights_version
        self._launch = launch
        self._engine_version = engine_version
        self._updates_are_unique = updates_are_unique
        self._seen = engine_version()
        self._epoch = 0
        self._used: set[str] = set()
        self._is_updated = False
        self._in_session = False
        self._names: set[str] = set()
        self._named: str | None = None

    @property
    def namespace(self) -> KeyNamespace:
        """Namespace of what is stored and looked up now."""
        return self._namespace

    @property
    def is_mixed(self) -> bool:
        """Whether weights are being replaced, or the prefix cache may still hold pages of replaced ones."""
        return self._is_updated or self._in_session

    @property
    def in_session(self) -> bool:
        """Whether a session is open."""
        return self._in_session

    def begin_session(self) -> None:
        """Note that weights will come in several updates, until the session ends."""
        self._is_updated = self._in_session = True
        self._names, self._named = set(), None

    def end_session(self) -> None:
        """Note that all of the session's updates are there; the next flush ends the mixture."""
        self._in_session = False

    def begin_update(self) -> None:
        """Note that weights are about to change."""
        if not self._in_session:
            self._names = set()
        self._is_updated, self._named = True, None

    def name_update(self, version: str | None) -> None:
        """Note that an update's weights are all there, and what the caller calls them."""
        self._is_updated, self._named = True, version
        if version is not None:
            self._names.add(version)

    def flush(self) -> KeyNamespace:
        """Note that the prefix cache is empty; return the namespace from here on."""
        if self._in_session:
            # What is computed until the session ends is of weights of which only some were replaced.
            return self._namespace
        version = self._version_now()
        if self._is_updated or version != self._seen:
            named = self._name() if self._is_updated else version
            self._namespace = replace(self._namespace, weights_version=self._version(named))
        self._is_updated, self._named, self._seen = False, None, version
        self._names = set()
        return self._namespace

    def _version_now(self) -> str | None:
        try:
            return self._engine_version()
        except Exception:  # noqa: BLE001  # an engine that cannot say it begins an epoch
            return None

    def _name(self) -> str | None:
        """Return the one name that the updates have; None where the last has none, or another has a second one."""
        return self._named if self._names == {self._named} else None

    def _version(self, named: str | None) -> str:
        if named is None or named in self._used:
            # Weights that nobody named, or of a name that others had before.
            self._epoch += 1
            return f"epoch {self._launch} {self._epoch}"
        self._used.add(named)
        launch = "" if self._updates_are_unique else f" of {self._launch}"
        return f"{self._start} update {named!r}{launch}"

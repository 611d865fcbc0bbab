"""A sending puts values on a server's connection without waiting for answers, which are taken later, in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from kvlinker_redis.wire import Command, Reply

__all__ = ["PlainSending", "Sending"]


class Sending(ABC):
    """Commands with large arguments, some at a time."""

    @property
    @abstractmethod
    def unanswered(self) -> int:
        """How many times commands were sent whose replies were not taken."""

    @abstractmethod
    def send(self, commands: Sequence[Command]) -> None:
        """Send commands; what they carry may be read until their replies were taken.

        Raises:
            Exception: whatever redis-py raises where a connection fails.
        """

    @abstractmethod
    def take(self) -> list[Reply]:
        """Return a reply for each command that was sent first of those unanswered; errors are among them.

        Raises:
            Exception: whatever redis-py raises where a connection fails.
        """

    @abstractmethod
    def close(self) -> None:
        """Send and take no more. Idempotent."""


class PlainSending(Sending):
    """Commands that are given when their replies are taken."""

    def __init__(self, run: Callable[[Sequence[Command]], list[Reply]]) -> None:
        """Take what gives commands and waits for their replies."""
        self._run = run
        self._kept: deque[Sequence[Command]] = deque()

    @property
    def unanswered(self) -> int:
        """See Sending."""
        return len(self._kept)

    def send(self, commands: Sequence[Command]) -> None:
        """See Sending."""
        self._kept.append(commands)

    def take(self) -> list[Reply]:
        """See Sending."""
        return self._run(self._kept.popleft())

    def close(self) -> None:
        """See Sending."""
        self._kept.clear()

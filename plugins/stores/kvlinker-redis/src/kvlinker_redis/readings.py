"""A reading asks many questions of a server and takes the replies to each while those to others are on their way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvlinker_redis.wire import Command, Reply, room_for

__all__ = ["MAX_COMMANDS", "Question", "Reading"]

MAX_COMMANDS = 1024
"""Commands of one pipeline: enough that round trips do not count, and few enough to be answered soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Commands whose replies are taken together."""

    commands: Sequence[Command]
    values: int
    """Replies that are values; the others are numbers."""
    reply_bytes: int
    """Of each value at most."""
    text: bytes
    """The commands as they go over the wire."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that go over the wire, about: of the values at most, or of the commands."""
        return max(self.values * self.reply_bytes, len(self.text))

    @property
    def room(self) -> int:
        """Bytes of a block that the replies fit into."""
        return room_for(self.values, self.reply_bytes) + room_for(len(self.commands), 0)


class Reading(ABC):
    """Questions that were asked together."""

    @abstractmethod
    def take(self) -> Sequence[Reply]:
        """Return the replies to the next question, one for each command; they overwrite the ones before.

        Raises:
            Exception: whatever redis-py raises where a connection fails.
        """

    @abstractmethod
    def close(self) -> None:
        """Ask and take no more. Idempotent."""

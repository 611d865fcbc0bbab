"""Replies are checked one by one: each has the type that its command promises, or is an error that says what it is."""

from __future__ import annotations

from kvlinker.errors import StoreError
from kvlinker_redis.wire import Reply

__all__ = ["expect_number", "expect_view", "is_full", "is_gone", "is_other_type"]


def expect_number(reply: Reply, command: str) -> int:
    """Return a number.

    Raises:
        StoreError: the server refused the command, or answered with something else.
    """
    if isinstance(reply, int):
        return int(reply)
    raise _unexpected(reply, command, "a number")


def expect_view(reply: Reply, command: str) -> memoryview:
    """Return a view of a text.

    Raises:
        StoreError: the server refused the command, or answered with something else.
    """
    if isinstance(reply, memoryview):
        return reply
    raise _unexpected(reply, command, "bytes")


def _unexpected(reply: Reply, command: str, expected: str) -> StoreError:
    found = str(reply) if isinstance(reply, Exception) else f"a {type(reply).__name__}"
    msg = f"redis store: {command} was answered with {found}, expected {expected}"
    if "has no permissions" in found:
        msg += "; allow the url's user keys that begin with the prefix, and +@read +@write +@connection +info"
    return StoreError(msg)


def is_other_type(reply: Reply) -> bool:
    """Whether the key has a value that is no text, and so none of ours."""
    return isinstance(reply, Exception) and str(reply).startswith("WRONGTYPE")


def is_full(reply: Reply) -> bool:
    """Whether the server has no memory left, and may evict nothing for it."""
    from redis.exceptions import OutOfMemoryError

    return isinstance(reply, OutOfMemoryError)


def is_gone(reply: Reply) -> bool:
    """Whether a rename found nothing to rename."""
    return isinstance(reply, Exception) and "no such key" in str(reply)

"""Requests are what a server is asked for one object each; each says what it means that there is none."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from kvlinker.named_values import Beginning, Range
from kvlinker_s3.failures import Failure, failure_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = [
    "Put",
    "Request",
    "begin_of",
    "delete",
    "put",
    "ranges_of",
    "read_bytes",
    "size_of",
]

_T = TypeVar("_T")
Request: TypeAlias = "Callable[[ObjectStore], _T]"
"""Asks a client for one thing."""

_COALESCE_BYTES = 128 << 10
"""Gaps between ranges that are read along: another request costs more."""


class Put(Enum):
    """What became of an object that was sent."""

    STORED = "stored"
    EXISTS = "exists"
    """Something has the name already, and nothing was written."""
    UNKNOWN = "unknown"
    """The server knows no writes that do not replace; nothing was written."""
    FULL = "full"


def size_of(name: str) -> Request[int | None]:
    """Ask for the length of an object; None where there is none."""

    def ask(client: ObjectStore) -> int | None:
        try:
            return client.head(name)["size"]
        except FileNotFoundError:
            return None

    return ask


def begin_of(name: str, size: int) -> Request[Beginning | None]:
    """Ask for at most so many bytes from the beginning of an object; None where there is none."""

    def ask(client: ObjectStore) -> Beginning | None:
        from obstore.exceptions import BaseError

        try:
            return _read(client, name, size)
        except FileNotFoundError:
            return None
        except BaseError as error:
            # Servers differ in what they say to a range that is longer than the object.
            if failure_of(error) is not Failure.NO_SUCH_RANGE:
                raise
        length = size_of(name)(client)
        if not length:
            return None if length is None else Beginning(raw=memoryview(b""), length=0)
        try:
            return _read(client, name, min(size, length))
        except FileNotFoundError:
            return None

    return ask


def _read(client: ObjectStore, name: str, size: int) -> Beginning:
    answer = client.get(name, options={"range": (0, size)})
    return Beginning(raw=memoryview(answer.buffer()), length=answer.meta["size"])


def ranges_of(name: str, ranges: Sequence[Range]) -> Request[list[memoryview] | None]:
    """Ask for ranges of an object; None where it is gone, or is shorter by now.

    Of an object that ends before, ranges may have fewer bytes, or none.
    """
    runs = _runs_of(ranges)
    starts, ends = [start for start, _ in runs], [end for _, end in runs]
    numbers = [bisect_right(starts, start) - 1 for start, _ in ranges]

    def ask(client: ObjectStore) -> list[memoryview] | None:
        from obstore.exceptions import BaseError

        try:
            # The library panics where it has to cut what it read together, and less came than it asked for.
            answers = client.get_ranges(name, starts=starts, ends=ends, coalesce=0)
        except FileNotFoundError:
            return None
        except BaseError as error:
            if failure_of(error) is Failure.NO_SUCH_RANGE:
                return None
            raise
        views = [memoryview(answer) for answer in answers]
        return [
            views[number][start - starts[number] :][:size]
            for number, (start, size) in zip(numbers, ranges, strict=True)
        ]

    return ask


def read_bytes(ranges: Sequence[Range]) -> int:
    """Return the bytes that `ranges_of` has in memory for one object, with the gaps that are read along."""
    return sum(end - start for start, end in _runs_of(ranges))


def _runs_of(ranges: Sequence[Range]) -> list[tuple[int, int]]:
    """Return what is read together, ascending: (first byte, end) of ranges that lie near each other."""
    runs: list[tuple[int, int]] = []
    for start, size in sorted(ranges):
        if runs and start - runs[-1][1] <= _COALESCE_BYTES:
            runs[-1] = runs[-1][0], max(runs[-1][1], start + size)
        else:
            runs.append((start, start + size))
    return runs


def put(name: str, value: memoryview, *, replace: bool) -> Request[Put]:
    """Send an object, which becomes visible whole or not at all."""

    def ask(client: ObjectStore) -> Put:
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        try:
            client.put(name, value, use_multipart=False, mode="overwrite" if replace else "create")
        except (AlreadyExistsError, PreconditionError):
            if replace:  # no condition was made: it is the server that lets nobody write there
                raise
            return Put.EXISTS
        except (BaseError, OSError) as error:
            failure = failure_of(error)
            if failure is Failure.FULL:
                return Put.FULL
            if failure is Failure.NOT_IMPLEMENTED and not replace:
                return Put.UNKNOWN
            raise
        return Put.STORED

    return ask


def delete(names: Sequence[str]) -> Request[bool]:
    """Remove objects; False where one was not there, and then others may be left."""

    def ask(client: ObjectStore) -> bool:
        try:
            client.delete(list(names))
        except FileNotFoundError:
            return False
        return True

    return ask

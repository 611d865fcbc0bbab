"""Values are texts of the server: many are asked for at once, and taken a few at a time while the rest arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvlinker.host_blocks import HostBlocks
from kvlinker.named_values import Beginning, Fetched, NamedValues, parts_of
from kvlinker.store import ObjectKey
from kvlinker_redis.lanes import RedisLane
from kvlinker_redis.names import Names
from kvlinker_redis.options import RedisStoreOptions
from kvlinker_redis.readings import MAX_COMMANDS, Question
from kvlinker_redis.replies import expect_number, expect_view, is_other_type
from kvlinker_redis.wire import Command, Reply

__all__ = ["RedisValues"]

_ANSWER_BYTES = 1 << 20
"""Bytes that are checked and copied while they are in the processor's cache, and the next ones arrive."""
_NOTHING = memoryview(b"")


class RedisValues(NamedValues):
    """The values of a store, through one of its lanes."""

    def __init__(
        self, lane: RedisLane, names: Names, options: RedisStoreOptions, blocks: HostBlocks
    ) -> None:
        """Take the lane, and the blocks that replies are received into."""
        self._lane = lane
        self._names = names
        self._ttl = options.ttl_seconds
        self._answer_bytes = min(_ANSWER_BYTES, options.call_bytes)
        self._blocks = blocks

    @property
    def answer_bytes(self) -> int:
        """See NamedValues."""
        return self._answer_bytes

    def begin(
        self, keys: Sequence[ObjectKey], size: int
    ) -> Iterator[Sequence[tuple[int, Beginning | None]]]:
        """See NamedValues; with a TTL, what is looked at lives on."""
        step = 2 if self._ttl is None else 3

        def commands_of(name: str) -> Sequence[Command]:
            commands: list[Command] = [("GETRANGE", name, 0, size - 1), ("STRLEN", name)]
            return commands if self._ttl is None else [*commands, ("EXPIRE", name, self._ttl)]

        for first, replies in self._replies(self._names.of_objects(keys), size, step, commands_of):
            yield [
                (first + at, _beginning(replies[at * step], replies[at * step + 1]))
                for at in range(len(replies) // step)
            ]

    def fetch(
        self, keys: Sequence[ObjectKey], ranges: Sequence[tuple[int, int]]
    ) -> Iterator[Fetched]:
        """See NamedValues."""
        names = self._names.of_objects(keys)
        for number, (start, size) in enumerate(ranges):
            last = start + size - 1

            def commands_of(name: str, start: int = start, last: int = last) -> Sequence[Command]:
                return (("GETRANGE", name, start, last),)

            for first, replies in self._replies(names, size, 1, commands_of):
                views = [_view(reply) for reply in replies]
                numbers = range(first, first + len(views))
                yield Fetched(range=number, numbers=numbers, views=views)

    def _replies(
        self,
        names: Sequence[str],
        size: int,
        step: int,
        commands_of: Callable[[str], Sequence[Command]],
    ) -> Iterator[tuple[int, Sequence[Reply]]]:
        """Yield replies of `size` bytes at most, of some names at a time, and the number of the first name."""
        each = max(1, min(MAX_COMMANDS // step, self._answer_bytes // size))
        parts = list(parts_of(len(names), each))
        questions = [
            Question(
                commands=[command for name in names[part] for command in commands_of(name)],
                reply_bytes=size,
            )
            for part in parts
        ]
        for part, replies in zip(parts, self._lane.ask(questions, self._blocks), strict=True):
            yield part.start, replies

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        """See NamedValues."""
        self._lane.run_in_parts([("UNLINK", name) for name in self._names.of_objects(keys)])


def _beginning(raw: Reply, length: Reply) -> Beginning | None:
    if is_other_type(raw) or is_other_type(length):
        return Beginning(raw=_NOTHING, length=1)  # something is there, and no object
    view, total = expect_view(raw, "GETRANGE"), expect_number(length, "STRLEN")
    # It came, or went, between the two commands.
    return Beginning(raw=view, length=total) if total and len(view) else None


def _view(reply: Reply) -> memoryview | None:
    view = _NOTHING if is_other_type(reply) else expect_view(reply, "GETRANGE")
    return view if len(view) else None

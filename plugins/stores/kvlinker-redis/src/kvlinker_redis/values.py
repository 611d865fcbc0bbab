"""Values are texts of the server: many are asked for at once, and taken a few at a time while the rest arrives."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import chain, starmap

from kvlinker.host_blocks import HostBlocks
from kvlinker.named_values import Beginning, Fetched, NamedValues, Range, RowViews, parts_of
from kvlinker.store import ObjectKey
from kvlinker_redis.lanes import RedisLane
from kvlinker_redis.names import Names
from kvlinker_redis.options import RedisStoreOptions
from kvlinker_redis.readings import MAX_COMMANDS, Question
from kvlinker_redis.replies import expect_number, expect_view, is_other_type
from kvlinker_redis.wire import Command, Reply, command_text, packed, text_of

__all__ = ["RedisValues"]

_ANSWER_BYTES = 1 << 20
"""Of one value at a time: less is more commands, more is memory of the server."""
_TOGETHER_BYTES = 4 << 20
"""Values that are checked and copied together while the next ones arrive: fewer calls, and not all of the cache."""
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
        # Of two, one is on its way while the other is used.
        self._together_bytes = min(_TOGETHER_BYTES, options.call_bytes // 2)
        self._blocks = blocks

    @property
    def answer_bytes(self) -> int:
        """See NamedValues."""
        return self._answer_bytes

    def begin(
        self, keys: Sequence[ObjectKey], size: int
    ) -> Iterator[Sequence[tuple[int, Beginning | None]]]:
        """See NamedValues; with a TTL, what is looked at lives on."""
        names = self._names.of_objects(keys)
        step = 2 if self._ttl is None else 3
        each = max(1, min(MAX_COMMANDS // step, self._together_bytes // size))
        parts = list(parts_of(len(names), each))
        questions = [self._look(names[part], size) for part in parts]
        for part, replies in zip(parts, self._lane.ask(questions, self._blocks), strict=True):
            pairs = zip(replies[::step], replies[1::step], strict=True)
            yield list(enumerate(starmap(_beginning, pairs), start=part.start))

    def _look(self, names: Sequence[str], size: int) -> Question:
        """Return what asks for beginnings and lengths, and lets values live on."""
        commands: list[Command] = []
        for name in names:
            commands += [("GETRANGE", name, 0, size - 1), ("STRLEN", name)]
            if self._ttl is not None:
                commands.append(("EXPIRE", name, self._ttl))
        text = b"".join(packed(commands))
        return Question(commands=commands, values=len(names), reply_bytes=size, text=text)

    def fetch(
        self, keys: Sequence[ObjectKey], ranges: Sequence[Range], *, expected: Sequence[Range] = ()
    ) -> Generator[Fetched]:
        """See NamedValues."""
        names = self._names.of_objects(keys)
        parts: list[tuple[int, slice]] = []
        questions: list[Question] = []
        # Most of what goes over the wire is the same for many: names for all ranges, ranges for all names.
        begun = [command_text("GETRANGE", 3) + text_of(name) for name in names]
        for number, (start, size) in enumerate([*ranges, *expected]):
            last = start + size - 1
            end = text_of(start, last)
            for part in parts_of(
                len(names), max(1, min(MAX_COMMANDS, self._together_bytes // size))
            ):
                parts.append((number, part))
                commands = [("GETRANGE", name, start, last) for name in names[part]]
                text = end.join([*begun[part], b""])
                question = Question(
                    commands=commands, values=len(commands), reply_bytes=size, text=text
                )
                questions.append(question)
        replies = self._lane.ask(questions, self._blocks)
        for (number, part), some in zip(parts, replies, strict=True):
            views = some if isinstance(some, RowViews) else [_view(reply) for reply in some]
            yield Fetched(range=number, numbers=range(part.start, part.stop), views=views)

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        """See NamedValues."""
        self.did("UNLINK", keys)

    def did(self, command: str, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """Give a command with each value's name alone, and return for which the answer was 1.

        Raises:
            StoreError: the server cannot be asked, or answers with something else.
        """
        names = self._names.of_objects(keys)
        questions = [
            self._one_by_one(command, names[p]) for p in parts_of(len(names), MAX_COMMANDS)
        ]
        replies = chain.from_iterable(self._lane.ask(questions, self._blocks))
        return tuple([expect_number(reply, command) == 1 for reply in replies])

    def _one_by_one(self, command: str, names: Sequence[str]) -> Question:
        """Return what gives a command with each name alone."""
        text = command_text(command, 1)
        return Question(
            commands=[(command, name) for name in names],
            values=0,
            reply_bytes=0,
            text=text.join([b"", *map(text_of, names)]),
        )


def _beginning(raw: Reply, length: Reply) -> Beginning | None:
    if is_other_type(raw) or is_other_type(length):
        return Beginning(raw=_NOTHING, length=1)  # something is there, and no object
    view, total = expect_view(raw, "GETRANGE"), expect_number(length, "STRLEN")
    # It came, or went, between the two commands.
    return Beginning(raw=view, length=total) if total and len(view) else None


def _view(reply: Reply) -> memoryview | None:
    view = _NOTHING if is_other_type(reply) else expect_view(reply, "GETRANGE")
    return view if len(view) else None

"""The Redis store: the contract's methods, each a few lines over the state of the open store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvlinker.errors import StoreError
from kvlinker.framed_store import FramedStore
from kvlinker.store import ObjectKey, StoreStats, WriteBatch
from kvlinker_redis.options import RedisStoreOptions
from kvlinker_redis.replies import expect_number
from kvlinker_redis.state import StoreState
from kvlinker_redis.wire import Command, Reply
from kvlinker_redis.writing import MAX_OBJECT_BYTES, RedisWrite

__all__ = ["MOST_STEPS", "RedisStore"]

_SCAN_COUNT = 2000
"""Keys that a server looks at in one step: about a millisecond, in which it answers nobody else."""
MOST_STEPS = 1 << 22
"""Of one listing: a server has 2**32 keys at most, and looks at 2000 of them in a step."""
_QUESTIONS: Sequence[Command] = (("INFO", "cluster"), ("INFO", "memory"), ("DBSIZE",))
_COUNTED_KEYS = 5 * _SCAN_COUNT
"""Up to so many keys in a database are counted one by one: whoever asks for figures asks again every few seconds."""


class RedisStore(FramedStore):
    """Objects as values of a Redis server or cluster, whose limit on memory decides what is evicted."""

    def __init__(self, options: RedisStoreOptions) -> None:
        """Connect to the server.

        Raises:
            StoreTimeoutError: it cannot be reached.
            StoreError: it refuses the connection, or is none that can be used.
        """
        self._state = state = StoreState(options)
        super().__init__(
            reads=state.reads,
            writes=state.writes,
            values=state.read_values,
            framed=state.framed,
            max_object_bytes=MAX_OBJECT_BYTES,
        )
        try:
            for lane in (self._state.reads, self._state.writes):
                for _, (cluster, memory, size) in lane.run_everywhere(_QUESTIONS):
                    _check_kind(options, cluster)
                    _memory_figures(memory)
                    expect_number(size, "DBSIZE")
        except BaseException:
            self.close()
            raise

    # ---- looking ------------------------------------------------------------------------------

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store.

        Raises:
            StoreError: the server cannot be asked.
        """
        self._state.reads.check_open()
        return self._state.read_values.did("EXISTS", keys)

    def stats(self) -> StoreStats:
        """See Store; bytes are the server's, over all that it holds.

        In a database of more than 10,000 keys, objects are all of its keys: counting takes the server's time.

        Raises:
            StoreError: the server cannot be asked.
        """
        answers = self._state.reads.run_everywhere([("INFO", "memory"), ("DBSIZE",)])
        figures = [_memory_figures(info) for _, (info, _) in answers]
        keys = sum(expect_number(size, "DBSIZE") for _, (_, size) in answers)
        limits = [limit for _, limit in figures]
        return StoreStats(
            objects=keys if keys > _COUNTED_KEYS else len(set().union(*self._scan())),
            used_bytes=sum(used for used, _ in figures),
            capacity_bytes=sum(limits) if all(limits) else None,
            counters=self._state.framed.counters,
        )

    # ---- moving -------------------------------------------------------------------------------

    def begin_write(self, batches: Sequence[WriteBatch]) -> RedisWrite:
        """See FramedStore."""
        return RedisWrite(self._state, batches)

    # ---- removing -----------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store.

        Raises:
            StoreError: the server cannot be asked; some may have been removed.
        """
        self._state.reads.check_open()
        return self._state.read_values.did("UNLINK", keys)

    def clear(self, namespace: bytes) -> int:
        """See Store; the server is asked for all of its keys.

        Raises:
            ContractError: that is no namespace.
            StoreError: the server cannot be asked; some objects may have been removed.
        """
        removed = 0
        pattern = self._state.names.pattern_of(namespace)
        for names in self._scan(pattern):
            commands: list[Command] = [("UNLINK", name) for name in names]
            replies = self._state.reads.run_in_parts(commands)
            removed += sum(expect_number(reply, "UNLINK") for reply in replies)
        return removed

    def _scan(self, pattern: str = "") -> Iterator[set[bytes]]:
        """Yield the names of objects, step by step; some may come again in another step."""
        lane = self._state.reads
        pattern = pattern or self._state.names.pattern
        begin: Command = ("SCAN", 0, "MATCH", pattern, "COUNT", _SCAN_COUNT)
        for node, (reply,) in lane.run_everywhere([begin]):
            cursor, names = _scanned(reply)
            yield names
            passed: set[int] = set()
            while cursor:
                if cursor in passed:
                    msg = f"{lane}: the server lists its keys in a circle, SCAN {cursor} came again"
                    raise StoreError(msg)
                if len(passed) == MOST_STEPS:
                    msg = (
                        f"{lane}: the server does not end listing its keys, after {MOST_STEPS} steps; "
                        f"no Redis does so: look what answers at this address"
                    )
                    raise StoreError(msg)
                passed.add(cursor)
                step: Command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
                cursor, names = _scanned(*lane.run_on(node, [step]))
                yield names


def _check_kind(options: RedisStoreOptions, reply: Reply) -> None:
    """Refuse a single server where a cluster is: it would answer for its own keys alone."""
    if not options.cluster and isinstance(reply, dict) and reply.get("cluster_enabled") == 1:
        msg = (
            f"redis store {options.address}: the server is a node of a cluster; set cluster to true"
        )
        raise StoreError(msg)


def _memory_figures(reply: Reply) -> tuple[int, int]:
    """Return the bytes that a server uses and those that it may use, 0 where it has no limit."""
    if isinstance(reply, dict):
        used, limit = reply.get("used_memory"), reply.get("maxmemory", 0)
        if isinstance(used, int) and isinstance(limit, int):
            return used, limit
    msg = f"redis store: INFO memory was answered with {reply!r:.200}, expected used_memory and maxmemory"
    raise StoreError(msg)


def _scanned(reply: Reply) -> tuple[int, set[bytes]]:
    """Return a cursor and the names that it came with."""
    match reply:
        case (int() as cursor, list() as names):
            return cursor, {name for name in names if isinstance(name, bytes)}
        case _:
            msg = f"redis store: SCAN was answered with {reply!r:.200}, expected a cursor and names"
            raise StoreError(msg)

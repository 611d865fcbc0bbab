"""The client is Mooncake's, with a deadline for every call, and every list of results as long as what was asked."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from kvlinker.errors import StoreContractError, StoreError
from kvlinker.lanes import LaneTask
from kvlinker_mooncake.calls import Calls
from kvlinker_mooncake.codes import UNANSWERED, Code
from kvlinker_mooncake.options import MooncakeStoreOptions
from kvlinker_mooncake.parts import CallPart
from kvlinker_mooncake.raw_client import RawClient, RawReplica, make_raw_client, replicate_config

__all__ = ["DRAIN_SECONDS", "Client", "Found"]

_ASKED = 4096
"""Names in one question."""
_COMPLETE = "COMPLETE"
_NO_QUESTION = bytes(64)
"""Longer than the head of a question, and not beginning as one does."""
DRAIN_SECONDS = 15.0
"""How long a client is kept for calls that hang; then it stays as it is until the process ends."""


class Found(NamedTuple):
    """An object that can be read; one is looked at for each object and layer of a load."""

    size: int
    places: frozenset[tuple[str, int]] = frozenset()
    """Segment and address of each copy in memory; none where it is on disk alone."""

    @property
    def in_memory(self) -> bool:
        """Whether a copy is in the memory of a segment."""
        return bool(self.places)

    def is_still(self, now: Found | None) -> bool:
        """Whether an object that was found again is this one, where it was.

        A master that was started anew has given its memory to others, while a session of the client goes on.
        """
        return now is not None and now.size == self.size and self.places <= now.places


class Client:
    """A client that has joined a cluster."""

    def __init__(
        self,
        options: MooncakeStoreOptions,
        *,
        make: Callable[[], RawClient] = make_raw_client,
        config: Callable[[MooncakeStoreOptions], object] = replicate_config,
        wait: Callable[[LaneTask, float], bool] = LaneTask.wait,
    ) -> None:
        """Join the cluster.

        Args:
            options: where it is.
            make: makes the client.
            config: says in the client's own form how objects are kept.
            wait: see `Calls`.

        Raises:
            UnsupportedOperationError: the client lacks calls or settings.
            StoreTimeoutError: the master did not answer in time.
            StoreError: there is no client, or it was refused.
        """
        self.calls = Calls(options.label, pause_seconds=options.pause_seconds, wait=wait)
        self._options = options
        self._raw = make()
        self._config = config(options)
        self._lock = threading.Lock()
        self._readers: Counter[str] = Counter()
        self._stuck: set[str] = set()
        self._moving: Counter[str] = Counter()
        """Names whose bytes a call is sending now, which may be one that nobody waits for any more."""
        self._has_closed = False
        self._states: dict[int, bool] = {}
        """Number of a copy's state to whether it can be read: the client is slow to tell its name."""
        self._join()

    def _join(self) -> None:
        options = self._options
        raw = self._raw
        self._knock()
        code = self.calls.ask(
            "joining the cluster",
            lambda: raw.setup(
                options.host,
                options.metadata,
                options.segment_bytes,
                options.buffer_bytes,
                options.protocol,
                options.devices,
                options.master,
            ),
            seconds=options.connect_seconds,
            on_late=lambda code: _leave_late(raw, code),
        )
        if code:
            msg = (
                f"{self.calls}: joining the cluster was refused with code {code}; "
                f"is {options.master} a master of this client's version, and {options.protocol} to be had?"
            )
            raise StoreError(msg)

    def _knock(self) -> None:
        """See whether anybody is there: the client tries for minutes, and stops all threads meanwhile.

        The kernel takes connections for a master that hangs. One that runs hangs up on what is no question of a
        client.
        """
        host, _, port = self._options.master.rpartition(":")
        place = (host.strip("[]"), int(port))
        try:
            with socket.create_connection(place, timeout=self._options.connect_seconds) as door:
                _await_life(door)
        except OSError as error:
            failure = self.calls.give_up("joining the cluster", str(error))
            raise failure from error

    def _ask(
        self,
        what: str,
        call: Callable[[], list[int]],
        count: int,
        *,
        on_late: Callable[[list[int]], object] | None = None,
    ) -> list[int]:
        codes = self.calls.ask(what, call, seconds=self._options.answer_seconds, on_late=on_late)
        return self._checked(what, codes, count)

    def _ask_for(
        self, what: str, names: Sequence[str], call: Callable[[list[str]], list[int]]
    ) -> list[int]:
        """Ask for some names at a time."""
        codes: list[int] = []
        for part in _parts(names):
            codes += self._ask(what, partial(call, part), len(part))
        if not names:
            self.calls.check_open()
        return codes

    def _checked(self, what: str, codes: list[int], count: int) -> list[int]:
        """Return the results of a call, where they are as many as were asked for and the master answered."""
        given: object = codes  # a client may answer with anything
        if not isinstance(given, list) or len(given) != count:
            results = f"{len(given)} results" if isinstance(given, list) else repr(given)
            msg = f"{self.calls}: {what} of {count} objects was answered with {results}"
            raise StoreContractError(msg)
        if unanswered := UNANSWERED.intersection(given):
            raise self.calls.give_up(what, f"the client says {int(min(unanswered))}")
        return codes

    # ---- looking ----------------------------------------------------------------------------------

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Return whether each object can be read.

        Raises:
            StoreError: the master cannot be asked, or answers with an error.
        """
        codes = self._ask_for("exists", names, self._raw.batch_is_exist)
        if wrong := [code for code in set(codes) if code < 0 and code != Code.NOT_READY]:
            msg = f"{self.calls}: exists was answered with code {wrong[0]}"
            raise StoreError(msg)
        return [code == 1 for code in codes]

    def look(self, names: Sequence[str]) -> list[Found | None]:
        """Return what is known of each object that can be read; None for the others.

        Raises:
            StoreError: the master cannot be asked.
        """
        found: list[Found | None] = []
        for part in _parts(names):
            found += self._look_at(part)
        if names and not any(found):
            self.exist(names[:1])  # a dead master describes nothing, and says so here alone
        return found

    def _look_at(self, names: list[str]) -> list[Found | None]:
        def call() -> list[Found | None]:
            copies = self._raw.batch_get_replica_desc(names)
            return [self._in_memory(copies[name]) if name in copies else None for name in names]

        found = self.calls.ask("look", call, seconds=self._options.answer_seconds)
        return [
            self._look_on_disk(name) if one is not None and not one.places else one
            for name, one in zip(names, found, strict=True)
        ]

    def _in_memory(self, copies: Sequence[RawReplica]) -> Found:
        """Return where the copies are that can be read from memory; nowhere where there are none."""
        places = []
        size = 0
        for copy in copies:
            if copy.is_memory_replica() and self._is_complete(copy):
                place = copy.get_memory_descriptor().buffer_descriptor
                places.append((place.transport_endpoint, place.buffer_address))
                size = size or place.size
        return Found(size, frozenset(places))

    def _is_complete(self, copy: RawReplica) -> bool:
        status = copy.status
        number = int(status)
        known = self._states.get(number)
        if known is None:
            known = self._states[number] = status.name == _COMPLETE
        return known

    def _look_on_disk(self, name: str) -> Found | None:
        """Return what is known of an object that has copies, and none in memory."""
        (size,) = self._ask("size", lambda: [self._raw.get_size(name)], 1)
        return Found(size=size) if size > 0 else None

    # ---- reading ----------------------------------------------------------------------------------

    def start_reads(self, names: Sequence[str]) -> list[int]:
        """Take leases on objects in memory, and remember where they are; results by position.

        Raises:
            StoreError: the master cannot be asked.
        """
        codes: list[int] = []
        for part in _parts(names):
            codes += self._start_some(part)
        return codes

    def _start_some(self, names: list[str]) -> list[int]:
        return self._ask(
            "session start",
            lambda: self._raw.batch_get_session_start(names),
            len(names),
            on_late=lambda _: self._end_unread(names),
        )

    def keep_reads(self, names: Sequence[str]) -> None:
        """Count one more reader of each object, until `end_reads`."""
        with self._lock:
            self._readers.update(names)

    def end_reads(self, names: Sequence[str]) -> None:
        """Count one less, and forget where objects are that nobody reads: the client has one session for all."""
        with self._lock:
            self._readers.subtract(names)
            self._readers = +self._readers  # without those that are 0
        self.calls.local(lambda: self._end_unread(names))

    def _end_unread(self, names: Sequence[str]) -> None:
        with self._lock:
            if over := [name for name in set(names) if name not in self._readers]:
                self._raw.batch_get_session_end(over)

    def get_ranges(self, part: CallPart) -> list[int]:
        """Read ranges of objects into pool memory; bytes or codes by position."""
        return self._move(
            "ranged get",
            lambda: self._raw.batch_get_into_multi_buffer_ranges(
                part.names, part.pointers, part.sizes, part.offsets
            ),
            len(part.names),
        )

    def get_whole(self, part: CallPart, *, into_pools: bool) -> list[int]:
        """Read whole objects into pool memory, or into memory of the store's own; bytes or codes by position.

        Raises:
            StoreError: the master cannot be asked; memory of the store's own may still be written then.
        """

        def call() -> list[int]:
            return self._raw.batch_get_into_multi_buffers(part.names, part.pointers, part.sizes)

        return self._transfer("get", call, len(part.names), of_pools=into_pools)

    def read_here(self, part: CallPart, *, is_whole: bool) -> list[int]:
        """Read objects, or ranges of them, into memory of the store's own, on a thread that may be left behind."""
        columns = (part.names, part.pointers, part.sizes)
        raw = self._raw

        def call() -> list[int]:
            if is_whole:
                return raw.batch_get_into_multi_buffers(*columns)
            return raw.batch_get_into_multi_buffer_ranges(*columns, part.offsets)

        seconds = self._options.transfer_seconds
        codes = self.calls.move("probe", call, seconds=seconds, of_pools=False)
        return self._checked("probe", codes, len(part.names))

    def _transfer(
        self,
        what: str,
        call: Callable[[], list[int]],
        count: int,
        *,
        of_pools: bool,
        on_late: Callable[[list[int]], object] | None = None,
    ) -> list[int]:
        if of_pools:
            return self._move(what, call, count)
        seconds = self._options.transfer_seconds
        codes = self.calls.ask(what, call, seconds=seconds, on_late=on_late)
        return self._checked(what, codes, count)

    def _move(self, what: str, call: Callable[[], list[int]], count: int) -> list[int]:
        codes = self.calls.move(what, call, seconds=self._options.transfer_seconds)
        return self._checked(what, codes, count)

    # ---- writing ----------------------------------------------------------------------------------

    def start_writes(self, names: Sequence[str], size: int) -> list[int]:
        """Reserve room for objects of one size; those that begun have to be ended or revoked.

        Raises:
            StoreError: the master cannot be asked; what it reserves later is given up.
        """
        self._revoke_stuck(names)
        asked = list(names)
        codes = self.calls.ask(
            "put start",
            lambda: self._raw.batch_put_session_start(asked, [size] * len(asked), self._config),
            seconds=self._options.answer_seconds,
            on_late=lambda codes: self._give_up(asked, codes),
        )
        try:
            return self._checked("put start", codes, len(asked))
        except (StoreError, StoreContractError):
            begun = _begun(asked, codes)
            self.revoke(asked if begun is None else begun)
            raise

    def _give_up(self, names: list[str], codes: object) -> None:
        """Give up what an answer says was begun that came when nobody waited for it any more."""
        begun = _begun(names, codes)
        if begun is None:
            self.revoke(names)
        else:
            self._raw_revoke(begun)

    def put_ranges(self, part: CallPart, *, from_pools: bool) -> list[int]:
        """Write ranges of objects that were begun; bytes or codes by position.

        Raises:
            StoreError: it took too long; what comes of it later is given up.
        """

        def call() -> list[int]:
            with self._sent(part.names):
                return self._raw.batch_put_from_multi_buffer_ranges(
                    part.names, part.pointers, part.sizes, part.offsets
                )

        count = len(part.names)
        return self._transfer(
            "put",
            call,
            count,
            of_pools=from_pools,
            on_late=lambda _: self._revoke_stuck(part.names),
        )

    @contextmanager
    def _sent(self, names: Sequence[str]) -> Iterator[None]:
        """Note that bytes of objects are being sent, for the length of a block."""
        with self._lock:
            self._moving.update(names)
        try:
            yield
        finally:
            with self._lock:
                self._moving.subtract(names)
                self._moving = +self._moving  # without those that are 0

    def end_writes(self, names: Sequence[str]) -> list[int]:
        """Let objects be read whose bytes are all there; results by position.

        Raises:
            StoreError: the master cannot be asked; they may become visible later.
        """
        asked = list(names)
        return self._ask("put end", lambda: self._raw.batch_put_session_end(asked), len(asked))

    def revoke(self, names: Sequence[str]) -> None:
        """Give up objects that were begun; where the master cannot be asked now, before they are begun again."""
        with self._lock:
            self._stuck.update(names)
        self._revoke_stuck(names)

    def _revoke_stuck(self, names: Sequence[str]) -> None:
        with self._lock:
            # Room that is given up goes to others, and what is still being sent would land in it.
            stuck = sorted(self._stuck.intersection(names).difference(self._moving))
        if not stuck:
            return
        try:
            self._ask("put revoke", lambda: self._raw_revoke(stuck), len(stuck))
        except StoreError:
            return
        with self._lock:  # whatever the answers are: it is given up, or was ended, or the master knows nothing of it
            self._stuck.difference_update(stuck)

    def _raw_revoke(self, names: list[str]) -> list[int]:
        return self._raw.batch_put_session_revoke(names) if names else []

    # ---- removing ---------------------------------------------------------------------------------

    def remove(self, names: Sequence[str], *, force: bool) -> list[int]:
        """Remove objects; results by position.

        Raises:
            StoreError: the master cannot be asked.
        """
        return self._ask_for(
            "remove", names, lambda part: self._raw.batch_remove(part, force=force)
        )

    def remove_matching(self, pattern: str) -> int:
        """Remove objects whose names match, and return how many.

        Raises:
            StoreError: the master cannot be asked, or refuses.
        """
        (count,) = self._ask("clear", lambda: [self._raw.remove_by_regex(pattern, force=False)], 1)
        if count < 0:
            msg = f"{self.calls}: clear was answered with code {count}"
            raise StoreError(msg)
        return count

    # ---- memory and life --------------------------------------------------------------------------

    def register(self, address: int, size: int) -> int:
        """Let transfers touch memory; 0, or the client's code."""
        return self.calls.local(lambda: self._raw.register_buffer(address, size))

    def unregister(self, address: int) -> int:
        """End that; 0, or the client's code."""
        return self.calls.local(lambda: self._raw.unregister_buffer(address))

    def close(self, *, at_exit: bool = False) -> None:
        """Leave the cluster when no call is under way any more. Idempotent.

        The client's own farewell takes about a second; it goes on behind, and a process that ends waits for it.

        Args:
            at_exit: wait for it here, where a process that ends may begin no more threads.
        """
        if self.calls.is_foreign:
            return
        self.calls.close()
        with self._lock:
            if self._has_closed:
                return
            self._has_closed = True
        if at_exit:
            self._leave()
        else:
            threading.Thread(target=self._leave, name="kvlinker-mooncake-close").start()

    def _leave(self) -> None:
        if self.calls.wait(DRAIN_SECONDS):
            self._raw.close()


def _await_life(door: socket.socket) -> None:
    """Wait for any answer, and for as long as the socket does."""
    with suppress(ConnectionError):
        door.sendall(_NO_QUESTION)
        door.recv(1)


def _leave_late(raw: RawClient, code: int) -> None:
    if not code:
        raw.close()


def _begun(names: list[str], codes: object) -> list[str] | None:
    """Return which names were begun, by an answer for each; None where it is none, and any may have been."""
    if not isinstance(codes, list) or len(codes) != len(names):
        return None
    return [name for name, code in zip(names, codes, strict=True) if code == Code.DONE]


def _parts(names: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), _ASKED):
        yield list(names[start : start + _ASKED])

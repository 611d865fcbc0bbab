"""Someone who does everything with a store, in random order, and knows what each answer must be."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from load_pages import KINDS, PAGES, Family, LoadPages, load_key, namespace_of
from load_plants import Plant

from kvlinker.errors import KVLinkerError
from kvlinker.store import Hold, ReadSession, ReadStatus, WriteBatch, WriteStatus
from kvlinker_file import FileStore

__all__ = ["LoadUser"]

_HOLD_SECONDS = 600.0
_TRUSTED_SECONDS = 300.0
"""Age up to which a hold is checked: far from its end, whoever stopped the process meanwhile."""
_MAX_HOLDS = 2
_HELD_KEYS = 3
_HOT = 12
"""Numbers that half of the choices fall on, so that several processes want one key at once."""
_OWN = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """Objects that must be readable until they are released."""

    hold: Hold
    kind: int
    keys: tuple[bytes, ...]
    since: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reading:
    """A session that stays open, and what its first read said: later ones must say the same."""

    session: ReadSession
    kind: int
    keys: tuple[bytes, ...]
    statuses: tuple[ReadStatus, ...]


class LoadUser:
    """One thread's calls; `counts` says how many of each answer there were."""

    def __init__(
        self,
        name: str,
        *,
        numbers: int,
        replaces: bool,
        plant: Plant | None = None,
        report: Callable[[str], None],
    ) -> None:
        """Make a user of a store that `begin` names.

        Args:
            name: nobody else's, ever: some of its objects have it in their keys.
            numbers: objects of each kind and family.
            replaces: write some keys as objects of another kind, which are then replaced.
            plant: what to do wrong.
            report: takes what was not as it must be.
        """
        self.counts: Counter[str] = Counter()
        self._name = name
        self._numbers = numbers
        self._replaces = replaces
        self._plant = plant
        self._report = report
        self._choose = random.Random(name)  # noqa: S311 - chooses calls, not secrets
        self._pools = [LoadPages(kind) for kind in range(len(KINDS))]
        self._own: set[bytes] = set()
        """Own objects that may exist; no other of this user's may."""
        self._held: list[_Held] = []
        self._reading: _Reading | None = None
        self._calls = {
            self._write: 40,
            self._read: 25,
            self._hold: 6,
            self._check_hold: 10,
            self._release: 5,
            self._open_session: 6,
            self._read_session: 8,
            self._close_session: 4,
            self._delete: 5,
            self._clear: 1,
            self._look: 6,
            self._ask: 2,
        }

    def begin(self, store: FileStore) -> None:
        """Use a store from now on."""
        self._store = store
        self.counts.clear()

    def end(self) -> None:
        """Let go of everything that the store gave."""
        self._close_session()
        while self._held:
            self._release()

    def some_steps(self, fewest: int, most: int) -> int:
        """Return how many calls to make in a round."""
        return self._choose.randint(fewest, most)

    def step(self) -> None:
        """Make one call, or two."""
        (call,) = self._choose.choices(list(self._calls), list(self._calls.values()))
        try:
            call()
        except KVLinkerError as error:
            self._report(f"{call.__name__.strip('_')} raised {type(error).__name__}: {error}")

    # ---- choosing -----------------------------------------------------------------------------

    def _key(self, family: Family, kind: int, number: int) -> bytes:
        owner = self._name if family is Family.OWN else ""
        return load_key(family, kind, number, owner)

    def _some_keys(self, families: Sequence[Family], kind: int, most: int) -> tuple[bytes, ...]:
        """Return some keys of objects of a kind, each once."""
        chosen: dict[bytes, None] = {}
        for _ in range(self._choose.randint(1, most)):
            family = self._choose.choice(families)
            limit = _OWN if family is Family.OWN else self._numbers
            limit = min(limit, _HOT) if self._choose.random() < 0.5 else limit
            chosen[self._key(family, kind, self._choose.randrange(limit))] = None
        return tuple(chosen)

    def _some_kind(self) -> int:
        return self._choose.randrange(len(KINDS))

    # ---- writing ------------------------------------------------------------------------------

    def _write(self) -> None:
        kinds = self._choose.sample(range(len(KINDS)), 2 if self._choose.random() < 0.15 else 1)
        # Two batches of one kind would need the same pages of the pool.
        replaces = self._replaces and len(kinds) == 1
        batches = [self._batch(kind, replaces=replaces) for kind in kinds]
        is_allowed = self._choose.random() < 0.9
        answer = self._store.write(batches, self._pools[0].access, may_publish=lambda: is_allowed)
        fresh: set[WriteStatus] = set()
        for batch, statuses in zip(batches, answer, strict=True):
            self._note_written(batch.keys, statuses)
            fresh.update(statuses)
        fresh.discard(WriteStatus.EXISTS)
        right = {WriteStatus.WRITTEN if is_allowed else WriteStatus.DISCARDED}
        if fresh not in (set(), right, {WriteStatus.FULL}):
            said = sorted(status.value for status in fresh)
            self._report(f"a write that was {'' if is_allowed else 'not '}allowed answered {said}")

    def _batch(self, kind: int, *, replaces: bool) -> WriteBatch:
        families = (Family.STABLE, Family.STABLE, Family.VOLATILE, Family.OWN)
        family = self._choose.choice(families)
        keys = self._some_keys([family], kind, PAGES)
        if replaces and family is Family.VOLATILE and self._choose.random() < 0.2:
            kind = (kind + 1) % len(KINDS)
        pages = self._pools[kind]
        batch = pages.batch(keys)
        if self._plant is Plant.LIE:
            pages.spoil(0, self._choose)
        return batch

    def _note_written(self, keys: Sequence[bytes], statuses: Sequence[WriteStatus]) -> None:
        for key, status in zip(keys, statuses, strict=True):
            self.counts[status.value] += 1
            if not self._is_own(key):
                continue
            if status is WriteStatus.EXISTS and key not in self._own:
                self._report(f"own object {key.hex()} was stored already, and nobody had stored it")
            if status.is_stored:
                self._own.add(key)

    def _is_own(self, key: bytes) -> bool:
        return any(
            key.startswith(namespace_of(Family.OWN, kind, self._name)) for kind in range(len(KINDS))
        )

    # ---- reading ------------------------------------------------------------------------------

    def _read(self) -> None:
        kind = self._some_kind()
        keys = self._some_keys(list(Family), kind, PAGES)
        with self._store.open_read(self._pools[kind].request(keys)) as session:
            self._first_read(session, kind, keys)

    def _first_read(
        self, session: ReadSession, kind: int, keys: tuple[bytes, ...]
    ) -> tuple[ReadStatus, ...]:
        statuses = self._read_checked(session, kind, keys)
        for key, status in zip(keys, statuses, strict=True):
            self.counts[f"read {status.value}"] += 1
            if status is ReadStatus.OK and self._is_own(key) and key not in self._own:
                self._report(f"own object {key.hex()} was read, and it was deleted or never stored")
        return statuses

    def _read_checked(
        self, session: ReadSession, kind: int, keys: tuple[bytes, ...]
    ) -> tuple[ReadStatus, ...]:
        """Read whole objects or some layers of them, into poisoned pages, and check every byte."""
        pages = self._pools[kind]
        pages.memory.poison()
        layers = list(range(KINDS[kind][0]))
        is_whole = self._choose.random() < 0.5
        statuses: tuple[ReadStatus, ...] = ()
        if is_whole:
            statuses = session.read(pages.plan(len(keys)), pages.access)
        else:
            layers = self._choose.sample(layers, self._choose.randint(1, len(layers)))
            for layer in layers:
                statuses = session.read(pages.layer_plan(len(keys), layer), pages.access)
        for page, (key, status) in enumerate(zip(keys, statuses, strict=True)):
            self._check_page(pages, page, key, status, layers)
        return statuses

    def _check_page(
        self, pages: LoadPages, page: int, key: bytes, status: ReadStatus, layers: Sequence[int]
    ) -> None:
        place = f"object {key.hex()} of kind {pages.kind}"
        if status is ReadStatus.OK:
            damage = pages.damage(page, key, layers)
            if damage is not None:
                self._report(f"{place}: wrong bytes were read as right ones: {damage}")
        elif status is not ReadStatus.MISS:
            self._report(f"{place}: a read answered {status.value!r}")
        elif not pages.is_untouched(page):
            self._report(f"{place}: a miss wrote into the pool")

    # ---- sessions -----------------------------------------------------------------------------

    def _open_session(self) -> None:
        self._close_session()
        kind = self._some_kind()
        keys = self._some_keys(list(Family), kind, PAGES)
        session = self._store.open_read(self._pools[kind].request(keys))
        try:
            statuses = self._first_read(session, kind, keys)
        except BaseException:
            session.close()
            raise
        self._reading = _Reading(session=session, kind=kind, keys=keys, statuses=statuses)

    def _read_session(self) -> None:
        open_one = self._reading
        if open_one is None:
            return
        statuses = self._read_checked(open_one.session, open_one.kind, open_one.keys)
        if statuses != open_one.statuses:
            before = [status.value for status in open_one.statuses]
            self._report(f"a session read {[status.value for status in statuses]} after {before}")
        self.counts["read again"] += 1

    def _close_session(self) -> None:
        if self._reading is not None:
            self._reading.session.close()
            self._reading = None

    # ---- holding ------------------------------------------------------------------------------

    def _hold(self) -> None:
        if len(self._held) == _MAX_HOLDS:
            return
        kind = self._some_kind()
        keys = self._some_keys([Family.STABLE], kind, _HELD_KEYS)
        hold = self._store.hold(keys, seconds=_HOLD_SECONDS)
        there = tuple(key for key, is_held in zip(keys, hold.present, strict=True) if is_held)
        self._held.append(_Held(hold=hold, kind=kind, keys=there, since=time.monotonic()))
        self.counts["held"] += len(there)
        if self._plant is Plant.LOSE:
            self._store.delete(there)

    def _check_hold(self) -> None:
        fresh = [one for one in self._held if time.monotonic() - one.since < _TRUSTED_SECONDS]
        if not fresh:
            return
        held = self._choose.choice(fresh)
        request = self._pools[held.kind].request(held.keys)
        is_there = self._store.exists(held.keys)
        with self._store.open_read(request) as session:
            statuses = self._first_read(session, held.kind, held.keys)
        self.counts["held and read"] += len(statuses)
        if not (all(is_there) and set(statuses) <= {ReadStatus.OK}):
            names = [key.hex() for key in held.keys]
            read = [status.value for status in statuses]
            self._report(f"objects {names} are held, and exist: {is_there}, and read: {read}")

    def _release(self) -> None:
        if self._held:
            self._held.pop(self._choose.randrange(len(self._held))).hold.release()

    # ---- removing and looking -----------------------------------------------------------------

    def _delete(self) -> None:
        family = self._choose.choice((Family.VOLATILE, Family.OWN))
        kind = self._some_kind()
        keys = self._some_keys([family], kind, PAGES)
        removed = self._store.delete(keys)
        self.counts["removed"] += sum(removed)
        if family is Family.OWN:
            self._own.difference_update(keys)
            if self._plant is Plant.RESURRECT:
                pages = self._pools[kind]
                pages.put(self._store, keys)
            self._check_own()

    def _clear(self) -> None:
        namespace = namespace_of(Family.OWN, self._some_kind(), self._name)
        mine = {key for key in self._own if key.startswith(namespace)}
        removed = self._store.clear(namespace)
        self.counts["removed"] += removed
        if removed > len(mine):
            self._report(f"clear removed {removed} objects of {len(mine)}")
        self._own -= mine
        self._check_own()

    def _look(self) -> None:
        keys = self._some_keys([Family.STABLE, Family.VOLATILE], self._some_kind(), PAGES)
        if len(self._store.exists(keys)) != len(keys):
            self._report(f"exists did not answer once for each of {len(keys)} keys")
        self._check_own()

    def _check_own(self) -> None:
        """Look for own objects that were deleted or not published."""
        keys = [
            self._key(Family.OWN, kind, number)
            for kind in range(len(KINDS))
            for number in range(_OWN)
        ]
        for key, is_there in zip(keys, self._store.exists(keys), strict=True):
            if is_there and key not in self._own:
                self._report(f"own object {key.hex()} exists, and it was deleted or never stored")

    def _ask(self) -> None:
        stats = self._store.stats()
        if not 0 <= stats.used_bytes <= (stats.capacity_bytes or 0) or stats.objects < 0:
            self._report(f"stats said {stats}")

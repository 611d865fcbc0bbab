"""Someone who does everything with a store, in random order, and knows which answers can be right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlinker.errors import KVLinkerError, StoreError
from kvlinker.keys import NAMESPACE_BYTES
from kvlinker.store import ObjectKey, ReadSession, ReadStatus, Store, WriteStatus
from kvlinker.testing.altered_access import FlippingAccess, first_rows
from kvlinker.testing.shelves import LAYERS, Shelf
from kvlinker.testing.soak_keys import Family, SoakKeys
from kvlinker.testing.soak_plants import Plant

__all__ = ["SoakUser"]

_MOST_KEYS = 6
"""Objects of one call at most."""
_HOT = 12
"""Numbers that half of the choices fall on, so that several processes want one key at once."""
_REPLACED = 0.2
"""Share of writes of objects that come and go in which they are of another kind."""
_ALLOWED = 0.9
_HALF = 0.5
_HOLD_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reading:
    """A session that stays open."""

    session: ReadSession
    kind: int
    keys: tuple[ObjectKey, ...]


class SoakUser:
    """One thread's calls; `counts` says how many of each answer there were."""

    def __init__(
        self,
        name: str,
        keys: SoakKeys,
        *,
        seed: str,
        plant: Plant | None = None,
        report: Callable[[str], None],
        note_error: Callable[[str], None],
    ) -> None:
        """Make a user of a store that `begin` names.

        Args:
            name: that of no other user who runs; some of its objects have it in their keys.
            keys: of all objects.
            seed: chooses calls.
            plant: what to do wrong.
            report: takes what was not as it must be.
            note_error: takes errors that are right while a server is away.
        """
        self.counts: Counter[str] = Counter()
        self._name = name
        self._keys = keys
        self._plant = plant
        self._report = report
        self._note_error = note_error
        self._choose = random.Random(seed)  # noqa: S311 - chooses calls, not secrets
        self._shared = {
            (family, kind): keys.shared(family, kind)
            for family in (Family.STABLE, Family.VOLATILE)
            for kind in range(keys.kinds)
        }
        self._generation = self._choose.randrange(1 << 60)  # nobody else's, and no earlier life's
        self._own: set[ObjectKey] = set()
        """Own objects that may exist; no other of this generation may."""
        self._reading: _Reading | None = None
        self._calls: dict[Callable[[], None], int] = {
            self._write: 36,
            self._read: 24,
            self._read_layers: 8,
            self._open_session: 6,
            self._read_session: 8,
            self._close_session: 4,
            self._delete: 6,
            self._clear: 1,
            self._look: 6,
            self._hold: 3,
            self._ask: 1,
        }

    def begin(self, store: Store, shelves: Sequence[Shelf]) -> None:
        """Use a store from now on, through one shelf for each kind of object."""
        self._store = store
        self._shelves: tuple[Shelf, ...] = tuple(shelves)
        self.counts.clear()

    def end(self) -> None:
        """Let go of everything that the store gave."""
        self._close_session()
        self._shelves = ()

    def some_steps(self, fewest: int, most: int) -> int:
        """Return how many calls to make in a round."""
        return self._choose.randint(fewest, most)

    def step(self) -> None:
        """Make one call, or two."""
        (call,) = self._choose.choices(list(self._calls), list(self._calls.values()))
        try:
            call()
        except StoreError as error:
            self._failed(f"{_name(call)} raised {type(error).__name__}: {error}")
        except (KVLinkerError, AssertionError) as error:
            self._report(f"{_name(call)} raised {type(error).__name__}: {error}")

    def _failed(self, what: str) -> None:
        """Take note of an error; what became of the objects of that call, nobody knows."""
        self._note_error(what)
        self._generation += 1
        self._own.clear()
        self._close_session()

    # ---- choosing -----------------------------------------------------------------------------

    def _own_keys(self, kind: int) -> tuple[ObjectKey, ...]:
        return self._keys.own(self._name, kind, self._generation)

    def _some_kind(self) -> int:
        return self._choose.randrange(self._keys.kinds)

    def _some_keys(self, family: Family, kind: int) -> tuple[ObjectKey, ...]:
        """Return some keys of objects of a kind, each once."""
        known = self._own_keys(kind) if family is Family.OWN else self._shared[family, kind]
        if self._choose.random() < _HALF:
            known = known[:_HOT]
        return tuple(
            self._choose.sample(known, min(len(known), self._choose.randint(1, _MOST_KEYS)))
        )

    def _some(self) -> tuple[Family, int, tuple[ObjectKey, ...]]:
        family, kind = self._choose.choice(list(Family)), self._some_kind()
        return family, kind, self._some_keys(family, kind)

    # ---- writing ------------------------------------------------------------------------------

    def _write(self) -> None:
        family, kind, keys = self._some()
        if family is Family.VOLATILE and self._choose.random() < _REPLACED:
            kind = (kind + 1) % len(self._shelves)
        shelf = self._shelves[kind]
        is_allowed = self._choose.random() < _ALLOWED
        statuses = self._put(shelf, keys, is_allowed=is_allowed)
        self.counts.update(status.value for status in statuses)
        if not is_allowed and WriteStatus.WRITTEN in statuses:
            self._report(f"a write that was not allowed answered {_values(statuses)}")
        if family is Family.OWN:
            self._note_own(keys, statuses)
        if WriteStatus.FAILED in statuses:
            self._failed(f"a write answered {_values(statuses)}")

    def _put(
        self, shelf: Shelf, keys: Sequence[ObjectKey], *, is_allowed: bool
    ) -> tuple[WriteStatus, ...]:
        if self._plant is Plant.LIE:
            rows = first_rows(shelf.plan(range(len(keys))).pages)
            lying = FlippingAccess(shelf.access, rows)
            return shelf.write(keys, memory=lying, may_publish=lambda: is_allowed)
        return shelf.write(keys, may_publish=lambda: is_allowed)

    def _note_own(self, keys: Sequence[ObjectKey], statuses: Sequence[WriteStatus]) -> None:
        for key, status in zip(keys, statuses, strict=True):
            if status is WriteStatus.EXISTS and key not in self._own:
                # Right where the answer to a first try was lost.
                self._failed(f"own object {key.hex()} was stored already, and nobody had stored it")
                return
            if status.is_stored:
                self._own.add(key)

    # ---- reading ------------------------------------------------------------------------------

    def _read(self) -> None:
        family, kind, keys = self._some()
        self._note_read("read", family, keys, self._shelves[kind].read(keys))

    def _read_layers(self) -> None:
        if not self._store.capabilities.ranged_reads:
            return
        family, kind, keys = self._some()
        shelf = self._shelves[kind]
        with shelf.open(keys) as session:
            for layer in range(self._choose.randint(1, LAYERS)):
                statuses = shelf.read(keys, session=session, layer=layer)
                self._note_read("layer", family, keys, statuses)

    def _note_read(
        self, what: str, family: Family, keys: Sequence[ObjectKey], statuses: Sequence[ReadStatus]
    ) -> None:
        """Count what a read answered; the shelf has compared every byte."""
        self.counts.update(f"{what} {status.value}" for status in statuses)
        if ReadStatus.CORRUPT in statuses:
            self._report(f"a {what} answered {_values(statuses)}: nothing here damages objects")
        if family is Family.OWN:
            found = [status is ReadStatus.OK for status in statuses]
            self._check_own(keys, found, "was read")
        if ReadStatus.FAILED in statuses:
            self._failed(f"a {what} answered {_values(statuses)}")

    def _open_session(self) -> None:
        self._close_session()
        _, kind, keys = self._some()
        session = self._shelves[kind].open(keys)
        self._reading = _Reading(session=session, kind=kind, keys=keys)

    def _read_session(self) -> None:
        reading = self._reading
        if reading is None:
            return
        statuses = self._shelves[reading.kind].read(reading.keys, session=reading.session)
        # An own object may have been stored and removed again while the session was open.
        self._note_read("later", Family.VOLATILE, reading.keys, statuses)

    def _close_session(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.session.close()

    # ---- holding, removing, looking -------------------------------------------------------------

    def _hold(self) -> None:
        """Hold what everybody leaves alone, and read it: with a server that dies, it may go all the same."""
        if not self._store.capabilities.leases:
            return
        kind = self._some_kind()
        keys = self._some_keys(Family.STABLE, kind)
        hold = self._store.hold(keys, seconds=_HOLD_SECONDS)
        statuses = self._shelves[kind].read(keys)
        lost = [
            key
            for key, is_held, status in zip(keys, hold.present, statuses, strict=True)
            if is_held and status is not ReadStatus.OK
        ]
        hold.release()
        self.counts["held"] += sum(hold.present)
        self.counts["held and lost"] += len(lost)

    def _delete(self) -> None:
        family = self._choose.choice((Family.VOLATILE, Family.OWN))
        kind = self._some_kind()
        keys = self._some_keys(family, kind)
        self.counts["removed"] += sum(self._store.delete(keys))
        if family is Family.OWN:
            self._own.difference_update(keys)
            if self._plant is Plant.RESURRECT:
                self._shelves[kind].write(keys)
            self._check_own(keys, self._store.exists(keys), "exists")

    def _clear(self) -> None:
        namespace = self._own_keys(0)[0][:NAMESPACE_BYTES]
        self.counts["removed"] += self._store.clear(namespace)
        self._own.clear()
        self._look()

    def _look(self) -> None:
        _, _, keys = self._some()
        if len(self._store.exists(keys)) != len(keys):
            self._report(f"exists did not answer once for each of {len(keys)} keys")
        for kind in range(self._keys.kinds):
            own = self._own_keys(kind)
            self._check_own(own, self._store.exists(own), "exists")

    def _check_own(self, keys: Sequence[ObjectKey], found: Sequence[bool], what: str) -> None:
        for key, is_there in zip(keys, found, strict=True):
            if is_there and key not in self._own:
                # Right where a first try landed late, at a server that had hung.
                self._failed(f"own object {key.hex()} {what}, and it was deleted or never stored")
                return

    def _ask(self) -> None:
        if self._plant is Plant.ERROR:
            msg = "planted"
            raise StoreError(msg)
        stats = self._store.stats()
        if min(stats.objects, stats.used_bytes) < 0:
            self._report(f"stats said {stats}")


def _name(call: Callable[[], None]) -> str:
    return call.__name__.strip("_")


def _values(statuses: Sequence[WriteStatus | ReadStatus]) -> list[str]:
    return [status.value for status in statuses]

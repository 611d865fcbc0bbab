"""What a tiered store hands out: sessions that read each object from the nearest tier that has it, and holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvlinker.device import DeviceAccess
from kvlinker.errors import StoreClosedError
from kvlinker.event_counts import EventCounts
from kvlinker.plans import TransferPlan
from kvlinker.store import Hold, ReadRequest, ReadSession, ReadStatus
from kvlinker.stores.host_pages import RangesSeen
from kvlinker.stores.promotion import Promoter, Promotion
from kvlinker.stores.tier import Tier
from kvlinker.stores.tier_copy import of_keys

__all__ = ["TieredHold", "TieredReadSession"]

_OK, _MISS, _FAILED = ReadStatus.OK, ReadStatus.MISS, ReadStatus.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Objects of a session that are read from one tier."""

    tier: Tier
    positions: tuple[int, ...]
    session: ReadSession | None
    """None where the tier did not open one."""

    @classmethod
    def opened(cls, tier: Tier, request: ReadRequest, positions: Sequence[int]) -> _Part:
        asked = of_keys(request, positions)
        session = tier.ask(lambda store: store.open_read(asked), otherwise=None)
        return cls(tier=tier, positions=tuple(positions), session=session)

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> dict[int, ReadStatus]:
        """Read the part's pages of a plan; one status by position."""
        if self.session is None:
            return dict.fromkeys(self.positions, _FAILED)
        is_all = len(self.positions) == plan.num_pages
        own = plan if is_all else plan.select(self.positions)
        statuses = self.tier.read(self.session, own, memory)
        return dict(zip(self.positions, statuses, strict=True))


class TieredReadSession(ReadSession):
    """Objects of both tiers; what the near one turns out not to have, or not right, is read from the far one."""

    def __init__(
        self,
        near: Tier,
        far: Tier,
        request: ReadRequest,
        *,
        promoter: Promoter,
        counts: EventCounts,
        since: int,
        check_open: Callable[[], None],
    ) -> None:
        """Open what the near tier says it has there, and all others in the far one.

        Args:
            near: is asked first.
            far: is asked for the rest.
            request: what is to be read.
            promoter: gets what was read whole from the far tier, when the session is closed.
            counts: where hits are counted, as `NAME_hits`, and objects that neither has, as `missed`.
            since: removals when the session was opened.
            check_open: raises once the store was closed.
        """
        self._far, self._request = far, request
        self._promoter, self._counts = promoter, counts
        self._since, self._check_open = since, check_open
        self._lock = threading.Lock()
        self._is_closed = False
        self._was_read = False
        self._seen = RangesSeen(request.object_bytes)
        self._from_far: set[int] = set()
        """Objects that the far tier has given so far, all of what was asked."""
        is_near = near.exists(request.keys)
        held = [i for i, is_there in enumerate(is_near) if is_there]
        rest = [i for i, is_there in enumerate(is_near) if not is_there]
        self._far_parts: list[_Part] = []
        with ExitStack() as opening:
            self._closing = opening
            self._near_part = self._open(near, held) if held else None
            if rest:
                self._far_parts.append(self._open(far, rest))
            self._closing = opening.pop_all()

    def _open(self, tier: Tier, positions: Sequence[int]) -> _Part:
        part = _Part.opened(tier, self._request, positions)
        if part.session is not None:
            self._closing.callback(part.session.close)
        return part

    def read(self, plan: TransferPlan, memory: DeviceAccess) -> tuple[ReadStatus, ...]:
        """See ReadSession."""
        self._check_open()
        self._check_fit(plan)
        found = self._near_part.read(plan, memory) if self._near_part else {}
        self._fall_back([i for i, status in found.items() if status is not _OK])
        given: dict[int, ReadStatus] = {}
        for part in self._far_parts:  # behind the near tier: what is wrong there is overwritten
            given |= part.read(plan, memory)
        self._note(plan, found, given)
        return tuple(
            _better(found.get(i, _MISS), given.get(i)) for i in range(len(self._request.keys))
        )

    def _check_fit(self, plan: TransferPlan) -> None:
        if self._is_closed:
            msg = f"pool {plan.pool!r}: this read session was closed; open another"
            raise StoreClosedError(msg)
        self._request.check(plan)

    def _fall_back(self, positions: Sequence[int]) -> None:
        """Open in the far tier what it was not asked for yet."""
        known = {i for part in self._far_parts for i in part.positions}
        fresh = [i for i in positions if i not in known]
        if fresh:
            self._far_parts.append(self._open(self._far, fresh))

    def _note(
        self, plan: TransferPlan, found: dict[int, ReadStatus], given: dict[int, ReadStatus]
    ) -> None:
        good = {i for i, status in given.items() if status is _OK}
        self._from_far = self._from_far & good if self._was_read else good
        self._seen.add(plan)
        if not self._was_read:  # once a session, however many layers it is read by
            near_hits = [i for i, status in found.items() if status is _OK and i not in good]
            if self._near_part:
                self._counts.add(f"{self._near_part.tier.name}_hits", len(near_hits))
            self._counts.add(f"{self._far.name}_hits", len(good))
            self._counts.add("missed", len(self._request.keys) - len(near_hits) - len(good))
        self._was_read = True

    def close(self) -> None:
        """See ReadSession."""
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
        if was_open:
            with ExitStack() as closing:  # whichever of them raises
                closing.callback(self._promote)
                closing.push(self._closing)

    def _promote(self) -> None:
        ranges = self._seen.tiling()
        if ranges is not None and self._from_far:
            request = of_keys(self._request, sorted(self._from_far))
            self._promoter.offer(Promotion(request=request, ranges=ranges, since=self._since))


def _better(near: ReadStatus, far: ReadStatus | None) -> ReadStatus:
    """Return what became of an object that was looked for in both tiers; None where the far one was not asked."""
    if far is None or (far is _MISS and near is not _OK):
        return near
    return far


class TieredHold(Hold):
    """A hold in each tier on what it has."""

    def __init__(self, holds: ExitStack, present: tuple[bool, ...]) -> None:
        """Keep what releases the tiers' holds, and which keys one of them names."""
        self._holds = holds
        self._present = present

    @property
    def present(self) -> tuple[bool, ...]:
        """See Hold."""
        return self._present

    def release(self) -> None:
        """See Hold."""
        self._holds.close()

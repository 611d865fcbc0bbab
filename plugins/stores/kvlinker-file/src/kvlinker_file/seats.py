"""Seats are the openers of a directory: each has a lock that ends with it, and a bit in every row's marks."""

from __future__ import annotations

import os

from kvlinker.errors import StoreBusyError
from kvlinker_file.directory import StoreDirectory
from kvlinker_file.tables import MAX_SEATS

__all__ = ["Seats"]


class Seats:
    """The seats of a directory as one opener sees them; the commit lock guards every call."""

    def __init__(self, directory: StoreDirectory) -> None:
        """Look who is there, and take no seat yet."""
        self._directory = directory
        self.own = -1

    def take(self) -> list[int]:
        """Take the first free seat; return the seats of the other openers.

        Raises:
            StoreBusyError: all seats are taken.
        """
        for seat in range(MAX_SEATS):
            if self._directory.take_seat(seat):
                self.own = seat
                return self.others()
        msg = (
            f"file store {self._directory.path}: is open {MAX_SEATS} times, by processes "
            f"{', '.join(sorted({self.pid_of(seat) for seat in range(MAX_SEATS)}))}; close one"
        )
        raise StoreBusyError(msg)

    def check_not_inherited(self) -> None:
        """Refuse a process that was forked from one that has the store open.

        It has that one's database connection, whose locks it has not: a second one would take them for its own.

        Raises:
            StoreBusyError: it is such a process.
        """
        pids = {self.pid_of(seat) for seat in self.others()}
        if self._directory.has_open_index() and str(os.getpid()) not in pids:
            msg = (
                f"file store {self._directory.path}: is in use by a process that this process {os.getpid()} "
                f"was forked from; open it in a process that is started anew, such as by spawn"
            )
            raise StoreBusyError(msg)

    def others(self) -> list[int]:
        """Return the seats of the openers that live, but for this one."""
        every = (seat for seat in range(MAX_SEATS) if seat != self.own)
        return [seat for seat in every if self._directory.is_seated(seat)]

    @property
    def own_mask(self) -> int:
        """The bit of this opener."""
        return 1 << self.own

    def living_mask(self) -> int:
        """Return the bits of all openers that live."""
        return self.own_mask | sum(1 << seat for seat in self.others())

    def dead_mask(self, taken: int) -> int:
        """Return those bits of seats that were taken whose opener is gone."""
        mask = 0
        for seat in range(MAX_SEATS):
            is_other = taken >> seat & 1 and seat != self.own
            if is_other and not self._directory.is_seated(seat):
                mask |= 1 << seat
        return mask

    def pid_of(self, seat: int) -> str:
        """Return the process that has a seat."""
        return self._directory.pid_of(seat)

"""A fetch asks for pieces of one object, compares their checksums, and puts them in their places, in its own thread."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvlinker.framed_objects import FoundObjects, Piece, are_ranges_right
from kvlinker_s3.requests import Request, ranges_of
from kvlinker_s3.state import checksum

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Fetched", "fetch"]


class Fetched(IntEnum):
    """What came of a fetch; bytes that are not right are put nowhere."""

    RIGHT = 0
    GONE = 1
    """The object is not there any more, or is shorter by now."""
    SHORT = 2
    """The answer has fewer bytes than were asked for."""
    CHANGED = 3
    """Its bytes are not those that the header vouches for."""


def fetch(
    name: str,
    part: FoundObjects,
    number: int,
    pieces: Sequence[Piece],
    targets: Sequence[NDArray[np.uint8]],
) -> Request[Fetched]:
    """Ask for pieces of an object.

    Args:
        name: of the object.
        part: has its header.
        number: of the object in the part.
        pieces: what to ask for.
        targets: [bytes] one for each piece; all of them are filled, or none.
    """
    starts = [part.header_bytes + piece.start for piece in pieces]
    request = ranges_of(name, starts, [piece.size for piece in pieces])

    def ask(client: ObjectStore) -> Fetched:
        views = request(client)
        if views is None:
            return Fetched.GONE
        found = list(zip(pieces, views, targets, strict=True))
        if any(len(view) != piece.size for piece, view, _ in found):
            return Fetched.SHORT
        for piece, view, _ in found:
            if not are_ranges_right(part.headers, number, piece, view, checksum=checksum):
                return Fetched.CHANGED
        for _, view, target in found:
            target[:] = np.frombuffer(view, dtype=np.uint8)
        return Fetched.RIGHT

    return ask

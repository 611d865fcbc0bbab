"""Result codes of Mooncake's client, as its `types.h` numbers them: the ones that this store tells apart."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ABSENT", "CONTENDED", "FULL", "UNANSWERED", "WHOLE_ONLY", "Code"]


class Code(IntEnum):
    """One result; counts of bytes are results too, and not negative."""

    DONE = 0
    NO_SEGMENT = -101
    NO_SPACE = -200
    """No segment has room, or there is none at all."""
    REFUSED = -600
    """Wrong arguments; no session; ranges of an object, or by a client, that serves whole objects alone."""
    NO_REPLICA = -702
    """No copy in memory: the object is on disk alone."""
    NOT_READY = -703
    """Its writer has not ended, or never will."""
    NOT_FOUND = -704
    EXISTS = -705
    """Somebody has written it, or is writing it, or died over it."""
    LEASED = -706
    LEASE_OVER = -707
    REPLICA_NOT_FOUND = -710
    REPLICA_GONE = -712
    NOT_TRANSFERRED = -800
    """The segment that holds the object cannot be reached."""
    NO_ANSWER = -900
    """The master did not answer the client, within its own 4.3 seconds."""
    ANSWER_LATE = -901
    """It took the question, and did not answer within 30 seconds."""


ABSENT = frozenset({Code.NOT_READY, Code.NOT_FOUND, Code.REPLICA_NOT_FOUND, Code.REPLICA_GONE})
"""A read that fails so is a miss."""
WHOLE_ONLY = frozenset({Code.REFUSED, Code.NO_REPLICA})
"""A ranged read that fails so may succeed for the whole object."""
CONTENDED = frozenset({Code.EXISTS, Code.REFUSED})
"""A write that cannot begin so meets another one's object: somebody else's, or one of this process under way."""
UNANSWERED = frozenset({Code.NO_ANSWER, Code.ANSWER_LATE})
"""Nobody has said anything."""
FULL = frozenset({Code.NO_SPACE, Code.NO_SEGMENT})

"""Failures are obstore's errors, told apart: the server is down, refuses us, is full, or has refused one request."""

from __future__ import annotations

import re
from enum import Enum

__all__ = ["Failure", "brief", "failure_of"]

_STATUS = re.compile(r"status code: (\d{3})")
_MAX_TEXT = 400
_REFUSALS = frozenset({401, 403})
_NO_SUCH_RANGE = frozenset({400, 416})
_TOO_MANY = 429
_NOT_IMPLEMENTED = 501
_NO_STORAGE = 507
_FULL_TEXTS = (
    "StorageFull",
    "QuotaExceeded",
    "InsufficientStorage",
    "No space left",
    "StorageLimit",
)
_RANGE_TEXTS = ("Received non-partial response", "UnexpectedRange")


class Failure(Enum):
    """What an error says of a server."""

    DOWN = "down"
    """It cannot be reached, is silent, or fails again and again."""
    REFUSED = "refused"
    """It does not let us."""
    WRONG_RANGE = "wrong range"
    """It was asked for a range, and answered with something else, such as the whole object."""
    NO_SUCH_RANGE = "no such range"
    """The object, or what lies in its place, is shorter than the range."""
    NOT_IMPLEMENTED = "not implemented"
    FULL = "full"
    """There is no space left, or no quota."""
    ODD = "odd"
    """It refused this request, and may answer others."""


def failure_of(error: Exception) -> Failure:
    """Return what an error of the library says, which has been through its retries."""
    from obstore.exceptions import (
        AlreadyExistsError,
        NotSupportedError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )

    text = str(error)
    found = _STATUS.search(text)
    status = int(found[1]) if found else None
    if status == _NO_STORAGE or any(part in text for part in _FULL_TEXTS):
        return Failure.FULL
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in _REFUSALS:
        return Failure.REFUSED
    if any(part in text for part in _RANGE_TEXTS):
        return Failure.WRONG_RANGE
    if status in _NO_SUCH_RANGE or "Requested range was invalid" in text:
        return Failure.NO_SUCH_RANGE
    if isinstance(error, NotSupportedError) or status == _NOT_IMPLEMENTED:
        return Failure.NOT_IMPLEMENTED
    is_answered = status is not None and 400 <= status < 500 and status != _TOO_MANY  # noqa: PLR2004  # HTTP's classes
    is_answered = is_answered or isinstance(error, AlreadyExistsError | PreconditionError)
    is_local = "LocalFileSystem" in text or isinstance(error, OSError)
    is_late = isinstance(error, TimeoutError)
    return Failure.ODD if (is_answered or is_local) and not is_late else Failure.DOWN


def brief(said: BaseException | str) -> str:
    """Return the first lines of an error in one: what follows is the library's own structure, many lines long."""
    text = str(said).split("Debug source:", maxsplit=1)[0]
    return " ".join(text.split())[:_MAX_TEXT]

"""Store options are what a configuration names for a store plugin: every one refuses what is none in the same words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from kvlinker.errors import ContractError
from kvlinker.spelling import nearest_names

__all__ = ["as_flag", "as_seconds", "check_names"]

_HOUR = 3600.0
_PERIODS = {_HOUR: "an hour", 86_400.0: "a day"}


def check_names(
    store: str, names: Iterable[object], known: Collection[str], *, needed: Mapping[str, str]
) -> None:
    """Refuse options that there are not, with the one that was meant, and the lack of one that is needed.

    Args:
        store: what the store is called in messages.
        names: of the options that are given.
        known: names of all options.
        needed: those that must be given, each with an example of what to write.

    Raises:
        ContractError: a name is unknown, or one is missing.
    """
    given = list(names)
    for name in given:
        if name not in known:
            close = " or ".join(map(repr, nearest_names(str(name), known)))
            hint = f"did you mean {close}?" if close else f"known are {sorted(known)}"
            msg = f"{store}: unknown option {name!r}; {hint}"
            raise ContractError(msg)
    for name, example in needed.items():
        if name not in given:
            msg = f"{store}: option {name!r} is needed, such as {example}"
            raise ContractError(msg)


def as_seconds(
    value: object, what: str, *, at_most: float = _HOUR, may_be_zero: bool = False
) -> float:
    """Return a number of seconds that somebody is to wait.

    Args:
        value: the option's.
        what: names the option in messages.
        at_most: largest number allowed.
        may_be_zero: whether nobody may wait at all.

    Raises:
        ContractError: it is no number, or out of bounds.
    """
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if 0 < number <= at_most or (may_be_zero and number == 0):
        return float(number)
    limit = _PERIODS.get(at_most, f"{at_most:g}")
    msg = f"{what} must be a positive number of seconds, at most {limit}, got {value!r}"
    raise ContractError(msg)


def as_flag(value: object, what: str) -> bool:
    """Return an option that is on or off.

    Args:
        value: the option's.
        what: names the option in messages.

    Raises:
        ContractError: it is neither.
    """
    if isinstance(value, bool):
        return value
    msg = f"{what} must be true or false, got {value!r}"
    raise ContractError(msg)

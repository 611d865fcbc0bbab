"""What stands in for a module, a class or a function of a package that is not there."""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

__all__ = ["StandInClass", "StandInFunction", "StandInModule", "stand_in"]


class StandInClass(type):
    """Metaclass of classes that can be named and derived from; every name in them exists."""

    def __getattr__(cls, name: str) -> object:
        return _remembered(cls, cls.__qualname__, name)


class StandInFunction:
    """A name that can be imported and passed on, has every attribute, and raises when it is called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> object:
        return _remembered(self, self.__name__, name)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise NotImplementedError."""
        del args, kwargs
        msg = f"{self.__name__} is a stand-in: nothing on this machine can run it"
        raise NotImplementedError(msg)

    def __repr__(self) -> str:
        return f"<stand-in for {self.__name__}>"


class StandInModule(ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name: str) -> object:
        return _remembered(self, self.__name__, name)


def stand_in(name: str) -> object:
    """Return what stands in for a dotted name: a class where it is written as one, else a function."""
    last = name.rpartition(".")[2]
    return (
        StandInClass(last, (), {"__qualname__": name})
        if last[:1].isupper()
        else StandInFunction(name)
    )


def _remembered(owner: object, owner_name: str, name: str) -> object:
    """Return the stand-in of an owner's name, the same one each time.

    Raises:
        AttributeError: the name is one that Python itself looks for.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    made = stand_in(f"{owner_name}.{name}")
    setattr(owner, name, made)
    return made

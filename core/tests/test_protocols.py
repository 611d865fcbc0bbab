"""Types are asked once whether they implement a protocol."""

from __future__ import annotations

import gc
import weakref
from typing import Protocol, runtime_checkable

import torch

from kvlinker.protocols import Implementers
from kvlinker.transfers import TensorIndices


@runtime_checkable
class Named(Protocol):
    def name(self) -> str: ...


class Cat:
    def name(self) -> str:
        return "cat"


class Counting(type):
    """Counts how often a class is asked for an attribute."""

    asked = 0

    def __getattribute__(cls, name: str) -> object:
        if name == "name":
            Counting.asked += 1
        return super().__getattribute__(name)


class Dog(metaclass=Counting):
    def name(self) -> str:
        return "dog"


def test_a_type_is_known_by_its_methods() -> None:
    named = Implementers(Named)

    assert [named.has_type_of(value) for value in (Cat(), object(), None, Cat)] == [
        True,
        False,
        False,
        False,
    ]


def test_a_tensor_and_a_type_derived_from_it_are_tensors() -> None:
    tensors = Implementers(TensorIndices)

    assert tensors.has_type_of(torch.zeros(1))
    assert tensors.has_type_of(torch.nn.Parameter(torch.zeros(1)))
    assert not tensors.has_type_of([1])


def test_a_type_is_asked_once() -> None:
    named = Implementers(Named)
    assert named.has_type_of(Dog())
    before = Counting.asked

    assert all(named.has_type_of(Dog()) for _ in range(5))
    assert Counting.asked == before


def test_a_type_that_nobody_uses_any_more_is_forgotten() -> None:
    named = Implementers(Named)
    kind = type("Made", (Cat,), {})
    named.has_type_of(kind())
    forgotten = weakref.ref(kind)

    del kind

    gc.collect()
    assert forgotten() is None

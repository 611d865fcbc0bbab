"""The environment that these tests run in: the SGLang that is stated, and stand-ins for what needs a GPU."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import requires, version
from pathlib import Path

import pytest

PINS = (Path(__file__).parent / "requirements-no-deps.txt").read_text().split()


def test_it_is_the_version_that_the_distribution_names() -> None:
    (named,) = [line for line in requires("kvlinker-sglang") or [] if "sglang==" in line]

    installed = f"sglang=={version('sglang')}"

    assert installed in PINS
    assert named.startswith(installed)


def test_a_kernel_can_be_defined_and_says_its_name_when_it_is_launched() -> None:
    triton = import_module("triton")

    def add_rows() -> None:
        raise AssertionError

    kernel = triton.jit(add_rows)

    with pytest.raises(NotImplementedError, match="add_rows"):
        kernel[(1,)]()


def test_a_function_of_a_stand_in_can_be_named_and_not_called() -> None:
    silu = import_module("sgl_kernel").silu_and_mul

    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.silu_and_mul"):
        silu()

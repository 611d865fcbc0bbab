"""The names of triton that are used while SGLang and torch are imported, with what they need to do then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

__all__ = ["Config", "JITFunction", "KernelInterface", "constexpr", "names_of"]


class KernelInterface:
    """Base of kernels."""


class JITFunction(KernelInterface):
    """A kernel that is defined and can never be launched."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.fn = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: object) -> NoReturn:
        self(grid)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise NotImplementedError."""
        del args, kwargs
        msg = f"the triton kernel {self.__name__} cannot run: triton is a stand-in in this environment"
        raise NotImplementedError(msg)


class Config:
    """One choice of an autotuned kernel, which is never made."""

    def __init__(self, kwargs: Mapping[str, object] | None = None, **options: object) -> None:
        self.kwargs = dict(kwargs or {})
        self.options = options


class constexpr:  # noqa: N801 - triton's name
    """A constant of a kernel."""

    def __init__(self, value: object = None) -> None:
        self.value = value


class OutOfResources(Exception):  # noqa: N818 - triton's name
    """Never raised: there is no kernel that could run out of anything."""


class PTXASError(Exception):
    """Never raised: there is no compiler."""


def jit(function: Callable[..., object] | None = None, **options: object) -> object:
    """Define a kernel, as a decorator with options or without."""
    del options
    return JITFunction if function is None else JITFunction(function)


def unchanged(*args: object, **options: object) -> Callable[[object], object]:
    """Return a decorator that leaves a kernel as it is."""
    del args, options
    return lambda kernel: kernel


def cdiv(dividend: int, divisor: int) -> int:
    """Divide, rounding up."""
    return -(dividend // -divisor)


def next_power_of_2(number: int) -> int:
    """Return the lowest power of two that is not below a number."""
    return 1 << (number - 1).bit_length() if number > 0 else 1


def triton_key() -> str:
    """Return what distinguishes this compiler from others."""
    return "stand-in"


def names_of(module: str) -> Mapping[str, object]:
    """Return the names that a module needs beside its stand-ins."""
    kernels = {"JITFunction": JITFunction, "KernelInterface": KernelInterface}
    tables: Mapping[str, Mapping[str, object]] = {
        "triton": {
            "__version__": "3.0.0",
            "Config": Config,
            "autotune": unchanged,
            "cdiv": cdiv,
            "heuristics": unchanged,
            "jit": jit,
            "next_power_of_2": next_power_of_2,
            **kernels,
        },
        "triton.knobs": {"runtime": None},
        "triton.language": {"constexpr": constexpr},
        "triton.runtime": kernels,
        "triton.runtime.autotuner": {"OutOfResources": OutOfResources, "PTXASError": PTXASError},
        "triton.runtime.cache": {"triton_key": triton_key},
        "triton.runtime.jit": kernels,
        "triton.compiler.compiler": {"triton_key": triton_key},
        "torchvision": {"__version__": "0.0.0"},
        "sgl_kernel": {"__version__": "0.4.10"},
    }
    return tables.get(module, {})

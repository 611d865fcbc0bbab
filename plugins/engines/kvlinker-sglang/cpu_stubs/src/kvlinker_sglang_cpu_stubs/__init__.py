"""Lets SGLang start where there is no GPU: triton, torchvision and sgl_kernel are stand-ins that can be imported.

A `.pth` file beside this package calls `install` in every interpreter of the environment that it is installed in.
A stand-in computes nothing: kernels can be defined, and say their name when they are called.
"""

from __future__ import annotations

from kvlinker_sglang_cpu_stubs.environment import set_variables
from kvlinker_sglang_cpu_stubs.finder import STUBBED, find_stand_ins
from kvlinker_sglang_cpu_stubs.forked_processes import fork_processes

__all__ = ["STUBBED", "install"]


def install() -> None:
    """Let imports find the stand-ins, and processes the CPU; once is enough."""
    find_stand_ins()
    set_variables()
    fork_processes()

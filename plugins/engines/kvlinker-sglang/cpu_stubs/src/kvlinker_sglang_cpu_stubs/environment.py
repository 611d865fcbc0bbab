"""Variables that every process of the environment finds set, so that all of them compile and run the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["set_variables"]


def set_variables() -> None:
    """Choose the CPU, and keep what SGLang compiles in the environment, built by its own ninja.

    A folder that environments share is compiled anew by each of them, whenever another one was there.
    """
    tools = str(Path(sys.prefix, "bin"))
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([tools, *(folder for folder in path if folder != tools)])
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))

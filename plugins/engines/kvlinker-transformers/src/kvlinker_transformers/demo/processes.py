"""Processes: starts one part of a case in a process of its own, and follows it until it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvlinker.errors import KVLinkerError
from kvlinker_transformers.demo.cases import DemoCase
from kvlinker_transformers.demo.records import Part, Progress

__all__ = ["DemoProcessError", "run_process"]

_CHILD = "kvlinker_transformers.demo.child"
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # everything is on this machine; nothing is asked for elsewhere
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",  # of libraries; what goes wrong here is raised
}
_SHOWN_LINES = 12


class DemoProcessError(KVLinkerError, RuntimeError):
    """A process of the demo failed; the text has the end of its output."""


def run_process(
    case: DemoCase, part: Part, folder: Path, on_step: Callable[[Progress], None]
) -> None:
    """Run one part of a case to its end; what it did is in its record.

    Args:
        case: model and text.
        part: what the process does.
        folder: of the demo.
        on_step: called with every step as it begins.

    Raises:
        DemoProcessError: the process failed.
    """
    log = folder / f"{case.name}-{part.value}.log"
    with log.open("w", encoding="utf-8") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", _CHILD, case.name, part.value, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        with child:
            try:
                for line in child.stdout or ():
                    on_step(Progress.from_line(line))
            except BaseException:
                child.kill()  # or it would fill the folder after it was deleted
                child.wait()
                raise
    if child.returncode:
        output = log.read_text(encoding="utf-8", errors="replace").splitlines()
        end = "\n".join(output[-_SHOWN_LINES:])
        msg = f"{case.name}: the process that should {part.value} ended with code {child.returncode}:\n{end}"
        raise DemoProcessError(msg)

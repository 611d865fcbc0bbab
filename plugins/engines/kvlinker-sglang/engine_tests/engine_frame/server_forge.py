"""Forks servers from a process that has imported SGLang once, which is most of what the start of one takes.

As a program it reads orders, a line of JSON each, and answers each with a process number. It ends with its input, and
every server ends with it.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module

__all__ = ["Forge", "Order"]

SERVER = "sglang.launch_server"
PRELOADED = (SERVER, "sglang.srt.entrypoints.http_server", "sglang.srt.models.registry")
"""Nothing of kvlinker's: a server loads what it links as it does elsewhere."""
END_WITH_PARENT = 1
"""The number of prctl's PR_SET_PDEATHSIG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a server is started with."""

    arguments: Sequence[str]
    """Of SGLang's command line, behind the name of the program."""
    environment: Mapping[str, str]
    """All variables. Those that decide an import are the forge's own."""
    log: str
    """The file that its output is added to."""


class Forge:
    """The process that servers are forked from."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it; the first order waits for its imports."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.close)

    def start(self, order: Order) -> int:
        """Return the process number of a new server, which leads a process group of its own.

        Raises:
            OSError: the forge has ended.
        """
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None
        assert answers is not None
        orders.write(json.dumps(asdict(order)) + "\n")
        orders.flush()
        number = answers.readline()
        if not number:
            msg = f"the process that servers are forked from ended with {self._process.wait()}"
            raise OSError(msg)
        return int(number)

    def close(self) -> None:
        """End it, and every server that it started."""
        self._process.communicate()


def _serve_orders() -> Order | None:
    """Fork a server for each order; return the order in the server, and nothing once there are no more."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what imports print is no answer
        for name in PRELOADED:
            import_module(name)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a server
        for line in sys.stdin:
            if not os.fork():
                os.setsid()
                print(os.getpid(), file=answers, flush=True)
                return Order(**json.loads(line))
    return None


def _become(order: Order) -> None:
    """Turn this process into what a new one with this order would be."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None, use_errno=True).prctl(END_WITH_PARENT, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for ours, given in enumerate((nothing, log, log)):
        os.dup2(given, ours)
    os.environ.clear()
    os.environ.update(order.environment)
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
    sys.argv[:] = [SERVER, *order.arguments]


def _run() -> None:
    order = _serve_orders()
    if order is None:
        os._exit(
            0
        )  # to take what was imported apart takes seconds, and servers end with this process alone
    _become(order)
    # runpy warns of a module that is imported already: here it is on purpose.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()

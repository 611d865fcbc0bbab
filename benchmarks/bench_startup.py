"""Time the start: what importing kvlinker and loading every installed plugin add to a new process.

Each is run in processes of its own, in turn; what Python itself takes to start is taken off.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from measuring import Row, Scale, Times, in_turn, run_script

TOPIC = "Start-up"
STATEMENTS = {
    "python": "pass",
    "`import kvlinker`": "import kvlinker",
    "`import kvlinker.linker`": "import kvlinker.linker",
    "`load_plugins()`, all plugins of this repository": (
        "from kvlinker.discovery import load_plugins; load_plugins()"
    ),
    "`import numpy`": "import numpy",
    "`import torch`": "import torch",
}
OURS = [name for name in STATEMENTS if "kvlinker" in name or "plugins" in name]
PEERS = ["`import numpy`", "`import torch`"]


def _in_new_process(statement: str) -> Callable[[], float]:
    command = [sys.executable, "-c", statement]
    # The warm-up leaves compiled modules behind, as an installed package has them.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

    def run() -> float:
        start = time.perf_counter()
        subprocess.run(command, check=True, env=environment)
        return time.perf_counter() - start

    return run


def _added(times: Times) -> Times:
    """Return the times without what an empty process takes; at least a millisecond."""
    empty = times.median("python")
    return Times(
        {name: [max(s - empty, 0.001) for s in found] for name, found in times.seconds.items()}
    )


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows."""
    runs = {name: _in_new_process(statement) for name, statement in STATEMENTS.items()}
    times = _added(in_turn(runs, rounds=scale.choose(11, 3)))
    for ours in OURS:
        for peer in PEERS:
            yield Row(
                topic=TOPIC,
                what=ours,
                against=peer,
                ratio=times.ratio(peer, ours),
                figures=times.figures(peer, ours),
            )


if __name__ == "__main__":
    run_script(__doc__, measure)

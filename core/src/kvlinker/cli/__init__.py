"""The `kvlinker` command: shows plugins, layouts, stores and the demo to people, and to programs as JSON.

It needs the extra `kvlinker[cli]`; without it, the command says so in one sentence.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

__all__ = ["main"]

_NEEDED = ("rich", "typer")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit; the process's arguments by default."""
    if absent := [name for name in _NEEDED if find_spec(name) is None]:
        sys.stderr.write(
            f"the kvlinker command needs {' and '.join(absent)}; "
            f"install the extra: pip install 'kvlinker[cli]'\n"
        )
        sys.exit(2)
    from kvlinker.cli.app import run  # noqa: PLC0415  # needs the extra, which may be absent

    run(arguments)

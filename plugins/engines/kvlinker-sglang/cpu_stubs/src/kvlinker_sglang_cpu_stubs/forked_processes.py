"""Processes of a server are forked where a variable says so: they need not import SGLang a second and a third time.

SGLang starts its scheduler and its detokenizer anew, which on two cores is most of the time until a server is up.
A forked process ends without the functions of `atexit`: tests of how a server ends leave the variable alone.
"""

from __future__ import annotations

import multiprocessing
import os

__all__ = ["FORKED", "fork_processes"]

FORKED = "KVLINKER_CPU_STUBS_FORK"
"""The variable; 1 to fork."""


def fork_processes() -> None:
    """Let SGLang's choice of a start method be without effect, where that is asked for."""
    if os.environ.get(FORKED) != "1":
        return
    choose = multiprocessing.set_start_method

    def fork(method: str | None, force: bool = False) -> None:  # noqa: FBT001, FBT002 - multiprocessing's own
        del method
        choose("fork", force=force)

    multiprocessing.set_start_method = fork

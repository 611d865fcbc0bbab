"""Processes of one server's ranks: they are joined by gloo on loopback, run a job each, and end."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TypeVar

import torch

__all__ = ["RankFailed", "run_ranks"]

LIMIT_SECONDS = 400.0
"""Far more than a job takes, also where others keep the cores busy: whoever gets there hangs."""
COLLECTIVE_SECONDS = 200.0
"""Behind it gloo ends a reduction that a rank never enters."""
_PRELOADED = ("rank_preloads",)
_T = TypeVar("_T")


class RankFailed(Exception):  # noqa: N818 - what happened
    """A rank raised, died, or never answered; says which one, and its traceback."""


def run_ranks(job: Callable[[int], _T], size: int, folder: Path) -> list[_T]:
    """Run a job on every rank of a new group of processes, and return what they returned, by rank.

    Args:
        job: can be pickled; gets its rank, and may use `torch.distributed`.
        size: processes.
        folder: where they meet.

    Raises:
        RankFailed: one did not return; none is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    _warm_up()
    meeting = folder / f"meeting-{secrets.token_hex(4)}"
    processes, answers = [], []
    for rank in range(size):
        answer, ours = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(job, rank, size, meeting, ours))
        process.start()
        ours.close()
        processes.append(process)
        answers.append(answer)
    with _ended(processes):
        return _collect(answers, job)


def _warm_up() -> None:
    """Start what ranks are forked from, once: it has imported the engine, and runs nothing else."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOADED))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextmanager
def _ended(processes: Sequence[ForkServerProcess]) -> Iterator[None]:
    """Leave no process behind: those that still run when the block ends in an error hang."""
    try:
        yield
        for process in processes:
            process.join(LIMIT_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(answers: Sequence[Connection], job: Callable[[int], _T]) -> list[_T]:
    """Return the results by rank, and give the others up as soon as one rank failed."""
    results: dict[int, _T] = {}
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(results) < len(answers):
        waiting = {answers[rank]: rank for rank in range(len(answers)) if rank not in results}
        for ready in connection.wait([*waiting], deadline - time.monotonic()):
            assert isinstance(ready, Connection)
            results[waiting[ready]] = _received(ready, waiting[ready], job)
        if time.monotonic() > deadline:
            msg = f"ranks {sorted(waiting.values())} did not end {job} within {LIMIT_SECONDS} s"
            raise RankFailed(msg)
    return [results[rank] for rank in range(len(answers))]


def _received(answer: Connection, rank: int, job: Callable[[int], _T]) -> _T:
    try:
        failure, result = answer.recv()
    except EOFError as error:
        msg = f"rank {rank} died in {job}"
        raise RankFailed(msg) from error
    if failure is not None:
        msg = f"rank {rank} failed in {job}:\n{failure}"
        raise RankFailed(msg)
    found: _T = result
    return found


def _run(
    job: Callable[[int], object], rank: int, size: int, meeting: Path, answer: Connection
) -> None:
    """Be a rank."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        result = job(rank)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        answer.send((None, result))
    except BaseException:  # noqa: BLE001  # the test says what happened
        answer.send((traceback.format_exc(), None))

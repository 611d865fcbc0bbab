"""Faults of one rank's store among several ranks: what each rank sees meanwhile, and when the store is well again."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from faulty_store import PATIENT, install, misbehave
from rank_processes import run_ranks
from rank_trees import Kept, Ranks, Worker, file_store, worker_of

__all__ = ["LOADS", "LOOKUPS", "OFFLOADS", "PAGES", "Endured", "endured"]

PAGES = 5
"""Of each prompt."""
FEWER = 3
"""Of them that every rank has, where one rank alone could not store the rest."""
LOOKUPS = ("deny", "hang", "raise")
"""What goes wrong when one rank asks its store what is there."""
LOADS = ("evict", "hang", "raise")
"""What goes wrong when one rank reads what it was promised."""
OFFLOADS = ("full", "hang", "raise")
"""What goes wrong when one rank writes."""
_CALLS = MappingProxyType({"evict": "open_read"})
_LIMITS = MappingProxyType({**PATIENT, "breaker_seconds": 0.001})


@dataclass(frozen=True, kw_only=True)
class Endured:
    """What a rank saw of one prompt while one rank's store failed, and behind it."""

    before: Kept
    """What it had of the whole prompt."""
    head: Kept
    """What it had of the pages that all ranks stored before."""
    offered: int
    """Pages that the tree offered."""
    failed: bool
    got: Kept
    retried: int
    """Pages that it offered once the store was well."""
    again: Kept
    """What came of the prompt when it had been computed and stored again."""


def endured(ranks: Ranks, bad: int, folder: Path) -> list[Mapping[tuple[str, str], Endured]]:
    """Let the store of one rank fail in every way; return what each rank saw, by what failed and how."""
    return run_ranks(partial(_endure, ranks=ranks, bad=bad, folder=folder), ranks.size, folder)


def _endure(
    rank: int, *, ranks: Ranks, bad: int, folder: Path
) -> Mapping[tuple[str, str], Endured]:
    sys.path.insert(0, str(install(folder / f"plugins-{rank}")))
    control = folder / f"control-{rank}"
    options = {"control": str(control), "path": str(folder / "store"), "capacity": "64MiB"}
    store = {**file_store(folder), "plugin": "faulty", "options": options}
    found = {}
    with worker_of(ranks, rank, store, limits=_LIMITS) as worker:
        trial = _Trial(worker, control if rank == bad else None)
        for number, fault in enumerate(LOOKUPS):
            found["lookup", fault] = trial.restore("exists", fault, first=10_000 + 500 * number)
        for number, fault in enumerate(LOADS):
            call = _CALLS.get(fault, "read")
            found["load", fault] = trial.restore(call, fault, first=20_000 + 500 * number)
        for number, fault in enumerate(OFFLOADS):
            found["offload", fault] = trial.store("write", fault, first=30_000 + 500 * number)
        assert worker.linker.metrics.snapshot().closes
        assert not worker.linker.pending
    return found


class _Trial:
    """One rank while one rank's store is told to fail."""

    def __init__(self, worker: Worker, control: Path | None) -> None:
        self._worker = worker
        self._control = control

    def restore(self, call: str, fault: str, *, first: int) -> Endured:
        """Let a prompt be stored well, and restored while a store fails."""
        before = self._worker.store(PAGES, first=first)
        self._tell((call, fault))
        return self._outcome(before, Kept(), first=first)

    def store(self, call: str, fault: str, *, first: int) -> Endured:
        """Let the head of a prompt be stored well, and the rest while a store fails."""
        head = self._worker.store(FEWER, first=first)
        self._tell((call, fault))
        before = self._worker.store(PAGES, first=first)
        self._tell()
        return self._outcome(before, head, first=first)

    def _outcome(self, before: Kept, head: Kept, *, first: int) -> Endured:
        worker, tokens = self._worker, self._worker.tokens(PAGES, first=first)
        worker.spoil()
        worker.take(2)
        restored, got = worker.restore(tokens, f"first {first}")
        self._tell()
        worker.tree.forget()
        retry = worker.tree.match(tokens, f"retry {first}")
        worker.tree.abort(retry)
        worker.tree.forget()
        return Endured(
            before=before,
            head=head,
            offered=self._pages(restored.match.host_tokens),
            failed=restored.failed,
            got=got,
            retried=self._pages(retry.host_tokens),
            again=self._again(tokens, first=first),
        )

    def _again(self, tokens: Sequence[int], *, first: int) -> Kept:
        self._worker.store(PAGES, first=first)
        self._worker.take(2)
        _, kept = self._worker.restore(tokens, f"again {first}")
        self._worker.tree.forget()
        return kept

    def _tell(self, *faults: tuple[str, str]) -> None:
        """Say what goes wrong from here on, once every rank is done with what came before."""
        torch.distributed.barrier()
        if self._control is not None:
            misbehave(self._control, *faults)
        torch.distributed.barrier()

    def _pages(self, tokens: int) -> int:
        return tokens // self._worker.tree.kind.page_size

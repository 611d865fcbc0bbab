"""What ranks do in tests: each job runs in a process of its own, and returns what that rank saw."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rank_processes import run_ranks
from rank_trees import Kept, Ranks, file_store, worker_of

from kvlinker_file import FileStore, FileStoreOptions
from kvlinker_sglang.engine.launch import launch_name

__all__ = [
    "PAGES",
    "Found",
    "Servers",
    "Stored",
    "launches",
    "objects_in",
    "restored",
    "stored",
]

PAGES = 5
"""Of the prompt."""
TAKEN = 2
"""Pages that are taken before the prompt is loaded, so that it comes to other slots."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What a rank had stored of a prompt."""

    kept: Kept
    written: int
    """Objects that it wrote."""
    skipped: int
    """Objects that it asked for and found written."""
    roles: tuple[str, ...]
    """Of its buffers, as they are described."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a rank got of a prompt."""

    tokens: int
    """Offered from the store, of `prompt_tokens`."""
    prompt_tokens: int
    failed: bool
    kept: Kept

    @property
    def is_all(self) -> bool:
        """Whether the whole prompt came."""
        return self.tokens == self.prompt_tokens and not self.failed

    @property
    def is_nothing(self) -> bool:
        """Whether it is a plain miss."""
        return not self.tokens and not self.failed and not self.kept.slots

    def has(self, before: Stored) -> bool:
        """Whether all that was stored came, byte for byte, to other slots."""
        return (
            self.is_all and self.kept.digest == before.kept.digest and self.kept.moved(before.kept)
        )


class Servers:
    """Servers that stored a prompt and ended, one of each kind."""

    def __init__(self, make_folder: Callable[[], Path]) -> None:
        self._make_folder = make_folder
        self._stored: dict[Ranks, tuple[list[Stored], Path]] = {}

    def __call__(self, ranks: Ranks) -> tuple[list[Stored], Path]:
        """Return what each rank of a server had stored, and in which folder."""
        if ranks not in self._stored:
            folder = self._make_folder()
            self._stored[ranks] = stored(ranks, folder), folder
        return self._stored[ranks]


def objects_in(folder: Path) -> int:
    """Count what a server's store holds."""
    options = FileStoreOptions.of_config({"path": str(folder / "store"), "capacity": "64MiB"})
    with closing(FileStore(options)) as store:
        return store.stats().objects


def stored(ranks: Ranks, folder: Path) -> list[Stored]:
    """Start a server, let it store a prompt, and end it; return what each rank had stored."""
    return run_ranks(partial(_store, ranks=ranks, folder=folder / "store"), ranks.size, folder)


def restored(ranks: Ranks, folder: Path) -> list[Found]:
    """Start a server anew, let it restore that prompt, and end it; return what each rank got."""
    return run_ranks(partial(_restore, ranks=ranks, folder=folder / "store"), ranks.size, folder)


def _store(rank: int, *, ranks: Ranks, folder: Path) -> Stored:
    with worker_of(ranks, rank, file_store(folder)) as worker:
        kept = worker.store(PAGES)
        events = worker.linker.metrics.snapshot().events
        return Stored(
            kept=kept,
            written=events.get("offload_objects", 0),
            skipped=events.get("objects_skipped", 0),
            roles=tuple(worker.tree.description.buffers),
        )


def _restore(rank: int, *, ranks: Ranks, folder: Path) -> Found:
    with worker_of(ranks, rank, file_store(folder)) as worker:
        worker.spoil()
        worker.take(TAKEN)
        tokens = worker.tokens(PAGES)
        restored, kept = worker.restore(tokens, "again")
        worker.tree.forget()
        assert not worker.linker.pending
        return Found(
            tokens=restored.match.host_tokens,
            prompt_tokens=len(tokens),
            failed=restored.failed,
            kept=kept,
        )


def launches(size: int, folder: Path) -> list[str]:
    """Return what each rank of a server calls the start that they share."""
    return run_ranks(_launch, size, folder)


def _launch(rank: int) -> str:
    del rank
    return launch_name(torch.distributed.group.WORLD)

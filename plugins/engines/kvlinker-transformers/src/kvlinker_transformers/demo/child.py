"""One process of the demo: `python -m kvlinker_transformers.demo.child CASE PART FOLDER`.

It reads or continues, tells its steps on standard output as lines of JSON, and leaves a record in the folder.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from kvlinker.discovery import load_plugins
from kvlinker.errors import ContractError, StoreError, StoreTimeoutError
from kvlinker.linker import Linker
from kvlinker.registry import open_store
from kvlinker.transfers import HitPolicy, PoolTransfer
from kvlinker_transformers.demo.cases import CASES, DemoCase, LoadedCase
from kvlinker_transformers.demo.records import Logits, Part, Progress, RunRecord
from kvlinker_transformers.engine import GenerationResult, PagedEngine, pools_for_config
from kvlinker_transformers.page_keys import page_keys
from kvlinker_transformers.pages import RESERVED_PAGE
from kvlinker_transformers.pools import PagedPools

__all__ = ["run_part"]

STORE_CAPACITY = "256MiB"
_SEEDS = {Part.READ: 1, Part.CONTINUE: 2}
"""Both processes hand pages out in another order, so that no page comes back to where it was."""
_RESTORES_ALONE = 3
"""The first one also waits for threads and for memory that nobody touched yet."""
_STEPS = {
    Part.READ: "reads the text and goes on writing",
    Part.CONTINUE: "restores, reads the rest and goes on writing",
}
_NONSENSE = 0xFF
"""NaN in bf16, fp32 and fp8 alike: a byte that was not restored cannot go unseen."""

Tell: TypeAlias = Callable[[Progress], None]


def run_part(case: DemoCase, part: Part, folder: Path, tell: Tell) -> None:
    """Do one part of a case and leave its record in the folder.

    Raises:
        KVLinkerError: no plugin takes the model's pools, or the store cannot be opened or filled.
    """
    # Sums in another order have other last bits: one thread in both processes makes logits comparable bit by bit.
    torch.set_num_threads(1)
    tell(Progress(step="loads the model"))
    loaded = case.load(folder / "model")
    pools = pools_for_config(loaded.model.config, pages=case.pages)
    options = {"path": str(folder / "store"), "capacity": STORE_CAPACITY}
    store = open_store(load_plugins(), "file", options)
    try:
        with PagedEngine(loaded.model, pools, shuffle_seed=_SEEDS[part]) as engine:
            engine.generate(
                [1], max_new_tokens=1
            )  # what torch sets up at its first pass costs neither part
            engine.attach(store)
            record, logits = _run(case, part, loaded, engine, tell)
    finally:
        store.close()
    record.save(folder, case.name, part, logits)


def _run(
    case: DemoCase, part: Part, loaded: LoadedCase, engine: PagedEngine, tell: Tell
) -> tuple[RunRecord, Logits]:
    pools, linker = engine.pools, _linker(engine)
    restore_seconds = 0.0
    if part is Part.CONTINUE:
        tell(Progress(step="fills its pools with 0xFF and restores to see how long it takes"))
        _fill_with_nonsense(pools)
        restore_seconds = statistics.median(
            _restore_alone(linker, pools, loaded.prompt, f"restore alone {number}")
            for number in range(_RESTORES_ALONE)
        )
        _fill_with_nonsense(pools)
    before = linker.metrics.snapshot().events
    result = _generate(case, part, loaded, engine, tell)
    tell(Progress(step="waits for its store", done=len(result.tokens)))
    if not engine.wait_for_offloads():
        msg = "the store did not take the pages in time"
        raise StoreTimeoutError(msg)
    after = linker.metrics.snapshot().events
    moved = "offload_bytes" if part is Part.READ else "load_bytes"
    record = RunRecord(
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        page_size=pools.page_size,
        pools={entry.name: entry.page_bytes for entry in linker.group.entries},
        moved_bytes=after.get(moved, 0) - before.get(moved, 0),
        restore_seconds=restore_seconds,
        first_token_seconds=result.first_token_seconds,
        tokens=result.tokens,
        text=loaded.decode(result.tokens),
        prompt_end=loaded.prompt_end,
    )
    return record, result.logits.float().numpy()


def _linker(engine: PagedEngine) -> Linker:
    if engine.linker is None:
        msg = "the engine has no store attached"
        raise ContractError(msg)
    return engine.linker


def _generate(
    case: DemoCase, part: Part, loaded: LoadedCase, engine: PagedEngine, tell: Tell
) -> GenerationResult:
    step = _STEPS[part]
    written = itertools.count(1)
    tell(Progress(step=step))
    return engine.generate(
        loaded.prompt,
        max_new_tokens=case.new_tokens,
        stop_token_ids=loaded.stop_token_ids,
        keep_logits=True,
        on_token=lambda _token: tell(Progress(step=step, done=next(written))),
    )


def _fill_with_nonsense(pools: PagedPools) -> None:
    for tensors in pools.tensors().values():
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(_NONSENSE)


def _restore_alone(linker: Linker, pools: PagedPools, prompt: Sequence[int], rid: str) -> float:
    """Restore the prompt's pages into the first ones of the pools; return the seconds from lookup to end."""
    keys = page_keys(prompt, pools.page_size)[: (len(prompt) - 1) // pools.page_size]
    asked, wanted = [], []
    for pool in pools.logical_pools:
        count = len(keys) if pool.window is None else -(-pool.window // pool.page_size)
        policy = HitPolicy.ALL_PAGES if pool.window is None else HitPolicy.TRAILING_PAGES
        slots = np.arange(count * pool.page_size) + (RESERVED_PAGE + 1) * pool.page_size
        transfer = PoolTransfer(name=pool.name, keys=keys[-count:], hit_policy=policy)
        asked.append(transfer)
        wanted.append(replace(transfer, device_indices=slots))
    started = time.perf_counter()
    found = max(linker.lookup(rid, asked), default=0)
    is_queued = found == len(keys) and linker.load(rid, wanted)
    is_done = is_queued and linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    seconds = time.perf_counter() - started
    if not is_done:
        msg = f"of {len(keys)} stored pages, {found} were found, and they could not be restored"
        raise StoreError(msg)
    return seconds


def main(arguments: Sequence[str]) -> None:
    """Run one part; what libraries print goes to standard error, so that standard output holds steps alone."""
    name, part, folder = arguments
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as steps:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def tell(progress: Progress) -> None:
            steps.write(progress.to_line())

        run_part(CASES[name], Part(part), Path(folder), tell)


if __name__ == "__main__":
    main(sys.argv[1:])

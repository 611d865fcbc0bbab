"""Compare what a real SGLang does without a cache, with its own pools, with kvlinker and with a file for each page.

One server has all linkers, on one thread, and asks them in turn. Every answer is compared with the one without a
cache before its time counts. How much memory each takes is measured in servers with one linker.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import run
from comparison import (
    LOAD_TARGET,
    Place,
    first_token_rows,
    limit_sentence,
    memory_rows,
    moving_rows,
    worth_sentence,
)
from limits import COPY, READ, limits
from measuring import Row, Scale, Times, missing_peer
from parts import insert
from random_model import KV_BYTES_PER_TOKEN, make_model
from side_by_side import COLD, SideBySide, make_prompt
from timed_engine import PAGE_SIZE, Engine, Memory, ServerDied

VERSION = "SGLang 0.5.23"
OURS = "kvlinker with its file store, verified"
TORCH = "torch.save, a file a page"
HICACHE_FILES = f"{VERSION} HiCacheFile, a file a page"
HICACHE = f"{VERSION} HiCache with its file backend"
SHORT_LENGTHS = (16, 32, 64, 128)
LONG_LENGTHS = (256, 1024, 3072)
QUICK_LENGTHS = (16, 256)
UNSEEN_LENGTH = 1024
ROUNDS, QUICK_ROUNDS = 7, 2
LINKERS: Mapping[str, str | None] = MappingProxyType(
    {OURS: None, TORCH: "torch", HICACHE_FILES: "hicache"}
)
"""Every linker by name, with the kind of files that it keeps; None for ours."""
HICACHE_FLAGS = (
    *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)
LIMITS = (COPY, READ)
WHY_MISSED = (
    "The peers read a page of 786 kB with a system call or two and check nothing. Ours copies each range once, from "
    "the mapped file into the pool, with compiled code on both cores, and sums it in the registers that copy it. "
    "What is left is memory, whose speed both cores share, and the cost of a load that does not depend on its length: "
    "some 1.5 ms of Python, in the processor's cold caches, for plans, the store's index and headers, and for waking "
    "threads. Of few tokens, a third of the time of raw files is no more than one plain copy takes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found."""

    rows: Sequence[Row]
    sentences: Sequence[str]


def measure(scale: Scale) -> Report:
    """Start an engine, ask, and return what was found.

    Raises:
        WrongAnswerError: a variant answers otherwise than the engine without a linker.
    """
    busy = f"Load average of the machine before the run: {os.getloadavg()[0]:.1f}."
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model")
        with Engine(model.folder, folder / "all", linkers=LINKERS) as engine:
            report = _ask(SideBySide(engine, tuple(LINKERS), scale.rounds), scale, folder)
        rows = [*report.rows]
        if not scale.is_quick:
            rows += [*_memory(model.folder, folder), _hicache(model.folder, folder)]
        about = f"{model}; pages of {PAGE_SIZE} tokens, and one thread for the engine."
        return Report(rows=rows, sentences=[about, busy, *report.sentences])


def _ask(found: SideBySide, scale: Scale, folder: Path) -> Report:
    lengths = QUICK_LENGTHS if scale.is_quick else (*SHORT_LENGTHS, *LONG_LENGTHS)
    restored: dict[int, Times] = {}
    first_tokens: list[Row] = []
    moving: list[Row] = []
    bounds = ""
    for length in lengths:
        found.prime(length)
        place = Place(tokens=length, bytes_per_token=KV_BYTES_PER_TOKEN, ours=OURS)
        restored[length], lookups = found.restores(length)
        first_tokens += first_token_rows("restored", place, restored[length])
        if length in LONG_LENGTHS:
            loads = found.loads(length, limits(folder / "limit", place.moved))
            moving += moving_rows(
                "load", place, loads, target=LOAD_TARGET, limits=LIMITS, why_missed=WHY_MISSED
            )
            bounds = limit_sentence(place, loads, target=LOAD_TARGET, limits=LIMITS)
            moving += moving_rows("lookup", place, lookups, in_bytes=False)
    place = Place(
        tokens=scale.choose(UNSEEN_LENGTH, 256), bytes_per_token=KV_BYTES_PER_TOKEN, ours=OURS
    )
    first_token, offloads = found.offloads(place.tokens)
    first_tokens += first_token_rows("computed and stored", place, first_token)
    moving += moving_rows("offload", place, offloads)
    worth = worth_sentence(restored, OURS, COLD)
    return Report(rows=[*first_tokens, *moving], sentences=[worth, bounds])


def _memory(model: Path, folder: Path) -> Iterator[Row]:
    """Yield what servers with one linker, or none, hold after the longest prompt was restored."""
    found: dict[str, Memory] = {}
    for number, name in enumerate((COLD, *LINKERS)):
        linkers = {name: LINKERS[name]} if name in LINKERS else None
        with Engine(model, folder / f"memory-{number}", linkers=linkers) as engine:
            for _ in range(3):
                engine.ask(name, make_prompt(LONG_LENGTHS[-1]), flush=True)
            found[name] = engine.memory()
    yield from memory_rows(
        OURS,
        {name: each.own for name, each in found.items()},
        {name: each.mapped for name, each in found.items()},
    )


def _hicache(model: Path, folder: Path) -> Row:
    """Try SGLang's own hierarchical cache, and say what comes of it."""
    engine = Engine(model, folder / "hicache", flags=HICACHE_FLAGS)
    reason = "it starts here, and is not measured yet"
    try:
        with engine:
            pass
    except ServerDied:
        reason = (
            f"its server does not start on a CPU: `{engine.last_error()}`. It pins its host memory and copies with "
            f"CUDA; the class of its file backend is measured in a linker instead"
        )
    return missing_peer("SGLang's hierarchical cache", "restored", HICACHE, reason)


def main() -> None:
    """Measure; only full sizes are written down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written down")
    parser.add_argument("--rounds", type=int, default=None)
    arguments = parser.parse_args()
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    start = time.perf_counter()
    found = measure(Scale(rounds=rounds, is_quick=arguments.quick))
    seconds = time.perf_counter() - start
    measured = run.report(found.rows, seconds, command="make bench-sglang", remarks=found.sentences)
    print(measured)
    if not arguments.quick:
        document = run.DOCUMENT.read_text()
        run.DOCUMENT.write_text(
            insert(document, measured, begin=run.SGLANG_BEGIN, end=run.SGLANG_END)
        )


if __name__ == "__main__":
    main()

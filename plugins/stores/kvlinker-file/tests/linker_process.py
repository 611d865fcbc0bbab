"""An engine's process: a linker over a small group and a file store, told what to do; run by test_linkers.py.

Arguments: folder, family of the group, version of the weights. Each line of the standard input is answered by
one JSON value: `offload PROMPT PAGES` by whether all was stored, `restore PROMPT PAGES` by the prefix length that
was found and the number of places whose bytes are wrong after the load.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.testing import FakePools, Family, fake_group, page_keys
from kvlinker.testing.small_linkers import offload_pages, prefix_transfers
from kvlinker.transfers import PageKey
from kvlinker_file import FileStore, FileStoreOptions

_CAPACITY = 8 << 20
_PATIENT = LinkerOptions(
    lookup_seconds=60, load_seconds=60, offload_seconds=60, hold_seconds=60, quiesce_seconds=60
)
"""Deadlines that a busy machine does not reach."""


class Engine:
    """What an engine does with a linker, and nothing else."""

    def __init__(self, folder: Path, family: Family, weights: str) -> None:
        """Open the store and link the pools to it."""
        self.store = FileStore(FileStoreOptions(path=folder, capacity=_CAPACITY))
        self._requests = itertools.count()
        self.pools: FakePools = fake_group(family)
        self.linker = Linker(
            self.pools.group,
            self.store,
            KeyNamespace(model_id="tiny", producer="test", weights_version=weights),
            device=self.pools.access(),
            options=_PATIENT,
        )

    def offload(self, keys: tuple[PageKey, ...]) -> bool:
        """Compute a prefix, store it and return whether all of it was."""
        return offload_pages(self.linker, self.pools, keys)

    def restore(self, keys: tuple[PageKey, ...]) -> tuple[int, int]:
        """Load the longest stored prefix into other pages; return its length, and how many places are wrong."""
        self.pools.memory.poison()
        request = f"request {next(self._requests)}"
        found = max(self.linker.lookup(request, self.pools.lookup_transfers(keys)), default=0)
        if not found:
            return 0, 0
        transfers = prefix_transfers(self.pools, keys[:found], range(8, 8 + found))
        assert self.linker.load(request, transfers)
        assert self.linker.finish_layer_wise_loading(self.linker.start_layer_wise_loading())
        return found, len(self.pools.wrong_pages(transfers))

    def close(self) -> None:
        """End the linker and the store."""
        self.linker.close()
        self.store.close()


def main() -> None:
    """Do what is asked until nothing more is."""
    engine = Engine(Path(sys.argv[1]), Family(sys.argv[2]), sys.argv[3])
    for line in sys.stdin:
        call, prompt, pages = line.split()
        keys = page_keys(int(pages), chain=prompt)
        answer = engine.offload(keys) if call == "offload" else engine.restore(keys)
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()
    engine.close()


if __name__ == "__main__":
    main()

"""A linker over a Mooncake cluster, and a process that offloads with one and ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import kvlinker_mooncake
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.store import Store
from kvlinker.testing import FakePools, Family, fake_group, page_keys
from kvlinker.testing.small_linkers import offload_pages

__all__ = ["linked", "offload_and_leave"]


@contextmanager
def linked(store: Store, family: Family) -> Iterator[tuple[Linker, FakePools]]:
    """Give a linker and its pools."""
    pools = fake_group(family, pages=16)
    linker = Linker(
        pools.group,
        store,
        KeyNamespace(model_id="model", producer="tests"),
        device=pools.access(),
        options=LinkerOptions(breaker_seconds=0.05, lookup_seconds=5.0),
    )
    try:
        yield linker, pools
    finally:
        linker.close()


def offload_and_leave(options: Mapping[str, object], family: str) -> None:
    """Store four pages and end, as another process; `True` on standard output once they are."""
    store = kvlinker_mooncake.open_store(options)
    with linked(store, Family(family)) as (linker, pools):
        stored = offload_pages(linker, pools, page_keys(4))
    store.close()
    sys.stdout.write(f"{stored}\n")

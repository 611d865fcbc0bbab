"""A linker over a Mooncake cluster: what one process stored another one loads, and outages are misses."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from mooncake_cluster import MooncakeCluster, OpenStore
from mooncake_offloader import linked

from kvlinker.testing import Family, page_keys
from kvlinker.testing.small_linkers import load_pages, offload_pages

DEADLINE_S = 60.0
_OFFLOADER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from mooncake_offloader import offload_and_leave
offload_and_leave(json.loads(sys.argv[2]), sys.argv[3])
"""


@pytest.mark.parametrize(
    ("family", "reads"),
    [(Family.MHA, "ranged"), (Family.DSA, "whole"), (Family.DSA, "staged")],
)
def test_pages_of_one_process_are_loaded_by_another(
    cluster: MooncakeCluster, open_quickly: OpenStore, prefix: str, family: Family, reads: str
) -> None:
    kind = {"staged": True} if reads == "staged" else {"reads": reads}
    options = {**cluster.options, "prefix": prefix, **kind}
    arguments = [json.dumps(sys.path), json.dumps(options), family.value]
    done = subprocess.run(
        [sys.executable, "-c", _OFFLOADER, *arguments], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n", done.stderr[-2000:]
    keys = page_keys(4)

    with linked(open_quickly(**kind), family) as (linker, pools):
        assert linker.lookup("request", pools.lookup_transfers(keys)) == [1, 2, 3, 4]
        assert load_pages(linker, pools, keys, rid="request")


def test_b71_a_master_that_goes_between_lookup_and_load_fails_the_load_and_is_used_when_it_is_back(
    own_cluster: MooncakeCluster, open_store: OpenStore
) -> None:
    keys, more = page_keys(4), page_keys(2, chain="more")
    store = open_store(own_cluster, pause_seconds=0.1)
    with linked(store, Family.MHA) as (linker, pools):
        assert offload_pages(linker, pools, keys)
        assert linker.lookup("request", pools.lookup_transfers(keys)) == [1, 2, 3, 4]

        own_cluster.kill_master()
        assert not load_pages(linker, pools, keys, rid="request")
        assert linker.lookup("again", pools.lookup_transfers(keys)) == []
        assert not offload_pages(linker, pools, more)
        own_cluster.start_master()

        end = time.monotonic() + DEADLINE_S
        while not offload_pages(linker, pools, keys):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert linker.lookup("once more", pools.lookup_transfers(keys)) == [1, 2, 3, 4]

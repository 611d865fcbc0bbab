"""What Prometheus gets is what the linker counted, and a store that hangs keeps nothing else back."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.request import ProxyHandler, build_opener

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvlinker.errors import ContractError
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker, LinkerOptions
from kvlinker.metrics import FAILING_CALLS
from kvlinker.testing import (
    Call,
    FakePools,
    Family,
    FaultStore,
    Gate,
    Hang,
    MemoryStore,
    Raise,
    Rule,
    fake_group,
    page_keys,
)
from kvlinker.testing.waiting import wait_for
from kvlinker_sglang.metrics import Exporter, WorkerPlace, worker_place
from kvlinker_sglang.options import MetricsConfig

KEYS = page_keys(4)


@dataclass(frozen=True)
class Served:
    """A linker whose metrics are served."""

    linker: Linker
    store: FaultStore
    port: int

    def values(self) -> dict[str, float]:
        """Return every sample, named as `metric` or `metric/label`."""
        opener = build_opener(ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{self.port}/metrics") as response:
            text = response.read().decode()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {n: v for n, v in sample.labels.items() if n not in {"model", "worker"}}
                assert sample.labels["model"] == "m"
                assert sample.labels["worker"] == "pp0-tp1"
                found["/".join([sample.name, *labels.values()])] = sample.value
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def exported(linker: Linker, store: FaultStore) -> tuple[Exporter, int]:
    """Serve metrics, and return the port too: another one where somebody took the first meanwhile."""
    place = WorkerPlace(number=1, label="pp0-tp1")
    for _ in range(20):
        port = free_port()
        config = MetricsConfig(enabled=True, port=port - 1)
        with suppress(ContractError):
            return Exporter(linker, store, config, model="m", place=place), port
    pytest.fail("nothing can listen on any port")


@contextmanager
def served(*rules: Rule) -> Iterator[tuple[Served, FakePools]]:
    pools = fake_group(Family.DSA)
    store = FaultStore(MemoryStore(), rules)
    namespace = KeyNamespace(model_id="m", producer="p")
    options = LinkerOptions(lookup_seconds=60)
    linker = Linker(pools.group, store, namespace, device=pools.access(), options=options)
    exporter, port = exported(linker, store)
    try:
        yield Served(linker, store, port), pools
    finally:
        exporter.close()
        linker.close()


def offload_all(linker: Linker, pools: FakePools) -> None:
    transfers = pools.page_transfers(KEYS, {name: range(4) for name in pools.logical_pools})
    assert linker.offload(transfers)
    wait_for(linker.num_completed_offloads, "the offload")
    assert linker.pop_completed_offload()


def test_l11_every_token_is_in_one_reason() -> None:
    with served() as (site, pools):
        offload_all(site.linker, pools)
        site.linker.lookup("a", pools.lookup_transfers(page_keys(6)))

        values = site.values()

    page_size = site.linker.group.page_size
    tokens = sum(
        amount for name, amount in values.items() if name.startswith("kvlinker_tokens_total/")
    )
    assert values["kvlinker_tokens_looked_up_total"] == 6 * page_size
    assert values["kvlinker_tokens_total/miss"] == 2 * page_size
    assert values["kvlinker_open_tokens"] == 4 * page_size
    assert tokens + values["kvlinker_open_tokens"] == values["kvlinker_tokens_looked_up_total"]
    assert values["kvlinker_queued/lookups"] == 1


def test_bytes_are_those_of_each_pool() -> None:
    with served() as (site, pools):
        offload_all(site.linker, pools)
        wait_for(lambda: "kvlinker_store_objects" in site.values(), "an answer of the store")

        values = site.values()

    for entry in site.linker.group.entries:
        assert values[f"kvlinker_offloaded_bytes_total/{entry.name}"] == 4 * entry.page_bytes
        assert values[f"kvlinker_offload_seconds_total/{entry.name}"] > 0
    assert values["kvlinker_store_objects"] == 4 * len(site.linker.group.entries)
    assert values["kvlinker_events_total/offloads_stored"] == 1


def test_the_errors_of_every_call_are_there_before_the_first_one() -> None:
    with served() as (site, _):
        values = site.values()

    errors = {name.partition("/")[2]: value for name, value in values.items() if "errors" in name}
    assert errors == dict.fromkeys(FAILING_CALLS, 0)


def test_errors_are_named_by_the_call_that_failed() -> None:
    with served(Rule(call=Call.EXISTS, fault=Raise(error=OSError("gone")))) as (site, pools):
        site.linker.lookup("a", pools.lookup_transfers(KEYS))

        values = site.values()

    assert values["kvlinker_errors_total/lookup"] == 1
    assert not [name for name in values if name.endswith("_errors")]


def test_a_store_that_hangs_keeps_no_other_number_back() -> None:
    gate = Gate()
    with served(Rule(call=Call.STATS, fault=Hang(gate=gate))) as (site, _):
        values = site.values()
        gate.open()

    assert values["kvlinker_tokens_looked_up_total"] == 0
    assert "kvlinker_store_objects" not in values


def test_a_port_that_is_taken_is_refused_by_its_number() -> None:
    with socket.socket() as taken, served() as (site, _):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = MetricsConfig(enabled=True, port=port)
        place = WorkerPlace(number=0, label="pp0-tp0")

        with pytest.raises(ContractError, match=str(port)):
            Exporter(site.linker, site.store, config, model="m", place=place)


def test_each_worker_of_a_server_has_the_next_port() -> None:
    replicas, stages, ranks = 2, 3, 4
    places = [
        worker_place(
            replica=replica,
            stage=stage,
            stages=stages,
            rank=rank,
            ranks=ranks,
            attention_group=None,
        )
        for replica in range(replicas)
        for stage in range(stages)
        for rank in range(ranks)
    ]

    assert [place.number for place in places] == list(range(24))
    assert len({place.label for place in places}) == 24


def test_attention_groups_are_within_the_ranks_that_are_counted() -> None:
    places = [
        worker_place(replica=0, stage=0, stages=1, rank=rank, ranks=8, attention_group=rank)
        for rank in range(3)
    ]

    assert [place.number for place in places] == [0, 1, 2]
    assert places[2].label == "dp2-pp0-tp2"

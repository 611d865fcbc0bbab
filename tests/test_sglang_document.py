"""What docs/sglang.md and its dashboard tell an operator is what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from repository import ROOT

from kvlinker.explanation import Explanation, PoolExplanation
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker
from kvlinker.metrics import TokenOutcome
from kvlinker.quantities import parse_bytes
from kvlinker.testing import MemoryStore, fake_group, page_keys
from kvlinker_sglang.compatibility import TESTED_VERSIONS
from kvlinker_sglang.metrics import LinkerCollector
from kvlinker_sglang.options import (
    LimitsConfig,
    MetricsConfig,
    NamespaceConfig,
    StoreConfig,
    WorkerConfig,
    parse_config,
)
from kvlinker_sglang.start_lines import start_lines

DOCUMENT = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
DASHBOARD = ROOT / "docs" / "grafana" / "kvlinker.json"
ENGINE_TESTS = ROOT / "plugins" / "engines" / "kvlinker-sglang" / "engine_tests"
TIB = 1 << 40


def cells(head: str) -> Iterator[list[str]]:
    """Yield the cells of every row of the table whose first head is a text."""
    table = DOCUMENT.partition(f"\n| {head} |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]


def number(text: str) -> int:
    return int(text.replace(",", "") or 0)


# ---- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", list(cells("model")), ids=lambda row: row[0])
def test_a_size_in_the_table_is_what_explain_says(row: list[str]) -> None:
    model, _, per_token, per_boundary, room = row
    command = [sys.executable, "-m", "kvlinker", "explain", "--json", "--store", "1TiB"]
    path = ROOT / "examples" / "descriptions" / f"{model}.json"

    done = subprocess.run([*command, str(path)], check=True, capture_output=True, text=True)

    found = json.loads(done.stdout)
    assert round(found["bytes_per_token"]) == number(per_token)
    assert found["bytes_per_boundary"] == number(per_boundary)
    # At most every page of every pool is stored, once; a state is stored behind a page of the tree.
    tree_page = max(pool["page_size"] for pool in found["pools"])
    dense = sum(pool["page_bytes"] for pool in found["pools"]) / tree_page
    rooms = {f"{TIB / size / 1e6:.1f}": None for size in (dense, found["bytes_per_token"])}
    assert room == f"{' to '.join(rooms)} million"


# ---- configuration ----------------------------------------------------------------------------


def keys_of(model: type[BaseModel], prefix: str = "") -> set[str]:
    parts: dict[str, type[BaseModel]] = {
        "store": StoreConfig,
        "namespace": NamespaceConfig,
        "metrics": MetricsConfig,
    }
    found: set[str] = set()
    for name in model.model_fields:
        found |= keys_of(parts[name], f"{name}.") if name in parts else {f"{prefix}{name}"}
    return found


def test_every_key_of_the_configuration_is_in_the_table_and_no_other() -> None:
    documented = {key for row in cells("key") for key in row[0].split(", ")}

    assert documented == keys_of(WorkerConfig)


def test_every_limit_is_in_its_table_with_its_default() -> None:
    documented = {name: float(number(default)) for name, default, _ in cells("limit")}

    assert documented == LimitsConfig().model_dump()


def test_the_room_in_the_document_is_what_a_worker_says() -> None:
    lines = [line for line in DOCUMENT.splitlines() if line.startswith("kvlinker: ")]
    capacity = parse_bytes("200GiB")
    page = PoolExplanation(
        name="kv",
        indices_from_pool="kv",
        page_size=64,
        page_bytes=8 << 20,
        spans=64,
        layers=32,
        objects_per_page=1,
    )
    found = Explanation(winner="mha", problem="", verdicts=(), pools=(page,))
    store = MemoryStore(capacity_bytes=capacity)

    layout, room = start_lines(found, store, "file")

    assert f"with a capacity of {capacity} B " in lines[0]
    assert lines[1] == f"kvlinker: {layout}"
    assert lines[2].replace(", 860160 B of", ", 0 B of") == f"kvlinker: {room}"


def test_the_configuration_in_the_document_is_taken() -> None:
    start, end = DOCUMENT.index("'{\n"), DOCUMENT.index("}'\n")
    config = json.loads(DOCUMENT[start + 1 : end + 1])

    assert config["linker"] == "KVLinker"
    assert parse_config(config["linker_extra_config"]).store.plugin == "file"


def test_the_tested_versions_are_named() -> None:
    assert f"Tested with SGLang {' and '.join(TESTED_VERSIONS)}." in DOCUMENT


# ---- metrics ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Every metric that a worker exports, by the name that Prometheus has, with its labels."""
    pools = fake_group()
    store = MemoryStore(capacity_bytes=1 << 20)
    namespace = KeyNamespace(model_id="m", producer="p")
    linker = Linker(pools.group, store, namespace, device=pools.access())
    collector = LinkerCollector(linker, store, {"model": "m", "worker": "w"})
    transfers = pools.page_transfers(page_keys(2), {"kv": (0, 1)})
    assert linker.offload(transfers)
    linker.lookup("r", transfers)
    found = {}
    for family in collector.collect():
        suffix = "_total" if family.type == "counter" else ""
        labels = set(family.samples[0].labels) if family.samples else {"model", "worker"}
        found[f"{family.name}{suffix}"] = labels
    linker.close()
    collector.close()
    return found


def named_in(text: str) -> set[str]:
    return set(re.findall(r"\bkvlinker_[a-z_]+\b", text)) - {"kvlinker_sglang"}


def test_every_metric_in_the_document_is_exported(exported: dict[str, set[str]]) -> None:
    named = named_in(DOCUMENT)

    assert named
    assert named <= exported.keys()


def expressions(path: Path) -> list[str]:
    panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_metric_is_in_the_dashboard_and_no_other(exported: dict[str, set[str]]) -> None:
    assert {name for text in expressions(DASHBOARD) for name in named_in(text)} == exported.keys()


def test_labels_and_reasons_in_the_dashboard_are_those_of_the_metrics() -> None:
    text = "\n".join(expressions(DASHBOARD))
    reasons = set(re.findall(r'reason="(\w+)"', text))

    assert reasons <= {outcome.value for outcome in TokenOutcome}
    assert set(re.findall(r"by \((\w+)\)", text)) == {"reason", "pool", "call", "queue", "event"}


# ---- engine tests -----------------------------------------------------------------------------


def test_every_module_of_the_engine_tests_is_in_their_readme_and_no_other() -> None:
    text = (ENGINE_TESTS / "README.md").read_text(encoding="utf-8")
    named = {
        pattern: set(ENGINE_TESTS.glob(pattern))
        for pattern in re.findall(r"(?<=`)[\w/*]+\.py(?=`)", text)
    }
    modules = {*ENGINE_TESTS.glob("*.py"), *(ENGINE_TESTS / "engine_frame").glob("[!_]*.py")}

    assert [pattern for pattern, found in named.items() if not found] == []
    assert set().union(*named.values()) == modules


def test_the_least_hit_by_default_is_the_length_from_which_restoring_was_measured_to_pay() -> None:
    measured = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    found = re.findall(
        r"[Rr]estoring (?:is|was) faster in every round from ([\d,]+) tokens on", measured
    )

    assert len(found) == 2, "on two machines, of which the slower decides"
    lengths = [int(tokens.replace(",", "")) for tokens in found]
    assert max(lengths) == WorkerConfig.model_fields["min_hit_tokens"].default

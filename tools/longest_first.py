"""Pytest plugin: files that take long begin first, so that no process is busy long after the others have ended.

pytest-xdist hands files out in the order in which they are collected, where it is told `--no-loadscope-reorder`;
by itself it takes those with the most tests first, and is left with a few tests that each start a server.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

__all__ = ["LONGEST", "place_of"]

LONGEST = (
    "benchmarks/tests/test_benchmarks.py",
    "kvlinker-transformers/tests/test_restart.py",
    "kvlinker-nixl/tests/test_kit.py",
    "kvlinker-transformers/tests/test_faulty_stores.py",
    "kvlinker-transformers/tests/test_generation.py",
    "tests/test_support_matrix.py",
    "kvlinker-file/tests/test_tiers.py",
    "tests/test_demo.py",
    "kvlinker-s3/tests/test_soak.py",
    "kvlinker-redis/tests/test_soak.py",
    "kvlinker-s3/tests/test_outages.py",
    "tests/test_wheels.py",
    "tests/test_repository.py",
    "tests/test_release.py",
    "tests/test_sglang_document.py",
    "kvlinker-nixl/tests/test_peers.py",
    "kvlinker-mooncake/tests/test_outages.py",
    "kvlinker-memory/tests/test_adversity.py",
    "benchmarks/tests/test_gpu_check.py",
    "tests/test_model_configs.py",
    "tests/test_hybrid_configs.py",
    "kvlinker-nixl/tests/test_soak.py",
    "core/tests/test_linker_machine.py",
    "core/tests/test_soak.py",
    "kvlinker-mooncake/tests/test_soak.py",
    "kvlinker-memory/tests/test_soak.py",
    "kvlinker-s3/tests/test_linker.py",
    "kvlinker-mooncake/tests/test_linker.py",
    "kvlinker-file/tests/test_load.py",
    "kvlinker-file/tests/test_concurrency.py",
    "core/tests/test_description_json.py",
    "tests/test_guides.py",
    "tests/test_tutorial.py",
    # With a real SGLang:
    "engine_tests/test_busy_servers.py",
    "engine_tests/test_linker_life.py",
    "engine_tests/test_shared_servers.py",
    "engine_tests/test_linker_faults.py",
    "engine_tests/test_ranks_faults.py",
    "engine_tests/test_linker_servers.py",
    "engine_tests/test_adapter_servers.py",
    "engine_tests/test_servers.py",
    "engine_tests/test_weight_servers.py",
    "engine_tests/test_outsider.py",
    "engine_tests/test_ranks_servers.py",
)
"""Ends of the paths of files that take about 10 s or more, by their time; others follow by their number of tests."""


def place_of(path: Path) -> int:
    """Return a file's place in the order, behind all that are named where it is not."""
    name = f"/{path.as_posix()}"
    places = (place for place, end in enumerate(LONGEST) if name.endswith(f"/{end}"))
    return next(places, len(LONGEST))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files, and leave the order of each one's tests."""
    sizes = Counter(item.path for item in items)
    places = {path: place_of(path) for path in sizes}
    items.sort(key=lambda item: (places[item.path], -sizes[item.path]))

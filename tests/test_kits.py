"""Every plugin of the repository is tested with the conformance kit of each kind that it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from repository import Distribution, by_name, distributions, table, write_distribution

KITS = {
    "kvlinker.movers": {"MoverTests"},
    "kvlinker.models": {"ModelPluginTests"},
    "kvlinker.stores": {"StoreTests", "PersistentStoreTests"},
    "kvlinker.engines": {"EngineAdapterTests"},
}
PLUGINS = [found for found in distributions() if found.kind != "core"]


def bases_of_classes(folder: Path) -> set[str]:
    """Return the names of what the classes in a folder's tests are subclasses of."""
    trees = [ast.parse(path.read_text()) for path in folder.glob("test_*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {ast.unparse(base) for found in classes for base in found.bases}


def missing_kits(distribution: Distribution) -> list[str]:
    """Return the groups of a plugin's entry points whose kit its tests do not use."""
    folders = (distribution.folder / name for name in ("tests", "engine_tests"))
    used = {base for folder in folders for base in bases_of_classes(folder)}
    groups = table(distribution.project.get("entry-points", {}))
    return [group for group in groups if not KITS[group] & used]


@pytest.mark.parametrize("distribution", PLUGINS, ids=by_name)
def test_a_plugin_is_tested_with_the_kit_of_its_kind(distribution: Distribution) -> None:
    assert missing_kits(distribution) == []


def test_a_plugin_without_its_kit_is_found(tmp_path: Path) -> None:
    pyproject = '[project.entry-points."kvlinker.models"]\nx = "kvlinker_x"\n'
    made = write_distribution(tmp_path, "", folder="models/kvlinker-x", pyproject=pyproject)
    tests = made.folder / "tests"
    tests.mkdir()
    (tests / "test_kit.py").write_text("class TestX(StoreTests):\n    pass\n")

    without = missing_kits(made)
    (tests / "test_more.py").write_text("class TestY(ModelPluginTests):\n    pass\n")

    assert without == ["kvlinker.models"]
    assert missing_kits(made) == []

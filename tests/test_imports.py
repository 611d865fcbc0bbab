"""Who may import what, and when: core knows no plugin, and nothing heavy loads with a module."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import (
    CORE,
    ROOT,
    Distribution,
    Import,
    Place,
    by_name,
    distributions,
    each_distribution,
    imports,
    python_files,
    table,
    write_distribution,
)

HEAVY = frozenset(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"][
        "flake8-tidy-imports"
    ]["banned-module-level-imports"]
)

EXTRA_ONLY_IN = {
    "typer": "kvlinker/cli",
    "rich": "kvlinker/cli",
    "pytest": "kvlinker/testing",
}

BUILT_ON = {"kvlinker_memory": "kvlinker_file"}
"""The one plugin that is another one in another place, and so imports that one's public names."""

MODEL_PLUGINS = [
    found
    for found in distributions()
    if list(table(found.project.get("entry-points", {}))) == ["kvlinker.models"]
]


def heavy_imports_at_module_level(path: Path) -> list[str]:
    """Return the imports that would load torch, an engine or a store client with the module."""
    return [
        f"{path}:{found.line}: {found.module} is imported at module level"
        for found in imports(path)
        if found.place is Place.MODULE and found.package in HEAVY
    ]


def undeclared_imports(distribution: Distribution) -> list[str]:
    """Return the imports of what a distribution neither is, nor requires.

    Core alone may import torch without requiring it, where a caller hands it tensors.
    """
    allowed = {*sys.stdlib_module_names, distribution.import_name}
    allowed |= importable(distribution.requirements + distribution.extra_requirements)
    findings: list[str] = []
    for path in distribution.modules():
        for found in imports(path):
            lazy_torch = found.package == "torch" and found.place is not Place.MODULE
            if found.package not in allowed and not (lazy_torch and distribution.kind == "core"):
                findings.append(
                    f"{path}:{found.line}: {found.module} is not among its dependencies"
                )
    return findings


def importable(requirements: list[Requirement]) -> set[str]:
    """Return the packages that come with these distributions, by metadata or by convention."""
    names = {canonicalize_name(requirement.name) for requirement in requirements}
    by_metadata = {
        package
        for package, providers in packages_distributions().items()
        if names & {canonicalize_name(provider) for provider in providers}
    }
    return by_metadata | {name.replace("-", "_") for name in names}


def imports_across_plugins(distribution: Distribution) -> list[str]:
    """Return the imports of any other plugin: core knows none, and a plugin knows core alone."""
    return [
        f"{path}:{found.line}: {found.module} is another plugin"
        for path in distribution.modules()
        for found in imports(path)
        if found.package.startswith("kvlinker_") and found.package != distribution.import_name
        if not _is_public_of(BUILT_ON.get(distribution.import_name), found)
    ]


def _is_public_of(package: str | None, found: Import) -> bool:
    """Say whether an import is of a name that a package offers to everybody."""
    if package is None or found.module != package:
        return False
    names: object = vars(importlib.import_module(package))["__all__"]
    return isinstance(names, list) and found.name in names


def tensor_imports(distribution: Distribution) -> list[str]:
    """Return the imports of anything heavy, wherever they stand: a model plugin plans with numbers."""
    return [
        f"{path}:{found.line}: {found.module} in a model plugin"
        for path in distribution.modules()
        for found in imports(path)
        if found.package in HEAVY
    ]


def misplaced_extras(distribution: Distribution) -> list[str]:
    """Return the imports of what an extra brings, outside the package that the extra is for; types need none."""
    return [
        f"{path}:{found.line}: {found.module} belongs to {EXTRA_ONLY_IN[found.package]}"
        for path in distribution.modules()
        for found in imports(path)
        if found.place is not Place.TYPING
        and EXTRA_ONLY_IN.get(found.package, path.as_posix()) not in path.as_posix()
    ]


def private_imports(path: Path) -> list[str]:
    """Return imports of private names; a line that says why for the linter may have one of others' code."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        f"{path}:{found.line}: {found.module} {found.name} is private"
        for found in imports(path)
        if any(is_private(part) for part in (*found.module.split("."), found.name))
        and not (_excused(lines[found.line - 1]) and not found.module.startswith("kvlinker"))
    ]


def _excused(line: str) -> bool:
    return "# noqa: PLC2701 " in line or line.lstrip().startswith("from _typeshed import ")


def is_private(name: str) -> bool:
    """Say whether a name is private by convention."""
    return name.startswith("_") and not name.endswith("__")


@each_distribution
def test_a_distribution_imports_only_what_it_requires(distribution: Distribution) -> None:
    assert undeclared_imports(distribution) == []


def test_an_undeclared_import_is_found_wherever_it_stands(tmp_path: Path) -> None:
    source = "import json\n\ndef f():\n    import xxhash\n    from hatchling.build import x\n"
    declared = 'dependencies = ["xxhash>=3"]\n'
    made = write_distribution(tmp_path, source, folder="kvlinker-x", pyproject=declared)

    findings = undeclared_imports(made)

    assert len(findings) == 1
    assert findings[0].endswith("__init__.py:5: hatchling.build is not among its dependencies")


def test_core_may_use_tensors_that_it_is_handed_and_no_other_distribution_may(
    tmp_path: Path,
) -> None:
    source = "def f(x):\n    import torch\n    return torch.is_tensor(x)\n"
    core = write_distribution(tmp_path, source, folder="core")
    plugin = write_distribution(tmp_path, source, folder="stores/kvlinker-x")

    assert undeclared_imports(core) == []
    assert len(undeclared_imports(plugin)) == 1


@each_distribution
def test_no_plugin_is_imported_by_core_or_by_another(distribution: Distribution) -> None:
    assert imports_across_plugins(distribution) == []


def test_an_import_of_another_plugin_is_found(tmp_path: Path) -> None:
    source = "from kvlinker_x import a\nfrom kvlinker.pools import b\nfrom kvlinker_mla.layout import c\n"
    made = write_distribution(tmp_path, source, folder="kvlinker-x")

    findings = imports_across_plugins(made)

    assert [finding.partition(":")[2] for finding in findings] == [
        "3: kvlinker_mla.layout is another plugin"
    ]


def test_the_plugin_that_is_built_on_another_imports_its_public_names_alone(
    tmp_path: Path,
) -> None:
    source = "from kvlinker_file import FileStore\nfrom kvlinker_file import nothing\nimport kvlinker_file.state\n"
    made = write_distribution(tmp_path, source, folder="kvlinker-memory")

    findings = imports_across_plugins(made)

    assert [finding.partition(":")[2] for finding in findings] == [
        "2: kvlinker_file is another plugin",
        "3: kvlinker_file.state is another plugin",
    ]


@pytest.mark.parametrize("distribution", MODEL_PLUGINS, ids=by_name)
def test_a_model_plugin_touches_no_tensor(distribution: Distribution) -> None:
    assert tensor_imports(distribution) == []


def test_a_tensor_import_is_found_even_inside_a_function(tmp_path: Path) -> None:
    made = write_distribution(tmp_path, "def f():\n    import torch.nn\n", folder="kvlinker-x")

    assert len(tensor_imports(made)) == 1


def test_extras_of_core_stay_in_their_packages() -> None:
    assert misplaced_extras(CORE) == []


def test_an_extra_outside_its_package_is_found(tmp_path: Path) -> None:
    source = "import numpy\nfrom rich import table\nif TYPE_CHECKING:\n    import pytest\n"
    made = write_distribution(tmp_path, source, folder="core")
    (made.package / "cli").mkdir()
    (made.package / "cli" / "__init__.py").write_text("import rich\n")

    findings = misplaced_extras(made)

    assert [finding.partition(":")[2] for finding in findings] == [
        "2: rich belongs to kvlinker/cli"
    ]


def test_no_module_loads_torch_an_engine_or_a_store_client_by_its_import_statements() -> None:
    core_and_entry_modules = [
        *CORE.modules(),
        *(found.package / "__init__.py" for found in distributions()),
    ]

    assert [f for path in core_and_entry_modules for f in heavy_imports_at_module_level(path)] == []


def test_a_heavy_import_is_found_at_module_level_alone(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\nelse:\n    import vllm\n"
        "try:\n    from mooncake.store import x\nexcept ImportError:\n    pass\n"
        "class A:\n    import redis\n"
        "def f():\n    import transformers\n"
    )

    findings = heavy_imports_at_module_level(path)

    assert [finding.rsplit(":", 1)[1].split()[0] for finding in findings] == [
        "vllm",
        "mooncake.store",
        "redis",
    ]


def test_b107_core_and_every_plugin_import_without_torch_engine_or_store_client() -> None:
    names = [
        *(
            ".".join(path.relative_to(CORE.folder / "src").with_suffix("").parts)
            for path in CORE.modules()
        ),
        *(found.import_name for found in distributions()),
    ]
    modules = sorted(
        {name.removesuffix(".__init__") for name in names if not name.endswith("__main__")}
    )
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True
    )

    loaded = set(done.stdout.split())
    assert {found.import_name for found in distributions()} <= loaded
    assert loaded & HEAVY == set()


def test_no_private_name_crosses_a_module() -> None:
    assert [finding for path in python_files() for finding in private_imports(path)] == []


def test_an_import_of_a_private_name_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from __future__ import annotations\nfrom kvlinker import __version__\n"
        "from kvlinker.pools import _rows\nimport kvlinker._core\nfrom kvlinker._core import x\n"
    )

    assert [finding.split(":")[1] for finding in private_imports(path)] == ["3", "4", "5"]

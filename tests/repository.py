"""The repository as tests see it: its distributions, its files, and what they import."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


class Place(Enum):
    """Where an import statement stands, and so when it runs."""

    MODULE = "at module level"
    TYPING = "for type checkers alone"
    FUNCTION = "inside a function"


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module, or one name imported from it."""

    module: str
    name: str
    """The imported name; empty where the module itself is imported."""
    line: int
    place: Place

    @property
    def package(self) -> str:
        """The module's first part."""
        return self.module.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """One folder that builds a wheel."""

    folder: Path

    @cached_property
    def pyproject(self) -> dict[str, object]:
        """All of its pyproject.toml."""
        return tomllib.loads((self.folder / "pyproject.toml").read_text())

    @cached_property
    def project(self) -> dict[str, object]:
        """The `project` table."""
        return table(self.pyproject["project"])

    @property
    def name(self) -> str:
        """Distribution name."""
        return str(self.project["name"])

    @property
    def import_name(self) -> str:
        """Name of the one package in it."""
        return self.name.replace("-", "_")

    @property
    def package(self) -> Path:
        """Folder of the package."""
        return self.folder / "src" / self.import_name

    @property
    def kind(self) -> str:
        """`core`, `models`, `stores`, `engines` or `examples`."""
        return "core" if self.folder.name == "core" else self.folder.parent.name

    @property
    def requirements(self) -> list[Requirement]:
        """What it always needs."""
        return [Requirement(line) for line in lines(self.project.get("dependencies", []))]

    @property
    def extra_requirements(self) -> list[Requirement]:
        """What its extras add."""
        extras = table(self.project.get("optional-dependencies", {}))
        return [Requirement(line) for extra in extras.values() for line in lines(extra)]

    def modules(self) -> list[Path]:
        """Return its source files."""
        return sorted(self.package.rglob("*.py"))


def table(value: object) -> dict[str, object]:
    """Return a TOML table as such."""
    assert isinstance(value, dict)
    return value


def lines(value: object) -> list[str]:
    """Return a TOML array of strings as such."""
    assert isinstance(value, list)
    return value


def distributions(root: Path = ROOT) -> list[Distribution]:
    """Return every distribution of a repository."""
    patterns = ("core", "plugins/*/*", "examples/*")
    found = (path for pattern in patterns for path in root.glob(f"{pattern}/pyproject.toml"))
    return [Distribution(folder=path.parent) for path in sorted(found)]


def repository_files() -> list[Path]:
    """Return every file that is, or is about to be, under version control."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = (ROOT / name for name in listed.split("\0") if name)
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def python_files() -> list[Path]:
    """Return every Python file of the repository."""
    return [path for path in repository_files() if path.suffix == ".py"]


def imports(path: Path) -> list[Import]:
    """Return every import of a file, in order."""
    return list(_imports(ast.parse(path.read_text(), path.name), Place.MODULE))


def _imports(node: ast.AST, place: Place) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        yield from _imported_by(child, place)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(child, Place.FUNCTION)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from _imports(ast.Module(child.body, []), Place.TYPING)
            yield from _imports(ast.Module(child.orelse, []), place)
        else:
            yield from _imports(child, place)


def _imported_by(node: ast.AST, place: Place) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(module=alias.name, name="", line=node.lineno, place=place)
    elif isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            yield Import(module=module, name=alias.name, line=node.lineno, place=place)


CORE = next(found for found in distributions() if found.kind == "core")


def by_name(distribution: Distribution) -> str:
    """Return the name that a test case carries."""
    return distribution.name


each_distribution = pytest.mark.parametrize("distribution", distributions(), ids=by_name)


def write_distribution(
    root: Path, source: str, *, folder: str, pyproject: str = ""
) -> Distribution:
    """Write a distribution of one module."""
    made = Distribution(folder=root / folder)
    made.folder.mkdir(parents=True)
    name = "kvlinker" if folder == "core" else made.folder.name
    head = f'[project]\nname = "{name}"\nversion = "0.1.0"\n'
    (made.folder / "pyproject.toml").write_text(head + pyproject)
    made.package.mkdir(parents=True)
    (made.package / "__init__.py").write_text(source)
    return made

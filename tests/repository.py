"""The repository as tests see it: its distributions, its files, and what they import."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
from distributions import CORE, ROOT, Distribution, distributions, lines, table

__all__ = [
    "CORE",
    "ROOT",
    "Distribution",
    "Import",
    "Place",
    "by_name",
    "distributions",
    "each_distribution",
    "imports",
    "lines",
    "python_files",
    "repository_files",
    "table",
    "write_distribution",
]


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

"""The distributions of the repository: where they are, what they state, and what they claim to work with."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

__all__ = ["CORE", "ROOT", "Distribution", "distributions", "lines", "table"]

ROOT = Path(__file__).parents[1]


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

    @property
    def version(self) -> Version:
        """Its version."""
        return Version(str(self.project["version"]))

    @property
    def entry_points(self) -> set[tuple[str, str, str]]:
        """Group, name and value of each entry point; commands are in the group `console_scripts`."""
        groups = {
            group: table(points)
            for group, points in table(self.project.get("entry-points", {})).items()
        }
        groups["console_scripts"] = table(self.project.get("scripts", {}))
        return {(group, *item) for group, points in groups.items() for item in as_text(points)}

    @property
    def plugins(self) -> list[str]:
        """What each of its plugins is called where names could clash: `distribution:name`; a mover is none."""
        groups = ("kvlinker.models", "kvlinker.stores", "kvlinker.engines")
        names = {name for group, name, _ in self.entry_points if group in groups}
        return [f"{self.name}:{name}" for name in sorted(names)]

    @property
    def core_floor(self) -> Version | None:
        """The lowest kvlinker that it claims to work with; None for kvlinker itself."""
        floors = [
            Version(clause.version)
            for requirement in self.requirements
            if requirement.name == "kvlinker"
            for clause in requirement.specifier
            if clause.operator == ">="
        ]
        return max(floors, default=None)

    def modules(self) -> list[Path]:
        """Return its source files."""
        return sorted(self.package.rglob("*.py"))


def table(value: object) -> dict[str, object]:
    """Return a TOML table as such.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, dict):
        msg = f"expected a table, got {value!r}"
        raise TypeError(msg)
    return value


def lines(value: object) -> list[str]:
    """Return a TOML array of strings as such.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, list):
        msg = f"expected a list, got {value!r}"
        raise TypeError(msg)
    return value


def distributions(root: Path = ROOT) -> list[Distribution]:
    """Return every distribution of a repository."""
    patterns = ("core", "plugins/*/*", "examples/*")
    found = (path for pattern in patterns for path in root.glob(f"{pattern}/pyproject.toml"))
    return [Distribution(folder=path.parent) for path in sorted(found)]


def as_text(points: dict[str, object]) -> list[tuple[str, str]]:
    """Return a TOML table of strings as pairs."""
    return [(name, str(value)) for name, value in points.items()]


CORE = next(found for found in distributions() if found.kind == "core")

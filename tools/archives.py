"""Checks of what is in a built wheel and a source archive: all of the package, what it states, and nothing else."""

from __future__ import annotations

import configparser
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from distributions import Distribution
from packaging.metadata import InvalidMetadata, Metadata

__all__ = ["entry_points_in", "metadata_problems", "sdist_problems", "wheel_problems"]

NEEDED_IN_SDIST = ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml")
UNWANTED = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"})


def wheel_problems(wheel: Path, distribution: Distribution) -> list[str]:
    """Return what a wheel lacks, has too much, or states wrongly."""
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if not name.endswith("/")]
        info = f"{distribution.import_name}-{distribution.version}.dist-info"
        metadata = opened.read(f"{info}/METADATA") if f"{info}/METADATA" in names else b""
        points = (
            opened.read(f"{info}/entry_points.txt") if f"{info}/entry_points.txt" in names else b""
        )
    problems = [
        *_contents_problems(names, distribution, info),
        *metadata_problems(metadata, distribution),
        *_entry_point_problems(points.decode(), distribution),
    ]
    return [f"{wheel.name}: {problem}" for problem in problems]


def _contents_problems(
    names: Iterable[str], distribution: Distribution, info: str
) -> Iterator[str]:
    found = set(names)
    sources = distribution.package.parent
    wanted = {path.relative_to(sources).as_posix() for path in distribution.modules()}
    wanted |= {f"{distribution.import_name}/py.typed", f"{info}/licenses/LICENSE"}
    for name in sorted(wanted - found):
        yield f"{name} is missing"
    for name in sorted(found):
        parts = PurePosixPath(name).parts
        if parts[0] not in {distribution.import_name, info}:
            yield f"{name} is in no package of this distribution"
        elif "tests" in parts or UNWANTED & set(parts):
            yield f"{name} does not belong into a wheel"


def metadata_problems(text: bytes, distribution: Distribution) -> list[str]:
    """Return what is wrong with core metadata, and where it differs from pyproject.toml."""
    try:
        metadata = Metadata.from_email(text, validate=True)
    except ExceptionGroup as group:
        return [f"metadata is invalid: {error}" for error in group.exceptions]
    except InvalidMetadata as error:
        return [f"metadata is invalid: {error}"]
    facts = {
        "name": (metadata.name, distribution.name),
        "version": (metadata.version, distribution.version),
        "Python": (str(metadata.requires_python), distribution.project.get("requires-python")),
        "licence": (metadata.license_expression, distribution.project.get("license")),
        "README": (metadata.description, (distribution.folder / "README.md").read_text()),
        "kind of README": (metadata.description_content_type, "text/markdown"),
    }
    return [
        f"metadata states another {what} than pyproject.toml and its files"
        for what, (stated, expected) in facts.items()
        if stated != expected
    ]


def entry_points_in(text: str) -> set[tuple[str, str, str]]:
    """Return group, name and value of each entry point of an entry_points.txt."""
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # the documented way to keep names as they are
    parser.read_string(text)
    return {
        (group, name, value) for group in parser.sections() for name, value in parser.items(group)
    }


def _entry_point_problems(text: str, distribution: Distribution) -> Iterator[str]:
    found, wanted = entry_points_in(text), distribution.entry_points
    for group, name, value in sorted(wanted - found):
        yield f"entry point {name} = {value} of {group} is missing"
    for group, name, value in sorted(found - wanted):
        yield f"entry point {name} = {value} of {group} is not in pyproject.toml"


def sdist_problems(archive: Path, distribution: Distribution) -> list[str]:
    """Return what a source archive lacks or has too much: it can be built and tested alone."""
    base = f"{distribution.import_name}-{distribution.version}"
    with tarfile.open(archive) as opened:
        names = {member.name for member in opened.getmembers() if member.isfile()}
        info = opened.extractfile(f"{base}/PKG-INFO") if f"{base}/PKG-INFO" in names else None
        metadata = info.read() if info else b""
    inside = {name.removeprefix(f"{base}/") for name in names}
    problems = [f"{name} is missing" for name in NEEDED_IN_SDIST if name not in inside]
    if not any(name.startswith("tests/test_") for name in inside):
        problems.append("it has no tests")
    problems += [
        f"{name} does not belong into a source archive"
        for name in sorted(inside)
        if UNWANTED & set(PurePosixPath(name).parts)
    ]
    problems += metadata_problems(metadata, distribution)
    return [f"{archive.name}: {problem}" for problem in problems]

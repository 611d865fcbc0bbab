"""Changelogs: each distribution has one, made of the fragments that changes bring with them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from distributions import ROOT, Distribution

__all__ = ["KINDS", "changelog_problems", "fragment_problems", "fragments"]

KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")
START = "<!-- towncrier release notes start -->"
FRAGMENT = re.compile(rf"[\w+-]+\.({'|'.join(KINDS)})(\.\d+)?\.md")


def fragments(distribution: Distribution) -> list[Path]:
    """Return the fragments of changes that no release has yet."""
    folder = distribution.folder / "newsfragments"
    return sorted(path for path in folder.glob("*") if not path.name.startswith("."))


def fragment_problems(distribution: Distribution) -> list[str]:
    """Return the fragments that would be left out of the changelog, or say nothing."""
    return [
        f"{path.parent.parent.name}/{path.parent.name}/{path.name}: call it NUMBER.KIND.md or +WORDS.KIND.md "
        f"with a KIND of {', '.join(KINDS)}, and say in it what changed for users"
        for path in fragments(distribution)
        if not FRAGMENT.fullmatch(path.name) or not path.read_text(encoding="utf-8").strip()
    ]


def changelog_problems(distribution: Distribution) -> list[str]:
    """Return why a distribution's changelog is not one of its version, ready to be released."""
    where, version = distribution.folder / "CHANGELOG.md", distribution.version
    text = where.read_text(encoding="utf-8") if where.is_file() else ""
    problems = []
    if START not in text:
        problems.append(f"{distribution.name}: CHANGELOG.md lacks the line {START}")
    if not re.search(rf"^## {re.escape(str(version))}( |$)", text, re.MULTILINE):
        problems.append(f"{distribution.name}: CHANGELOG.md has no section for {version}")
    if waiting := fragments(distribution):
        names = ", ".join(path.name for path in waiting)
        problems.append(
            f"{distribution.name}: {names} are in no release; run: towncrier build --config pyproject.toml "
            f"--dir {os.path.relpath(distribution.folder, ROOT)} "
            f"--name {distribution.name} --version {version}"
        )
    return problems
